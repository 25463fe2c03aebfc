"""All-gather and reduce-scatter of rows over a replica group, on chip where the rows fit, else through private HBM.

Rows lie on partitions, so up to 128 rows go from SBUF to SBUF and touch no HBM. More rows go through HBM in one
collective: in groups of 128 they would stay on chip, but each further collective costs its start (7.5 microseconds
where it was measured), and the HBM passes of 1024 rows cost about what three of these do.

Rows are gathered in the model's dtype. Quantised first they would be half as long with one MXFP8 term and no shorter
with two. Collectives take whole dense tensors only. A group of one rank needs none.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.tiles import COLUMNS, PARTITIONS, cast

FP8_MAX = 240.0


def all_gather_rows(rows: nl.NkiTensor, groups: tuple[tuple[int, ...], ...], name: str) -> list[nl.NkiTensor]:
    """Every rank's `rows` [n, width] one after another, as tiles of up to 128 rows."""
    size = len(groups[0])
    if size == 1:
        return [rows]
    n, width = rows.shape
    group = ncc.ReplicaGroup(groups)
    total = n * size
    if total <= PARTITIONS:
        gathered = nl.ndarray((total, width), dtype=rows.dtype, buffer=nl.sbuf, name=f"{name}_gathered")
        ncc.all_gather(srcs=[rows], dsts=[gathered], replica_group=group, collective_dim=0)
        return [gathered]
    source = nl.ndarray((n, width), dtype=rows.dtype, buffer=nl.private_hbm, name=f"{name}_source")
    nisa.dma_copy(dst=source, src=rows)
    everyone = nl.ndarray((total, width), dtype=rows.dtype, buffer=nl.private_hbm, name=f"{name}_everyone")
    ncc.all_gather(srcs=[source], dsts=[everyone], replica_group=group, collective_dim=0)
    tiles = []
    for first in range(0, total, PARTITIONS):
        here = min(PARTITIONS, total - first)
        tile = nl.ndarray((here, width), dtype=rows.dtype, buffer=nl.sbuf, name=f"{name}_tile{first}")
        nisa.dma_copy(dst=tile, src=everyone[first : first + here, :])
        tiles.append(tile)
    return tiles


def reduce_scatter_rows(
    tiles: list[nl.NkiTensor], groups: tuple[tuple[int, ...], ...], dtype: nl.DType, name: str
) -> nl.NkiTensor:
    """This rank's rows of the sum over a group of tiles of up to 128 rows, sent and added in `dtype`."""
    size = len(groups[0])
    if size == 1:
        return tiles[0]
    total = 0
    for tile in tiles:
        total += tile.shape[0]
    width = tiles[0].shape[1]
    group = ncc.ReplicaGroup(groups)
    if total <= PARTITIONS:
        partial = cast(tiles[0], dtype, f"{name}_partial")
        mine = nl.ndarray((total // size, width), dtype=dtype, buffer=nl.sbuf, name=f"{name}_mine")
        ncc.reduce_scatter(srcs=[partial], dsts=[mine], replica_group=group, collective_dim=0, op=nl.add)
        return mine
    source = nl.ndarray((total, width), dtype=dtype, buffer=nl.private_hbm, name=f"{name}_source")
    first = 0
    for tile in tiles:
        nisa.dma_copy(dst=source[first : first + tile.shape[0], :], src=tile)
        first += tile.shape[0]
    scattered = nl.ndarray((total // size, width), dtype=dtype, buffer=nl.private_hbm, name=f"{name}_scattered")
    ncc.reduce_scatter(srcs=[source], dsts=[scattered], replica_group=group, collective_dim=0, op=nl.add)
    own = nl.ndarray((total // size, width), dtype=dtype, buffer=nl.sbuf, name=f"{name}_own")
    nisa.dma_copy(dst=own, src=scattered)
    return own


def reduce_scatter_fp8(tiles: list[nl.NkiTensor], groups: tuple[tuple[int, ...], ...], name: str) -> nl.NkiTensor:
    """The same sum with FP8 (e4m3, largest 240) on the wire: a quarter of float32's bytes, and its precision.

    Collectives neither carry nor add FP8, so every rank sends its rows as pairs of bytes under the name of bfloat16 and
    adds what arrives itself, in float32: senders lie on partitions, and a contraction with ones sums over them.
    """
    size = len(groups[0])
    if size == 1:
        return tiles[0]
    assert size <= PARTITIONS, "FP8 reduce-scatter takes groups of up to 128 ranks"
    total = 0
    for tile in tiles:
        total += tile.shape[0]
    width = tiles[0].shape[1]
    own = total // size
    source = nl.ndarray((total, width // 2), dtype=nl.bfloat16, buffer=nl.private_hbm, name=f"{name}_source")
    first = 0
    for tile in tiles:
        rows = tile.shape[0]
        clamped = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_clamped{first}")
        nisa.tensor_scalar(
            dst=clamped, data=tile, op0=nl.minimum, operand0=FP8_MAX, op1=nl.maximum, operand1=-FP8_MAX
        )  # fmt: skip
        narrow = nl.ndarray((rows, width), dtype=nl.float8_e4m3, buffer=nl.sbuf, name=f"{name}_narrow{first}")
        nisa.tensor_copy(dst=narrow, src=clamped)
        nisa.dma_copy(dst=source[first : first + rows, :], src=narrow.view(nl.bfloat16))
        first += rows
    arrived = nl.ndarray((total, width // 2), dtype=nl.bfloat16, buffer=nl.private_hbm, name=f"{name}_arrived")
    ncc.all_to_all(srcs=[source], dsts=[arrived], replica_group=ncc.ReplicaGroup(groups), collective_dim=0)

    # pick[:, t] has ones in column t: it adds row t of every sender into row t of the result.
    pick = nl.ndarray((size, own, own), dtype=nl.bfloat16, buffer=nl.sbuf, name=f"{name}_pick")
    nisa.memset(dst=pick, value=0.0)
    by_sender = arrived.reshape((size, own, width // 2))
    shares = []
    for t in range(own):
        nisa.memset(dst=pick[:, t, t : t + 1], value=1.0)
        share = nl.ndarray((size, width // 2), dtype=nl.bfloat16, buffer=nl.sbuf, name=f"{name}_share{t}")
        nisa.dma_copy(dst=share, src=by_sender[:, t, :])
        shares.append(share.view(nl.float8_e4m3))
    out = nl.ndarray((own, width), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_out")
    for column in range(0, width, COLUMNS):
        sums = nl.ndarray((own, COLUMNS), dtype=nl.float32, buffer=nl.psum, name=f"{name}_sums{column}")
        for t in range(own):
            nisa.nc_matmul(
                dst=sums, stationary=pick[:, t, :], moving=shares[t][:, column : column + COLUMNS], accumulate=t > 0
            )
        nisa.tensor_copy(dst=out[:, column : column + COLUMNS], src=sums)
    return out
