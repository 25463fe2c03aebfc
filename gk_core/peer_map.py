"""Peer map: which ranks of a peer hold our heads and tokens, and which bytes of their blocks are ours.

Head relations are computed from what the peer says, never assumed: a prefill engine at TP4 holds two of 8 KV heads per
rank, a decode engine at TP8 one, so its blocks are split. A block is head-major, so a run of heads is one run of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from attrs import field, frozen

from gk_core.disaggregation import Role
from gk_core.errors import LayoutError, Mismatch, PeerMismatchError
from gk_core.handshake import check_peer
from gk_core.model_geometry import AttentionKind
from gk_core.peer_layout import PeerLayout
from gk_core.rank_grid import RankGrid

__all__ = [
    "HeadMap",
    "HeadRelation",
    "HeadSlice",
    "MappedRank",
    "PeerMap",
    "head_map",
    "map_peer",
    "notifying_ranks",
    "target_ranks",
]


@frozen(kw_only=True)
class HeadSlice:
    """Which bytes of a block move; the same for every block and region of one read.

    Attributes:
        local_offset_bytes: into our block.
        remote_offset_bytes: into the peer's block.
        length_bytes: of each piece.
    """

    local_offset_bytes: int
    remote_offset_bytes: int
    length_bytes: int


class HeadRelation(Enum):
    """How our heads of a block lie in the peer's."""

    MATCH = "match"
    SPLIT = "split"
    MERGE = "merge"


@frozen(kw_only=True)
class HeadMap:
    """Relation of our blocks to the peer's, and how many of the smaller one make the larger."""

    relation: HeadRelation
    factor: int


def head_map(*, local_block_bytes: int, remote_block_bytes: int) -> HeadMap:
    """Computed from block lengths: theirs over ours 1 matches, above 1 splits their blocks, below 1 merges them.

    >>> head_map(local_block_bytes=8192, remote_block_bytes=16384)
    HeadMap(relation=<HeadRelation.SPLIT: 'split'>, factor=2)

    Raises:
        PeerMismatchError: neither length is a multiple of the other.
    """
    if local_block_bytes == remote_block_bytes:
        return HeadMap(relation=HeadRelation.MATCH, factor=1)
    if remote_block_bytes % local_block_bytes == 0:
        return HeadMap(relation=HeadRelation.SPLIT, factor=remote_block_bytes // local_block_bytes)
    if local_block_bytes % remote_block_bytes == 0:
        return HeadMap(relation=HeadRelation.MERGE, factor=local_block_bytes // remote_block_bytes)
    raise PeerMismatchError(
        (Mismatch(field="block_bytes", ours=str(local_block_bytes), theirs=str(remote_block_bytes)),)
    )


@frozen(kw_only=True)
class MappedRank:
    """One remote rank that a local rank reads or notifies.

    Attributes:
        tp_rank: of the peer.
        head_slice: bytes of each of its blocks that are ours.
        dcp_rank: its share of the tokens.
        notify_only: a further replica of heads that another rank supplies; it waits for our notice all the same.
    """

    tp_rank: int
    head_slice: HeadSlice
    dcp_rank: int
    notify_only: bool


@frozen(kw_only=True)
class PeerMap:
    """What does not change between the pulls of one local rank from one peer.

    Attributes:
        engine_id: of the peer.
        ranks: remote ranks, ascending.
        num_regions: K and V regions.
        group_kinds: attention kind per group.
        sliding_window: tokens.
        local_dcp_size, local_dcp_rank, remote_dcp_size: how tokens are dealt.
        unit_tokens: tokens of one unit that is paired.
        local_units_per_id, remote_units_per_id: units behind one block id.
        kernel_blocks_per_unit: registered blocks of one unit.
        local_num_ids, remote_num_ids: block ids that exist; the least of the mapped remote ranks.
        is_one_to_one: whether each id of a list stands for one unit and all tokens are on one rank, on both sides.
    """

    engine_id: str
    ranks: tuple[MappedRank, ...]
    num_regions: int
    group_kinds: tuple[AttentionKind, ...]
    sliding_window: int
    local_dcp_size: int
    local_dcp_rank: int
    remote_dcp_size: int
    unit_tokens: int
    local_units_per_id: int
    remote_units_per_id: int
    kernel_blocks_per_unit: int
    local_num_ids: int
    remote_num_ids: int
    is_one_to_one: bool = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        sizes = (self.local_dcp_size, self.remote_dcp_size, self.local_units_per_id, self.remote_units_per_id)
        object.__setattr__(self, "is_one_to_one", set(sizes) == {1})


def _targets(ours: RankGrid, theirs: RankGrid, rank: int) -> Iterator[tuple[int, int, int, bool]]:
    """(remote rank, first head we share, dcp rank, notify only) for everything that holds our heads and tokens."""
    first_head = ours.head_group(rank) * ours.heads_per_rank
    d = ours.dcp_rank(rank)
    if theirs.dcp_size >= ours.dcp_size:
        shares = range(d, theirs.dcp_size, ours.dcp_size)
    else:
        shares = range(d % theirs.dcp_size, d % theirs.dcp_size + 1)
    for head in range(first_head, first_head + ours.heads_per_rank, theirs.heads_per_rank):
        for replica in range(theirs.replicas):
            for c in shares:
                group = head // theirs.heads_per_rank
                yield theirs.rank_of(head_group=group, replica=replica, dcp_rank=c), head, c, replica > 0


def target_ranks(ours: PeerLayout, theirs: PeerLayout) -> tuple[int, ...]:
    """TP ranks of the peer that this rank shakes hands with, from any one of the peer's ranks; ascending.

    Replicas that are only notified are among them.
    """
    return tuple(sorted(t[0] for t in _targets(ours.grid, theirs.grid, ours.tp_rank)))


def notifying_ranks(*, producer: RankGrid, consumer: RankGrid, producer_rank: int) -> tuple[int, ...]:
    """Consumer ranks whose notice a producer rank waits for before it frees a request's blocks.

    >>> notifying_ranks(producer=RankGrid(num_kv_heads=8, tp_size=4, dcp_size=1),
    ...                 consumer=RankGrid(num_kv_heads=8, tp_size=8, dcp_size=1), producer_rank=2)
    (4, 5)
    """
    return tuple(
        rank
        for rank in range(consumer.tp_size)
        if any(target == producer_rank for target, *_ in _targets(consumer, producer, rank))
    )


def map_peer(ours: PeerLayout, theirs: Mapping[int, PeerLayout]) -> PeerMap:
    """Map this rank onto a peer, once all its `target_ranks` have answered.

    Args:
        ours: this rank, of the decode side.
        theirs: layouts of the peer's ranks, by TP rank; those of one engine may differ in num_blocks.

    Raises:
        PeerMismatchError: a rank does not pair with ours, or the peer's ranks contradict each other.
        LayoutError: we are not the consumer, or a rank's layout is missing.
    """
    if ours.role is not Role.DECODE:
        raise LayoutError("only the decode side pulls; map the peer on its ranks")
    if not theirs:
        raise LayoutError("no rank of the peer is described; shake hands first")
    first = next(iter(theirs.values()))
    mapped: list[PeerLayout] = []
    ranks: list[MappedRank] = []
    for tp_rank, head, dcp_rank, notify_only in sorted(_targets(ours.grid, first.grid, ours.tp_rank)):
        if tp_rank not in theirs:
            raise LayoutError(
                f"rank {tp_rank} of {first.engine_id} is not described; shake hands with all target ranks"
            )
        peer = theirs[tp_rank]
        found = check_peer(ours, peer) + _same_engine(first, peer, tp_rank)
        if found:
            raise PeerMismatchError(found)
        mapped.append(peer)
        head_slice = _head_slice(ours, peer, head)
        ranks.append(MappedRank(tp_rank=tp_rank, head_slice=head_slice, dcp_rank=dcp_rank, notify_only=notify_only))
    same = ours.block_size == first.block_size
    return PeerMap(
        engine_id=first.engine_id,
        ranks=tuple(ranks),
        num_regions=ours.num_regions,
        group_kinds=ours.group_kinds,
        sliding_window=ours.sliding_window,
        local_dcp_size=ours.dcp_size,
        local_dcp_rank=ours.dcp_rank,
        remote_dcp_size=first.dcp_size,
        unit_tokens=ours.block_size if same else ours.kernel_block_size,
        local_units_per_id=1 if same else ours.kernel_blocks_per_block,
        remote_units_per_id=1 if same else first.kernel_blocks_per_block,
        kernel_blocks_per_unit=ours.kernel_blocks_per_block if same else 1,
        local_num_ids=ours.num_blocks // ours.kernel_blocks_per_block,
        remote_num_ids=min(p.num_blocks // p.kernel_blocks_per_block for p in mapped),
    )


def _same_engine(first: PeerLayout, peer: PeerLayout, tp_rank: int) -> tuple[Mismatch, ...]:
    """Ranks of one engine agree on what is the engine's, and answer under their own rank."""
    wanted = {"tp_rank": tp_rank}
    wanted |= {n: getattr(first, n) for n in ("engine_id", "tp_size", "dcp_size", "group_block_sizes")}
    return tuple(
        Mismatch(field=name, ours=f"{value} (expected)", theirs=str(getattr(peer, name)))
        for name, value in wanted.items()
        if getattr(peer, name) != value
    )


def _head_slice(ours: PeerLayout, theirs: PeerLayout, head: int) -> HeadSlice:
    """Bytes of our block and of theirs that hold the heads from `head` on which both have."""
    heads = head_map(local_block_bytes=ours.block_bytes[0], remote_block_bytes=theirs.block_bytes[0])
    local_heads, remote_heads = ours.grid.heads_per_rank, theirs.grid.heads_per_rank
    head_bytes = ours.block_bytes[0] // local_heads
    split = heads.relation is HeadRelation.SPLIT
    return HeadSlice(
        local_offset_bytes=head % local_heads * head_bytes,
        remote_offset_bytes=head % remote_heads * head_bytes,
        length_bytes=ours.block_bytes[0] if split else theirs.block_bytes[0],
    )
