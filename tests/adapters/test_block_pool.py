"""The block pool's two orders of ids, its free runs, the fake, and what churn does to the number of reads."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.block_pool import BlockOrder, HybridBlockPool, PoolUsage, id_runs
from gk_adapters.fakes.block_pool import FakeBlockPool
from gk_adapters.free_runs import FreeRuns
from gk_adapters.pool_churn import ChurnSettings, paired_runs, pool_churn
from gk_core.block_table import NULL_BLOCK_ID
from gk_core.errors import CapacityError, LayoutError


def make_pool(order: BlockOrder, num_blocks: int = 30, window: int = 6) -> HybridBlockPool:
    return HybridBlockPool(num_blocks=num_blocks, block_size=4, sliding_window=window, order=order)


def ids(pool: HybridBlockPool, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tables = pool.tables(request_id=name)
    return tables.sliding.block_ids, tables.full.block_ids


def test_vllm_order_hands_out_ascending_ids_and_reuses_the_last_freed_first() -> None:
    """Sliding before full; freed: full backwards, then sliding backwards; worked by hand from vLLM's queue."""
    pool = make_pool(BlockOrder.VLLM)
    pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=9)
    assert ids(pool, "a") == ((1, 2, 3), (4, 5, 6))
    pool.grow(request_id="b", num_computed_tokens=0, num_new_tokens=5)
    assert ids(pool, "b") == ((7, 8), (9, 10))
    pool.free(request_id="a")
    pool.grow(request_id="c", num_computed_tokens=0, num_new_tokens=17)
    assert ids(pool, "c") == ((6, 5, 4, 3, 2), (1, 11, 12, 13, 14))


def test_vllm_order_covers_arrived_tokens_first_and_reuses_evicted_blocks_at_once() -> None:
    """9 arrive (their first sliding block never exists), 4 are new: one block more in each group."""
    pool = make_pool(BlockOrder.VLLM)
    pool.grow(request_id="a", num_computed_tokens=9, num_new_tokens=4)
    assert ids(pool, "a") == ((0, 1, 2, 6), (3, 4, 5, 7))
    pool.grow(request_id="a", num_computed_tokens=16, num_new_tokens=1)
    assert ids(pool, "a") == ((0, 0, 2, 6, 1), (3, 4, 5, 7, 8))


def test_contiguous_order_keeps_each_group_in_one_piece_and_lets_full_tables_grow() -> None:
    """Sliding blocks, which pass, come from the far end; growth continues behind the last block."""
    pool = make_pool(BlockOrder.CONTIGUOUS)
    pool.grow(request_id="a", num_computed_tokens=9, num_new_tokens=4)
    assert ids(pool, "a") == ((0, 27, 28, 29), (1, 2, 3, 4))
    pool.grow(request_id="a", num_computed_tokens=16, num_new_tokens=1)
    assert ids(pool, "a")[1] == (1, 2, 3, 4, 5)
    pool.grow(request_id="b", num_computed_tokens=0, num_new_tokens=8)
    assert ids(pool, "b")[1] == (6, 7)
    pool.grow(request_id="c", num_computed_tokens=0, num_new_tokens=4)
    pool.free(request_id="b")
    pool.grow(request_id="d", num_computed_tokens=0, num_new_tokens=8)
    assert ids(pool, "d")[1] == (6, 7)
    pool.grow(request_id="d", num_computed_tokens=8, num_new_tokens=1)
    assert ids(pool, "d")[1] == (6, 7, 9)


def test_tables_are_the_same_object_until_they_change() -> None:
    """A decode step inside a block costs no new tuples."""
    pool = make_pool(BlockOrder.CONTIGUOUS)
    first = pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=5)
    assert pool.grow(request_id="a", num_computed_tokens=5, num_new_tokens=1) is first
    assert pool.tables(request_id="a") is first
    assert pool.grow(request_id="a", num_computed_tokens=8, num_new_tokens=1) is not first


@pytest.mark.parametrize("order", list(BlockOrder))
def test_a_request_may_jump_ahead_of_what_it_holds(order: BlockOrder) -> None:
    """A later turn whose tokens arrive by transfer: held blocks behind the window go, skipped ones are null."""
    pool = make_pool(order)
    pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=7)
    pool.grow(request_id="a", num_computed_tokens=25, num_new_tokens=1)
    sliding, full = ids(pool, "a")
    assert sliding[:5] == (0,) * 5
    assert NULL_BLOCK_ID not in sliding[5:]
    assert (len(sliding), len(full)) == (7, 7)
    assert pool.check_invariants() == PoolUsage(full=7, sliding=2, free=20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 1}, "num_blocks must be >= 2 because block 0 is the null block, got 1"),
        ({"block_size": 0}, "block_size must be >= 1 token, got 0"),
        ({"sliding_window": 0}, "sliding_window must be >= 1 token, got 0"),
    ],
)
def test_impossible_pools_are_refused(change: dict[str, int], message: str) -> None:
    """Two blocks are the least."""
    right: dict[str, Any] = {"num_blocks": 2, "block_size": 4, "sliding_window": 6}
    assert HybridBlockPool(**right).num_free_blocks() == 1
    with pytest.raises(LayoutError, match=message):
        HybridBlockPool(**(right | change))


def test_the_invariant_check_finds_lost_doubled_foreign_and_kept_blocks() -> None:
    """Each kind of damage, made by hand, is named."""

    def damaged(**damage: Any) -> HybridBlockPool:
        pool = make_pool(BlockOrder.VLLM, num_blocks=12)
        pool.grow(request_id="a", num_computed_tokens=9, num_new_tokens=3)
        assert pool.check_invariants() == PoolUsage(full=3, sliding=2, free=6)
        held = pool._requests["a"]
        for name, change in damage.items():
            change(getattr(held, name))
        return pool

    for pool, message in (
        (damaged(full=lambda b: b.pop()), "block 5 is neither held nor free"),
        (
            damaged(full=lambda b: b.append(b[0])),
            r"block 3 belongs to request 'a' \(full\) and to request 'a' \(full\)",
        ),
        (damaged(full=lambda b: b.append(9)), r"block 9 belongs to request 'a' \(full\) and to the free list"),
        (damaged(full=lambda b: b.append(12)), r"block 12 of request 'a' \(full\) is outside 1\.\.11"),
        (damaged(sliding=lambda b: b.__setitem__(1, 0)), r"block 0 of request 'a' \(sliding\) is outside 1\.\.11"),
        (damaged(sliding=lambda b: b.__setitem__(0, 1)), "request 'a' kept a sliding block that the window had left"),
    ):
        with pytest.raises(LayoutError, match=message):
            pool.check_invariants()


def test_the_fake_remembers_evictions_and_checks_itself() -> None:
    """Request, logical block and id; also when the growth itself fails."""
    pool = FakeBlockPool(num_blocks=9, block_size=4, sliding_window=6)
    pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=16)
    with pytest.raises(CapacityError):
        pool.grow(request_id="a", num_computed_tokens=13, num_new_tokens=20)
    assert pool.evicted == (("a", 0, 1), ("a", 1, 2))
    pool._requests["a"].full.append(pool._requests["a"].full[0])
    with pytest.raises(LayoutError, match="belongs to"):
        pool.free(request_id="nobody")


@pytest.mark.parametrize(
    ("block_ids", "runs"), [((), 0), ((7,), 1), ((4, 5, 6), 1), ((6, 5, 4), 3), ((4, 5, 9, 10, 3), 3)]
)
def test_runs_of_a_table_ascend_by_one(block_ids: tuple[int, ...], runs: int) -> None:
    """Descending neighbours are not a run."""
    assert id_runs(block_ids) == runs


@pytest.mark.parametrize(
    ("local", "remote", "handed_out", "any_order"),
    [
        ((), (), 0, 0),
        ((1, 2, 3), (7, 8, 9), 1, 1),
        ((3, 2, 1), (9, 8, 7), 3, 1),
        ((1, 2, 3), (9, 8, 7), 3, 3),
        ((1, 2, 3, 4), (7, 8, 5, 6), 2, 2),
        ((5, 4, 7), (9, 8, 3), 3, 2),
    ],
)
def test_a_read_moves_blocks_that_ascend_on_both_sides(
    local: tuple[int, ...], remote: tuple[int, ...], handed_out: int, any_order: int
) -> None:
    """Sorting pairs helps where both sides run backwards together, and only there."""
    assert paired_runs(local, remote, in_order=True) == handed_out
    assert paired_runs(local, remote, in_order=False) == any_order


def test_free_runs_follow_their_three_rules() -> None:
    """Behind the last block, then the shortest run that holds all, else the longest ones; passing from the far end."""
    runs = FreeRuns(range(1, 21))
    assert runs.take(20, after=None, passing=False) == list(range(1, 21))
    runs.give([1, 2, 3, 6, 7, 8, 9, 12, 13, 20])
    assert (runs.num_runs, len(runs), list(runs.ids())) == (4, 10, [1, 2, 3, 6, 7, 8, 9, 12, 13, 20])
    assert runs.take(1, after=11, passing=False) == [12]
    assert runs.take(1, after=12, passing=False) == [13]
    assert runs.take(3, after=None, passing=False) == [1, 2, 3]
    assert runs.take(2, after=None, passing=True) == [8, 9]
    runs.give([8, 9, 12])
    assert runs.take(5, after=None, passing=False) == [6, 7, 8, 9, 12]
    with pytest.raises(CapacityError, match="2 blocks wanted, 1 are free"):
        runs.take(2, after=None, passing=False)
    assert runs.take(1, after=None, passing=False) == [20]
    assert len(runs) == 0


def test_freed_neighbours_join_on_both_sides() -> None:
    """Giving back 5 between 3..4 and 6..7 makes one run of five."""
    runs = FreeRuns(range(3, 8))
    runs.take(5, after=None, passing=False)
    for given_back, num_runs in (([3, 4], 1), ([7, 6], 2), ([5], 1)):
        runs.give(given_back)
        assert runs.num_runs == num_runs
    assert runs.take(5, after=None, passing=False) == [3, 4, 5, 6, 7]


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=40)
def test_free_runs_equal_a_set_of_ids(seed: int) -> None:
    """Any takes and gives: the same ids as a plain set, in maximal runs."""
    choose = random.Random(seed)
    runs, free, taken = FreeRuns(range(1, 60)), set(range(1, 60)), list[int]()
    for _ in range(60):
        if taken and choose.random() < 0.5:
            choose.shuffle(taken)
            back = [taken.pop() for _ in range(choose.randint(1, len(taken)))]
            runs.give(back)
            free |= set(back)
        else:
            count = choose.randint(0, len(free))
            got = runs.take(count, after=choose.choice([None, *taken]), passing=choose.random() < 0.5)
            assert len(set(got)) == count
            assert set(got) <= free
            free -= set(got)
            taken += got
        assert list(runs.ids()) == sorted(free)
        assert len(runs) == len(free)
        assert runs.num_runs == id_runs(sorted(free))


@given(seed=st.integers(0, 10_000), order=st.sampled_from(BlockOrder))
@settings(deadline=None, max_examples=30)
def test_both_orders_hold_the_same_logical_blocks(seed: int, order: BlockOrder) -> None:
    """The order of ids decides nothing else; used and free add up after every step."""
    choose = random.Random(seed)
    pool, reference = make_pool(order), make_pool(BlockOrder.VLLM)
    tokens: dict[str, int] = {}
    for _ in range(80):
        name = f"r{choose.randrange(5)}"
        at, new = tokens.get(name, choose.choice([0, 13])), choose.choice([1, 1, 9])
        outcomes = []
        for p in (pool, reference):
            try:
                t = p.grow(request_id=name, num_computed_tokens=at, num_new_tokens=new)
                outcomes.append(tuple(b == NULL_BLOCK_ID for g in (t.full, t.sliding) for b in g.block_ids))
            except CapacityError:
                outcomes.append(())
                p.free(request_id=name)
        assert outcomes[0] == outcomes[1]
        tokens[name] = at + new
        if not outcomes[0]:
            del tokens[name]
        assert pool.check_invariants() == reference.check_invariants()


def test_after_churn_contiguous_blocks_need_several_times_fewer_reads() -> None:
    """Two simulated minutes of the target's pools with 240 live requests, seeded."""
    report: Any = pool_churn(ChurnSettings(seconds=120.0))
    reads = report["reads_per_pull"]
    assert report["pulls"] > 500
    assert report["turned_away"] == {"vllm": 0, "contiguous": 0}
    assert reads["contiguous"]["mean"] * 5 < reads["vllm_sorted"]["mean"]
    assert reads["vllm_sorted"]["mean"] <= reads["vllm_as_handed_out"]["mean"] <= report["blocks_per_pull"]["mean"]
    assert reads["contiguous"]["min"] == 2
    runs = report["decode_side_runs"]
    assert all(runs[order]["mean"] <= reads[order]["mean"] for order in reads)
    assert runs["contiguous"]["mean"] * 2 < runs["vllm_sorted"]["mean"] < runs["vllm_as_handed_out"]["mean"]
    assert report["sorted_vllm_over_contiguous"] > 5
    assert json.loads(json.dumps(report)) == report


def test_churn_turns_requests_away_when_the_pools_are_too_small() -> None:
    """And goes on; both orders meet the same requests and turn the same ones away."""
    report: Any = pool_churn(ChurnSettings(num_blocks=1500, num_live=60, seconds=60.0))
    assert report["turned_away"]["vllm"] == report["turned_away"]["contiguous"] > 0
    assert report["pulls"] > 0


def test_churn_is_the_same_for_the_same_seed() -> None:
    """And differs for another."""
    small = ChurnSettings(num_blocks=4000, num_live=20, seconds=60.0)
    assert pool_churn(small) == pool_churn(small)
    assert pool_churn(small) != pool_churn(ChurnSettings(num_blocks=4000, num_live=20, seconds=60.0, seed=1))
