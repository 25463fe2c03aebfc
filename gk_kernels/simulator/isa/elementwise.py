"""Element-wise instructions of the Vector, Scalar and GpSimd engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa.check import (
    DONE,
    PSUM,
    Scalar,
    bits16,
    column,
    column_values,
    core_of,
    cycles,
    integer,
    no_psum,
    one_psum,
    pick_engine,
    put,
    put_raw,
    read_f32,
    same,
    tensor,
    tensors,
    writable,
)
from gk_kernels.simulator.isa.constants import NkiInstruction, engine
from gk_kernels.simulator.ops import Op, as_op, binary
from gk_kernels.simulator.tensor import NkiTensor

_unknown = engine.unknown
_INT32 = ("int32", "uint32")
_F32 = ("float32",)
_VSG = ("vector", "scalar", "gpsimd")


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engine = _unknown, name: str | None = None) -> NkiInstruction:
    """dst = src; bit for bit between equal dtypes (except on the Scalar Engine), else through fp32."""
    core = core_of("tensor_copy")
    tile = same("tensor_copy", dst, src)
    used = pick_engine("tensor_copy", engine, "vector", _VSG, dst, src)
    writable("tensor_copy", dst)
    core.retire("tensor_copy", used, cycles(tile.free), tile.free, dst, src)
    if core.trace:
        return DONE
    if dst.dtype == src.dtype:
        values = src.read()
        if dst.storage is src.storage:
            values = values.copy()
        put_raw(dst, values)
    else:
        put(dst, read_f32(src))
    return DONE


def memset(dst: NkiTensor, value: float, engine: engine = _unknown, name: str | None = None) -> NkiInstruction:
    """dst = value, which the dtype must be able to hold (x4 types: only 0)."""
    core = core_of("memset")
    tile = tensor("memset", "dst", dst).tile()
    writable("memset", dst)
    used = pick_engine("memset", engine, "vector", ("vector", "gpsimd"), dst)
    if not isinstance(value, (int, float, np.integer, np.floating)):
        refuse("memset: value", repr(value), "a number known at build time", UsageError)
    dtype = dst.dtype
    if dtype.kind == "x":
        if value != 0:
            refuse("memset: value of an x4 type", value, "0")
        cast: Any = dtype.np.type(0)
    elif dtype.kind in "iu":
        if value != int(value) or not np.iinfo(dtype.np).min <= value <= np.iinfo(dtype.np).max:
            refuse(f"memset: value of {dtype}", value, "a value that the dtype can hold")
        cast = dtype.np.type(int(value))
    else:
        cast = dtype.from_f32(np.asarray([value], np.float32))[0]
        if np.isfinite(value) and not np.isfinite(np.float32(cast)):
            refuse(f"memset: value of {dtype}", value, "a value that the dtype can hold")
    core.retire("memset", used, cycles(tile.free), tile.free, dst)
    if not core.trace:
        dst.write_target()[...] = cast
        if dst.storage.unwritten is not None or dst.storage.matmul is not None:
            dst.wrote()
    return DONE


def bit_operands(rule: str, *operands: NkiTensor) -> None:
    for operand in operands:
        if not integer(operand.dtype):
            refuse(f"{rule}: bitwise operand dtype", operand.dtype, "an integer dtype")
        if operand.dtype.itemsize != operands[0].dtype.itemsize:
            refuse(f"{rule}: bitwise operand sizes", f"{operand.dtype} and {operands[0].dtype}", "equal sizes")


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: engine = _unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data1 op data2, in fp32; 32-bit integers exactly, on GpSimd, when no operand is in PSUM."""
    core = core_of("tensor_tensor")
    tile = same("tensor_tensor", dst, data1, data2)
    found = op if type(op) is Op and op.alu is not None else binary(op, "tensor_tensor")
    one_psum("tensor_tensor", data1, data2)
    if 0 in dst.strides:
        writable("tensor_tensor", dst)
    exact = (
        not found.bitwise
        and dst.dtype in _INT32
        and data1.dtype in _INT32
        and data2.dtype in _INT32
        and PSUM not in (dst.buffer, data1.buffer, data2.buffer)
    )
    power = found.name == "power"
    if found.bitwise:
        bit_operands("tensor_tensor", dst, data1, data2)
    default = "gpsimd" if exact or power else "vector"
    used = pick_engine("tensor_tensor", engine, default, ("vector", "gpsimd"), dst, data1, data2)
    if power:
        no_psum("tensor_tensor with power", dst, data1, data2)
        if used != "gpsimd":
            refuse("tensor_tensor: engine of power", used, "gpsimd")
    n = tile.free
    core.retire("tensor_tensor", used, cycles(n if bits16(data1, data2) else 2 * n), n, dst, data1, data2)
    if core.trace:
        return DONE
    assert found.alu is not None
    if found.bitwise:
        a, b = data1.read(), data2.read()
        put_raw(dst, found.alu(a, _like(b, a).view(a.dtype)).view(dst.dtype.np))
    elif exact and used == "gpsimd":
        a = data1.read()
        wide = found.alu(a.astype(np.int64), _like(data2.read(), a).astype(np.int64))
        info = np.iinfo(dst.dtype.np)
        put_raw(dst, np.clip(wide, info.min, info.max).astype(dst.dtype.np))
    else:
        a, b = read_f32(data1), read_f32(data2)
        put(dst, found.alu(a, b if a.shape == b.shape else b.reshape(a.shape)))
    return DONE


def _like(values: Array, other: Array) -> Array:
    return np.ascontiguousarray(values if values.shape == other.shape else values.reshape(other.shape))


def scalar_step(op: Op, values: Array, operand: Any, reverse: bool) -> Array:
    if op.alu is None:
        assert op.alu_unary is not None
        return op.alu_unary(values)
    return op.alu(operand, values) if reverse else op.alu(values, operand)


def scalar_op(rule: str, op: Any, operand: Any, label: str) -> Op:
    found = as_op(op, rule)
    if found.alu is None and found.alu_unary is None:
        refuse(f"{rule}: {label}", repr(found), "an ALU operator")
    if found.alu is None and not (operand is None or (not isinstance(operand, NkiTensor) and operand == 0)):
        refuse(f"{rule}: operand of unary {found!r}", repr(operand), "None or 0")
    return found


def _bit_column(value: Any, dtype: np.dtype[Any], ndim: int) -> Any:
    if isinstance(value, NkiTensor):
        values = value.read()
        return values.reshape((values.shape[0],) + (1,) * (ndim - 1)).astype(dtype)
    return np.array(int(value) & (2 ** (8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Scalar | None,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Scalar | None = None,
    reverse1: bool = False,
    engine: engine = _unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = (data op0 operand0) op1 operand1; operands are constants or fp32 [P, 1] columns."""
    rule = "tensor_scalar"
    core = core_of(rule)
    tile = same(rule, dst, data)
    if 0 in dst.strides:
        writable(rule, dst)
    first = scalar_op(rule, op0, operand0, "op0")
    second = None if op1 is None else scalar_op(rule, op1, operand1, "op1")
    if second is None and operand1 is not None:
        refuse(f"{rule}: operand1", repr(operand1), "None without op1", UsageError)
    if second is not None and second.bitwise != first.bitwise:
        refuse(f"{rule}: operators", f"{first!r} and {second!r}", "both bitwise or both arithmetic")
    default = "gpsimd" if first.name == "rsqrt" or (second is not None and second.name == "rsqrt") else "vector"
    used = pick_engine(rule, engine, default, _VSG, dst, data)
    if first.bitwise:
        bit_operands(rule, dst, data)
        if used != "vector":
            refuse(f"{rule}: engine of a bitwise operator", used, "vector")
    else:
        if used == "vector" and default == "gpsimd":
            refuse(f"{rule}: rsqrt on the Vector Engine", "engine.vector", "gpsimd, or nisa.activation")
        if used == "scalar" and core.target.generation == 3:
            pair = (first.name, None if second is None else second.name)
            if pair not in (("multiply", "add"), ("multiply", None), ("add", None)):
                refuse(
                    f"{rule}: operators on trn2's Scalar Engine",
                    pair,
                    "multiply then add, multiply alone, or add alone",
                )
        if used == "gpsimd":
            if default != "gpsimd":
                refuse(f"{rule}: engine of {first!r}", used, "vector or scalar (GpSimd runs rsqrt only)")
            no_psum(rule, dst, data)
    allowed = None if first.bitwise else _F32
    a = None if first.alu is None else column(rule, "operand0", operand0, tile, allowed)
    b = None if second is None or second.alu is None else column(rule, "operand1", operand1, tile, allowed)
    n = tile.free
    core.retire(rule, used, cycles(n), n, dst, data, *tensors(a, b))
    if core.trace:
        return DONE
    ndim = len(data.shape)
    if first.bitwise:
        values = data.read()
        kind = values.dtype
        values = scalar_step(first, values, None if a is None else _bit_column(a, kind, ndim), reverse0)
        if second is not None:
            values = scalar_step(second, values, None if b is None else _bit_column(b, kind, ndim), reverse1)
        put_raw(dst, np.ascontiguousarray(values).view(dst.dtype.np))
        return DONE
    values = scalar_step(first, read_f32(data), None if a is None else column_values(a, ndim), reverse0)
    if second is not None:
        values = scalar_step(second, values, None if b is None else column_values(b, ndim), reverse1)
    put(dst, values)
    return DONE


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Scalar,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = (data op0 operand0) op1 operand1, where operand1 is a whole tile. Vector Engine."""
    rule = "scalar_tensor_tensor"
    core = core_of(rule)
    tile = same(rule, dst, data, operand1)
    if 0 in dst.strides:
        writable(rule, dst)
    first, second = scalar_op(rule, op0, operand0, "op0"), binary(op1, rule)
    if first.bitwise or second.bitwise:
        refuse(f"{rule}: operators", f"{first!r} and {second!r}", "arithmetic operators")
    one_psum(rule, data, operand1)
    a = None if first.alu is None else column(rule, "operand0", operand0, tile)
    n = tile.free
    core.retire(rule, "vector", cycles(n if bits16(data, operand1) else 2 * n), n, dst, data, operand1, *tensors(a))
    if core.trace:
        return DONE
    values = scalar_step(first, read_f32(data), None if a is None else column_values(a, len(data.shape)), reverse0)
    other = read_f32(operand1)
    put(dst, scalar_step(second, values, other.reshape(values.shape), reverse1))
    return DONE
