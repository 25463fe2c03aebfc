"""The Tensor Engine: nc_matmul and nc_transpose.

PSUM remembers which bytes a matmul wrote, because `accumulate` depends on it: False overwrites, True adds and needs an
earlier matmul there, None overwrites the first time and adds afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import FP8, Array
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa.check import (
    DONE,
    PSUM,
    SBUF,
    buffer,
    core_of,
    cycles,
    dtype_in,
    pick_engine,
    put_raw,
    read_f32,
    tensor,
    writable,
)
from gk_kernels.simulator.isa.constants import NkiInstruction, engine, matmul_perf_mode
from gk_kernels.simulator.targets import PSUM_BANK_BYTES
from gk_kernels.simulator.tensor import NkiTensor

_FLOATS = FP8 | {"bfloat16", "float16", "tfloat32", "float32"}
_WIDE = frozenset({"tfloat32", "float32"})
_none, _double = matmul_perf_mode.none, matmul_perf_mode.double_row


def accumulate_into(rule: str, core: Core, dst: NkiTensor, result: Array | None, accumulate: Any) -> None:
    """Write or add an fp32 matmul result, keeping PSUM's accumulation marks.

    Raises:
        ConstraintError: `accumulate` disagrees with what the location holds.
    """
    if accumulate is not None and not isinstance(accumulate, (bool, np.bool_)):
        refuse(f"{rule}: accumulate", repr(accumulate), "True, False or None", UsageError)
    if core.trace:
        return
    assert result is not None
    low, high = dst.matmul_state()
    if accumulate is None:
        if low != high:
            refuse(
                f"{rule}: accumulate=None",
                "a PSUM region of which only a part was written by a matmul",
                "all of it or none of it; pass accumulate explicitly",
            )
        if high == 2 and core.target.generation < 4:
            refuse(
                f"{rule}: accumulate=None",
                "a PSUM region set by another instruction",
                "accumulate=False, or a matmul first (undefined before trn3)",
            )
        adding = high != 0
    else:
        adding = bool(accumulate)
        if adding and low == 0:
            refuse(f"{rule}: accumulate=True", "a PSUM region that no matmul wrote", "accumulate=False first")
        if adding and high == 2 and core.target.generation < 4:
            refuse(
                f"{rule}: accumulate=True",
                "a PSUM region set by another instruction",
                "a matmul with accumulate=False first (undefined before trn3)",
            )
    out = dst.write_target()
    if result.shape != out.shape:
        result = result.reshape(out.shape)
    if adding:
        result = dst.dtype.to_f32(out) + result
    out[...] = dst.dtype.from_f32(result)
    if dst.storage.unwritten is not None:
        dst.wrote()
    dst.mark_matmul(1)


def check_psum_dst(rule: str, core: Core, dst: NkiTensor, m: int, n: int) -> None:
    """The result's buffer, dtype, shape and place in PSUM."""
    buffer(rule, "dst", dst, PSUM)
    if dst.dtype != "float32" and not (dst.dtype == "bfloat16" and core.target.generation >= 4):
        refuse(
            f"{rule}: dst dtype on {core.target.name}",
            dst.dtype,
            "float32 or bfloat16" if core.target.generation >= 4 else "float32",
        )
    tile = dst.tile()
    if (tile.partitions, tile.free) != (m, n):
        refuse(f"{rule}: dst shape", dst.shape, f"({m}, {n})")
    limit = core.target.moving_bytes // dst.dtype.itemsize
    if n > limit:
        refuse(f"{rule}: moving free size on {core.target.name}", n, limit)
    writable(rule, dst)
    if core.target.generation < 4:
        check_bank(rule, dst)


def check_bank(rule: str, dst: NkiTensor) -> None:
    """A result stays inside one PSUM bank."""
    size = dst.dtype.itemsize
    start = dst.offset % dst.row
    last = start + sum((count - 1) * stride for count, stride in zip(dst.shape[1:], dst.strides[1:], strict=True))
    base = max(0, dst.storage.life.free_start)
    first_bank, last_bank = (base + start * size) // PSUM_BANK_BYTES, (base + last * size + size - 1) // PSUM_BANK_BYTES
    if first_bank != last_bank:
        refuse(
            f"{rule}: PSUM banks of one result",
            f"banks {first_bank} to {last_bank}",
            f"one bank of {PSUM_BANK_BYTES} bytes per partition",
        )


def check_tiling(rule: str, k: int, m: int, position: Any, size: Any, generation: int, start: int) -> None:
    """tile_position and tile_size: both or neither, and the operands fit."""
    if not position and not size:
        return
    if not position or not size:
        refuse(f"{rule}: tiling", f"tile_position {position!r}, tile_size {size!r}", "both or neither", UsageError)
    rows, columns = int(size[0]), int(size[1])
    row, column = int(position[0]), int(position[1])
    if rows not in (32, 64, 128) or columns not in (32, 64, 128):
        refuse(f"{rule}: tile_size", tuple(size), "32, 64 or 128 rows and columns")
    if row % rows or column % columns or row + rows > 128 or column + columns > 128:
        refuse(f"{rule}: tile_position", tuple(position), f"multiples of {tuple(size)} inside 128 x 128")
    if k > rows or m > columns:
        refuse(f"{rule}: operand in a tile", f"K {k}, M {m}", f"at most {rows} rows, {columns} columns")


def _flatten(values: Array) -> Array:
    return values if values.ndim == 2 else values.reshape(values.shape[0], -1)


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: matmul_perf_mode = _none,
    name: str | None = None,
) -> NkiInstruction:
    """dst[M, N] (+)= stationary[K, M]^T . moving[K, N], accumulated in fp32. SBUF to PSUM."""
    rule = "nc_matmul"
    core = core_of(rule)
    buffer(rule, "stationary", stationary, SBUF)
    buffer(rule, "moving", moving, SBUF)
    left, right = stationary.tile(), moving.tile()
    k = left.partitions
    if right.partitions != k:
        refuse(f"{rule}: contraction", f"{k} and {right.partitions} partitions", "equal partitions")
    if left.start != right.start:
        refuse(
            f"{rule}: input start partitions",
            f"{left.start} and {right.start}",
            "two SBUF inputs start on the same partition",
        )
    m, n = left.free, right.free
    double = perf_mode is not _none
    if double:
        if is_transpose:
            refuse(f"{rule}: is_transpose with double_row", True, False)
        _check_double_row(rule, stationary, moving, tile_size)
        m, n = m // 2, n // 2
    if m > 128:
        refuse(f"{rule}: stationary free size", m, 128)
    if not is_transpose:
        _check_dtypes(rule, core, stationary, moving)
    check_tiling(rule, k, m, tile_position, tile_size, core.target.generation, left.start)
    if is_transpose:
        return _transpose(rule, core, dst, stationary, moving)
    check_psum_dst(rule, core, dst, m, n)
    # fp32 takes four passes, two when one side is declared to hold ones and zeros only.
    slow = 1 if stationary.dtype not in _WIDE else 2 if is_stationary_onezero or is_moving_onezero else 4
    stat = core.retire(rule, "tensor", cycles(n) * slow, n, dst, stationary, moving)
    stat.macs += k * m * n * (2 if double else 1)
    if core.trace:
        accumulate_into(rule, core, dst, None, accumulate)
        return DONE
    a, b = read_f32(stationary), read_f32(moving)
    if double:
        result = np.einsum("kim,kin->mn", a.reshape(k, 2, m), b.reshape(k, 2, n), optimize=True)
    else:
        result = _flatten(a).T @ _flatten(b)
    accumulate_into(rule, core, dst, result, accumulate)
    return DONE


def _check_dtypes(rule: str, core: Core, stationary: NkiTensor, moving: NkiTensor) -> None:
    a, b = stationary.dtype, moving.dtype
    if a not in _FLOATS or b not in _FLOATS:
        dtype_in(rule, "stationary", stationary, _FLOATS)
        dtype_in(rule, "moving", moving, _FLOATS)
    if a == b and a != "float8_e4m3fn":
        return
    if (a in _WIDE) != (b in _WIDE):
        refuse(f"{rule}: dtype pair", f"{a} and {b}", "fp32 or tfloat32 pairs only with the same kind")
    if "float8_e4m3fn" in (a, b):
        if core.target.generation < 4:
            refuse(f"{rule}: dtype on {core.target.name}", "float8_e4m3fn", "float8_e4m3 (e4m3fn needs trn3)")
        if "float8_e4m3" in (a, b):
            refuse(f"{rule}: dtype pair", f"{a} and {b}", "the two e4m3 dialects do not mix")


def _check_double_row(rule: str, stationary: NkiTensor, moving: NkiTensor, tile_size: Any) -> None:
    for label, value in (("stationary", stationary), ("moving", moving)):
        if value.dtype not in FP8:
            refuse(f"{rule}: {label} dtype with double_row", value.dtype, ", ".join(sorted(FP8)))
        if len(value.shape) < 3 or value.shape[1] != 2:
            refuse(f"{rule}: {label} shape with double_row", value.shape, "[K, 2, free]")
    if tile_size and int(tile_size[1]) != 128:
        refuse(f"{rule}: column tiling with double_row", tuple(tile_size), "128 columns")


def _transpose(rule: str, core: Core, dst: NkiTensor, data: NkiTensor, moving: NkiTensor | None) -> NkiInstruction:
    """dst[F, P] = data[P, F] on the Tensor Engine, bit for bit."""
    tile = data.tile()
    p, f = tile.partitions, tile.free
    buffer(rule, "dst of a Tensor Engine transpose", dst, PSUM)
    if p > 128 or f > 128:
        refuse(f"{rule}: transpose size on the Tensor Engine", f"{p} x {f}", "128 x 128")
    if dst.dtype != data.dtype:
        refuse(f"{rule}: dst dtype of a transpose", dst.dtype, f"{data.dtype}, the dtype of the input")
    if data.dtype.kind != "f":
        refuse(f"{rule}: dtype of a Tensor Engine transpose", data.dtype, "a float dtype (view integers as floats)")
    out = dst.tile()
    if out.partitions != f or out.free != p:
        refuse(f"{rule}: dst shape of a transpose", dst.shape, f"({f}, {p})")
    if data.dtype.itemsize == 1 and dst.strides[-1] != 2 and p > 1:
        refuse(f"{rule}: dst stride of an fp8 transpose", dst.strides[-1], "2 (each value lands on two bytes)")
    check_bank(rule, dst)
    slow = 4 if data.dtype in _WIDE else 1
    core.retire(rule, "tensor", cycles(p) * slow, p, dst, data, *([] if moving is None else [moving]))
    if not core.trace:
        if moving is not None and not np.array_equal(_flatten(read_f32(moving)), np.eye(p, dtype=np.float32)):
            refuse(f"{rule}: moving with is_transpose", f"a {moving.shape} matrix", f"the {p} x {p} identity")
        put_raw(dst, np.ascontiguousarray(_flatten(data.read()).T))
    return DONE


def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """dst = data with partitions and (flattened) free axis swapped; Tensor Engine, or Vector up to 32 x 32."""
    rule = "nc_transpose"
    core = core_of(rule)
    tile = tensor(rule, "data", data).tile()
    tensor(rule, "dst", dst)
    small = tile.partitions <= 32 and tile.free <= 32
    vector_only = dst.buffer is SBUF or data.buffer is PSUM
    default = "vector" if vector_only else "tensor"
    used = pick_engine(rule, engine, default, ("tensor", "vector"))
    if used == "tensor":
        buffer(rule, "data of a Tensor Engine transpose", data, SBUF)
        return _transpose(rule, core, dst, data, None)
    if not small:
        refuse(f"{rule}: size on the Vector Engine", f"{tile.partitions} x {tile.free}", "32 x 32")
    if dst.dtype != data.dtype:
        refuse(f"{rule}: dst dtype", dst.dtype, f"{data.dtype}, the dtype of the input")
    out = dst.tile()
    if (out.partitions, out.free) != (tile.free, tile.partitions):
        refuse(f"{rule}: dst shape", dst.shape, f"({tile.free}, {tile.partitions})")
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data)
    if not core.trace:
        put_raw(dst, np.ascontiguousarray(_flatten(data.read()).T))
    return DONE
