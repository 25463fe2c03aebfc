"""Block tables, slots and trims."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.block_table import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    BlockId,
    SlidingBlockTable,
    first_window_block,
    require_block_size,
    slot_mapping,
    trim_to_window,
    trimmed_width,
)
from gk_core.errors import LayoutError, UnsupportedError

from .layout_builders import make_table


def test_the_null_block_is_0_and_the_pad_slot_is_minus_1() -> None:
    """0 is a valid slot address, so it is no pad."""
    assert (NULL_BLOCK_ID, PAD_SLOT_ID) == (0, -1)


@pytest.mark.parametrize(
    ("ids", "block_size", "positions", "slots"),
    [
        ((15, 8), 64, (0, 63, 64), (960, 1023, 512)),
        ((4, 9, 3), 16, (0, 15, 16, 31, 32, 47), (64, 79, 144, 159, 48, 63)),
        ((36_174,), 128, (127,), (4_630_399,)),
        ((0, 0, 7), 128, (256, 383), (896, 1023)),
        ((5,), 3, (), ()),
    ],
)
def test_slots_are_block_times_size_plus_offset(
    ids: tuple[int, ...], block_size: int, positions: tuple[int, ...], slots: tuple[int, ...]
) -> None:
    """Worked by hand."""
    assert slot_mapping(make_table(ids, block_size), positions) == slots


@pytest.mark.parametrize("position", [32, -1])
def test_a_position_outside_the_table_has_no_slot(position: int) -> None:
    """The last slot passes, the next and -1 do not."""
    table = make_table((5, 6), 16)
    assert table.num_slots == 32
    assert slot_mapping(table, [31]) == (111,)
    with pytest.raises(LayoutError, match=f"position {position} is outside the table's 32 slots"):
        slot_mapping(table, [position])


def test_a_position_in_the_null_block_has_no_slot() -> None:
    """An evicted block is not writable."""
    with pytest.raises(LayoutError, match="position 15 falls in the null block"):
        slot_mapping(make_table((0, 6), 16), [16, 15])


def test_tables_refuse_negative_ids_and_empty_blocks() -> None:
    """A pad value is not a block id."""
    with pytest.raises(LayoutError, match="block id must be >= 0, got -1 at logical block 1"):
        make_table((3, -1), 16)
    with pytest.raises(LayoutError, match="block_size must be >= 1 token, got 0"):
        make_table((3,), 0)


@pytest.mark.parametrize("block_size", [1, 16, 32, 64, 128, 256, 384])
def test_blocks_that_make_whole_tiles_are_served(block_size: int) -> None:
    """Divisors and multiples of 128."""
    require_block_size(block_size)


@pytest.mark.parametrize("block_size", [0, -128, 24, 48, 96, 192, 129])
def test_other_block_sizes_are_refused(block_size: int) -> None:
    """The message names the limit and the choices."""
    with pytest.raises(UnsupportedError, match=f"divide 128 or be a multiple of it, got {block_size}; choose 16, 32"):
        require_block_size(block_size)


@pytest.mark.parametrize(
    ("block_size", "prompt", "needed", "after_all_tokens"),
    [
        (128, 127, (0,), 0),
        (128, 254, (0, 1), 0),
        (128, 255, (0, 1), 1),
        (128, 256, (1,), 1),
        (128, 383, (1, 2), 2),
        (16, 143, tuple(range(9)), 1),
        (64, 191, (0, 1, 2), 1),
        (256, 383, (0, 1), 1),
    ],
)
def test_recomputing_the_last_prompt_token_needs_one_block_more_at_the_boundary(
    block_size: int, prompt: int, needed: tuple[int, ...], after_all_tokens: int
) -> None:
    """Window 128: keys of query N-1 among N-1 transferred tokens, and the first block of query N."""
    first = first_window_block(prompt - 1, 128, block_size)
    assert tuple(range(first, (prompt - 2) // block_size + 1)) == needed
    assert first_window_block(prompt, 128, block_size) == after_all_tokens


@given(prompt=st.integers(2, 5000), window=st.integers(1, 600), block=st.sampled_from([16, 32, 64, 128, 256, 7]))
@settings(deadline=None)
def test_the_two_queries_differ_exactly_on_a_block_boundary_of_the_window(prompt: int, window: int, block: int) -> None:
    """N-1 needs an earlier block than N exactly when N - W + 1 > 0 and divides by the block size."""
    differ = first_window_block(prompt - 1, window, block) != first_window_block(prompt, window, block)
    assert differ == (prompt - window + 1 > 0 and (prompt - window + 1) % block == 0)


@pytest.mark.parametrize(
    ("window", "block_size", "max_len", "width"),
    [
        (128, 16, 10_240, 16),
        (128, 32, 10_240, 8),
        (128, 64, 10_240, 4),
        (128, 128, 10_240, 2),
        (128, 256, 10_240, 2),
        (100, 16, 10_240, 8),
        (114, 16, 10_240, 16),
        (1, 128, 10_240, 1),
        (2, 128, 10_240, 2),
        (256, 128, 10_240, 3),
        (128, 16, 100, 7),
        (128, 128, 128, 1),
    ],
)
def test_a_trimmed_table_holds_the_window_in_whole_tiles(
    window: int, block_size: int, max_len: int, width: int
) -> None:
    """(W + n - 2) // n + 1 blocks, rounded up to 128 tokens, never wider than the full table."""
    assert trimmed_width(window, block_size, max_len) == width


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_window_128_always_trims_to_256_tokens(block_size: int) -> None:
    """For each block size that divides 128."""
    assert trimmed_width(128, block_size, 10_240) * block_size == 256


def test_trims_of_impossible_sizes_are_refused() -> None:
    """No window, no length, no such block."""
    with pytest.raises(LayoutError, match="must be >= 1, got 0, 5"):
        trimmed_width(0, 16, 5)
    with pytest.raises(LayoutError, match="must be >= 1, got 4, 0"):
        trimmed_width(4, 16, 0)
    with pytest.raises(UnsupportedError, match="got 24"):
        trimmed_width(4, 24, 5)


@pytest.mark.parametrize(
    ("ids", "position", "trimmed", "start"),
    [
        ((0, 0, 57, 58), 511, (57, 58), 256),
        ((0, 0, 57, 58), 384, (57, 58), 256),
        ((5, 6), 200, (5, 6), 0),
        ((5, 6), 127, (5, 6), 0),
        ((5,), 0, (5, 0), 0),
        ((0, 6, 7), 300, (6, 7), 128),
    ],
)
def test_a_trim_ends_with_the_block_of_the_position(
    ids: tuple[int, ...], position: int, trimmed: tuple[int, ...], start: int
) -> None:
    """Block 128, width 2: null blocks in front stay behind, missing ones at the end are null."""
    t = trim_to_window(make_table(ids, 128), position, 2)
    assert (t.block_ids, t.start_position, t.block_size) == (trimmed, start, 128)


def test_a_trim_at_a_negative_position_is_refused() -> None:
    """Positions start at 0."""
    with pytest.raises(LayoutError, match="position must be >= 0, got -1"):
        trim_to_window(make_table((5,), 128), -1, 2)


@pytest.mark.parametrize(("position", "frame"), [(383, 127), (256, 0), (511, 255), (255, 0), (0, 0)])
def test_frame_positions_count_from_the_first_slot_and_stop_at_zero(position: int, frame: int) -> None:
    """A stale row's position lies before its table; it must not turn negative."""
    ids = (BlockId(3), BlockId(5))
    assert SlidingBlockTable(block_ids=ids, block_size=128, start_position=256).frame_position(position) == frame


@given(
    position=st.integers(0, 3000),
    window=st.integers(1, 400),
    block_size=st.sampled_from([8, 16, 32, 64, 128, 256]),
)
@settings(deadline=None, max_examples=300)
def test_the_trimmed_table_covers_the_window_at_every_position(position: int, window: int, block_size: int) -> None:
    """Each key of the window is found in the frame at its own slot, and nothing before the request is."""
    max_len = 3001
    table = make_table([1000 + 3 * i for i in range(position // block_size + 1)], block_size)
    width = trimmed_width(window, block_size, max_len)
    trimmed = trim_to_window(table, position, width)
    assert len(trimmed.block_ids) == width
    oldest = max(position - window + 1, 0)
    for key in {oldest, (oldest + position) // 2, position}:
        frame = key - trimmed.start_position
        assert 0 <= frame < width * block_size
        slot = trimmed.block_ids[frame // block_size] * block_size + frame % block_size
        assert slot == slot_mapping(table, [key])[0]
