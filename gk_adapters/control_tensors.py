"""AttentionControl as NumPy arrays that are kept up to date in place, row by row only where a row changes.

Dims: R rows, F full-table width, S sliding-table width, n tokens per block, W window.

Equal to `gk_core.decode_step` by property test. What a step costs depends on how many rows change their blocks, not on
how many rows there are: everything else is a handful of vector operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gk_core.block_table import NULL_BLOCK_ID, PAD_SLOT_ID, BlockId
from gk_core.decode_step import AttentionControl, ControlShape, DecodeRow, build_attention_control
from gk_core.errors import LayoutError

__all__ = ["ControlArrays", "IncrementalControl", "TrackedControl", "arrays_of"]

Rows = NDArray[np.intp]
Ints = NDArray[np.int32]
_NEVER = -(2**31)
"""Tokens to the next block of a row that does not move."""


@frozen(kw_only=True, eq=False)
class ControlArrays:
    """The fields of `AttentionControl` with the shapes and dtypes that a kernel's contract asks for.

    Attributes:
        block_table: int32 [R, F].
        block_table_swa: int32 [R, S].
        positions, positions_swa, swa_start: float32 [R, 1].
        update_index, update_index_swa: int32 [R, 1]; PAD_SLOT_ID on inactive rows.
        active: uint8 [R, 1].
    """

    block_table: NDArray[np.int32]
    block_table_swa: NDArray[np.int32]
    positions: NDArray[np.float32]
    positions_swa: NDArray[np.float32]
    swa_start: NDArray[np.float32]
    update_index: Ints
    update_index_swa: Ints
    active: NDArray[np.uint8]


class IncrementalControl:
    """Keeps one engine's `ControlArrays` from step to step.

    A step is: `clear_row` finished requests, `set_row` new ones, `append_blocks` and `evict_blocks` where the pool did,
    then `advance`, which moves the rows that were not set since the last one. After it `arrays` are the step's; they
    are live, the same objects from the first step to the last. Every call checks before it changes anything.

    Args:
        shape: rows, block size, window, longest context.
    """

    def __init__(self, shape: ControlShape) -> None:
        rows, full, sliding = shape.num_rows, shape.full_width, shape.sliding_width
        self._shape = shape
        # What moves by one token a step lies together, so that a step is two additions.
        self._ints = np.zeros((4, rows), np.int32)
        self._position, slot, slot_swa, self._to_next_block = self._ints
        self._floats = np.zeros((2, rows), np.float32)
        slot[:] = slot_swa[:] = PAD_SLOT_ID
        self._to_next_block[:] = _NEVER
        self.arrays = ControlArrays(
            block_table=np.zeros((rows, full), np.int32),
            block_table_swa=np.zeros((rows, sliding), np.int32),
            positions=self._floats[0][:, None],
            positions_swa=self._floats[1][:, None],
            swa_start=np.zeros((rows, 1), np.float32),
            update_index=slot[:, None],
            update_index_swa=slot_swa[:, None],
            active=np.zeros((rows, 1), np.uint8),
        )
        self._sliding = np.zeros((rows, full), np.int32)  # untrimmed
        self._flat_full, self._flat_sliding = self.arrays.block_table.reshape(-1), self._sliding.reshape(-1)
        self._num_blocks = np.zeros(rows, np.int32)
        self._first_kept = np.zeros(rows, np.int32)
        self._step, self._step_float = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        self._active: set[int] = set()
        self._fresh: list[int] = []
        self._evicted: list[Rows] = []
        self._window = np.arange(sliding)

    def set_row(self, row: int, decode_row: DecodeRow) -> None:
        """Put a request in a row, whatever was there before.

        Raises:
            LayoutError: as `build_attention_control`; tables of unequal length; no such row.
        """
        line = build_attention_control([decode_row], self._one_row_shape())
        full, sliding = decode_row.full_table.block_ids, decode_row.sliding_table.block_ids
        if len(full) != len(sliding):
            raise LayoutError(f"full and sliding table must be equally long, got {len(full)} and {len(sliding)} blocks")
        self._require_row(row)
        a = self.arrays
        a.block_table[row] = line.block_table[0]
        a.block_table_swa[row] = line.block_table_swa[0]
        a.positions[row], a.positions_swa[row] = line.positions[0], line.positions_swa[0]
        a.swa_start[row] = line.swa_start[0]
        a.update_index[row], a.update_index_swa[row] = line.update_index[0], line.update_index_swa[0]
        a.active[row] = 1
        self._sliding[row, : len(sliding)] = sliding
        self._sliding[row, len(sliding) :] = NULL_BLOCK_ID
        self._position[row], self._num_blocks[row] = decode_row.position, len(full)
        self._to_next_block[row] = decode_row.position % self._shape.block_size - self._shape.block_size
        self._first_kept[row] = next(i for i, block_id in enumerate(sliding) if block_id != NULL_BLOCK_ID)
        self._step[row] = self._step_float[row] = 1
        self._active.add(row)
        self._fresh.append(row)

    def clear_row(self, row: int) -> None:
        """Make a row inactive; harmless when it is.

        Raises:
            LayoutError: no such row.
        """
        self._require_row(row)
        a = self.arrays
        for array in (a.block_table, a.block_table_swa, a.positions, a.positions_swa, a.swa_start, a.active):
            array[row] = 0
        a.update_index[row] = a.update_index_swa[row] = PAD_SLOT_ID
        self._sliding[row] = NULL_BLOCK_ID
        self._position[row] = self._num_blocks[row] = self._first_kept[row] = 0
        self._step[row] = self._step_float[row] = 0
        self._to_next_block[row] = _NEVER
        self._active.discard(row)

    def append_blocks(self, rows: Sequence[int], full_ids: Sequence[int], sliding_ids: Sequence[int]) -> None:
        """Give each of the rows one more block in both groups.

        Raises:
            LayoutError: lengths differ, a row is inactive, named twice or full, or an id is not a block's.
        """
        index = self._active_rows(rows)
        if not len(rows) == len(full_ids) == len(sliding_ids):
            raise LayoutError(f"{len(rows)} rows need as many blocks, got {len(full_ids)} and {len(sliding_ids)}")
        if rows and min(*full_ids, *sliding_ids) <= NULL_BLOCK_ID:
            raise LayoutError(f"an appended block id must be >= 1, got {min(*full_ids, *sliding_ids)}")
        at = self._num_blocks[index]
        if rows and at.max() >= self._shape.full_width:
            row = int(index[at.argmax()])
            raise LayoutError(f"row {row} has {self._shape.full_width} blocks, which is all that max_model_len allows")
        self.arrays.block_table[index, at] = full_ids
        self._sliding[index, at] = sliding_ids
        self._num_blocks[index] = at + 1

    def evict_blocks(self, rows: Sequence[int], first_kept: Sequence[int]) -> None:
        """Put the null block in sliding tables before logical block `first_kept`, as a pool does.

        Trimmed tables follow with the next `advance`.

        Raises:
            LayoutError: lengths differ, a row is inactive or named twice, or its next query reads an evicted block.
        """
        index = self._active_rows(rows)
        if len(first_kept) != len(rows):
            raise LayoutError(f"{len(rows)} rows need as many first kept blocks, got {len(first_kept)}")
        shape, kept = self._shape, np.array(first_kept, np.int32)
        oldest = np.maximum(self._position[index] + (2 - shape.sliding_window), 0) // shape.block_size
        if (kept > oldest).any():
            i = int((kept > oldest).argmax())
            raise LayoutError(
                f"row {index[i]} reads sliding blocks from logical block {oldest[i]} next, cannot evict up to {kept[i]}"
            )
        before = self._first_kept[index]
        if (kept - before == 1).all():
            self._sliding[index, before] = NULL_BLOCK_ID
        else:
            for row, first in zip(rows, first_kept, strict=True):
                self._sliding[row, : max(first, 0)] = NULL_BLOCK_ID
        self._first_kept[index] = np.maximum(kept, before)
        self._evicted.append(index)

    def advance(self) -> None:
        """Move every active row one token on, but those that were set since the last time.

        Raises:
            LayoutError: a row has no block for its next position, or reached max_model_len; no row was moved.
        """
        step, step_float = self._step, self._step_float
        crossing = (self._to_next_block == -1).nonzero()[0]
        if self._fresh:
            step = step.copy()
            step[self._fresh] = 0
            step_float = step.astype(np.float32)
            crossing = crossing[step[crossing] == 1]
        if self._position.max() + 1 >= self._shape.max_model_len:
            self._require_positions(self._position + step)
        entered = self._enter(crossing) if len(crossing) else None
        np.add(self._ints, step, out=self._ints)
        np.add(self._floats, step_float, out=self._floats)
        self._fresh.clear()
        if entered is not None:
            self._cross(crossing, *entered)
        for rows in self._evicted:
            self._trim(rows, self._position[rows] // self._shape.block_size)
        self._evicted.clear()
        start = self.arrays.swa_start
        np.subtract(self.arrays.positions_swa, self._shape.sliding_window - 1, out=start)
        np.maximum(start, 0, out=start)

    def to_control(self, full_table: Sequence[tuple[BlockId, ...]] | None = None) -> AttentionControl:
        """The same values as the core has them.

        Args:
            full_table: rows of the full table where the caller has them as tuples already.
        """
        a = self.arrays
        if full_table is None:
            full_table = [tuple(row) for row in a.block_table.tolist()]
        return AttentionControl(
            block_table=tuple(full_table),
            block_table_swa=tuple(map(tuple, a.block_table_swa.tolist())),
            positions=tuple(a.positions[:, 0].astype(int).tolist()),
            positions_swa=tuple(a.positions_swa[:, 0].astype(int).tolist()),
            swa_start=tuple(a.swa_start[:, 0].astype(int).tolist()),
            update_index=tuple(a.update_index[:, 0].tolist()),
            update_index_swa=tuple(a.update_index_swa[:, 0].tolist()),
            active=tuple(a.active[:, 0].astype(bool).tolist()),
        )

    def _require_positions(self, position: Ints) -> None:
        limit = self._shape.max_model_len
        if (position >= limit).any():
            raise LayoutError(f"row {position.argmax()} reached max_model_len {limit}; finish its request")

    def _enter(self, rows: Rows) -> tuple[Ints, Ints, Ints]:
        """Logical block that each row is about to enter, and its ids in both groups."""
        block = (self._position[rows] + 1) // self._shape.block_size
        places = rows * self._shape.full_width + block
        full, sliding = self._flat_full[places], self._flat_sliding[places]
        if not (full.all() and sliding.all()):
            i = int(((full == NULL_BLOCK_ID) | (sliding == NULL_BLOCK_ID)).argmax())
            position = int(self._position[rows[i]]) + 1
            raise LayoutError(f"row {rows[i]} has no block for position {position}; append one first")
        return block, full, sliding

    def _cross(self, rows: Rows, block: Ints, full: Ints, sliding: Ints) -> None:
        """Rows that are now on the first token of `block`: new slots, and perhaps a new frame."""
        n = self._shape.block_size
        _, slot, slot_swa, to_next_block = self._ints
        slot[rows], slot_swa[rows] = full * n, sliding * n
        to_next_block[rows] = -n
        self._floats[1, rows] = (block - self._trim(rows, block)) * n

    def _trim(self, rows: Rows, block: Ints) -> Ints:
        """Refill the trimmed tables of rows that stand in `block`; logical block of their first entry."""
        start = np.maximum(block - (self._shape.sliding_width - 1), 0)
        places = (rows * self._shape.full_width + start)[:, None] + self._window
        self.arrays.block_table_swa[rows] = self._flat_sliding[places]
        return start

    def _active_rows(self, rows: Sequence[int]) -> Rows:
        named = set(rows)
        if not named <= self._active:
            raise LayoutError(f"rows {sorted(named - self._active)} are not active, or not in 0..{len(self._step) - 1}")
        if len(named) < len(rows):
            raise LayoutError(f"rows must be named once each, got {list(rows)}")
        return np.array(rows, np.intp)

    def _require_row(self, row: int) -> None:
        if not 0 <= row < self._shape.num_rows:
            raise LayoutError(f"row {row} is outside 0..{self._shape.num_rows - 1}")

    def _one_row_shape(self) -> ControlShape:
        s = self._shape
        return ControlShape(
            num_rows=1, block_size=s.block_size, sliding_window=s.sliding_window, max_model_len=s.max_model_len
        )


class TrackedControl:
    """`build_attention_control` for an engine that hands over whole rows each step, at the price of what changed.

    Pass it as `build_control`; whoever turns the control into tensors takes `arrays_of` it.
    """

    def __init__(self, shape: ControlShape) -> None:
        self._shape = shape
        self._last: AttentionControl | None = None
        self._reset()

    def __call__(self, rows: Sequence[DecodeRow | None], shape: ControlShape) -> AttentionControl:
        """The control of these rows.

        Raises:
            LayoutError: as `build_attention_control`.
        """
        if shape != self._shape:
            raise LayoutError(f"this control was made for {self._shape}, got {shape}")
        if len(rows) > shape.num_rows:
            raise LayoutError(f"{len(rows)} rows do not fit the padded batch of {shape.num_rows}")
        try:
            self._update([*rows, *[None] * (shape.num_rows - len(rows))])
        except LayoutError:
            self._reset()
            raise
        control = self._incremental.to_control(self._full)
        self._last = control
        return control

    def arrays_of(self, control: AttentionControl) -> ControlArrays:
        """Live arrays of the control that was built last; fresh ones of any other."""
        return self._incremental.arrays if control is self._last else arrays_of(control)

    def _reset(self) -> None:
        self._incremental = IncrementalControl(self._shape)
        self._rows: list[DecodeRow | None] = [None] * self._shape.num_rows
        self._full: list[tuple[BlockId, ...]] = [(NULL_BLOCK_ID,) * self._shape.full_width] * self._shape.num_rows
        self._last = None

    def _update(self, rows: list[DecodeRow | None]) -> None:
        for index, (row, before) in enumerate(zip(rows, self._rows, strict=True)):
            if row is None:
                if before is not None:
                    self._incremental.clear_row(index)
                    self._full[index] = (NULL_BLOCK_ID,) * self._shape.full_width
            elif before is None or not _moved_on(before, row):
                self._incremental.set_row(index, row)
                ids = row.full_table.block_ids
                self._full[index] = ids + (NULL_BLOCK_ID,) * (self._shape.full_width - len(ids))
        self._incremental.advance()
        self._rows = rows


def _moved_on(before: DecodeRow, row: DecodeRow) -> bool:
    return (
        row.position == before.position + 1
        and row.full_table.block_ids == before.full_table.block_ids
        and row.sliding_table.block_ids == before.sliding_table.block_ids
    )


def arrays_of(control: AttentionControl) -> ControlArrays:
    """Fresh arrays of a control."""
    return ControlArrays(
        block_table=np.array(control.block_table, np.int32),
        block_table_swa=np.array(control.block_table_swa, np.int32),
        positions=np.array(control.positions, np.float32)[:, None],
        positions_swa=np.array(control.positions_swa, np.float32)[:, None],
        swa_start=np.array(control.swa_start, np.float32)[:, None],
        update_index=np.array(control.update_index, np.int32)[:, None],
        update_index_swa=np.array(control.update_index_swa, np.int32)[:, None],
        active=np.array(control.active, np.uint8)[:, None],
    )
