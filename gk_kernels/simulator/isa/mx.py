"""MX on trn3: quantize_mx (Vector Engine) and nc_matmul_mx (Tensor Engine)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator import mx
from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import MX_ELEMENTS, Array
from gk_kernels.simulator.errors import refuse
from gk_kernels.simulator.isa.check import DONE, SBUF, buffer, core_of, cycles, dtype_in, put_raw, read_f32
from gk_kernels.simulator.isa.constants import NkiInstruction
from gk_kernels.simulator.isa.matmul import accumulate_into, check_psum_dst, check_tiling
from gk_kernels.simulator.tensor import NkiTensor

_SCALES = frozenset({"float8_e8m0fnu", "uint8"})
_HALF = frozenset({"float16", "bfloat16"})
_FP8_X4 = frozenset({"float8_e4m3fn_x4", "float8_e5m2_x4"})


def _scale_view(rule: str, name: str, scale: NkiTensor, data: NkiTensor, free: int) -> Array | None:
    """Check a scale tile and return the row numbers in it, one per group of 8 partitions of `data`."""
    buffer(rule, name, scale, SBUF)
    dtype_in(rule, name, scale, _SCALES)
    partitions = data.shape[0]
    tile = scale.tile(check=False)
    if tile.free != free:
        refuse(f"{rule}: {name} free size", tile.free, f"{free}, one scale per x4 element")
    start, base = tile.start, data.tile().start
    if start % 32 not in (0, 4, 8, 12):
        refuse(f"{rule}: {name} start partition", start, "a multiple of 32, plus 0, 4, 8 or 12")
    if start // 32 != base // 32:
        refuse(
            f"{rule}: {name} quadrant",
            f"partition {start} for data at partition {base}",
            "scales in the 32-partition quadrant of their data",
        )
    rows = mx.scale_rows(partitions)
    if tile.partitions <= rows[-1]:
        refuse(
            f"{rule}: {name} partitions",
            tile.partitions,
            f"{partitions // 8} when the data has 32 partitions, else up to row {int(rows[-1])} of each quadrant",
        )
    return rows


def _check_partitions(rule: str, partitions: int) -> None:
    if partitions % 32 or partitions > 128:
        refuse(f"{rule}: partitions", partitions, "a multiple of 32, at most 128")


def _need_mx(rule: str) -> Core:
    core = core_of(rule)
    if not core.target.has_mx:
        refuse(rule, core.target.name, "trn3 or newer (dequantise first on trn2)")
    return core


def quantize_mx(dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Quantise bf16/fp16 [P, F] to fp8 x4 [P, F/4] with one scale per 8 partitions x 4 values."""
    rule = "quantize_mx"
    core = _need_mx(rule)
    buffer(rule, "dst", dst, SBUF)
    buffer(rule, "src", src, SBUF)
    dtype_in(rule, "dst", dst, _FP8_X4)
    dtype_in(rule, "src", src, _HALF)
    tile, out = src.tile(), dst.tile()
    _check_partitions(rule, tile.partitions)
    if tile.free % 4:
        refuse(f"{rule}: src free size", tile.free, "a multiple of 4")
    if (out.partitions, out.free) != (tile.partitions, tile.free // 4):
        refuse(f"{rule}: dst shape", dst.shape, f"({tile.partitions}, {tile.free // 4})")
    rows = _scale_view(rule, "dst_scale", dst_scale, src, out.free)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, src, dst_scale)
    if core.trace:
        return DONE
    packed, scale = mx.quantize(read_f32(src).reshape(tile.partitions, -1), dst.dtype)
    put_raw(dst, packed)
    target = dst_scale.write_target()
    target[rows] = scale.view(dst_scale.dtype.np).reshape(len(scale), *dst_scale.shape[1:])
    if dst_scale.storage.unwritten is not None:
        dst_scale.marks()[rows] = 0
        dst_scale.storage.settle()
    return DONE


def _operand(rule: str, data: NkiTensor, scale: NkiTensor, rows: Array | None) -> Array:
    """fp32 [P * 4, n] of a quantised operand."""
    assert rows is not None
    if scale.storage.unwritten is not None:
        marks = scale.marks()[rows]
        if marks.any():
            scale.report_poison(marks)
    picked = scale.numpy_view()[rows].reshape(len(rows), -1)
    packed = data.read().reshape(data.shape[0], -1)
    values = mx.dequantize(packed, data.dtype, np.ascontiguousarray(picked).view(np.uint8))
    lanes: Array = values.transpose(0, 2, 1).reshape(-1, packed.shape[1])
    return lanes


def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """dst[M, N] (+)= dequantised stationary^T . dequantised moving, over partitions and x4 lanes. SBUF to PSUM."""
    rule = "nc_matmul_mx"
    core = _need_mx(rule)
    for label, value in (("stationary", stationary), ("moving", moving)):
        buffer(rule, label, value, SBUF)
        dtype_in(rule, label, value, MX_ELEMENTS)
    left, right = stationary.tile(), moving.tile()
    k, m, n = left.partitions, left.free, right.free
    if right.partitions != k:
        refuse(f"{rule}: contraction", f"{k} and {right.partitions} partitions", "equal partitions")
    _check_partitions(rule, k)
    if m % 2 or m > 128:
        refuse(f"{rule}: stationary free size", m, "even, at most 128")
    if left.start != right.start:
        refuse(
            f"{rule}: input start partitions",
            f"{left.start} and {right.start}",
            "two SBUF inputs start on the same partition",
        )
    if tile_size and int(tile_size[1]) != 128:
        refuse(f"{rule}: tile_size", tuple(tile_size), "128 columns (row tiles only)")
    check_tiling(rule, k, m, tile_position, tile_size, core.target.generation, left.start)
    check_psum_dst(rule, core, dst, m, n)
    left_rows = _scale_view(rule, "stationary_scale", stationary_scale, stationary, m)
    right_rows = _scale_view(rule, "moving_scale", moving_scale, moving, n)
    stat = core.retire(rule, "tensor", cycles(n), n, dst, stationary, moving, stationary_scale, moving_scale)
    stat.macs += 4 * k * m * n
    if core.trace:
        accumulate_into(rule, core, dst, None, accumulate)
        return DONE
    a = _operand(rule, stationary, stationary_scale, left_rows)
    b = _operand(rule, moving, moving_scale, right_rows)
    accumulate_into(rule, core, dst, a.T @ b, accumulate)
    return DONE
