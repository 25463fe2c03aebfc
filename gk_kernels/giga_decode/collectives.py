"""All-gather and reduce-scatter of rows over a replica group, on chip where the rows fit, else through private HBM.

Rows lie on partitions, so up to 128 rows go from SBUF to SBUF and touch no HBM. Collectives take whole dense tensors
only. A group of one rank needs none.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.tiles import PARTITIONS, cast


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
