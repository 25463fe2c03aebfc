"""Rows in, attention control out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.block_table import slot_mapping, trimmed_width
from gk_core.decode_step import ControlShape, DecodeRow, build_attention_control
from gk_core.errors import LayoutError, UnsupportedError

from .layout_builders import make_table

SHAPE = ControlShape(num_rows=3, block_size=128, sliding_window=128, max_model_len=640)


def row(position: int, full: tuple[int, ...], sliding: tuple[int, ...], block_size: int = 128) -> DecodeRow:
    return DecodeRow(
        position=position, full_table=make_table(full, block_size), sliding_table=make_table(sliding, block_size)
    )


def test_the_shape_fixes_both_table_widths() -> None:
    """5 blocks of 128 for 640 tokens; 2 for the window."""
    assert (SHAPE.full_width, SHAPE.sliding_width) == (5, 2)
    odd = ControlShape(num_rows=1, block_size=16, sliding_window=100, max_model_len=10_001)
    assert (odd.full_width, odd.sliding_width) == (626, 8)


def test_a_step_of_two_rows_is_worked_by_hand() -> None:
    """Row 0 at 300: blocks 1..2 slide, frame starts at 128; row 1 is idle; row 2 at 127 has not filled its window."""
    c = build_attention_control([row(300, (4, 9, 11), (0, 6, 7)), None, row(127, (20,), (21,))], SHAPE)
    assert c.block_table == ((4, 9, 11, 0, 0), (0, 0, 0, 0, 0), (20, 0, 0, 0, 0))
    assert c.block_table_swa == ((6, 7), (0, 0), (21, 0))
    assert c.positions == (300, 0, 127)
    assert c.positions_swa == (172, 0, 127)
    assert c.swa_start == (45, 0, 0)
    assert c.update_index == (11 * 128 + 44, -1, 20 * 128 + 127)
    assert c.update_index_swa == (7 * 128 + 44, -1, 21 * 128 + 127)
    assert c.active == (True, False, True)
    assert c.num_rows == 3


@pytest.mark.parametrize(
    ("position", "sliding", "swa", "frame", "start"),
    [
        (125, (5,), (5, 0), 125, 0),
        (126, (5,), (5, 0), 126, 0),
        (127, (5,), (5, 0), 127, 0),
        (128, (5, 6), (5, 6), 128, 1),
        (129, (5, 6), (5, 6), 129, 2),
        (254, (5, 6), (5, 6), 254, 127),
        (255, (0, 6), (0, 6), 255, 128),
        (256, (0, 6, 7), (6, 7), 128, 1),
        (257, (0, 6, 7), (6, 7), 129, 2),
    ],
)
def test_the_window_moves_with_the_position(
    position: int, sliding: tuple[int, ...], swa: tuple[int, int], frame: int, start: int
) -> None:
    """128 keys at most, itself included; the frame moves on by whole blocks."""
    full = tuple(range(30, 30 + position // 128 + 1))
    c = build_attention_control([row(position, full, sliding)], SHAPE)
    assert (c.block_table_swa[0], c.positions_swa[0], c.swa_start[0]) == (swa, frame, start)
    assert c.positions_swa[0] - c.swa_start[0] + 1 == min(position + 1, 128)


def test_groups_keep_their_own_ids() -> None:
    """Block 7 of the sliding group and block 7 of the full group of two requests each land in their own table."""
    c = build_attention_control([row(5, (7,), (8,)), row(6, (8,), (7,))], SHAPE)
    assert [t[0] for t in c.block_table[:2]] == [7, 8]
    assert [t[0] for t in c.block_table_swa[:2]] == [8, 7]
    assert c.update_index[:2] == (7 * 128 + 5, 8 * 128 + 6)
    assert c.update_index_swa[:2] == (8 * 128 + 5, 7 * 128 + 6)


def test_an_idle_engine_has_a_control_of_the_same_shape() -> None:
    """Missing rows are inactive: null tables, position 0, pad slots."""
    c = build_attention_control([], SHAPE)
    assert c.active == (False, False, False)
    assert c.update_index == c.update_index_swa == (-1, -1, -1)
    assert set(c.block_table) == {(0, 0, 0, 0, 0)}
    assert set(c.block_table_swa) == {(0, 0)}
    assert c.positions == c.positions_swa == c.swa_start == (0, 0, 0)


def test_more_rows_than_the_batch_are_refused() -> None:
    """Three fit, four do not."""
    build_attention_control([None] * 3, SHAPE)
    with pytest.raises(LayoutError, match="4 rows do not fit the padded batch of 3"):
        build_attention_control([None] * 4, SHAPE)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(640, (4,) * 5, (5,) * 5), "position 640 is outside max_model_len 640"),
        (row(-1, (4,), (5,)), "position -1 is outside max_model_len 640"),
        (row(128, (4,), (5, 6)), "position 128 is outside the table's 128 slots"),
        (row(128, (4, 5), (6,)), "position 128 is outside the table's 128 slots"),
        (row(1, (1, 2, 3, 4, 5, 6), (7,)), "full table has 6 blocks, max_model_len 640 allows 5"),
        (row(1, (7,), (1, 2, 3, 4, 5, 6)), "sliding table has 6 blocks, max_model_len 640 allows 5"),
        (row(1, (7,), (8,), block_size=64), "full table has block_size 64, the step has 128"),
        (row(200, (0, 7), (8, 9)), "full table has the null block at logical block 0"),
        (row(254, (6, 7), (0, 9)), "sliding table has the null block at logical block 0"),
        (row(300, (4, 9, 11), (0, 6, 0)), "position 300 falls in the null block"),
    ],
)
def test_a_row_that_would_read_or_write_wrong_blocks_is_refused(bad: DecodeRow, message: str) -> None:
    """Each refusal names what it met and the limit."""
    with pytest.raises(LayoutError, match=message):
        build_attention_control([bad], SHAPE)


def test_a_null_block_behind_the_window_is_fine() -> None:
    """Position 255 no longer reads block 0; position 254 does, as refused above."""
    build_attention_control([row(255, (6, 7), (0, 9))], SHAPE)


def test_sliding_table_of_another_block_size_is_refused() -> None:
    """Both groups have the step's block size."""
    bad = DecodeRow(position=1, full_table=make_table((7,), 128), sliding_table=make_table((8,), 64))
    with pytest.raises(LayoutError, match="sliding table has block_size 64, the step has 128"):
        build_attention_control([bad], SHAPE)


def test_shapes_that_no_kernel_serves_are_refused() -> None:
    """No rows; a block that makes no whole tile; no window."""
    with pytest.raises(LayoutError, match="num_rows must be >= 1, got 0"):
        ControlShape(num_rows=0, block_size=128, sliding_window=128, max_model_len=640)
    with pytest.raises(UnsupportedError, match="got 48"):
        ControlShape(num_rows=1, block_size=48, sliding_window=128, max_model_len=640)
    with pytest.raises(LayoutError, match="must be >= 1, got 0, 640"):
        ControlShape(num_rows=1, block_size=128, sliding_window=0, max_model_len=640)


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_every_control_has_one_shape_and_finds_every_key(data: st.DataObject) -> None:
    """Any rows, window and block size: fixed shapes; frame and absolute addressing name the same slots."""
    block_size = data.draw(st.sampled_from([16, 32, 64, 128, 256]), label="block_size")
    window = data.draw(st.integers(1, 300), label="window")
    max_len = data.draw(st.integers(1, 1500), label="max_model_len")
    positions = data.draw(st.lists(st.none() | st.integers(0, max_len - 1), max_size=5), label="positions")
    shape = ControlShape(num_rows=5, block_size=block_size, sliding_window=window, max_model_len=max_len)
    rows: list[DecodeRow | None] = []
    for i, p in enumerate(positions):
        if p is None:
            rows.append(None)
            continue
        held = range(p // block_size + 1)
        first = max(p - window + 1, 0) // block_size
        full = tuple(10_000 * (i + 1) + 2 * b for b in held)
        sliding = tuple(0 if b < first else 10_000 * (i + 1) + 2 * b + 1 for b in held)
        rows.append(row(p, full, sliding, block_size))
    c = build_attention_control(rows, shape)
    assert len(c.positions) == len(c.update_index) == len(c.active) == 5
    assert {len(t) for t in c.block_table} == {-(-max_len // block_size)}
    assert {len(t) for t in c.block_table_swa} == {trimmed_width(window, block_size, max_len)}
    for i, r in enumerate(rows):
        assert c.active[i] is (r is not None)
        if r is None:
            continue
        assert c.update_index[i] == slot_mapping(r.full_table, [r.position])[0]
        frame, start = c.positions_swa[i], c.swa_start[i]
        assert frame - start + 1 == min(r.position + 1, window)
        for back in {0, (frame - start) // 2, frame - start}:
            at = frame - back
            slot = c.block_table_swa[i][at // block_size] * block_size + at % block_size
            assert slot == slot_mapping(r.sliding_table, [r.position - back])[0]
        assert c.update_index_swa[i] == c.block_table_swa[i][frame // block_size] * block_size + frame % block_size
