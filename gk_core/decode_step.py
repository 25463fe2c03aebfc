"""One decode step's attention control: plain rows in, the layer-invariant tensors of the kernel out, as tuples.

Dims: R rows (padded batch), F full-table width, S sliding-table width. One new token per row.

This is the definition; adapters may compute the same values with arrays (a property test holds them to it).
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from gk_core.block_table import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    BlockId,
    BlockTable,
    slot_mapping,
    trim_to_window,
    trimmed_width,
)
from gk_core.errors import LayoutError

__all__ = ["AttentionControl", "ControlShape", "DecodeRow", "build_attention_control"]


@frozen(kw_only=True)
class ControlShape:
    """What is fixed while an engine runs, so that graphs never change shape.

    Attributes:
        num_rows: R, padded batch.
        block_size: tokens per block, same for both groups.
        sliding_window: tokens.
        max_model_len: tokens; the widest context.
    """

    num_rows: int
    block_size: int
    sliding_window: int
    max_model_len: int

    def __attrs_post_init__(self) -> None:
        if self.num_rows < 1:
            raise LayoutError(f"num_rows must be >= 1, got {self.num_rows}")
        trimmed_width(self.sliding_window, self.block_size, self.max_model_len)

    @property
    def full_width(self) -> int:
        """F: ceil(max_model_len / block_size)."""
        return -(-self.max_model_len // self.block_size)

    @property
    def sliding_width(self) -> int:
        """S: see `trimmed_width`."""
        return trimmed_width(self.sliding_window, self.block_size, self.max_model_len)


@frozen(kw_only=True)
class DecodeRow:
    """One request's place in a step.

    Attributes:
        position: of its new token; equal to the number of tokens already in the cache.
        full_table: blocks of the full group, one entry per logical block, covering `position`.
        sliding_table: blocks of the sliding group, evicted entries NULL_BLOCK_ID.
    """

    position: int
    full_table: BlockTable
    sliding_table: BlockTable


@frozen(kw_only=True)
class AttentionControl:
    """Layer-invariant control of one decode step.

    Attributes:
        block_table: [R, F] block ids of the full group; unused entries NULL_BLOCK_ID.
        block_table_swa: [R, S] block ids of the trimmed sliding group.
        positions: [R] absolute position of each new token; 0 for inactive rows.
        positions_swa: [R] the same in the trimmed table's frame.
        swa_start: [R] first key, in that frame, that a sliding layer may read.
        update_index: [R] slot of the full group that the new K and V go to; PAD_SLOT_ID writes nothing.
        update_index_swa: [R] slot of the sliding group.
        active: [R] rows that hold a request.
    """

    block_table: tuple[tuple[BlockId, ...], ...]
    block_table_swa: tuple[tuple[BlockId, ...], ...]
    positions: tuple[int, ...]
    positions_swa: tuple[int, ...]
    swa_start: tuple[int, ...]
    update_index: tuple[int, ...]
    update_index_swa: tuple[int, ...]
    active: tuple[bool, ...]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.active)


def build_attention_control(rows: Sequence[DecodeRow | None], shape: ControlShape) -> AttentionControl:
    """Control of one step; None is an inactive row, and missing rows at the end are inactive too.

    >>> table = BlockTable(block_ids=(BlockId(4), BlockId(9)), block_size=128)
    >>> swa = BlockTable(block_ids=(BlockId(5), BlockId(6)), block_size=128)
    >>> c = build_attention_control(
    ...     [DecodeRow(position=200, full_table=table, sliding_table=swa)],
    ...     ControlShape(num_rows=2, block_size=128, sliding_window=128, max_model_len=384))
    >>> c.block_table, c.block_table_swa
    (((4, 9, 0), (0, 0, 0)), ((5, 6), (0, 0)))
    >>> c.positions_swa, c.swa_start, c.update_index, c.update_index_swa
    ((200, 0), (73, 0), (1224, -1), (840, -1))

    Raises:
        LayoutError: more rows than the shape holds, a position past max_model_len, a table that does not cover its
            position or is too wide, or a window block that is the null block.
    """
    if len(rows) > shape.num_rows:
        raise LayoutError(f"{len(rows)} rows do not fit the padded batch of {shape.num_rows}")
    padded = list(rows) + [None] * (shape.num_rows - len(rows))
    lines = [_inactive_line(shape) if row is None else _active_line(row, shape) for row in padded]
    return AttentionControl(
        block_table=tuple(line.full for line in lines),
        block_table_swa=tuple(line.swa for line in lines),
        positions=tuple(line.position for line in lines),
        positions_swa=tuple(line.position_swa for line in lines),
        swa_start=tuple(line.swa_start for line in lines),
        update_index=tuple(line.slot for line in lines),
        update_index_swa=tuple(line.slot_swa for line in lines),
        active=tuple(row is not None for row in padded),
    )


@frozen
class _Line:
    full: tuple[BlockId, ...]
    swa: tuple[BlockId, ...]
    position: int
    position_swa: int
    swa_start: int
    slot: int
    slot_swa: int


def _inactive_line(shape: ControlShape) -> _Line:
    null_full = (NULL_BLOCK_ID,) * shape.full_width
    null_swa = (NULL_BLOCK_ID,) * shape.sliding_width
    return _Line(null_full, null_swa, 0, 0, 0, PAD_SLOT_ID, PAD_SLOT_ID)


def _active_line(row: DecodeRow, shape: ControlShape) -> _Line:
    position, window = row.position, shape.sliding_window
    if not 0 <= position < shape.max_model_len:
        raise LayoutError(f"position {position} is outside max_model_len {shape.max_model_len}")
    for name, table in (("full", row.full_table), ("sliding", row.sliding_table)):
        if table.block_size != shape.block_size:
            raise LayoutError(f"{name} table has block_size {table.block_size}, the step has {shape.block_size}")
        if len(table.block_ids) > shape.full_width:
            raise LayoutError(
                f"{name} table has {len(table.block_ids)} blocks, max_model_len "
                f"{shape.max_model_len} allows {shape.full_width}"
            )
    slot, slot_swa = (slot_mapping(t, [position])[0] for t in (row.full_table, row.sliding_table))
    last = position // shape.block_size
    oldest = max(position - window + 1, 0) // shape.block_size
    _require_filled("full", row.full_table, 0, last)
    _require_filled("sliding", row.sliding_table, oldest, last)
    trimmed = trim_to_window(row.sliding_table, position, shape.sliding_width)
    frame = trimmed.frame_position(position)
    full = row.full_table.block_ids
    return _Line(
        full=full + (NULL_BLOCK_ID,) * (shape.full_width - len(full)),
        swa=trimmed.block_ids,
        position=position,
        position_swa=frame,
        swa_start=max(frame - window + 1, 0),
        slot=slot,
        slot_swa=slot_swa,
    )


def _require_filled(name: str, table: BlockTable, first: int, last: int) -> None:
    for logical in range(first, last + 1):
        if table.block_ids[logical] == NULL_BLOCK_ID:
            raise LayoutError(
                f"{name} table has the null block at logical block {logical}, which the step reads; "
                "the block was evicted too early or never transferred"
            )
