"""Block tables: which blocks hold a request's tokens, in full and trimmed to the sliding window.

Dims: W sliding window (tokens), n block size (tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

from attrs import frozen

from gk_core.errors import LayoutError, UnsupportedError

__all__ = [
    "NULL_BLOCK_ID",
    "PAD_SLOT_ID",
    "PARTITION_TILE",
    "BlockId",
    "BlockTable",
    "SlidingBlockTable",
    "first_window_block",
    "require_block_size",
    "slot_mapping",
    "trim_to_window",
    "trimmed_width",
]

BlockId = NewType("BlockId", int)
"""Index into the pool that all groups draw from; meaningless without the group it was handed out for."""

NULL_BLOCK_ID = BlockId(0)
"""Never allocated; stands in a table where a block was evicted or never filled."""

PAD_SLOT_ID = -1
"""Slot of a row that must write nothing. Each adapter turns it into what its kernel needs."""

PARTITION_TILE = 128
"""Tokens that the kernel attends to at once, one per SBUF partition; a table's width fills whole tiles."""


def require_block_size(block_size: int) -> None:
    """Refuse block sizes from which no whole partition tile can be made.

    Raises:
        UnsupportedError: block_size neither divides 128 nor is a multiple of it.
    """
    if block_size < 1 or (PARTITION_TILE % block_size and block_size % PARTITION_TILE):
        raise UnsupportedError(
            f"block_size must divide {PARTITION_TILE} or be a multiple of it, got {block_size}; "
            "choose 16, 32, 64, 128 or 256"
        )


@frozen(kw_only=True)
class BlockTable:
    """A request's block ids in one group, by logical block.

    Attributes:
        block_ids: entry i holds tokens i*n .. i*n+n-1; NULL_BLOCK_ID where evicted.
        block_size: tokens per block.
    """

    block_ids: tuple[BlockId, ...]
    block_size: int

    def __attrs_post_init__(self) -> None:
        if self.block_size < 1:
            raise LayoutError(f"block_size must be >= 1 token, got {self.block_size}")
        for logical, block_id in enumerate(self.block_ids):
            if block_id < 0:
                raise LayoutError(f"block id must be >= 0, got {block_id} at logical block {logical}")

    @property
    def num_slots(self) -> int:
        """Tokens that the table has room for."""
        return len(self.block_ids) * self.block_size


@frozen(kw_only=True)
class SlidingBlockTable:
    """The part of a table that a sliding layer reads, with its place in the request.

    Attributes:
        block_ids: `trimmed_width` entries, NULL_BLOCK_ID where nothing is.
        block_size: tokens per block.
        start_position: position of the first slot of the first entry.
    """

    block_ids: tuple[BlockId, ...]
    block_size: int
    start_position: int

    def frame_position(self, position: int) -> int:
        """A position counted from the table's first slot, never below 0 (stale rows of idle requests).

        >>> SlidingBlockTable(block_ids=(BlockId(3), BlockId(5)), block_size=128,
        ...                   start_position=256).frame_position(383)
        127
        """
        return max(position - self.start_position, 0)


def slot_mapping(table: BlockTable, positions: Sequence[int]) -> tuple[int, ...]:
    """Slot of each token position; shape [len(positions)].

    slot = block_ids[position // block_size] * block_size + position % block_size

    >>> slot_mapping(BlockTable(block_ids=(BlockId(15), BlockId(8)), block_size=64), [0, 63, 64])
    (960, 1023, 512)

    Raises:
        LayoutError: a position is outside the table, or its block is the null block.
    """
    slots = []
    for position in positions:
        if not 0 <= position < table.num_slots:
            raise LayoutError(f"position {position} is outside the table's {table.num_slots} slots")
        block_id = table.block_ids[position // table.block_size]
        if block_id == NULL_BLOCK_ID:
            raise LayoutError(f"position {position} falls in the null block; its block was evicted")
        slots.append(block_id * table.block_size + position % table.block_size)
    return tuple(slots)


def first_window_block(position: int, sliding_window: int, block_size: int) -> int:
    """Logical block of the oldest key that a sliding query at `position` reads.

    max(position - W + 1, 0) // n. Position 254 (last of 255 tokens) with W = n = 128 still needs block 0;
    position 255 does not.

    >>> first_window_block(254, 128, 128), first_window_block(255, 128, 128)
    (0, 1)
    """
    return max(position - sliding_window + 1, 0) // block_size


def trimmed_width(sliding_window: int, block_size: int, max_model_len: int) -> int:
    """Entries of a trimmed table: blocks that a window can touch, in whole partition tiles.

    A window of W tokens ending anywhere touches at most (W + n - 2) // n + 1 blocks. Rounded up to whole tiles of 128
    tokens, and never wider than the full table.

    >>> [trimmed_width(128, n, 10240) for n in (16, 32, 64, 128)]
    [16, 8, 4, 2]

    Raises:
        LayoutError: window or length below one token.
        UnsupportedError: see `require_block_size`.

    Source: the rule W // n + 1 of the reference agrees with ours where n divides W; for W = 100, n = 16 it is one block
    short, so ours counts the worst case.
    """
    if sliding_window < 1 or max_model_len < 1:
        raise LayoutError(f"sliding_window and max_model_len must be >= 1, got {sliding_window}, {max_model_len}")
    require_block_size(block_size)
    touched = (sliding_window + block_size - 2) // block_size + 1
    per_tile = max(1, PARTITION_TILE // block_size)
    return min(-(-touched // per_tile) * per_tile, -(-max_model_len // block_size))


def trim_to_window(table: BlockTable, position: int, width: int) -> SlidingBlockTable:
    """The `width` entries that end with the block of `position`, padded with the null block.

    start = max(position // n - width + 1, 0)

    >>> t = BlockTable(block_ids=tuple(BlockId(b) for b in (0, 0, 7, 9)), block_size=128)
    >>> trim_to_window(t, 400, 2)
    SlidingBlockTable(block_ids=(7, 9), block_size=128, start_position=256)
    """
    if position < 0:
        raise LayoutError(f"position must be >= 0, got {position}")
    start = max(position // table.block_size - width + 1, 0)
    ids = table.block_ids[start : start + width]
    return SlidingBlockTable(
        block_ids=ids + (NULL_BLOCK_ID,) * (width - len(ids)),
        block_size=table.block_size,
        start_position=start * table.block_size,
    )
