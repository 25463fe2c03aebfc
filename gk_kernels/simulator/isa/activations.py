"""Activation functions of the Scalar Engine; `exponential` and `reciprocal` of the Vector Engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa import accumulators
from gk_kernels.simulator.isa.check import (
    DONE,
    Scalar,
    column,
    column_values,
    core_of,
    cycles,
    dtype_in,
    put,
    read_f32,
    same,
    tensors,
    writable,
)
from gk_kernels.simulator.isa.constants import NkiInstruction, reduce_cmd
from gk_kernels.simulator.ops import OPS, Op, as_op
from gk_kernels.simulator.tensor import NkiTensor

_F32 = ("float32",)
_EXP_SRC = frozenset(
    [
        "float8_e4m3",
        "float8_e5m2",
        "float16",
        "bfloat16",
        "float32",
        "int8",
        "int16",
        "int32",
        "uint8",
        "uint16",
        "uint32",
    ]
)
_EXP_DST = (_EXP_SRC - {"uint32"}) | {"tfloat32"}
_ADD = OPS["add"]
_ACT2_PAIRS = frozenset(
    {
        ("multiply", "add"),
        ("multiply", "subtract"),
        ("multiply", "bypass"),
        ("add", "bypass"),
        ("subtract", "bypass"),
        ("bypass", "bypass"),
    }
)


def _function(rule: str, op: Any) -> Op:
    found = op if type(op) is Op else as_op(op, rule)
    if found.act is None:
        refuse(f"{rule}: op", repr(found), "an activation function")
    return found


def _check_domain(core: Core, rule: str, op: Op, values: Array) -> None:
    """Outside the documented range the engine's result is invalid."""
    assert op.domain is not None
    low, high = op.domain
    seen = np.abs(values) if op.magnitude else values
    bad = (seen < np.float32(low)) | (seen > np.float32(high))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        core.refuse_or_warn(
            core.options.domain,
            f"{rule}: input range of {op!r}",
            f"{float(values[at])!r} at {at}",
            f"{'magnitude ' if op.magnitude else ''}{low:.6g} to {high:.6g}",
        )


def _apply(core: Core, rule: str, op: Op, values: Array) -> Array:
    if op.domain is not None:
        _check_domain(core, rule, op, values)
    assert op.act is not None
    return op.act(values)


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Scalar | None = None,
    scale: Scalar = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op(data * scale + bias) in fp32, and optionally a running sum per partition. Scalar Engine."""
    rule = "activation"
    core = core_of(rule)
    tile = same(rule, dst, data)
    found = _function(rule, op)
    if 0 in dst.strides:
        writable(rule, dst)
    factor = (
        None if scale is None or (type(scale) is float and scale == 1.0) else column(rule, "scale", scale, tile, _F32)
    )
    term = None if bias is None else column(rule, "bias", bias, tile)
    if isinstance(term, NkiTensor) and (term.dtype == "tfloat32" or term.dtype.kind == "x"):
        refuse(f"{rule}: bias dtype", term.dtype, "any dtype but tfloat32 and x4")
    if reduce_op is not None or reduce_res is not None or reduce_cmd is not _IDLE:
        if reduce_cmd is _LOAD:
            refuse(f"{rule}: reduce_cmd", "load_reduce", "idle, reset, reduce or reset_reduce", UsageError)
        accumulators.check(rule, "scalar", tile, reduce_cmd, reduce_res, None)
        if reduce_op is not None and as_op(reduce_op, rule) is not _ADD:
            refuse(f"{rule}: reduce_op", repr(reduce_op), "nl.add")
        reducing = True
    else:
        reducing = False
    if reducing and reduce_res is not None:
        core.retire(rule, "scalar", cycles(tile.free), tile.free, dst, data, reduce_res, *tensors(factor, term))
    elif type(factor) is NkiTensor or type(term) is NkiTensor:
        core.retire(rule, "scalar", cycles(tile.free), tile.free, dst, data, *tensors(factor, term))
    else:
        core.retire(rule, "scalar", cycles(tile.free), tile.free, dst, data)
    if core.trace:
        return DONE
    values = read_f32(data)
    ndim = len(data.shape)
    if factor is not None:
        values = values * column_values(factor, ndim)
    if term is not None:
        values = values + column_values(term, ndim)
    values = _apply(core, rule, found, values)
    put(dst, values)
    if reducing:
        accumulators.run(core, "scalar", tile, _ADD, values, reduce_cmd, reduce_res)
    return DONE


_IDLE, _LOAD = reduce_cmd.idle, reduce_cmd.load_reduce


def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Scalar | None = None,
    scale: Scalar = 1.0,
    name: str | None = None,
) -> NkiInstruction:
    """`activation` with reduce_cmd.reset_reduce."""
    return activation(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce, name)


def activate2(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Scalar,
    imm1: Scalar,
    op0: Any,
    op1: Any,
    relu_param: Scalar = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op((data op0 imm0) op1 imm1), and optionally a running reduction. Scalar Engine, trn3."""
    rule = "activate2"
    core = core_of(rule)
    if core.target.generation < 4:
        refuse(rule, core.target.name, "trn3 or newer")
    tile = same(rule, dst, data)
    found = _function(rule, op)
    first, second = as_op(op0, rule), as_op(op1, rule)
    if (first.name, second.name) not in _ACT2_PAIRS:
        refuse(f"{rule}: op0, op1", f"{first!r}, {second!r}", "multiply/add/subtract/bypass pairs of the document")
    if (reverse0 and first.name == "bypass") or (reverse1 and second.name == "bypass"):
        refuse(f"{rule}: reverse", "reverse of bypass", "an operator to reverse", UsageError)
    a, b = column(rule, "imm0", imm0, tile), column(rule, "imm1", imm1, tile)
    if isinstance(a, NkiTensor) and isinstance(b, NkiTensor) and a.dtype != b.dtype:
        refuse(f"{rule}: imm dtypes", f"{a.dtype} and {b.dtype}", "equal dtypes")
    slope = column(rule, "relu_param", relu_param, tile)
    accumulators.check(rule, "scalar", tile, reduce_cmd, reduce_res, None)
    reduction = _ADD if reduce_op is None else as_op(reduce_op, rule)
    if reduction.name not in ("add", "maximum", "minimum", "abs_max", "abs_min"):
        refuse(f"{rule}: reduce_op", repr(reduction), "add, maximum, minimum, abs_max or abs_min")
    core.retire(rule, "scalar", cycles(tile.free), tile.free, dst, data, *tensors(a, b, slope, reduce_res))
    if core.trace:
        return DONE
    values, ndim = read_f32(data), len(data.shape)
    for operator, operand, reverse in ((first, a, reverse0), (second, b, reverse1)):
        if operator.name != "bypass":
            assert operator.alu is not None
            other = column_values(operand, ndim)
            values = operator.alu(other, values) if reverse else operator.alu(values, other)
    if found.name == "prelu":
        assert found.act is not None
        values = found.act(values, column_values(slope, ndim))
    else:
        values = _apply(core, rule, found, values)
    put(dst, values)
    if reduce_res is not None or reduce_cmd is not _IDLE:
        accumulators.run(core, "scalar", tile, reduction, values, reduce_cmd, reduce_res)
    return DONE


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Scalar = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_init: Scalar = 0.0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = exp(src - max_value), and optionally its running sum. Vector Engine, trn3."""
    rule = "exponential"
    core = core_of(rule)
    if core.target.generation < 4:
        refuse(rule, core.target.name, "trn3 or newer")
    tile = same(rule, dst, src)
    dtype_in(rule, "dst", dst, _EXP_DST)
    dtype_in(rule, "src", src, _EXP_SRC)
    limit = column(rule, "max_value", max_value, tile, _F32)
    if reduce_cmd is reduce_cmd.reset:
        refuse(f"{rule}: reduce_cmd", "reset", "idle, reset_reduce, reduce or load_reduce", UsageError)
    accumulators.check(rule, "vector", tile, reduce_cmd, reduce_res, reduce_init)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, src, *tensors(limit, reduce_res, reduce_init))
    if core.trace:
        return DONE
    values = np.exp(read_f32(src) - column_values(limit, len(src.shape)))
    put(dst, values)
    if reduce_res is not None or reduce_cmd is not _IDLE:
        accumulators.run(core, "vector", tile, _ADD, values, reduce_cmd, reduce_res, reduce_init)
    return DONE


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst = 1 / data. Vector Engine, 8 cycles per element."""
    core = core_of("reciprocal")
    tile = same("reciprocal", dst, data)
    if 0 in dst.strides:
        writable("reciprocal", dst)
    core.retire("reciprocal", "vector", cycles(8 * tile.free), tile.free, dst, data)
    if not core.trace:
        put(dst, 1 / read_f32(data))
    return DONE
