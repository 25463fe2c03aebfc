"""MXFP4 weights to floats on chip, exactly, for devices without MX matmuls and for float32 builds.

A word holds four FP4 values of consecutive features. Moved to the right bits, an FP4 value is an FP8 (e4m3) value 64
times smaller, its subnormal included: sign to bit 7, exponent and mantissa to bits 4..2. So two masks and an or make a
byte, the FP8 cast makes the number, and one multiplication by 64 * 2 ** (scale - 127) finishes it. Scales, one per 8
partitions, are spread over them by a contraction with a band of 64s: they are read from HBM once.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.tiles import COLUMNS, PARTITIONS, Constants

LANES = 4
SCALE_ROWS = 16
FP4_TO_FP8 = 64.0


def dequantise_columns(
    weight: nl.NkiTensor, scale: nl.NkiTensor, first: int, dtype: nl.DType, constants: Constants, name: str
) -> nl.NkiTensor:
    """512 columns of an MXFP4 matrix [128, tiles, n] uint16 with scale [16, tiles, n] as [128, 4 * tiles, 512] `dtype`.

    Lane l of tile t becomes chunk l * tiles + t: partition p of it is feature 512 t + 4 p + l, the order in which the
    hidden axis is stored.
    """
    tiles = weight.shape[1]
    shape = (PARTITIONS, tiles, COLUMNS)
    words = nl.ndarray(shape, dtype=nl.uint16, buffer=nl.sbuf, name=f"{name}_words")
    nisa.dma_copy(dst=words, src=weight[:, :, first : first + COLUMNS])
    factors = spread_scales(scale[:, :, first : first + COLUMNS], constants, f"{name}_scale")
    out = nl.ndarray((PARTITIONS, LANES * tiles, COLUMNS), dtype=dtype, buffer=nl.sbuf, name=name)
    for lane in range(LANES):
        sign = nl.ndarray(shape, dtype=nl.uint16, buffer=nl.sbuf, name=f"{name}_sign{lane}")
        move_bits(sign, words, 4 * lane + 3, 7, 0x80)
        value = nl.ndarray(shape, dtype=nl.uint16, buffer=nl.sbuf, name=f"{name}_value{lane}")
        move_bits(value, words, 4 * lane, 2, 0x1C)
        nisa.tensor_tensor(dst=value, data1=value, data2=sign, op=nl.bitwise_or)
        byte = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf, name=f"{name}_byte{lane}")
        nisa.tensor_copy(dst=byte, src=value)
        nisa.tensor_tensor(
            dst=out[:, lane * tiles : (lane + 1) * tiles, :], data1=byte.view(nl.float8_e4m3), data2=factors,
            op=nl.multiply,
        )  # fmt: skip
    return out


def move_bits(dst: nl.NkiTensor, src: nl.NkiTensor, source: int, target: int, mask: int) -> None:
    """dst = (src with bit `source` moved to bit `target`) & mask."""
    if target >= source:
        nisa.tensor_scalar(
            dst=dst, data=src, op0=nl.left_shift, operand0=target - source, op1=nl.bitwise_and, operand1=mask
        )
    else:
        nisa.tensor_scalar(
            dst=dst, data=src, op0=nl.right_shift, operand0=source - target, op1=nl.bitwise_and, operand1=mask
        )


def spread_scales(scale: nl.NkiTensor, constants: Constants, name: str) -> nl.NkiTensor:
    """64 * 2 ** (byte - 127) of scale bytes [16, tiles, 512] in HBM, float32 [128, tiles, 512]; byte 0 gives 0.

    Byte 0 is 2 ** -127, below what the engines hold as a normal number; only padding has it in practice.
    """
    tiles = scale.shape[1]
    small = (SCALE_ROWS, tiles, COLUMNS)
    exponents = nl.ndarray(small, dtype=nl.uint8, buffer=nl.sbuf, name=f"{name}_exponents")
    nisa.dma_copy(dst=exponents, src=scale)
    bits = nl.ndarray(small, dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_bits")
    nisa.tensor_copy(dst=bits, src=exponents)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.left_shift, operand0=23)
    powers = bits.view(nl.float32)
    out = nl.ndarray((PARTITIONS, tiles, COLUMNS), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_spread")
    for t in range(tiles):
        spread = nl.ndarray((PARTITIONS, COLUMNS), dtype=nl.float32, buffer=nl.psum, name=f"{name}_psum{t}")
        nisa.nc_matmul(dst=spread, stationary=constants.band, moving=powers[:, t, :], accumulate=False)
        nisa.tensor_copy(dst=out[:, t, :], src=spread)
    return out
