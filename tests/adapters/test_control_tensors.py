"""Incremental control arrays: equal to the core's definition, literally and by property; bad calls change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import fields
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.control_tensors import IncrementalControl, TrackedControl, arrays_of
from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable
from gk_core.decode_step import AttentionControl, ControlShape, DecodeRow, build_attention_control
from gk_core.errors import LayoutError

SHAPE = ControlShape(num_rows=3, block_size=128, sliding_window=128, max_model_len=640)


def _row(position: int, full: tuple[int, ...], sliding: tuple[int, ...], block_size: int = 128) -> DecodeRow:
    def table(ids: tuple[int, ...]) -> BlockTable:
        return BlockTable(block_ids=tuple(map(BlockId, ids)), block_size=block_size)

    return DecodeRow(position=position, full_table=table(full), sliding_table=table(sliding))


def test_one_step_of_one_row_has_the_hand_worked_values() -> None:
    """Position 383 to 384: block 3 begins, the frame moves from 256 to 384 - 128, the window starts 127 back."""
    control = IncrementalControl(SHAPE)
    control.set_row(1, _row(383, (4, 9, 11), (0, 5, 6)))
    control.advance()
    a = control.arrays
    assert a.block_table.tolist() == [[0] * 5, [4, 9, 11, 0, 0], [0] * 5]
    assert a.block_table_swa.tolist() == [[0, 0], [5, 6], [0, 0]]
    assert a.positions[:, 0].tolist() == [0, 383, 0]
    assert a.positions_swa[:, 0].tolist() == [0, 255, 0]
    assert a.swa_start[:, 0].tolist() == [0, 128, 0]
    assert a.update_index[:, 0].tolist() == [-1, 11 * 128 + 127, -1]
    assert a.update_index_swa[:, 0].tolist() == [-1, 6 * 128 + 127, -1]
    assert a.active[:, 0].tolist() == [0, 1, 0]
    control.append_blocks([1], [12], [7])
    control.evict_blocks([1], [2])
    control.advance()
    assert a.block_table[1].tolist() == [4, 9, 11, 12, 0]
    assert a.block_table_swa[1].tolist() == [6, 7]
    assert (a.positions[1, 0], a.positions_swa[1, 0], a.swa_start[1, 0]) == (384, 128, 1)
    assert (a.update_index[1, 0], a.update_index_swa[1, 0]) == (12 * 128, 7 * 128)


def test_shapes_and_dtypes_are_the_contracts() -> None:
    """int32 tables, float32 positions, int32 slots, uint8 flags; a column each."""
    a = IncrementalControl(SHAPE).arrays
    wanted = {
        "block_table": ("int32", (3, 5)),
        "block_table_swa": ("int32", (3, 2)),
        **dict.fromkeys(("positions", "positions_swa", "swa_start"), ("float32", (3, 1))),
        **dict.fromkeys(("update_index", "update_index_swa"), ("int32", (3, 1))),
        "active": ("uint8", (3, 1)),
    }
    assert {name: (getattr(a, name).dtype.name, getattr(a, name).shape) for name in wanted} == wanted


class _Request:
    """A request as a pool would hold it: both tables, old sliding blocks evicted exactly."""

    def __init__(self, position: int, ids: Any, shape: ControlShape, *, spare_block: bool) -> None:
        self.position, self.ids, self.shape = position, ids, shape
        blocks = position // shape.block_size + 1 + spare_block
        blocks = min(blocks, shape.full_width)
        self.full = [next(ids) for _ in range(blocks)]
        self.sliding = [next(ids) for _ in range(blocks)]
        self.evict()

    @property
    def first_kept(self) -> int:
        return max(self.position - self.shape.sliding_window + 1, 0) // self.shape.block_size

    def evict(self) -> None:
        self.sliding = [NULL_BLOCK_ID if i < self.first_kept else b for i, b in enumerate(self.sliding)]

    def row(self) -> DecodeRow:
        return _row(self.position, tuple(self.full), tuple(self.sliding), self.shape.block_size)


@st.composite
def _shapes(draw: st.DrawFn) -> ControlShape:
    return ControlShape(
        num_rows=draw(st.integers(1, 4)),
        block_size=draw(st.sampled_from([16, 32, 128, 256])),
        sliding_window=draw(st.sampled_from([1, 40, 128, 200])),
        max_model_len=draw(st.integers(300, 900)),
    )


def _assert_equal(control: AttentionControl, arrays: Any, wanted: AttentionControl) -> None:
    assert control == wanted
    for name in ("block_table", "block_table_swa"):
        assert np.array_equal(getattr(arrays, name), np.array(getattr(wanted, name)))
    for name in ("positions", "positions_swa", "swa_start", "update_index", "update_index_swa", "active"):
        assert getattr(arrays, name)[:, 0].tolist() == [float(v) for v in getattr(wanted, name)]


def _churn(data: st.DataObject, shape: ControlShape, requests: list[_Request | None], ids: Any) -> tuple[Any, ...]:
    """One step's worth of finishing, admitting, growing and evicting; says what changed."""
    cleared, admitted, grown, evicted = [], [], [], []
    for i, request in enumerate(requests):
        if request is not None:
            at_end = request.position + 1 >= shape.max_model_len
            if at_end or data.draw(st.integers(0, 9)) == 0:
                requests[i] = None
                cleared.append(i)
                continue
            before = request.first_kept
            request.position += 1
            if request.position // shape.block_size >= len(request.full):
                request.full.append(next(ids))
                request.sliding.append(next(ids))
                grown.append((i, request.full[-1], request.sliding[-1]))
            if request.first_kept > before:
                request.evict()
                evicted.append((i, request.first_kept))
        elif data.draw(st.booleans()):
            near = data.draw(st.sampled_from([0, shape.block_size - 2, shape.sliding_window - 1, 2 * shape.block_size]))
            position = min(near, shape.max_model_len - 1)
            requests[i] = _Request(position, ids, shape, spare_block=data.draw(st.booleans()))
            admitted.append(i)
    return cleared, admitted, grown, evicted


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=_shapes())
def test_incremental_arrays_equal_the_cores_control_through_any_churn(data: st.DataObject, shape: ControlShape) -> None:
    """Random admissions, finishes, appended and evicted blocks over up to 40 steps."""
    ids = iter(range(1, 100_000))
    requests: list[_Request | None] = [None] * shape.num_rows
    control, tracked = IncrementalControl(shape), TrackedControl(shape)
    live = control.arrays
    for _ in range(data.draw(st.integers(1, 40))):
        cleared, admitted, grown, evicted = _churn(data, shape, requests, ids)
        for i in cleared:
            control.clear_row(i)
        for i in admitted:
            request = requests[i]
            assert request is not None
            control.set_row(i, request.row())
        control.append_blocks(*zip(*grown, strict=True)) if grown else None
        control.evict_blocks(*zip(*evicted, strict=True)) if evicted else None
        control.advance()
        rows = [None if r is None else r.row() for r in requests]
        wanted = build_attention_control(rows, shape)
        _assert_equal(control.to_control(), live, wanted)
        again = tracked(rows, shape)
        _assert_equal(again, tracked.arrays_of(again), wanted)


def test_tracked_arrays_are_live_for_the_last_control_only() -> None:
    """An older control is converted afresh, so it never shows a later step's values."""
    tracked = TrackedControl(SHAPE)
    first = tracked([_row(5, (4,), (6,))], SHAPE)
    second = tracked([_row(6, (4,), (6,))], SHAPE)
    assert tracked.arrays_of(second).positions[0, 0] == 6
    assert tracked.arrays_of(first).positions[0, 0] == 5
    assert arrays_of(first).update_index[0, 0] == 4 * 128 + 5


def test_tracked_control_recovers_after_a_refused_step() -> None:
    """A bad row refuses the step; the next good step is right, as if it had been the first."""
    tracked = TrackedControl(SHAPE)
    good = [_row(5, (4,), (6,)), _row(130, (7, 8), (9, 10))]
    tracked(good, SHAPE)
    with pytest.raises(LayoutError, match="null block"):
        tracked([_row(6, (4,), (6,)), _row(131, (7, 8), (9, 0))], SHAPE)
    rows = [_row(6, (4,), (6,)), _row(131, (7, 8), (9, 10))]
    assert tracked(rows, SHAPE) == build_attention_control(rows, SHAPE)


def test_a_repeated_step_is_not_taken_for_the_next_one() -> None:
    """The same rows again, as when a refused call is tried row by row."""
    tracked = TrackedControl(SHAPE)
    rows = [_row(5, (4,), (6,)), _row(130, (7, 8), (9, 10))]
    for attempt in (rows, rows, [rows[0], None], [None, rows[1]], rows):
        assert tracked(attempt, SHAPE) == build_attention_control(attempt, SHAPE)


def _snapshot(control: IncrementalControl) -> list[list[Any]]:
    a = control.arrays
    return [getattr(a, field.name).tolist() for field in fields(type(a))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.set_row(3, _row(0, (4,), (5,))), "row 3 is outside 0..2"),
        (lambda c: c.set_row(0, _row(640, (4,) * 5, (5,) * 5)), "position 640 is outside max_model_len 640"),
        (lambda c: c.set_row(0, _row(5, (4, 6), (5,))), "equally long, got 2 and 1"),
        (lambda c: c.clear_row(-1), "row -1 is outside"),
        (lambda c: c.append_blocks([1], [4], [5]), "rows .1. are not active"),
        (lambda c: c.append_blocks([7], [4], [5]), "rows .7. are not active, or not in 0..2"),
        (lambda c: c.append_blocks([0], [0], [5]), "must be >= 1, got 0"),
        (lambda c: c.append_blocks([0], [4, 5], [6, 7]), "1 rows need as many blocks, got 2 and 2"),
        (lambda c: c.append_blocks([0, 0], [4, 5], [6, 7]), "named once each"),
        (lambda c: c.append_blocks([2], [4], [5]), "has 5 blocks, which is all"),
        (lambda c: c.evict_blocks([0], [1]), "reads sliding blocks from logical block 0 next"),
        (lambda c: c.evict_blocks([0], [1, 1]), "as many first kept blocks, got 2"),
        (lambda c: c.advance(), "row 0 has no block for position 128"),
    ],
)  # fmt: skip
def test_a_refused_call_changes_nothing(call: Any, message: str) -> None:
    """Each names its rule; arrays stay as they were, and a repaired call goes on from there."""
    control = IncrementalControl(SHAPE)
    control.set_row(0, _row(127, (30,), (31,)))
    control.set_row(2, _row(600, (40, 41, 42, 43, 44), (0, 0, 0, 53, 54)))
    control.advance()
    before = _snapshot(control)
    with pytest.raises(LayoutError, match=message):
        call(control)
    assert _snapshot(control) == before
    control.append_blocks([0], [32], [33])
    control.advance()
    assert control.arrays.positions[:, 0].tolist() == [128, 0, 601]


def test_a_row_stops_at_max_model_len_inside_a_block() -> None:
    """The limit need not be a whole number of blocks."""
    shape = ControlShape(num_rows=1, block_size=16, sliding_window=16, max_model_len=20)
    control = IncrementalControl(shape)
    control.set_row(0, _row(19, (1, 2), (3, 4), 16))
    control.advance()
    with pytest.raises(LayoutError, match="row 0 reached max_model_len 20"):
        control.advance()
