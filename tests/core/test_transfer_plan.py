"""Which remote blocks land in which local blocks: by logical position, per group, checked."""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from gk_core.disaggregation import Role
from gk_core.errors import LayoutError, RequestError
from gk_core.model_geometry import AttentionKind
from gk_core.peer_layout import PeerLayout
from gk_core.peer_map import HeadSlice, PeerMap, map_peer
from gk_core.transfer_plan import BlockPairs, BlockRun, GroupBlocks, RankRead, TransferPlan, plan_pull
from tests.core.peer_builders import make_groups, make_map, make_peer, make_rank

S, F = AttentionKind.SLIDING, AttentionKind.FULL


def resized(peer: PeerLayout, *, kernel: int, block: int) -> PeerLayout:
    """A peer with another block size and kernel block size."""
    return evolve(
        peer,
        kernel_block_size=kernel,
        group_block_sizes=(block, block),
        interleave_size=block,
        block_bytes=(peer.grid.heads_per_rank * kernel * 64,) * 36,
    )


def pairs_of(plan: TransferPlan, remote_rank: int = 0) -> list[tuple[int, int]]:
    """(local, remote) block ids of the one read from a rank."""
    (read,) = [r for r in plan.reads if r.remote_rank == remote_rank]
    return [(run.local_start + i, run.remote_start + i) for run in read.runs for i in range(run.count)]


def one_to_one(**sizes: int) -> PeerMap:
    ours, theirs = make_peer(Role.DECODE), make_peer(Role.PREFILL)
    if sizes:
        ours, theirs = (resized(p, kernel=sizes["kernel"], block=sizes["block"]) for p in (ours, theirs))
    return make_map(ours, theirs)


NO_WINDOW = make_groups((), ())


def test_blocks_pair_by_position_and_not_by_count_from_the_end() -> None:
    """160 tokens; theirs blocks of 128 over kernel blocks of 64, ours of 64: A, B, C, and never the unused fourth."""
    ours = resized(make_peer(Role.DECODE), kernel=64, block=64)
    theirs = resized(make_peer(Role.PREFILL), kernel=64, block=128)
    plan = plan_pull(
        make_map(ours, theirs),
        local=make_groups((30, 31, 32), (20, 21, 22)),
        remote=make_groups((9, 8), (5, 7)),
        num_tokens=160,
    )
    # sliding: kernel blocks 0..2 (the query at 160 reads from 33 on); their ids 9, 8 are kernel blocks 18, 19, 16, 17
    assert sorted(pairs_of(plan)) == [(20, 10), (21, 11), (22, 14), (30, 18), (31, 19), (32, 16)]


def test_a_lookahead_block_of_the_producer_is_not_read() -> None:
    """16 tokens in blocks of 16: theirs b0 and b1, ours a0."""
    plan = plan_pull(
        one_to_one(kernel=16, block=16),
        local=make_groups((11,), (10,)),
        remote=make_groups((41, 42), (50, 51)),
        num_tokens=16,
    )
    assert pairs_of(plan) == [(10, 50), (11, 41)]


def test_a_partly_cached_prompt_reads_the_block_at_its_position() -> None:
    """2048 tokens in blocks of 64, 31 cached: their block 31 goes to our first, our last is left to compute."""
    remote = tuple(range(100, 132))
    plan = plan_pull(
        one_to_one(kernel=64, block=64),
        local=make_groups((7, 8), (5, 6), first_sliding=31, first_full=31),
        remote=make_groups(range(200, 232), remote),
        num_tokens=2048,
        num_cached_tokens=31 * 64,
    )
    assert pairs_of(plan) == [(5, 131), (7, 231)]


def test_only_blocks_with_tokens_in_them_are_read() -> None:
    """256 tokens in blocks of 128 and ids [5, 6, 9]: 5 and 6."""
    plan = plan_pull(
        one_to_one(),
        local=make_groups((3, 4, 12), (1, 2, 13)),
        remote=make_groups((7, 8, 10), (5, 6, 9)),
        num_tokens=256,
    )
    assert pairs_of(plan) == [(1, 5), (2, 6), (4, 8)]


def test_block_ids_expand_by_their_own_sides_ratio() -> None:
    """Their block 3 of two kernel blocks is kernel blocks 6 and 7; ours are one each."""
    ours = resized(make_peer(Role.DECODE), kernel=64, block=64)
    theirs = resized(make_peer(Role.PREFILL), kernel=64, block=128)
    plan = plan_pull(
        make_map(ours, theirs), local=make_groups((20, 21), (10, 11)), remote=make_groups((4,), (3,)), num_tokens=128
    )
    assert pairs_of(plan) == [(10, 6), (11, 7), (20, 8), (21, 9)]
    back = make_map(resized(ours, kernel=64, block=128), resized(theirs, kernel=64, block=64))
    plan = plan_pull(back, local=make_groups((4,), (3,)), remote=make_groups((20, 21), (10, 11)), num_tokens=128)
    assert pairs_of(plan) == [(6, 10), (7, 11), (8, 20), (9, 21)]


def test_a_pull_may_begin_in_the_middle_of_their_block() -> None:
    """Ours 64 with one block (64 tokens) cached, theirs 128: kernel block 1 is the second half of their block 3."""
    ours = resized(make_peer(Role.DECODE), kernel=64, block=64)
    theirs = resized(make_peer(Role.PREFILL), kernel=64, block=128)
    plan = plan_pull(
        make_map(ours, theirs),
        local=make_groups((21, 22), (11, 12), first_sliding=1, first_full=1),
        remote=make_groups((4, 6), (3, 5)),
        num_tokens=192,
        num_cached_tokens=64,
    )
    # sliding: the query at 192 reads from token 65 on, so from kernel block 1 too
    assert pairs_of(plan) == [(11, 7), (12, 10), (21, 9), (22, 12)]


def test_blocks_of_equal_size_move_with_all_their_kernel_blocks() -> None:
    """Block 128 over kernel 64 on both sides."""
    plan = plan_pull(
        one_to_one(kernel=64, block=128), local=make_groups((4,), (3,)), remote=make_groups((8,), (9,)), num_tokens=100
    )
    assert pairs_of(plan) == [(6, 18), (7, 19), (8, 16), (9, 17)]


@pytest.mark.parametrize(
    ("n", "sliding", "reads"), [(10_240, [79], 2916), (10_239, [78, 79], 2952), (10_242, [79, 80], 2988)]
)
def test_a_window_moves_by_the_mask_and_not_by_what_the_producer_still_holds(
    n: int, sliding: list[int], reads: int
) -> None:
    """Their sliding row still lists every block, and ours has room for all; 36 regions."""
    blocks = -(-(n - 1) // 128)
    plan = plan_pull(
        one_to_one(),
        local=make_groups(range(1, blocks + 1), range(101, blocks + 101)),
        remote=make_groups(range(1001, blocks + 1001), range(2001, blocks + 2001)),
        num_tokens=n - 1,
    )
    moved = pairs_of(plan)
    assert [b for b in moved if b[0] <= blocks] == [(i + 1, i + 1001) for i in sliding]
    assert [b for b in moved if b[0] > blocks] == [(i + 101, i + 2001) for i in range(blocks)]
    assert plan.num_regions * sum(r.num_blocks for r in plan.reads) == reads
    assert plan.num_bytes == reads * 8192


@pytest.mark.parametrize(("n", "sliding"), [(254, [0, 1]), (255, [0, 1]), (256, [1]), (383, [1, 2]), (127, [0])])
def test_the_block_that_the_stock_rule_loses_is_in_the_plan(n: int, sliding: list[int]) -> None:
    """Prompts around the boundary, block 128, window 128."""
    local, remote = make_groups((1, 2, 3), (4, 5, 6)), make_groups((11, 12, 13), (14, 15, 16))
    plan = plan_pull(one_to_one(), local=local, remote=remote, num_tokens=n - 1)
    assert [r for _, r in pairs_of(plan) if r < 14] == [11 + i for i in sliding]


def test_evicted_entries_in_front_of_the_window_are_neither_read_nor_written() -> None:
    """Ids [0, 0, 57, 58] with 400 tokens: 57 and 58."""
    plan = plan_pull(
        one_to_one(),
        local=make_groups((0, 0, 21, 22), (1, 2, 3, 4)),
        remote=make_groups((0, 0, 57, 58), (31, 32, 33, 34)),
        num_tokens=400,
    )
    assert pairs_of(plan) == [(1, 31), (2, 32), (3, 33), (4, 34), (21, 57), (22, 58)]


def test_under_context_parallelism_a_block_id_covers_all_ranks_tokens() -> None:
    """DCP 2, block 128: entries of 256 tokens, ids [0, 0, 57, 58]. 770 tokens need blocks 5 and 6: odd ones lie on
    dcp rank 1 in entry 2, even ones on dcp rank 0 in entry 3; id 0 is never read."""
    ours, theirs = make_peer(Role.DECODE), make_peer(Role.PREFILL, tp=16, dcp=2)
    plan = plan_pull(
        make_map(ours, theirs),
        local=make_groups((25, 26), range(1, 8), first_sliding=5),
        remote=make_groups((0, 0, 57, 58), (61, 62, 63, 64)),
        num_tokens=770,
    )
    assert pairs_of(plan, 0) == [(1, 61), (3, 62), (5, 63), (7, 64), (26, 58)]
    assert pairs_of(plan, 1) == [(2, 61), (4, 62), (6, 63), (25, 57)]


def test_fewer_dcp_ranks_there_are_read_in_steps() -> None:
    """DCP 2 to DCP 4, blocks 0..8: our rank 3 holds 3 and 7, which are entries 1 and 3 of their rank 1."""
    ours, theirs = make_peer(Role.DECODE, tp=32, dcp=4, rank=3), make_peer(Role.PREFILL, tp=16, dcp=2)
    plan = plan_pull(
        make_map(ours, theirs),
        local=make_groups((0, 0, 9), (1, 2, 3)),
        remote=make_groups((0, 0, 0, 51, 52), (11, 12, 13, 14, 15)),
        num_tokens=9 * 128,
    )
    # The window reaches back to token 1025: block 8, which is our dcp rank 0's.
    assert pairs_of(plan, 1) == [(1, 12), (2, 14)]


def test_a_partly_cached_prompt_under_context_parallelism_keeps_its_place() -> None:
    """DCP 4 to DCP 2: one of our entries (2 blocks, 256 tokens) is cached; blocks 2.. are read, not 0.. again."""
    ours, theirs = make_peer(Role.DECODE, tp=16, dcp=2, rank=1), make_peer(Role.PREFILL, tp=32, dcp=4)
    plan = plan_pull(
        make_map(ours, theirs),
        local=make_groups((31, 32, 33), (21, 22, 23), first_sliding=1, first_full=1),
        remote=make_groups((41, 42), (51, 52)),
        num_tokens=7 * 128,
        num_cached_tokens=256,
    )
    # Our dcp rank 1 wants blocks 3 and 5: block 3 is entry 0 of their dcp rank 3, block 5 entry 1 of their dcp rank 1.
    assert pairs_of(plan, 3) == [(21, 51)]
    assert pairs_of(plan, 1) == [(22, 52)]


def test_equal_numbers_in_two_groups_stay_apart() -> None:
    """Their sliding block 7 is not their full block 7's namesake here: ours has 7 in the full group."""
    plan = plan_pull(one_to_one(), local=make_groups((3,), (7,)), remote=make_groups((7,), (5,)), num_tokens=9)
    assert pairs_of(plan) == [(3, 7), (7, 5)]


def test_lists_of_the_wrong_group_are_refused() -> None:
    """A sliding id never stands for a full one."""
    sliding, full = make_groups((3,), (7,))
    with pytest.raises(RequestError, match="remote lists must be of groups sliding_attention, full_attention in this"):
        plan_pull(one_to_one(), local=(sliding, full), remote=(full, sliding), num_tokens=9)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_lists_must_be_the_number_of_groups(count: int) -> None:
    """Naming both counts."""
    lists = (*make_groups((3,), (7,)), make_groups((3,), (8,))[1])[:count]
    with pytest.raises(RequestError, match=f"2 groups, got {count} remote lists"):
        plan_pull(one_to_one(), local=make_groups((3,), (7,)), remote=lists, num_tokens=9)


def test_an_empty_list_beside_a_full_one_is_legal_where_nothing_is_needed() -> None:
    """A window of one token needs no sliding block."""
    ours, theirs = (evolve(make_peer(r), sliding_window=1) for r in (Role.DECODE, Role.PREFILL))
    plan = plan_pull(make_map(ours, theirs), local=make_groups((), (7,)), remote=make_groups((), (5,)), num_tokens=128)
    assert pairs_of(plan) == [(7, 5)]


@pytest.mark.parametrize("num_tokens", [0, 256])
def test_a_pull_of_nothing_still_notifies_every_mapped_rank(num_tokens: int) -> None:
    """N = 1, and a fully cached prompt; replicas too."""
    ours, theirs = make_peer(Role.DECODE, tp=4, rank=1), make_peer(Role.PREFILL, tp=16)
    plan = plan_pull(
        make_map(ours, theirs),
        local=NO_WINDOW,
        remote=make_groups((1, 2), (3, 4)),
        num_tokens=num_tokens,
        num_cached_tokens=num_tokens,
    )
    assert [(r.remote_rank, tuple(r.runs)) for r in plan.reads] == [(4, ()), (5, ()), (6, ()), (7, ())]
    assert plan.num_bytes == 0


def test_a_dcp_rank_with_an_empty_share_is_still_notified() -> None:
    """One block on four DCP ranks: rank 0 is read, ranks 1 to 3 are told."""
    plan = plan_pull(
        make_map(make_peer(Role.DECODE), make_peer(Role.PREFILL, tp=32, dcp=4)),
        local=make_groups((1,), (2,)),
        remote=make_groups((3,), (4,)),
        num_tokens=100,
    )
    assert [(r.remote_rank, r.num_blocks) for r in plan.reads] == [(0, 2), (1, 0), (2, 0), (3, 0)]


def test_a_merge_reads_the_same_blocks_from_each_rank() -> None:
    """Two halves of our block from two ranks."""
    plan = plan_pull(
        make_map(make_peer(Role.DECODE, tp=4, rank=3), make_peer(Role.PREFILL, tp=8)),
        local=make_groups((1, 4), (2, 3)),
        remote=make_groups((9, 8), (6, 7)),
        num_tokens=129,
    )
    assert [(r.remote_rank, r.head_slice.local_offset_bytes) for r in plan.reads] == [(6, 0), (7, 8192)]
    assert pairs_of(plan, 6) == pairs_of(plan, 7) == [(1, 9), (2, 6), (3, 7), (4, 8)]
    assert plan.num_bytes == 36 * 2 * 4 * 8192


GOOD_LOCAL, GOOD_REMOTE = ((1, 8), (2, 3)), ((4, 5), (6, 7))
BAD: list[tuple[str, Any, Any, str]] = [  # (sliding, full) here, (sliding, full) there
    ("remote_out_of_range", GOOD_LOCAL, ((4, 5), (6, 3000)), "remote block id 3000 does not exist; ids are below 30"),
    ("local_out_of_range", ((1, 8), (2, 3000)), GOOD_REMOTE, "local block id 3000 does not exist; ids are below 3000"),
    ("remote_null", GOOD_LOCAL, ((4, 5), (0, 7)), "a needed remote block is the null block"),
    ("local_null", ((1, 8), (0, 3)), GOOD_REMOTE, "a needed local block is the null block"),
    ("remote_twice", GOOD_LOCAL, ((4, 5), (6, 6)), "remote block 6 is named twice"),
    ("remote_in_two_groups", GOOD_LOCAL, ((4, 7), (6, 7)), "remote block 7 is named twice"),
    ("local_twice", ((1, 8), (3, 3)), GOOD_REMOTE, "local block 3 is named twice"),
    ("local_in_two_groups", ((1, 8), (8, 3)), GOOD_REMOTE, "local block 8 is named twice"),
    ("local_11_in_two_groups", ((11, 8), (11, 3)), GOOD_REMOTE, "local block 11 is named twice"),
    ("remote_short", GOOD_LOCAL, ((4, 5), (6,)), r"blocks 0\.\.1 of the full_attention group are needed, the remote"),
    ("local_short", ((1, 8), (2,)), GOOD_REMOTE, r"the local list holds 0\.\.0; recompute"),
    ("remote_empty", GOOD_LOCAL, ((), (6, 7)), "the remote list holds none"),
]


@pytest.mark.parametrize(("local", "remote", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_blocks_that_cannot_be_paired_are_refused(local: Any, remote: Any, message: str) -> None:
    """130 tokens: both groups need blocks 0 and 1."""
    with pytest.raises(RequestError, match=message):
        plan_pull(one_to_one(), local=make_groups(*local), remote=make_groups(*remote), num_tokens=130)


def test_a_list_that_begins_after_the_needed_block_is_refused() -> None:
    """First blocks missing in front, on either side, are not read from somewhere else."""
    late = make_groups((1, 8), (2, 3), first_full=1)
    with pytest.raises(RequestError, match=r"the local list holds 1\.\.2"):
        plan_pull(one_to_one(), local=late, remote=make_groups(*GOOD_REMOTE), num_tokens=130)
    much_later = make_groups((1, 8), range(20, 30), first_full=5)
    with pytest.raises(RequestError, match=r"the local list holds 5\.\.14"):
        plan_pull(one_to_one(), local=much_later, remote=make_groups(*GOOD_REMOTE), num_tokens=130)
    late = make_groups((4, 5), (6, 7), first_sliding=1)
    with pytest.raises(RequestError, match=r"sliding_attention group are needed, the remote list holds 1\.\.2"):
        plan_pull(one_to_one(), local=make_groups(*GOOD_LOCAL), remote=late, num_tokens=130)


def test_the_last_block_id_is_legal_and_one_past_it_is_not() -> None:
    """36175 blocks there, 20000 here: 36174 may be read, 36175 not; a smaller consumer is fine."""
    ours, theirs = make_peer(Role.DECODE, num_blocks=20_000), make_peer(Role.PREFILL, num_blocks=36_175)
    peers, local = make_map(ours, theirs), make_groups((19_999,), (19_998,))
    plan = plan_pull(peers, local=local, remote=make_groups((36_173,), (36_174,)), num_tokens=5)
    assert pairs_of(plan) == [(19_998, 36_174), (19_999, 36_173)]
    with pytest.raises(RequestError, match="remote block id 36175 does not exist; ids are below 36175"):
        plan_pull(peers, local=local, remote=make_groups((36_173,), (36_175,)), num_tokens=5)


def test_ids_are_checked_against_the_ranks_own_block_count() -> None:
    """Ranks of one peer with 111,680 and 111,488 blocks."""
    p = make_peer(Role.PREFILL)
    theirs = {0: evolve(p, num_blocks=111_680), 1: evolve(make_rank(p, 1), num_blocks=111_488)}
    local, remote = make_groups((1,), (2,)), make_groups((3,), (111_600,))
    assert plan_pull(map_peer(make_peer(Role.DECODE), theirs), local=local, remote=remote, num_tokens=5).num_bytes
    with pytest.raises(RequestError, match="ids are below 111488"):
        plan_pull(map_peer(make_peer(Role.DECODE, rank=1), theirs), local=local, remote=remote, num_tokens=5)
    with pytest.raises(RequestError, match="ids are below 111488"):
        plan_pull(map_peer(make_peer(Role.DECODE, tp=4), theirs), local=local, remote=remote, num_tokens=5)


def test_ids_in_blocks_of_several_kernel_blocks_are_counted_in_blocks() -> None:
    """3000 kernel blocks are 1500 blocks of two."""
    peers = one_to_one(kernel=64, block=128)
    plan_pull(peers, local=make_groups((1,), (2,)), remote=make_groups((3,), (1499,)), num_tokens=5)
    with pytest.raises(RequestError, match="remote block id 1500 does not exist; ids are below 1500"):
        plan_pull(peers, local=make_groups((1,), (2,)), remote=make_groups((3,), (1500,)), num_tokens=5)
    with pytest.raises(RequestError, match="local block id 1500 does not exist; ids are below 1500"):
        plan_pull(peers, local=make_groups((1500,), (2,)), remote=make_groups((3,), (4,)), num_tokens=5)


@pytest.mark.parametrize("bad", [-1, True, False, 1.0, "1", None, (1,), -(1 << 20_000)], ids=lambda b: type(b).__name__)
def test_what_is_no_block_id_never_becomes_one(bad: object) -> None:
    """True is block 1 to Python, and to nobody else."""
    with pytest.raises(RequestError, match=r"block id must be an int >= 0, got .* at entry 1 of group full"):
        GroupBlocks(kind=F, first_logical=0, block_ids=(5, cast(int, bad)))


@pytest.mark.parametrize("bad", [-1, True, 1.0, "0", None, 1 << 20_000], ids=lambda b: type(b).__name__)
def test_what_is_no_count_is_refused(bad: object) -> None:
    """Positions and token counts."""
    with pytest.raises(RequestError, match="first_logical must be an int"):
        GroupBlocks(kind=F, first_logical=cast(int, bad), block_ids=(5,))
    groups = make_groups((1,), (2,))
    with pytest.raises(RequestError, match="num_tokens must be an int"):
        plan_pull(one_to_one(), local=groups, remote=groups, num_tokens=cast(int, bad))
    with pytest.raises(RequestError, match="num_cached_tokens must be an int"):
        plan_pull(one_to_one(), local=groups, remote=groups, num_tokens=5, num_cached_tokens=cast(int, bad))


def test_a_huge_block_id_is_refused_without_printing_it() -> None:
    """Thousands of digits would make the refusal itself fail."""
    with pytest.raises(RequestError, match="remote block id an int of 20001 bits does not exist"):
        plan_pull(one_to_one(), local=make_groups((1,), (2,)), remote=make_groups((3,), (1 << 20_000,)), num_tokens=5)


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        (((4, 5), (6, 5, 9, 3)), "remote block 5 is named twice"),
        (((4, 5), (6, 8, 6, 3)), "remote block 6 is named twice"),
        (((4, 5), (6, 0, 9, 3)), "a needed remote block is the null block"),
        (((5, 4), (6, 7, 8, 9)), None),
        (((4, 5), (9, 8, 7, 6)), None),
        (((4, 5), (9, 8, 7, 6, 9, 0, 2**31)), None),
    ],
)
def test_scattered_ids_pair_by_position_and_are_looked_at_where_they_are_needed(
    remote: tuple[tuple[int, ...], tuple[int, ...]], message: str | None
) -> None:
    """A run beside no run, doubles inside and across groups, and entries that nothing needs."""
    local = make_groups((21, 20), (13, 12, 11, 10), first_sliding=2)
    theirs = make_groups(*remote, first_sliding=2)
    if message is not None:
        with pytest.raises(RequestError, match=message):
            plan_pull(one_to_one(), local=local, remote=theirs, num_tokens=510)
        return
    read = plan_pull(one_to_one(), local=local, remote=theirs, num_tokens=510).reads[0]
    pairs = dict(zip(read.local_ids, read.remote_ids, strict=True))
    (a, b), (c, d, e, f) = remote[0], remote[1][:4]
    assert pairs == {21: a, 20: b, 13: c, 12: d, 11: e, 10: f}


def test_neighbouring_blocks_become_one_run() -> None:
    """Only where both sides are consecutive, sorted by our ids, whatever order they came in."""
    pairs = BlockPairs.of(local_ids=(12, 5, 6, 7, 13, 20), remote_ids=(3, 80, 81, 40, 2, 21))
    assert pairs == (
        BlockRun(local_start=5, remote_start=80, count=2),
        BlockRun(local_start=7, remote_start=40, count=1),
        BlockRun(local_start=12, remote_start=3, count=1),
        BlockRun(local_start=13, remote_start=2, count=1),
        BlockRun(local_start=20, remote_start=21, count=1),
    )
    assert (len(pairs), pairs[0].count, bool(pairs)) == (5, 2, True)
    assert pairs[1:3] == tuple(pairs)[1:3]
    assert hash(pairs) == hash(tuple(pairs))
    assert repr(pairs) == repr(tuple(pairs))
    assert pairs != [*pairs]


def test_a_contiguous_prompt_is_one_run() -> None:
    """82 blocks, one read per region."""
    plan = plan_pull(
        one_to_one(),
        local=make_groups((100, 101), range(102, 182), first_sliding=78),
        remote=make_groups((500, 501), range(502, 582), first_sliding=78),
        num_tokens=10_238,
    )
    assert plan.reads[0].runs == (BlockRun(local_start=100, remote_start=500, count=82),)
    assert plan.num_bytes == 36 * 82 * 8192


@given(pairs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), unique_by=(lambda p: p[0], lambda p: p[1])))
def test_runs_hold_the_same_pairs_and_cannot_be_merged_further(pairs: list[tuple[int, int]]) -> None:
    """Ascending, never overlapping, and no two neighbours that continue each other."""
    runs = list(BlockPairs.of(local_ids=tuple(p[0] for p in pairs), remote_ids=tuple(p[1] for p in pairs)))
    assert [(r.local_start + i, r.remote_start + i) for r in runs for i in range(r.count)] == sorted(pairs)
    for a, b in itertools.pairwise(runs):
        assert (a.local_start + a.count, a.remote_start + a.count) != (b.local_start, b.remote_start)


def test_a_read_knows_its_ids_however_its_runs_are_held() -> None:
    """As runs or as pairs."""
    whole = HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=7)
    runs = (BlockRun(local_start=4, remote_start=9, count=2), BlockRun(local_start=8, remote_start=3, count=1))
    read = RankRead(remote_rank=2, head_slice=whole, runs=runs)
    assert (read.local_ids, read.remote_ids, read.num_blocks) == ((4, 5, 8), (9, 10, 3), 3)
    same = evolve(read, runs=BlockPairs.of(local_ids=(8, 4, 5), remote_ids=(3, 9, 10)))
    assert (same.local_ids, same.remote_ids, same.num_blocks) == ((8, 4, 5), (3, 9, 10), 3)
    assert same == read


@pytest.mark.parametrize(("local", "remote", "count"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_a_run_of_nothing_or_before_the_pool_is_refused(local: int, remote: int, count: int) -> None:
    """Ids from 0, at least one block."""
    with pytest.raises(LayoutError, match="ids >= 0 and count >= 1"):
        BlockRun(local_start=local, remote_start=remote, count=count)


@given(
    n=st.integers(1, 2000),
    cached_blocks=st.integers(0, 20),
    extra=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_a_plan_moves_exactly_the_needed_blocks_that_are_not_here(
    n: int, cached_blocks: int, extra: int, seed: int
) -> None:
    """Random pools, lookahead blocks on both sides, any prefix already here; window 128, block 64."""
    tokens, block = n - 1, 64
    blocks = -(-tokens // block)
    cached = min(cached_blocks, tokens // block)
    rng = random.Random(seed)
    ours = rng.sample(range(1, 3000), 2 * (blocks + extra))
    theirs = rng.sample(range(1, 3000), 2 * (blocks + extra))
    half = blocks + extra
    plan = plan_pull(
        one_to_one(kernel=block, block=block),
        local=make_groups(ours[cached:half], ours[half + cached :], first_sliding=cached, first_full=cached),
        remote=make_groups(theirs[:half], theirs[half:]),
        num_tokens=tokens,
        num_cached_tokens=cached * block,
    )
    visible = {k // block for k in range(tokens) if k > tokens - 128}
    wanted = {(ours[i], theirs[i]) for i in visible if i >= cached}
    wanted |= {(ours[half + i], theirs[half + i]) for i in range(cached, blocks)}
    assert set(pairs_of(plan)) == wanted
