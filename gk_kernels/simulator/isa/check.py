"""Operand checks and the read, compute, write steps that instructions share."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from gk_kernels.simulator import context as cx
from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import Array, DType
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa.constants import NkiInstruction, engine
from gk_kernels.simulator.memory import MemoryRegion
from gk_kernels.simulator.tensor import NkiTensor, Tile

PSUM, SBUF = MemoryRegion.psum, MemoryRegion.sbuf
DONE = NkiInstruction()
Scalar: TypeAlias = "float | int | NkiTensor"
ENGINE_NAMES = {member: member.name for member in engine}


def core_of(rule: str) -> Core:
    """The running core."""
    core = cx.core
    return core if core is not None else cx.current(rule)


def tensor(rule: str, name: str, value: Any) -> NkiTensor:
    """`value` if it is a tensor."""
    if type(value) is not NkiTensor:
        refuse(f"{rule}: {name}", repr(value), "an NkiTensor", UsageError)
    return value


def same(rule: str, dst: NkiTensor, *srcs: NkiTensor) -> Tile:
    """The destination's tile, when every source has as many partitions and elements per partition."""
    if type(dst) is not NkiTensor:
        tensor(rule, "dst", dst)
    want = dst._tile or dst.tile()
    for src in srcs:
        if type(src) is not NkiTensor:
            tensor(rule, "an input", src)
        got = src._tile or src.tile()
        if got.partitions != want.partitions or got.free != want.free:
            refuse(
                f"{rule}: operand shapes",
                f"{src.shape} against dst {dst.shape}",
                "equal partitions and equal elements per partition",
            )
    return want


def writable(rule: str, dst: NkiTensor) -> None:
    """A destination must not address one element twice."""
    if 0 in dst.strides:
        for count, stride in zip(dst.shape, dst.strides, strict=True):
            if stride == 0 and count > 1:
                refuse(f"{rule}: dst", f"stride 0 over {count} elements", "each element is written once")


def one_psum(rule: str, a: NkiTensor, b: NkiTensor) -> None:
    """Two inputs: not both in PSUM; both in SBUF start on one partition."""
    if a.buffer is PSUM:
        if b.buffer is PSUM:
            refuse(f"{rule}: input buffers", "two inputs in PSUM", "at most one input in PSUM")
    elif b.buffer is SBUF and a.tile().start != b.tile().start:
        refuse(
            f"{rule}: input start partitions",
            f"{a.tile().start} and {b.tile().start}",
            "two SBUF inputs start on the same partition",
        )


def pick_engine(rule: str, value: Any, default: str, allowed: tuple[str, ...], *operands: Any) -> str:
    """The engine that runs an instruction.

    Raises:
        UsageError: not a nisa.engine.
        ConstraintError: the engine has not this instruction, or it is GpSimd with an operand in PSUM.
    """
    name = ENGINE_NAMES.get(value) if isinstance(value, engine) else None
    if name is None:
        refuse(f"{rule}: engine", repr(value), "a member of nisa.engine", UsageError)
    if name == "unknown":
        return default
    if name not in allowed:
        refuse(f"{rule}: engine", name, " or ".join(allowed))
    if name == "gpsimd":
        no_psum(rule, *operands)
    return name


def no_psum(rule: str, *operands: Any) -> None:
    """GpSimd reaches no PSUM."""
    for operand in operands:
        if type(operand) is NkiTensor and operand.buffer is PSUM:
            refuse(f"{rule}: GpSimd operand", "a tensor in PSUM", "GpSimd reaches SBUF only")


def buffer(rule: str, name: str, value: NkiTensor, allowed: MemoryRegion) -> None:
    """An operand that has one legal buffer."""
    if type(value) is not NkiTensor:
        tensor(rule, name, value)
    if value.buffer is not allowed:
        refuse(f"{rule}: {name} buffer", value.buffer.value, allowed.value)


def dtype_in(rule: str, name: str, value: NkiTensor, allowed: Any) -> None:
    """An operand whose dtype is restricted."""
    if value.dtype not in allowed:
        refuse(f"{rule}: {name} dtype", value.dtype, ", ".join(sorted(allowed)))


def column(rule: str, name: str, value: Any, tile: Tile, dtypes: Any = None) -> Any:
    """A constant, or a [P, 1] tensor of one value per partition; what is read later by `column_values`."""
    if type(value) is NkiTensor:
        got = value.tile()
        if got.partitions != tile.partitions or got.free != 1:
            refuse(f"{rule}: {name} shape", value.shape, f"({tile.partitions}, 1)")
        if dtypes is not None and value.dtype not in dtypes:
            refuse(f"{rule}: {name} dtype", value.dtype, ", ".join(sorted(dtypes)))
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        refuse(f"{rule}: {name}", repr(value), "a number or a (P, 1) tensor", UsageError)
    return value


def column_values(value: Any, ndim: int) -> Any:
    """fp32 of a constant or of a column, ready to broadcast against a tile of `ndim` dimensions."""
    if type(value) is NkiTensor:
        values = value.dtype.to_f32(value.read())
        return values.reshape((values.shape[0],) + (1,) * (ndim - 1))
    return np.float32(value)


def read_f32(value: NkiTensor) -> Array:
    """The operand in fp32 (a live view when it is fp32 already)."""
    return value.dtype.to_f32(value.read())


def put(dst: NkiTensor, values: Array) -> None:
    """Write fp32 values, cast to the destination's dtype."""
    out = dst.write_target()
    if values.shape != out.shape:
        values = values.reshape(out.shape)
    out[...] = dst.dtype.from_f32(values)
    storage = dst.storage
    if storage.unwritten is not None or storage.matmul is not None:
        dst.wrote()


def put_raw(dst: NkiTensor, values: Array) -> None:
    """Write values that are already of the destination's NumPy dtype."""
    out = dst.write_target()
    out[...] = values if values.shape == out.shape else values.reshape(out.shape)
    storage = dst.storage
    if storage.unwritten is not None or storage.matmul is not None:
        dst.wrote()


def tensors(*values: Any) -> list[NkiTensor]:
    """The tensors among optional operands."""
    return [value for value in values if type(value) is NkiTensor]


def int32(rule: str, name: str, value: Any) -> None:
    """An integer that an instruction encodes in 32 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        refuse(f"{rule}: {name}", repr(value), "an integer known at build time", UsageError)
    if not -(1 << 31) <= value < 1 << 31:
        refuse(f"{rule}: {name}", value, "int32")


def integer(dtype: DType) -> bool:
    """Whether a dtype holds integers (booleans included)."""
    return dtype.kind in "iub"


def bits16(*values: NkiTensor) -> bool:
    """Whether all operands are 16-bit floats or narrower (the Vector Engine's fast mode)."""
    return all(v.dtype.itemsize <= 2 and v.dtype.kind == "f" for v in values)


def cycles(elements: int) -> int:
    """One pass over `elements` per partition."""
    return elements if elements > 64 else 64
