"""Control tensors out of vLLM's tables are the core's, value for value, stale table entries and all."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.vllm.step_control import GroupStep, StepRows, control_of_rows, row_starts
from gk_core.block_table import BlockId, BlockTable, first_window_block
from gk_core.decode_step import ControlShape, DecodeRow, build_attention_control
from gk_core.errors import LayoutError
from gk_core.model_geometry import GPT_OSS_20B

pytestmark = pytest.mark.vllm

SHAPE = ControlShape(num_rows=3, block_size=128, sliding_window=128, max_model_len=640)


def make_rows(positions: list[int], full: list[list[int]], sliding: list[list[int]], block_size: int) -> StepRows:
    """Rows whose slots follow from their tables."""
    at = torch.tensor(positions)
    tables = [torch.tensor(t, dtype=torch.int32) for t in (full, sliding)]
    slots = [t.long().gather(1, at[:, None] // block_size)[:, 0] * block_size + at % block_size for t in tables]
    return StepRows(positions=at, full_table=tables[0], sliding_table=tables[1], slots=slots[0], slots_swa=slots[1])


def test_a_row_past_the_window_reads_the_trimmed_table() -> None:
    """Position 300: block 2 of the request is entry 1 of a two-entry frame that begins at position 128."""
    rows = make_rows([300], [[7, 8, 9, 77, 77]], [[0, 5, 6, 66, 66]], 128)
    c = control_of_rows(rows, SHAPE, GPT_OSS_20B, torch.float32)
    assert c.block_table.tolist() == [[7, 8, 9, 0, 0], [0] * 5, [0] * 5]
    assert c.block_table_swa.tolist() == [[5, 6], [0, 0], [0, 0]]
    assert c.positions[:, 0].tolist() == [300, 0, 0]
    assert c.positions_swa[:, 0].tolist() == [172, 0, 0]
    assert c.swa_start[:, 0].tolist() == [45, 0, 0]
    assert c.update_index[:, 0].tolist() == [9 * 128 + 44, -1, -1]
    assert c.update_index_swa[:, 0].tolist() == [6 * 128 + 44, -1, -1]
    assert c.active[:, 0].tolist() == [1, 0, 0]


@given(
    seed=st.integers(0, 2**32),
    positions=st.lists(st.integers(0, 511), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
)
@settings(max_examples=120, deadline=None)
def test_control_is_what_the_core_defines(seed: int, positions: list[int], block_size: int) -> None:
    """Any rows, with garbage behind each row's last block as vLLM leaves it, evicted blocks null in front."""
    rng = random.Random(seed)
    shape = ControlShape(num_rows=5, block_size=block_size, sliding_window=128, max_model_len=512)
    ids = iter(rng.sample(range(1, 4000), 2 * 5 * 32))
    full, sliding, rows = [], [], []
    for position in positions:
        held = position // block_size + 1
        oldest = first_window_block(position, 128, block_size)
        a = [next(ids) for _ in range(held)]
        b = [0 if i < oldest else next(ids) for i in range(held)]
        junk = [9999] * (shape.full_width + 2 - held)
        full.append(a + junk)
        sliding.append(b + junk)
        table = [BlockTable(block_ids=tuple(map(BlockId, t)), block_size=block_size) for t in (a, b)]
        rows.append(DecodeRow(position=position, full_table=table[0], sliding_table=table[1]))
    wanted = build_attention_control(rows, shape)
    got = control_of_rows(make_rows(positions, full, sliding, block_size), shape, GPT_OSS_20B, torch.float32)
    for name in ("block_table", "block_table_swa"):
        assert getattr(got, name).tolist() == [list(row) for row in getattr(wanted, name)], name
    for name in ("positions", "positions_swa", "swa_start", "update_index", "update_index_swa", "active"):
        assert getattr(got, name)[:, 0].tolist() == list(getattr(wanted, name)), name


@pytest.mark.parametrize(("positions", "said"), [([1, 2, 3, 4], "4 rows do not fit"), ([640], "must be 0..639")])
def test_rows_that_do_not_fit_are_refused(positions: list[int], said: str) -> None:
    """Too many rows, or a position past max_model_len."""
    n = len(positions)
    rows = make_rows(positions, [[1] * 8] * n, [[2] * 8] * n, 128)
    with pytest.raises(LayoutError, match=said):
        control_of_rows(rows, SHAPE, GPT_OSS_20B, torch.float32)


def test_a_row_waits_for_the_row_that_writes_what_it_reads() -> None:
    """Row 1 has hit block 9, which row 0 writes in this step, and begins after row 0's four tokens; row 2 at once.

    Blocks of 4. Row 0: tokens 0..3 into block 9. Row 1: position 4, table 9, 5. Row 2: position 4, table 7, 6; its own
    block 6 is no reason to wait. Row 3 has hit what row 1 writes.
    """
    table = torch.tensor([[9, 0], [9, 5], [7, 6], [9, 5]])
    slots = torch.tensor([36, 37, 38, 39, 20, 24, 21])
    firsts, lengths = torch.tensor([0, 4, 5, 6]), torch.tensor([4, 1, 1, 1])
    positions = torch.tensor([0, 1, 2, 3, 4, 4, 5])
    group = GroupStep(table=table, slots=slots)
    assert row_starts((group,), firsts, lengths, positions, 4).tolist() == [0, 4, 0, 4]
    slots[6] = 12
    later = GroupStep(table=torch.tensor([[9, 0, 0], [9, 5, 0], [7, 6, 0], [9, 5, 3]]), slots=slots)
    positions[6] = 8
    assert row_starts((later,), firsts, lengths, positions, 4).tolist() == [0, 4, 0, 5]
    unrelated = GroupStep(table=torch.tensor([[19, 0], [8, 5], [7, 6], [8, 4]]), slots=slots)
    assert row_starts((unrelated, group), firsts, lengths, positions, 4).tolist()[1] == 4
    assert row_starts((unrelated,), firsts, lengths, positions, 4).tolist() == [0, 0, 0, 0]


def test_rows_that_wait_for_each_other_are_refused() -> None:
    """Blocks of 4; each row at position 4 has hit the block that the other writes."""
    group = GroupStep(table=torch.tensor([[6, 5], [5, 6]]), slots=torch.tensor([20, 24]))
    with pytest.raises(LayoutError, match=r"wait for each other's blocks in one step: \[\(0, 1\), \(1, 0\)\]"):
        row_starts((group,), torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([4, 4]), 4)


def test_a_table_entry_behind_the_window_is_nothing_to_wait_for() -> None:
    """Blocks of 4, window 6, a row at position 12 that sees 7..12: block 9 of entry 0 was taken back and came again."""
    slots = torch.tensor([36])
    one, position = torch.tensor([0]), torch.tensor([12])
    table = torch.tensor([[9, 4, 5, 9]])
    sliding = GroupStep(table=table, slots=slots, window=6)
    assert row_starts((sliding,), one, torch.tensor([1]), position, 4).tolist() == [0]
    other = GroupStep(table=torch.tensor([[3, 8, 5, 6], [9, 0, 0, 0]]), slots=torch.tensor([24, 36, 32]), window=6)
    starts = row_starts((other,), torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([12, 0, 1]), 4)
    assert starts.tolist() == [2, 0]  # entry 1 is block 8, which position 7 is in and row 1 writes
