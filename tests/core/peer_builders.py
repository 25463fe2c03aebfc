"""Peers of GPT-OSS-120B for the tests of handshake, mapping and planning: 8 KV heads, FP8, block 128."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from gk_core.disaggregation import Role
from gk_core.handshake import describe_rank
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import GPT_OSS_120B, AttentionKind
from gk_core.peer_layout import PeerLayout
from gk_core.peer_map import PeerMap, map_peer, target_ranks
from gk_core.rank_grid import RankGrid
from gk_core.transfer_plan import GroupBlocks
from tests.core.layout_builders import make_layout

__all__ = ["make_groups", "make_map", "make_peer", "make_rank", "make_ranks"]


def make_peer(
    role: Role,
    *,
    tp: int = 8,
    dcp: int = 1,
    rank: int = 0,
    num_blocks: int = 3000,
    k_byte_order: KByteOrder = KByteOrder.PAIR_PACKED,
) -> PeerLayout:
    """One rank of a 120B engine: "P" or "D"."""
    heads = RankGrid(num_kv_heads=8, tp_size=tp, dcp_size=dcp).heads_per_rank
    layout = make_layout(
        num_layers=36,
        num_blocks=num_blocks,
        num_kv_heads=heads,
        block_size=128,
        head_size=64,
        dtype=KVDtype.FP8_E4M3FN,
        k_byte_order=k_byte_order,
    )
    engine_id = "P" if role is Role.PREFILL else "D"
    return describe_rank(GPT_OSS_120B, layout, engine_id=engine_id, role=role, tp_size=tp, tp_rank=rank, dcp_size=dcp)


def make_rank(peer: PeerLayout, rank: int) -> PeerLayout:
    """Another rank of the same engine."""
    return evolve(peer, tp_rank=rank, dcp_rank=rank % peer.dcp_size)


def make_ranks(peer: PeerLayout) -> dict[int, PeerLayout]:
    """All ranks of an engine."""
    return {rank: make_rank(peer, rank) for rank in range(peer.tp_size)}


def make_map(ours: PeerLayout, theirs: PeerLayout) -> PeerMap:
    """A map onto just the ranks that are needed."""
    return map_peer(ours, {rank: make_rank(theirs, rank) for rank in target_ranks(ours, theirs)})


def make_groups(
    sliding: Sequence[int], full: Sequence[int], *, first_sliding: int = 0, first_full: int = 0
) -> tuple[GroupBlocks, GroupBlocks]:
    """Blocks of the sliding and of the full group."""
    return (
        GroupBlocks(kind=AttentionKind.SLIDING, first_logical=first_sliding, block_ids=tuple(sliding)),
        GroupBlocks(kind=AttentionKind.FULL, first_logical=first_full, block_ids=tuple(full)),
    )
