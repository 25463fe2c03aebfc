"""Which ranks of a peer hold our heads and tokens, and which bytes of their blocks; 8 KV heads, FP8, block 128."""

from __future__ import annotations

import pytest
from attrs import evolve

from gk_core.disaggregation import Role
from gk_core.errors import LayoutError, PeerMismatchError
from gk_core.kv_layout import KByteOrder
from gk_core.peer_map import (
    HeadMap,
    HeadRelation,
    HeadSlice,
    head_map,
    map_peer,
    notifying_ranks,
    target_ranks,
)
from gk_core.rank_grid import RankGrid
from tests.core.peer_builders import make_map, make_peer, make_rank, make_ranks

TOPOLOGIES = [  # prefill (TP, DCP), decode (TP, DCP), relation, factor, ranks read by decode rank 0, 1, 2, 3
    ((8, 1), (8, 1), HeadRelation.MATCH, 1, [[0], [1], [2], [3]]),
    ((4, 1), (8, 1), HeadRelation.SPLIT, 2, [[0], [0], [1], [1]]),
    ((8, 1), (4, 1), HeadRelation.MERGE, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ((8, 1), (16, 1), HeadRelation.MATCH, 1, [[0], [0], [1], [1]]),
    ((16, 2), (8, 1), HeadRelation.MATCH, 1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ((16, 2), (16, 2), HeadRelation.MATCH, 1, [[0], [1], [2], [3]]),
    ((32, 4), (16, 2), HeadRelation.MATCH, 1, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ((16, 2), (32, 4), HeadRelation.MATCH, 1, [[0], [1], [0], [1]]),
    ((16, 1), (16, 2), HeadRelation.MATCH, 1, [[0], [0], [2], [2]]),
]


@pytest.mark.parametrize(("prefill", "decode", "relation", "factor", "reads"), TOPOLOGIES)
def test_each_decode_rank_reads_the_ranks_that_hold_its_heads_and_tokens(
    prefill: tuple[int, int], decode: tuple[int, int], relation: HeadRelation, factor: int, reads: list[list[int]]
) -> None:
    """TP to TP, DCP to TP, DCP to DCP, TP to DCP."""
    theirs = make_peer(Role.PREFILL, tp=prefill[0], dcp=prefill[1])
    for rank, wanted in enumerate(reads):
        ours = make_rank(make_peer(Role.DECODE, tp=decode[0], dcp=decode[1]), rank)
        heads = head_map(local_block_bytes=ours.block_bytes[0], remote_block_bytes=theirs.block_bytes[0])
        assert heads == HeadMap(relation=relation, factor=factor)
        assert [r.tp_rank for r in make_map(ours, theirs).ranks if not r.notify_only] == wanted


SLICES = [  # prefill TP, prefill block, decode TP, decode block, decode rank, (rank, there, here, length) ...
    (8, 8192, 8, 8192, 5, [(5, 0, 0, 8192)]),
    (4, 16_384, 8, 8192, 4, [(2, 0, 0, 8192)]),
    (4, 16_384, 8, 8192, 5, [(2, 8192, 0, 8192)]),
    (8, 8192, 16, 8192, 6, [(3, 0, 0, 8192)]),
    (8, 8192, 16, 8192, 7, [(3, 0, 0, 8192)]),
    (8, 8192, 4, 16_384, 3, [(6, 0, 0, 8192), (7, 0, 8192, 8192)]),
    (2, 32_768, 4, 16_384, 3, [(1, 16_384, 0, 16_384)]),
    (4, 16_384, 2, 32_768, 1, [(2, 0, 0, 16_384), (3, 0, 16_384, 16_384)]),
    (1, 65_536, 16, 8192, 11, [(0, 40_960, 0, 8192)]),
]


@pytest.mark.parametrize("order", list(KByteOrder), ids=lambda o: o.value)
@pytest.mark.parametrize(("p_tp", "p_block", "d_tp", "d_block", "rank", "slices"), SLICES)
def test_a_read_takes_the_bytes_of_our_heads(
    p_tp: int, p_block: int, d_tp: int, d_block: int, rank: int, slices: list[tuple[int, ...]], order: KByteOrder
) -> None:
    """Packing lies inside one head, so packed K has the same offsets."""
    ours = make_peer(Role.DECODE, tp=d_tp, rank=rank, k_byte_order=order)
    theirs = make_peer(Role.PREFILL, tp=p_tp, k_byte_order=order)
    assert (theirs.block_bytes[0], ours.block_bytes[0]) == (p_block, d_block)
    assert [(r.tp_rank, r.head_slice) for r in make_map(ours, theirs).ranks if not r.notify_only] == [
        (remote, HeadSlice(remote_offset_bytes=there, local_offset_bytes=here, length_bytes=length))
        for remote, there, here, length in slices
    ]


def test_sixteen_ranks_read_one_rank_in_eight_slices() -> None:
    """TP1 to TP16: ranks 2k and 2k + 1 read head k; never 16 slices."""
    theirs = make_peer(Role.PREFILL, tp=1)
    offsets = [
        make_map(make_peer(Role.DECODE, tp=16, rank=r), theirs).ranks[0].head_slice.remote_offset_bytes
        for r in range(16)
    ]
    assert offsets == [k * 8192 for k in range(8) for _ in range(2)]


def test_a_peer_that_says_twice_the_block_at_the_same_tp_is_refused() -> None:
    """Its length is another dtype's, or K and V joined: never a split."""
    theirs = evolve(make_peer(Role.PREFILL), block_bytes=(16_384,) * 36)
    with pytest.raises(PeerMismatchError, match="block_bytes: ours 8192, theirs 16384"):
        map_peer(make_peer(Role.DECODE), {0: theirs})


@pytest.mark.parametrize(("local", "remote"), [(8192, 12_288), (12_288, 8192), (8192, 8191)])
def test_block_lengths_in_no_whole_ratio_are_refused(local: int, remote: int) -> None:
    """3:2, 2:3 and almost equal."""
    with pytest.raises(PeerMismatchError, match=f"block_bytes: ours {local}, theirs {remote}"):
        head_map(local_block_bytes=local, remote_block_bytes=remote)


def test_producer_replicas_are_notified_and_not_read() -> None:
    """TP32 holds each head four times; all four wait for a notice."""
    ours = make_peer(Role.DECODE, tp=8, rank=3)
    mapped = make_map(ours, make_peer(Role.PREFILL, tp=32)).ranks
    assert [(r.tp_rank, r.notify_only) for r in mapped] == [(12, False), (13, True), (14, True), (15, True)]
    assert target_ranks(ours, make_peer(Role.PREFILL, tp=32)) == (12, 13, 14, 15)


NOTIFIES = [  # prefill (TP, DCP), decode (TP, DCP), prefill rank, decode ranks that notify it
    ((8, 1), (8, 1), 3, (3,)),
    ((4, 1), (8, 1), 2, (4, 5)),
    ((8, 1), (4, 1), 5, (2,)),
    ((8, 1), (16, 1), 3, (6, 7)),
    ((16, 1), (8, 1), 7, (3,)),
    ((16, 2), (32, 4), 1, (1, 3)),
    ((32, 4), (16, 2), 6, (2,)),
    ((32, 4), (8, 1), 6, (1,)),
]


@pytest.mark.parametrize(("prefill", "decode", "rank", "wanted"), NOTIFIES)
def test_a_producer_rank_waits_for_every_rank_that_maps_it(
    prefill: tuple[int, int], decode: tuple[int, int], rank: int, wanted: tuple[int, ...]
) -> None:
    """The mirror image of the reads."""
    grids = [RankGrid(num_kv_heads=8, tp_size=tp, dcp_size=dcp) for tp, dcp in (prefill, decode)]
    assert notifying_ranks(producer=grids[0], consumer=grids[1], producer_rank=rank) == wanted


@pytest.mark.parametrize("prefill", [(1, 1), (4, 1), (8, 1), (16, 2), (32, 4), (32, 1)])
@pytest.mark.parametrize("decode", [(2, 1), (8, 1), (16, 2), (32, 1)])
def test_every_producer_rank_hears_from_somebody(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """None would hold its blocks until the lease runs out; targets and notifiers agree."""
    theirs = make_peer(Role.PREFILL, tp=prefill[0], dcp=prefill[1])
    consumer = make_peer(Role.DECODE, tp=decode[0], dcp=decode[1])
    if max(prefill[1], decode[1]) % min(prefill[1], decode[1]):
        return
    for rank in range(theirs.tp_size):
        told = {r for r in range(consumer.tp_size) if rank in target_ranks(make_rank(consumer, r), theirs)}
        assert told == set(notifying_ranks(producer=theirs.grid, consumer=consumer.grid, producer_rank=rank))
        assert told


def test_a_rank_that_did_not_answer_is_not_mapped_around() -> None:
    """A partial map would start reads too early."""
    ours, theirs = make_peer(Role.DECODE, tp=4), make_peer(Role.PREFILL, tp=8)
    with pytest.raises(LayoutError, match="rank 1 of P is not described"):
        map_peer(ours, {0: make_rank(theirs, 0)})
    with pytest.raises(LayoutError, match="no rank of the peer is described"):
        map_peer(ours, {})


def test_only_the_decode_side_maps() -> None:
    """The producer does not pull."""
    with pytest.raises(LayoutError, match="only the decode side pulls"):
        map_peer(make_peer(Role.PREFILL), {0: make_peer(Role.DECODE)})


def test_ranks_of_one_peer_that_contradict_each_other_are_refused() -> None:
    """Another engine's rank, another TP size, an answer under the wrong rank, packed on one rank only."""
    ours, ranks = make_peer(Role.DECODE, tp=4), make_ranks(make_peer(Role.PREFILL, tp=8))
    map_peer(ours, ranks)
    for field, bad in (
        ("engine_id", evolve(ranks[1], engine_id="P2")),
        ("tp_rank", ranks[2]),
        ("k_byte_order", evolve(ranks[1], k_byte_order=KByteOrder.TOKEN_MAJOR)),
        ("tp_size", evolve(ranks[1], tp_size=16)),
    ):
        with pytest.raises(PeerMismatchError) as caught:
            map_peer(ours, {**ranks, 1: bad})
        assert [m.field for m in caught.value.mismatches] == [field]


GRIDS = [  # heads, tp, dcp, heads per rank, replicas, (head group, replica, dcp rank) of ranks 0..
    (8, 4, 1, 2, 1, [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]),
    (2, 8, 2, 1, 2, [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]),
    (4, 4, 2, 2, 1, [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]),
]


@pytest.mark.parametrize(("heads", "tp", "dcp", "per_rank", "replicas", "places"), GRIDS)
def test_a_rank_grid_has_dcp_innermost_then_replicas_then_heads(
    heads: int, tp: int, dcp: int, per_rank: int, replicas: int, places: list[tuple[int, int, int]]
) -> None:
    """Worked by hand, and back again."""
    grid = RankGrid(num_kv_heads=heads, tp_size=tp, dcp_size=dcp)
    assert (grid.heads_per_rank, grid.replicas) == (per_rank, replicas)
    assert [(grid.head_group(r), grid.replica(r), grid.dcp_rank(r)) for r in range(tp)] == places
    assert [grid.rank_of(head_group=g, replica=r, dcp_rank=c) for g, r, c in places] == list(range(tp))


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_grid_holds_nothing(rank: int) -> None:
    """One before, one past."""
    with pytest.raises(LayoutError, match=r"outside 0\.\.7"):
        RankGrid(num_kv_heads=8, tp_size=8, dcp_size=1).head_group(rank)


@pytest.mark.parametrize("name", ["num_kv_heads", "tp_size", "dcp_size"])
def test_a_grid_of_nothing_is_refused(name: str) -> None:
    """Naming the size."""
    sizes = {"num_kv_heads": 8, "tp_size": 8, "dcp_size": 1, name: 0}
    with pytest.raises(LayoutError, match=f"{name} must be >= 1, got 0"):
        RankGrid(**sizes)
