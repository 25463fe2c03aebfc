"""Reductions and scans over the free axes. Vector Engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import refuse
from gk_kernels.simulator.isa import accumulators
from gk_kernels.simulator.isa.check import (
    DONE,
    Scalar,
    column,
    column_values,
    core_of,
    cycles,
    one_psum,
    put,
    put_raw,
    read_f32,
    same,
    tensor,
    tensors,
)
from gk_kernels.simulator.isa.constants import NkiInstruction, reduce_cmd
from gk_kernels.simulator.isa.elementwise import bit_operands, scalar_op, scalar_step
from gk_kernels.simulator.ops import Op, binary, reducer
from gk_kernels.simulator.tensor import NkiTensor

_INT32 = ("int32", "uint32")
_F32 = ("float32",)


def _axes(rule: str, axis: Any, ndim: int) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    axes = tuple(sorted(a + ndim if a < 0 else a for a in axes))
    if not axes or axes[0] == 0:
        refuse(f"{rule}: axis", axis, "free axes only; the partition axis cannot be reduced")
    if axes != tuple(range(axes[0], ndim)):
        refuse(f"{rule}: axis", axis, "the last contiguous free axes")
    return axes


def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op over the last free axes of data, in fp32, optionally negated. Vector Engine."""
    rule = "tensor_reduce"
    core = core_of(rule)
    out, tile = tensor(rule, "dst", dst).tile(), tensor(rule, "data", data).tile()
    found = reducer(op, rule)
    axes = _axes(rule, axis, len(data.shape))
    kept = 1
    for size in data.shape[1 : axes[0]]:
        kept *= size
    if out.partitions != tile.partitions or out.free != kept:
        refuse(f"{rule}: dst shape", dst.shape, f"({tile.partitions}, {kept} elements per partition)")
    if found.bitwise:
        bit_operands(rule, dst, data)
        if negate:
            refuse(f"{rule}: negate", f"with {found!r}", "arithmetic operators")
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data)
    if core.trace:
        return DONE
    if found.bitwise:
        put_raw(dst, found.reduce.reduce(data.read(), axis=axes).astype(dst.dtype.np))
        return DONE
    values = _reduce(found, read_f32(data), axes)
    put(dst, -values if negate else values)
    return DONE


def _reduce(op: Op, values: Array, axes: tuple[int, ...]) -> Array:
    if op.name == "subtract":
        flat = values.reshape(*values.shape[: axes[0]], -1)
        rest: Array = flat[..., 1:].sum(axis=-1, dtype=np.float32)
        return np.asarray(flat[..., 0] - rest)
    result: Array = np.asarray(op.reduce.reduce(values, axis=axes), np.float32)
    return result


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Scalar | None,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: Scalar | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """tensor_scalar with one operator, and a reduction of its result over all free axes. Vector Engine."""
    rule = "tensor_scalar_reduce"
    core = core_of(rule)
    tile = same(rule, dst, data)
    first = scalar_op(rule, op0, operand0, "op0")
    if first.bitwise:
        refuse(f"{rule}: op0", repr(first), "an arithmetic operator")
    if reverse0:
        refuse(f"{rule}: reverse0", True, "False (not supported yet)")
    found = reducer(reduce_op, rule, frozenset({"add", "multiply", "maximum", "minimum"}))
    a = None if first.alu is None else column(rule, "operand0", operand0, tile, _F32)
    accumulators.check(rule, "vector", tile, reduce_cmd, reduce_res, reduce_init)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data, *tensors(a, reduce_res, reduce_init))
    if core.trace:
        return DONE
    values = scalar_step(first, read_f32(data), None if a is None else column_values(a, len(data.shape)), False)
    put(dst, values)
    accumulators.run(core, "vector", tile, found, values, reduce_cmd, reduce_res, reduce_init, reduce_res_negate)
    return DONE


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Scalar,
    imm1: Scalar | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> NkiInstruction:
    """dst[i] = op1(op0(src[i], imm0), dst[i-1]), a running reduction along the free axes. Vector Engine."""
    rule = "tensor_scalar_cumulative"
    core = core_of(rule)
    tile = same(rule, dst, src)
    first = scalar_op(rule, op0, imm0, "op0")
    second = reducer(op1, rule, frozenset({"add", "subtract", "multiply", "maximum", "minimum"}))
    for operand in (dst, src):
        if operand.dtype in _INT32:
            refuse(f"{rule}: dtype", operand.dtype, "no 32-bit integers")
    a = column(rule, "imm0", imm0, tile, _F32)
    accumulators.check(rule, "vector", tile, reduce_cmd, None, imm1)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, src, *tensors(a, imm1))
    if core.trace:
        return DONE
    values = scalar_step(first, read_f32(src), column_values(a, len(src.shape)), False)
    flat = values.reshape(tile.partitions, -1)
    register = accumulators.start(core, "vector", tile, second, reduce_cmd, imm1)
    result = np.empty_like(flat)
    assert second.alu is not None
    for i in range(flat.shape[1]):
        register = second.alu(flat[:, i], register)
        result[:, i] = register
    accumulators.store(core, "vector", tile, register)
    put(dst, result)
    return DONE


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Scalar,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst[i] = op1(op0(data0[i], dst[i-1]), data1[i]) along the free axes, from `initial`. Vector Engine."""
    rule = "tensor_tensor_scan"
    core = core_of(rule)
    tile = same(rule, dst, data0, data1)
    one_psum(rule, data0, data1)
    first, second = binary(op0, rule), binary(op1, rule)
    if first.bitwise or second.bitwise:
        refuse(f"{rule}: operators", f"{first!r} and {second!r}", "arithmetic operators")
    a = column(rule, "initial", initial, tile)
    core.retire(rule, "vector", cycles(2 * tile.free), tile.free, dst, data0, data1, *tensors(a))
    if core.trace:
        return DONE
    x, y = read_f32(data0).reshape(tile.partitions, -1), read_f32(data1).reshape(tile.partitions, -1)
    state = np.broadcast_to(np.ravel(column_values(a, 2)), (tile.partitions,)).astype(np.float32)
    result = np.empty(x.shape, np.float32)
    assert first.alu is not None
    assert second.alu is not None
    for i in range(x.shape[1]):
        step = first.alu(state, x[:, i]) if reverse0 else first.alu(x[:, i], state)
        state = second.alu(y[:, i], step) if reverse1 else second.alu(step, y[:, i])
        result[:, i] = state
    put(dst, result)
    return DONE
