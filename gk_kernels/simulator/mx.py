"""The MX formats in plain NumPy: x4 packing, e8m0 scales, and where a scale row lives in SBUF.

One group is 32 values with one scale: 8 partitions times the 4 values of one x4 element. Scales of the groups of one
32-partition quadrant are four rows inside that quadrant, at row 0, 4, 8 or 12 of it.

Source: NKI 0.6, nisa.quantize_mx and nisa.nc_matmul_mx.
"""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

from gk_kernels.simulator.dtypes import ALL, Array

# The eight magnitudes of e2m1, sign in bit 3.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES: Array = np.concatenate([_E2M1, -_E2M1])
E8M0_BIAS = 127
MAX_EXPONENT = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}
_LARGEST = {"float8_e4m3fn_x4": 448.0, "float8_e5m2_x4": 57344.0}
_FP8 = {"float8_e4m3fn_x4": ml_dtypes.float8_e4m3fn, "float8_e5m2_x4": ml_dtypes.float8_e5m2}


def pack_fp4_x4(nibbles: Array) -> Array:
    """uint16 x4 elements from uint8 nibbles [..., 4 * n]; the first value is in the lowest bits.

    >>> int(pack_fp4_x4(np.array([1, 2, 3, 4], np.uint8))[0]) == 0x4321
    True
    """
    four = nibbles.reshape(*nibbles.shape[:-1], -1, 4).astype(np.uint16)
    packed: Array = four[..., 0] | four[..., 1] << 4 | four[..., 2] << 8 | four[..., 3] << 12
    return packed


def unpack_fp4_x4(packed: Array) -> Array:
    """fp32 values [..., n, 4] of uint16 x4 elements."""
    values: Array = _fp4_table().take(packed, axis=0)
    return values


@lru_cache(maxsize=1)
def _fp4_table() -> Array:
    """The four values of every uint16, [65536, 4]."""
    shifts = np.arange(0, 16, 4, dtype=np.uint16)
    table: Array = E2M1_VALUES[(np.arange(1 << 16, dtype=np.uint16)[:, None] >> shifts) & 0xF]
    return table


def pack_fp8_x4(values: Array) -> Array:
    """uint32 x4 elements from fp8 values [..., 4 * n]; the first value is in the lowest byte."""
    packed: Array = np.ascontiguousarray(values).view(np.uint32)
    return packed


def unpack_x4(packed: Array, dtype: str) -> Array:
    """fp32 values [..., n, 4] of x4 elements of any kind."""
    if dtype == "float4_e2m1fn_x4":
        return unpack_fp4_x4(packed)
    lanes: Array = np.ascontiguousarray(packed)[..., None].view(np.uint8)
    return ALL[dtype.removesuffix("_x4")].to_f32(lanes)


def e8m0_to_f32(scale: Array) -> Array:
    """2^(byte - 127) of scale bytes; 255 is NaN."""
    exponent = scale.view(np.uint8).astype(np.int32) - E8M0_BIAS
    values = np.ldexp(np.float32(1), np.minimum(exponent, 127))
    return np.where(exponent == 128, np.float32(np.nan), values)


def scale_rows(partitions: int) -> Array:
    """Row, inside the scale tile, of each group of 8 partitions.

    >>> scale_rows(64).tolist()
    [0, 1, 2, 3, 32, 33, 34, 35]
    >>> scale_rows(32).tolist()
    [0, 1, 2, 3]
    """
    group = np.arange(partitions // 8)
    rows: Array = group // 4 * 32 + group % 4
    return rows


def quantize(values: Array, dtype: str, *, doubled_scale: bool = True) -> tuple[Array, Array]:
    """Quantise fp32 [P, F] to x4 elements [P, F/4] and scale bytes [P/8, F/4].

    Scale exponent = floor(log2 of the largest magnitude) - (Emax - 1), which is twice the OCP sample's scale and leaves
    room to round up without saturation; `doubled_scale=False` gives the OCP sample's, with clipping. A group of zeros
    gets 2^-127.
    """
    partitions, free = values.shape
    groups = values.reshape(partitions // 8, 8, free // 4, 4)
    largest = np.abs(groups).max(axis=(1, 3))
    _, exponent = np.frexp(largest)
    limit = MAX_EXPONENT[dtype] - (1 if doubled_scale else 0)
    scale = np.where(largest > 0, np.clip(exponent - 1 - limit + E8M0_BIAS, 0, 254), 0)
    scale = np.where(np.isfinite(largest), scale, 255).astype(np.uint8)
    shift = -(scale.astype(np.int32) - E8M0_BIAS)
    scaled = np.ldexp(groups.astype(np.float64), shift[:, None, :, None])
    if not doubled_scale:
        most = _LARGEST[dtype]
        scaled = np.clip(scaled, -most, most)
    lanes = scaled.astype(np.float32).reshape(partitions, free).astype(_FP8[dtype])
    return pack_fp8_x4(lanes), scale


def dequantize(packed: Array, dtype: str, scale: Array) -> Array:
    """fp32 [P, n, 4] of x4 elements [P, n] and scale bytes [P/8, n]."""
    values: Array = unpack_x4(packed, dtype) * np.repeat(e8m0_to_f32(scale), 8, axis=0)[:, :, None]
    return values


def scatter_scales(scale: Array, partitions: int) -> Array:
    """The SBUF scale tile of dense scale rows [P/8, n]: dense up to 32 partitions, else spread over quadrants."""
    if partitions <= 32:
        return scale
    tile = np.zeros((partitions, scale.shape[1]), scale.dtype)
    tile[scale_rows(partitions)] = scale
    return tile
