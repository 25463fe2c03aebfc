"""The block pool against real vLLM: same requests, same fate of every logical block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gk_adapters.block_pool import BlockOrder
from gk_adapters.fakes.block_pool import FakeBlockPool
from gk_core.block_table import NULL_BLOCK_ID, slot_mapping
from gk_core.decode_step import ControlShape, DecodeRow, build_attention_control
from gk_core.errors import CapacityError
from gk_core.ports import BlockPool, GroupTables

from ..contract.block_pool_contract import BlockPoolContract
from .vllm_pool import MAX_MODEL_LEN, VllmPool

pytestmark = pytest.mark.vllm

NUM_ROWS = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestVllmPool(BlockPoolContract):
    """vLLM's manager keeps our contract, so the contract is vLLM's."""

    def make_pool(self, *, num_blocks: int, block_size: int = 4, sliding_window: int = 6) -> BlockPool:
        return VllmPool(num_blocks=num_blocks, block_size=block_size, sliding_window=sliding_window)


class Act(NamedTuple):
    """One thing that happens to one request."""

    what: str
    who: int
    tokens: int


ACTS = st.lists(
    st.builds(
        Act,
        what=st.sampled_from(["prefill", "prefill", "arrive", "arrive_and_run", "decode", "decode", "decode", "end"]),
        who=st.integers(0, NUM_ROWS - 1),
        tokens=st.one_of(st.integers(1, 40), st.integers(1, 500), st.sampled_from([127, 128, 129, 255, 256, 383])),
    ),
    min_size=10,
    max_size=70,
)
SIZES = st.tuples(st.sampled_from([16, 32, 64, 128, 256]), st.sampled_from([128, 100, 1, 300, 17, 64]))


class Twins:
    """Our pool and vLLM's, led through the same acts and compared after each."""

    def __init__(self, *, num_blocks: int, block_size: int, window: int, order: BlockOrder, caching: bool) -> None:
        self.ours = FakeBlockPool(num_blocks=num_blocks, block_size=block_size, sliding_window=window, order=order)
        self.theirs = VllmPool(
            num_blocks=num_blocks, block_size=block_size, sliding_window=window, caching=caching, num_rows=NUM_ROWS
        )
        self.shape = ControlShape(num_rows=1, block_size=block_size, sliding_window=window, max_model_len=MAX_MODEL_LEN)
        self.same_ids = order is BlockOrder.VLLM and not caching
        self.tokens: dict[str, int] = {}
        self.refusals = 0

    def do(self, act: Act) -> None:
        name = f"r{act.who}"
        at = self.tokens.get(name)
        if act.what == "end":
            self.end(name)
        elif at is None:
            computed = 0 if act.what in ("prefill", "decode") else act.tokens
            new = {"prefill": act.tokens, "decode": act.tokens, "arrive": 0, "arrive_and_run": 1}[act.what]
            self.grow(name, computed, new)
        else:
            self.grow(name, at, min(act.tokens if act.what == "prefill" else 1, MAX_MODEL_LEN - at))
        self.compare()

    def grow(self, name: str, computed: int, new: int) -> None:
        if computed + new > MAX_MODEL_LEN or new == computed == 0:
            return
        outcomes = []
        for pool in (self.ours, self.theirs):
            try:
                pool.grow(request_id=name, num_computed_tokens=computed, num_new_tokens=new)
                outcomes.append("grown")
            except CapacityError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1], (name, computed, new)
        if outcomes[0] == "refused":
            self.refusals += 1
            if name in self.tokens and self.refusals % 2:
                # Preempted, as vLLM does when it finds no room; else it waits with what it has.
                self.end(name)
        else:
            self.tokens[name] = computed + new
            if new:
                self.compare_slots(name, computed, new)

    def end(self, name: str) -> None:
        for pool in (self.ours, self.theirs):
            pool.free(request_id=name)
        self.tokens.pop(name, None)

    def compare(self) -> None:
        assert self.ours.num_free_blocks() == self.theirs.num_free_blocks()
        assert set(self.ours.request_ids()) == set(self.tokens)
        for name in self.tokens:
            ours, theirs = (p.tables(request_id=name) for p in (self.ours, self.theirs))
            assert holes(ours) == holes(theirs), name
            if self.same_ids:
                assert ours == theirs, name

    def compare_slots(self, name: str, computed: int, new: int) -> None:
        """Slots of the step's tokens, and the control tensors of a decode step."""
        ours, theirs = (p.tables(request_id=name) for p in (self.ours, self.theirs))
        positions = range(computed, computed + new)
        sliding, full = self.theirs.slots(name, positions)
        assert slot_mapping(theirs.sliding, positions) == sliding
        assert slot_mapping(theirs.full, positions) == full
        if self.same_ids:
            assert slot_mapping(ours.sliding, positions) == sliding
            assert slot_mapping(ours.full, positions) == full
        if new == 1:
            row = DecodeRow(position=computed, full_table=theirs.full, sliding_table=theirs.sliding)
            control = build_attention_control([row], self.shape)
            assert (control.update_index_swa, control.update_index) == (sliding, full)
            # The worker's row keeps stale ids behind the window; inside it the trimmed table shows the same blocks.
            stale = self.theirs.worker_row(name, 0)
            start = (computed - control.positions_swa[0]) // self.shape.block_size
            for i, block_id in enumerate(control.block_table_swa[0]):
                if block_id != NULL_BLOCK_ID:
                    assert stale[start + i] == block_id
            assert control.block_table[0][: len(theirs.full.block_ids)] == self.theirs.worker_row(name, 1)


def holes(tables: GroupTables) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which logical blocks a request holds, by group."""
    sliding, full = (tuple(b != NULL_BLOCK_ID for b in t.block_ids) for t in (tables.sliding, tables.full))
    return sliding, full


@pytest.mark.parametrize(
    ("order", "caching"),
    [(BlockOrder.VLLM, False), (BlockOrder.CONTIGUOUS, False), (BlockOrder.VLLM, True)],
    ids=["vllm_ids", "contiguous_ids", "against_the_hybrid_coordinator"],
)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(acts=ACTS, sizes=SIZES, num_blocks=st.integers(20, 90))
def test_every_logical_block_fares_as_in_vllm(
    order: BlockOrder, caching: bool, acts: list[Act], sizes: tuple[int, int], num_blocks: int
) -> None:
    """Chunked prefills, arrivals, decodes, aborts, full pools: same blocks, evictions, slots, free counts, and ids."""
    block_size, window = sizes
    twins = Twins(num_blocks=num_blocks, block_size=block_size, window=window, order=order, caching=caching)
    for act in acts:
        twins.do(act)
    for name in list(twins.tokens):
        twins.end(name)
        twins.compare()
    assert twins.ours.num_free_blocks() == num_blocks - 1
    twins.theirs.check_null_block()


def test_a_long_run_meets_evictions_and_full_pools() -> None:
    """2000 seeded acts on one pool: the comparison above is not empty."""
    choose = random.Random(7)
    twins = Twins(num_blocks=60, block_size=32, window=100, order=BlockOrder.VLLM, caching=False)
    kinds = ["prefill"] * 5 + ["arrive", "arrive_and_run", "decode", "decode", "decode", "end"]
    for _ in range(2000):
        tokens = choose.choice([1, 31, 32, 33, choose.randint(1, 700)])
        twins.do(Act(choose.choice(kinds), choose.randrange(NUM_ROWS), tokens))
    assert twins.refusals > 100
    assert len(twins.ours.evicted) > 200
