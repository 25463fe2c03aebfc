"""What the parts share: constants on chip, transposes, and the one matmul form `rows @ weight + bias`.

A weight streams through the Tensor Engine as the moving operand, 512 columns (one PSUM bank) at a time; the tokens
are the stationary operand, turned so that the contraction lies on partitions. Biases join the accumulation as a
contraction of one row, which costs no pass over the result and reads the bias from HBM once.

Plain copies of whole tiles go to the Scalar Engine, which has time; the Vector Engine has the rest of the work.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
BANK_BYTES = 2048
COLUMNS = 512


class Constants(NamedTuple):
    """Tiles that every layer reads.

    Attributes:
        ones: [128, 128] in the model's dtype.
        ones_f32: [128, 128] float32.
        identity: [128, 128] float32.
        band: [16, 128] float32, 64 where the partition is one of the row's eight, else 0; see `dequantise`.
    """

    ones: nl.NkiTensor
    ones_f32: nl.NkiTensor
    identity: nl.NkiTensor
    band: nl.NkiTensor


def bytes_of(dtype: nl.DType) -> int:
    """Bytes of one element of a dtype that the kernel holds."""
    if dtype == nl.float32 or dtype == nl.int32 or dtype == nl.uint32:
        return 4
    if dtype == nl.bfloat16 or dtype == nl.float16:
        return 2
    return 1


def make_constants(dtype: nl.DType) -> Constants:
    """Constants for a model of `dtype`."""
    ones = nl.ndarray((PARTITIONS, PARTITIONS), dtype=dtype, buffer=nl.sbuf, name="ones")
    nisa.memset(dst=ones, value=1.0)
    ones_f32 = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf, name="ones_f32")
    nisa.memset(dst=ones_f32, value=1.0)
    identity = nl.shared_identity_matrix(PARTITIONS, dtype=nl.float32)
    # 8 columns of the identity's first 16 rows, each repeated: row B is 1 on partitions 8 B .. 8 B + 7.
    band = nl.ndarray((16, 16, 8), dtype=nl.float32, buffer=nl.sbuf, name="band")
    nisa.tensor_scalar(
        dst=band, data=identity[0:16, 0:16].expand_dim(2).broadcast(2, 8), op0=nl.multiply, operand0=64.0
    )
    return Constants(ones=ones, ones_f32=ones_f32, identity=identity, band=band.reshape((16, PARTITIONS)))


def layer_of(stack: nl.NkiTensor, layer: int) -> nl.NkiTensor:
    """Layer `layer` of a stack; a leading axis of 1 is shared by all layers."""
    return stack[layer if stack.shape[0] > 1 else 0]


def load(src: nl.NkiTensor, dtype: nl.DType, name: str) -> nl.NkiTensor:
    """A [rows <= 128, ...] HBM view as an SBUF tile of `dtype`."""
    tile = nl.ndarray(src.shape, dtype=dtype, buffer=nl.sbuf, name=name)
    nisa.dma_copy(dst=tile, src=src)
    return tile


def turn_rows(rows: nl.NkiTensor, width: int, name: str) -> nl.NkiTensor:
    """`rows` [n, chunks * width] to [width, chunks, n]: the contraction axis goes to the partitions."""
    return turn_tiles([rows], width, name)


def turn_tiles(tiles: list[nl.NkiTensor], width: int, name: str) -> nl.NkiTensor:
    """The same for rows in several tiles of up to 128, side by side: [width, chunks, n over all tiles]."""
    dtype = tiles[0].dtype
    chunks = tiles[0].shape[1] // width
    total = 0
    for rows in tiles:
        total += rows.shape[0]
    out = nl.ndarray((width, chunks, total), dtype=dtype, buffer=nl.sbuf, name=name)
    start = 0
    for rows in tiles:
        count = rows.shape[0]
        # PSUM accesses start on multiples of 4 bytes, so an odd number of 2-byte values is stored one wider.
        stride = count + count % 2
        per_bank = max(1, BANK_BYTES // (stride * bytes_of(dtype)))
        for first in range(0, chunks, per_bank):
            here = min(per_bank, chunks - first)
            turned = nl.ndarray((width, here, stride), dtype=dtype, buffer=nl.psum, name=f"{name}_psum{start}_{first}")
            for i in range(here):
                column = (first + i) * width
                nisa.nc_transpose(dst=turned[:, i, 0:count], data=rows[:, column : column + width])
            nisa.tensor_copy(
                dst=out[:, first : first + here, start : start + count], src=turned[:, :, 0:count],
                engine=nisa.engine.scalar,
            )  # fmt: skip
        start += count
    return out


def load_columns(
    weight: nl.NkiTensor, depth: int, first: int, columns: int, dtype: nl.DType, name: str
) -> nl.NkiTensor:
    """Columns of `weight` [chunks * depth, n] as [depth, chunks, columns]: row c * depth + p on partition p."""
    chunks = weight.shape[0] // depth
    split = weight.reshape((chunks, depth, weight.shape[1])).permute((1, 0, 2))
    tile = nl.ndarray((depth, chunks, columns), dtype=dtype, buffer=nl.sbuf, name=name)
    nisa.dma_copy(dst=tile, src=split[:, :, first : first + columns])
    return tile


def contract(
    turned: nl.NkiTensor, weight: nl.NkiTensor, bias: nl.NkiTensor | None, ones: nl.NkiTensor, name: str
) -> nl.NkiTensor:
    """PSUM [rows, columns] = turned [depth, chunks, rows]^T . weight [depth, chunks, columns] + bias [1, columns]."""
    rows = turned.shape[2]
    chunks = turned.shape[1]
    sums = nl.ndarray((rows, weight.shape[2]), dtype=nl.float32, buffer=nl.psum, name=name)
    for c in range(chunks):
        nisa.nc_matmul(dst=sums, stationary=turned[:, c, :], moving=weight[:, c, :], accumulate=c > 0)
    if bias is not None:
        nisa.nc_matmul(dst=sums, stationary=ones[0:1, 0:rows], moving=bias, accumulate=True)
    return sums


def linear(
    turned: nl.NkiTensor, weight: nl.NkiTensor, bias: nl.NkiTensor, ones: nl.NkiTensor, name: str
) -> nl.NkiTensor:
    """SBUF float32 [rows, n] = rows @ weight [K, n] + bias [1, n], weight and bias in HBM and each read once."""
    depth = turned.shape[0]
    rows = turned.shape[2]
    n = weight.shape[1]
    out = nl.ndarray((rows, n), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_out")
    bias_tile = load(bias, turned.dtype, f"{name}_bias")
    for first in range(0, n, COLUMNS):
        columns = min(COLUMNS, n - first)
        tile = load_columns(weight, depth, first, columns, turned.dtype, f"{name}_weight{first}")
        sums = contract(turned, tile, bias_tile[:, first : first + columns], ones, f"{name}_sums{first}")
        nisa.tensor_copy(dst=out[:, first : first + columns], src=sums, engine=nisa.engine.scalar)
    return out


def spread_row(row: nl.NkiTensor, rows: int, constants: Constants, name: str) -> nl.NkiTensor:
    """A [1, n] HBM row on `rows` partitions, float32: read once and spread by the Tensor Engine."""
    n = row.shape[1]
    tile = load(row, nl.float32, f"{name}_row")
    if rows == 1:
        return tile
    out = nl.ndarray((rows, n), dtype=nl.float32, buffer=nl.sbuf, name=name)
    for first in range(0, n, COLUMNS):
        columns = min(COLUMNS, n - first)
        spread = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum, name=f"{name}_psum{first}")
        nisa.nc_matmul(
            dst=spread, stationary=constants.ones_f32[0:1, 0:rows], moving=tile[:, first : first + columns],
            accumulate=False,
        )  # fmt: skip
        nisa.tensor_copy(dst=out[:, first : first + columns], src=spread, engine=nisa.engine.scalar)
    return out


def cast(tile: nl.NkiTensor, dtype: nl.DType, name: str) -> nl.NkiTensor:
    """A tile in another dtype; itself when it has that dtype."""
    if tile.dtype == dtype:
        return tile
    out = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf, name=name)
    nisa.tensor_copy(dst=out, src=tile, engine=nisa.engine.scalar)
    return out
