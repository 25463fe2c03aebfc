"""Plans of all topologies against a brute-force map of who holds which head of which token, byte by byte.

The map below counts ranks off one by one and deals blocks like cards; it shares no formula with the planner. Every
element of a producer's memory is stamped with region, head, token and dim, so what arrives says where it is from.
"""

from __future__ import annotations

import random
from functools import cache, lru_cache

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.disaggregation import Role
from gk_core.errors import LayoutError
from gk_core.handshake import check_peer
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from gk_core.peer_layout import PeerLayout
from gk_core.peer_map import map_peer, target_ranks
from gk_core.rank_grid import RankGrid
from gk_core.transfer_plan import plan_pull
from tests.core.peer_builders import make_groups, make_peer, make_rank

BLOCK, DIMS, ITEM, REGIONS, WINDOW = 2, 3, 4, 2, 9
UNTOUCHED = b"\xee"


@frozen
class Side:
    """One engine and one request in it."""

    heads: int
    tp: int
    dcp: int
    num_tokens: int
    seed: int

    @property
    def heads_of_rank(self) -> list[tuple[tuple[int, ...], int]]:
        """(heads, dcp rank) of each rank, dealt out in order: heads outermost, then copies, then dcp."""
        places = self.tp // self.dcp
        ranks: list[tuple[tuple[int, ...], int]] = []
        if places <= self.heads:
            each, copies = self.heads // places, 1
        else:
            each, copies = 1, places // self.heads
        heads = list(range(self.heads))
        while heads:
            mine, heads = tuple(heads[:each]), heads[each:]
            for _ in range(copies):
                ranks += [(mine, c) for c in range(self.dcp)]
        return ranks

    @property
    def tables(self) -> tuple[list[int], list[int]]:
        """Sliding and full block tables: random distinct ids, the same on all ranks."""
        return tables_of(self)

    @property
    def num_blocks(self) -> int:
        return 2 * len(self.tables[0]) + 6

    def holder(self, block: int) -> tuple[int, int]:
        """(dcp rank, entry) of one block of the request, dealing one by one."""
        rank = entry = 0
        for _ in range(block):
            rank += 1
            if rank == self.dcp:
                rank, entry = 0, entry + 1
        return rank, entry

    def layout(self, role: Role, rank: int = 0) -> PeerLayout:
        per_rank = len(self.heads_of_rank[0][0])
        base = evolve(make_peer(role), k_byte_order=KByteOrder.TOKEN_MAJOR)
        return make_rank(
            evolve(
                base,
                num_kv_heads=self.heads,
                head_size=DIMS,
                sliding_window=WINDOW,
                kernel_block_size=BLOCK,
                group_block_sizes=(BLOCK, BLOCK),
                interleave_size=BLOCK,
                kv_dtype=KVDtype.FP32,
                num_blocks=self.num_blocks,
                block_bytes=(per_rank * BLOCK * DIMS * ITEM,) * REGIONS,
                tp_size=self.tp,
                dcp_size=self.dcp,
            ),
            rank,
        )


@lru_cache(maxsize=256)
def tables_of(side: Side) -> tuple[list[int], list[int]]:
    blocks = -(-side.num_tokens // BLOCK)
    entries = -(-blocks // side.dcp)
    ids = random.Random(side.seed).sample(range(1, 2 * entries + 6), 2 * entries)
    return ids[:entries], ids[entries:]


@lru_cache(maxsize=2)
def producer(side: Side) -> tuple[dict[int, PeerLayout], dict[int, list[bytearray]]]:
    """Layouts and filled memories of all ranks; nobody writes to them."""
    ranks = range(side.tp)
    return {r: side.layout(Role.PREFILL, r) for r in ranks}, {r: memory_of(side, r, filled=True) for r in ranks}


@cache
def stamps(group: int, region: int, head: int, block: int) -> bytes:
    """One head of one block: each element says group, region, head, token, dim."""
    return b"".join(
        ((((group * 2 + region) * 64 + head) * 4096 + block * BLOCK + token) * 4 + dim).to_bytes(ITEM, "little")
        for token in range(BLOCK)
        for dim in range(DIMS)
    )


def memory_of(side: Side, rank: int, filled: bool) -> list[bytearray]:
    """A rank's regions; a producer's hold the request."""
    heads, dcp_rank = side.heads_of_rank[rank]
    block_bytes = len(heads) * BLOCK * DIMS * ITEM
    regions = [bytearray(UNTOUCHED * (side.num_blocks * block_bytes)) for _ in range(REGIONS)]
    for group, table in enumerate(side.tables) if filled else ():
        for block in range(-(-side.num_tokens // BLOCK)):
            rank_of_block, entry = side.holder(block)
            if rank_of_block == dcp_rank:
                at = table[entry] * block_bytes
                for region in range(REGIONS):
                    data = b"".join(stamps(group, region, h, block) for h in heads)
                    regions[region][at : at + block_bytes] = data
    return regions


def check_rank(
    p: Side, d: Side, rank: int, memories: dict[int, list[bytearray]], layouts: dict[int, PeerLayout]
) -> None:
    """Plan and move one rank's pull, then compare every byte of its memory."""
    ours = d.layout(Role.DECODE, rank)
    peers = map_peer(ours, {r: layouts[r] for r in target_ranks(ours, layouts[0])})
    plan = plan_pull(peers, local=make_groups(*d.tables), remote=make_groups(*p.tables), num_tokens=p.num_tokens)
    got = memory_of(d, rank, filled=False)
    ours_bytes, theirs_bytes = ours.block_bytes[0], layouts[0].block_bytes[0]
    moved = 0
    for read in plan.reads:
        cut = read.head_slice
        for run in read.runs:
            for i in range(run.count):
                to = (run.local_start + i) * ours_bytes + cut.local_offset_bytes
                at = (run.remote_start + i) * theirs_bytes + cut.remote_offset_bytes
                assert cut.remote_offset_bytes + cut.length_bytes <= theirs_bytes
                for region in range(REGIONS):
                    piece = memories[read.remote_rank][region][at : at + cut.length_bytes]
                    got[region][to : to + cut.length_bytes] = piece
                    moved += len(piece)
    wanted = memory_of(d, rank, filled=False)
    heads, dcp_rank = d.heads_of_rank[rank]
    visible = {t // BLOCK for t in range(p.num_tokens) if t > p.num_tokens - WINDOW}
    needed = 0
    for group, table in enumerate(d.tables):
        for block in sorted(visible) if group == 0 else range(-(-p.num_tokens // BLOCK)):
            rank_of_block, entry = d.holder(block)
            if rank_of_block == dcp_rank:
                for region in range(REGIONS):
                    data = b"".join(stamps(group, region, h, block) for h in heads)
                    wanted[region][table[entry] * ours_bytes : (table[entry] + 1) * ours_bytes] = data
                    needed += len(data)
    assert got == wanted
    assert moved == needed == plan.num_bytes


def check_pair(p: Side, d: Side, ranks: int = 64) -> None:
    """All ranks of a consumer (or some of them, spread out), or a refusal where sizes are in no whole ratio."""
    layouts, memories = producer(p)
    found = check_peer(d.layout(Role.DECODE), layouts[0])
    each = [len(s.heads_of_rank[0][0]) for s in (p, d)]
    refused = {name for name, sizes in (("dcp_size", [p.dcp, d.dcp]), ("block_bytes", each)) if max(sizes) % min(sizes)}
    assert {m.field for m in found} == refused
    if refused:
        return
    for rank in range(0, d.tp, max(1, d.tp // ranks)):
        check_rank(p, d, rank, memories, layouts)


def legal(heads: int, tp: int, dcp: int) -> bool:
    """Whole heads, or whole replicas, on every rank."""
    return tp % dcp == 0 and (heads % (tp // dcp) == 0 or (tp // dcp) % heads == 0)


def sizes(heads: int, most: int = 32) -> list[tuple[int, int]]:
    return [(tp, dcp) for tp in range(1, most + 1) for dcp in range(1, tp + 1) if legal(heads, tp, dcp)]


def test_sizes_that_deal_no_whole_heads_are_refused() -> None:
    """All TP and DCP in 1..32, for 8 and for 6 heads: refused exactly where the dealing does not come out."""
    for heads in (8, 6):
        for tp in range(1, 33):
            for dcp in range(1, 33):
                if legal(heads, tp, dcp):
                    RankGrid(num_kv_heads=heads, tp_size=tp, dcp_size=dcp)
                else:
                    with pytest.raises(LayoutError, match="must divide"):
                        RankGrid(num_kv_heads=heads, tp_size=tp, dcp_size=dcp)
    assert len(sizes(8)) == 64


POWERS = [s for s in sizes(8) if s[0] in (1, 2, 4, 8, 16, 32)]


@pytest.mark.parametrize("prefill", POWERS, ids=lambda s: f"p{s[0]}x{s[1]}")
def test_every_topology_of_powers_of_two_moves_every_byte_home(prefill: tuple[int, int]) -> None:
    """8 heads; 71 tokens, so that the last block and the last round of dealing are partial."""
    for decode in POWERS:
        p = Side(heads=8, tp=prefill[0], dcp=prefill[1], num_tokens=71, seed=1)
        d = Side(heads=8, tp=decode[0], dcp=decode[1], num_tokens=75, seed=2)
        check_pair(p, d, ranks=3)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), heads=st.sampled_from([8, 6, 4, 1]), tokens=st.integers(0, 90), extra=st.integers(0, 9))
def test_any_topology_moves_every_byte_home(data: st.DataObject, heads: int, tokens: int, extra: int) -> None:
    """Any legal sizes up to 32 on both sides, any length, our table with room to spare; the rest is refused by name."""
    prefill, decode = (data.draw(st.sampled_from(sizes(heads))) for _ in range(2))
    p = Side(heads=heads, tp=prefill[0], dcp=prefill[1], num_tokens=tokens, seed=tokens)
    d = Side(heads=heads, tp=decode[0], dcp=decode[1], num_tokens=tokens + extra, seed=extra)
    check_pair(p, d)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "most"), [(8, 32), (6, 32), (1, 16)])
def test_all_pairs_of_tp_and_dcp_move_every_byte_home(heads: int, most: int) -> None:
    """Every legal pair, every rank; the rest is refused by name. One head has twice as many pairs, so fewer sizes."""
    for prefill in sizes(heads, most):
        for decode in sizes(heads, most):
            p = Side(heads=heads, tp=prefill[0], dcp=prefill[1], num_tokens=67, seed=3)
            d = Side(heads=heads, tp=decode[0], dcp=decode[1], num_tokens=67, seed=4)
            check_pair(p, d)
