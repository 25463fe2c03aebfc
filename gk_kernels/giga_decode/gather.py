"""Paged gather: where the blocks of each row land on chip, their row numbers in the cache, and which keys count.

A block is cut into `splits` runs of `run` tokens, and each run goes to a partition of its own: one index per
partition, one descriptor of run * d elements. The more runs, the fuller the partitions; the longer the run, the
better the DMA. Tables and positions are the same for every layer of a kind, so indices and masks are made once per
step.

Partition p of a tile holds row p // stride of its row group and run p % stride of that row; its tokens are
run * (p % stride) + 0 .. run - 1 of the block tile.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.tiles import PARTITIONS, bytes_of

SMALLEST_DESCRIPTOR = 512


class GatherPlan(NamedTuple):
    """Shapes of one attention kind's gathers.

    Attributes:
        rows: R.
        width: blocks of a row's table.
        block_size: tokens of a block.
        splits: runs of a block.
        run: tokens of a run.
        stride: partitions from one row to the next: 32, 64 or 128, which is where an engine may start.
        rows_per_tile: rows that share the 128 partitions.
        row_groups: tiles over the rows.
        block_tiles: tiles over the blocks of a row; more than one from 129 blocks on.
    """

    rows: int
    width: int
    block_size: int
    splits: int
    run: int
    stride: int
    rows_per_tile: int
    row_groups: int
    block_tiles: int

    def blocks_of(self, tile: int) -> int:
        """Blocks of one row in a block tile."""
        return min(PARTITIONS, self.width - tile * PARTITIONS)

    def runs_of(self, tile: int) -> int:
        """Partitions that one row fills in a block tile."""
        return self.blocks_of(tile) * self.splits

    def has_holes(self, tile: int) -> bool:
        """Whether some partitions of a tile hold no run."""
        return self.runs_of(tile) != self.stride

    def keys(self) -> int:
        """Tokens that a partition holds over all block tiles."""
        return self.block_tiles * self.run


class Gather(NamedTuple):
    """One attention kind's control on chip.

    Attributes:
        plan: shapes.
        indices: int32 [128, kv, block_tiles, row_groups], run numbers in the cache; block 0 in holes.
        hidden: uint8 [128, row_groups, keys], 1 where a key must not be read.
    """

    plan: GatherPlan
    indices: nl.NkiTensor
    hidden: nl.NkiTensor


def make_gather_plan(rows: int, width: int, block_size: int, head_size: int, itemsize: int, packed: bool) -> GatherPlan:
    """The fullest tiles whose descriptors are still at least 512 bytes; a packed run holds whole pairs."""
    splits = 1
    while (
        width * splits * 2 <= PARTITIONS
        and block_size % (splits * 2) == 0
        and block_size // (splits * 2) * head_size * itemsize >= SMALLEST_DESCRIPTOR
        and (not packed or block_size // (splits * 2) % 2 == 0)
    ):
        splits *= 2
    runs = min(width, PARTITIONS) * splits
    stride = 32 if runs <= 32 else 64 if runs <= 64 else PARTITIONS
    rows_per_tile = PARTITIONS // stride
    while rows % rows_per_tile != 0:
        rows_per_tile //= 2
    return GatherPlan(
        rows=rows, width=width, block_size=block_size, splits=splits, run=block_size // splits, stride=stride,
        rows_per_tile=rows_per_tile, row_groups=rows // rows_per_tile,
        block_tiles=(width + PARTITIONS - 1) // PARTITIONS,
    )  # fmt: skip


def make_gather(
    table: nl.NkiTensor, positions: nl.NkiTensor, starts: nl.NkiTensor | None, num_kv_heads: int, plan: GatherPlan,
    name: str,
) -> Gather:  # fmt: skip
    """Indices and mask of one kind from its table [R, width], positions [R, 1] and first keys [R, 1] (None: 0)."""
    inside = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_inside")
    nisa.iota(dst=inside, pattern=[[1, 1]], channel_multiplier=1)
    nisa.tensor_scalar(dst=inside, data=inside, op0=nl.bitwise_and, operand0=plan.stride - 1)
    return Gather(
        plan=plan,
        indices=make_indices(table, inside, num_kv_heads, plan, f"{name}_index"),
        hidden=make_mask(positions, starts, inside, plan, f"{name}_mask"),
    )


def make_indices(
    table: nl.NkiTensor, inside: nl.NkiTensor, num_kv_heads: int, plan: GatherPlan, name: str
) -> nl.NkiTensor:
    """Run number block * kv * splits + head * splits + p % splits, exact int32, for every head."""
    shape = (PARTITIONS, plan.block_tiles, plan.row_groups)
    blocks = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_blocks")
    nisa.memset(dst=blocks, value=0)
    for tile in range(plan.block_tiles):
        for row in range(plan.rows_per_tile):
            first = row * plan.stride
            nisa.dma_copy(
                dst=blocks[first : first + plan.runs_of(tile), tile, :],
                src=table.ap(
                    pattern=[
                        [1, plan.blocks_of(tile)], [0, plan.splits], [plan.rows_per_tile * plan.width, plan.row_groups],
                    ],
                    offset=row * plan.width + tile * PARTITIONS,
                ),
            )  # fmt: skip
    runs_per_block = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_runs")
    nisa.memset(dst=runs_per_block, value=num_kv_heads * plan.splits)
    nisa.tensor_tensor(dst=blocks, data1=blocks, data2=runs_per_block, op=nl.multiply)
    split = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_split")
    nisa.tensor_scalar(dst=split, data=inside, op0=nl.bitwise_and, operand0=plan.splits - 1)
    out = nl.ndarray(
        (PARTITIONS, num_kv_heads, plan.block_tiles, plan.row_groups), dtype=nl.int32, buffer=nl.sbuf, name=name
    )
    for head in range(num_kv_heads):
        of_head = nl.ndarray((PARTITIONS, 1, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_head{head}")
        nisa.tensor_scalar(dst=of_head, data=split, op0=nl.add, operand0=head * plan.splits)
        nisa.tensor_tensor(
            dst=out[:, head, :, :], data1=blocks,
            data2=of_head.broadcast(1, plan.block_tiles).broadcast(2, plan.row_groups), op=nl.add,
        )  # fmt: skip
    return out


def per_partition(column: nl.NkiTensor, plan: GatherPlan, name: str) -> nl.NkiTensor:
    """A float32 [R, 1] HBM column as [128, row_groups]: on each partition the value of its row."""
    out = nl.ndarray((PARTITIONS, plan.row_groups), dtype=nl.float32, buffer=nl.sbuf, name=name)
    if plan.stride * plan.rows_per_tile < PARTITIONS:
        nisa.memset(dst=out, value=0.0)
    for row in range(plan.rows_per_tile):
        first = row * plan.stride
        nisa.dma_copy(
            dst=out[first : first + plan.stride, :],
            src=column.ap(pattern=[[0, plan.stride], [plan.rows_per_tile, plan.row_groups]], offset=row),
        )
    return out


def make_mask(
    positions: nl.NkiTensor, starts: nl.NkiTensor | None, inside: nl.NkiTensor, plan: GatherPlan, name: str
) -> nl.NkiTensor:
    """Keys outside start .. position - 1 are hidden: the row's own token joins from the registers of this step."""
    keys = plan.keys()
    first_key = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_first")
    nisa.tensor_scalar(dst=first_key, data=inside, op0=nl.multiply, operand0=float(plan.run))
    key = nl.ndarray((PARTITIONS, keys), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_key")
    nisa.iota(dst=key, pattern=[[PARTITIONS * plan.block_size, plan.block_tiles], [1, plan.run]])
    nisa.tensor_scalar(dst=key, data=key, op0=nl.add, operand0=first_key)
    position = per_partition(positions, plan, f"{name}_position")
    hidden = nl.ndarray((PARTITIONS, plan.row_groups, keys), dtype=nl.uint8, buffer=nl.sbuf, name=f"{name}_hidden")
    if starts is None:
        for group in range(plan.row_groups):
            nisa.tensor_scalar(
                dst=hidden[:, group, :], data=key, op0=nl.greater_equal, operand0=position[:, group : group + 1]
            )
        return hidden
    start = per_partition(starts, plan, f"{name}_start")
    for group in range(plan.row_groups):
        late = nl.ndarray((PARTITIONS, keys), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_late{group}")
        nisa.tensor_scalar(dst=late, data=key, op0=nl.greater_equal, operand0=position[:, group : group + 1])
        nisa.scalar_tensor_tensor(
            dst=hidden[:, group, :], data=key, op0=nl.less, operand0=start[:, group : group + 1], op1=nl.maximum,
            operand1=late,
        )  # fmt: skip
    return hidden


def gather_runs(
    cache: nl.NkiTensor, gather: Gather, head: int, group: int, tile: int, dtype: nl.DType, name: str
) -> nl.NkiTensor:
    """Runs of one row group, head and block tile: [128, run, d] in `dtype`, tokens in order.

    cache: one buffer's K [num_blocks, kv, block, d], packed [num_blocks, kv, block / 2, d, 2], or V. Holes are zeros.
    """
    plan = gather.plan
    packed = len(cache.shape) == 5
    d = cache.shape[3]
    elements = plan.run * d
    table = cache.reshape((cache.shape[0] * cache.shape[1] * plan.splits, elements))
    raw = nl.ndarray((PARTITIONS, elements), dtype=cache.dtype, buffer=nl.sbuf, name=f"{name}_raw")
    if plan.has_holes(tile) or plan.stride * plan.rows_per_tile < PARTITIONS:
        nisa.memset(dst=raw, value=0.0)
    runs = plan.runs_of(tile)
    for row in range(plan.rows_per_tile):
        first = row * plan.stride
        nisa.dma_copy(
            dst=raw[first : first + runs, :],
            src=table.ap(
                pattern=[[elements, runs], [1, elements]],
                vector_offset=gather.indices[first : first + runs, head, tile, group : group + 1], indirect_dim=0,
            ),
        )  # fmt: skip
    if not packed and cache.dtype == dtype:
        return raw.reshape((PARTITIONS, plan.run, d))
    out = nl.ndarray((PARTITIONS, plan.run, d), dtype=dtype, buffer=nl.sbuf, name=name)
    if packed:
        # A pair's bytes alternate: even token, odd token. Reading them with stride 2 is what unpacks them.
        pairs = raw.reshape((PARTITIONS, plan.run // 2, d, 2)).permute((0, 1, 3, 2))
        nisa.tensor_copy(dst=out.reshape((PARTITIONS, plan.run // 2, 2, d)), src=pairs)
    else:
        nisa.tensor_copy(dst=out, src=raw.reshape((PARTITIONS, plan.run, d)), engine=nisa.engine.scalar)
    return out


def itemsize_of(cache: nl.NkiTensor) -> int:
    """Bytes of one element of the cache."""
    return bytes_of(cache.dtype)
