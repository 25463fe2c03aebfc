"""Rank grid: which TP rank of one engine holds which KV heads and which tokens.

rank = (head_group * replicas + replica) * dcp_size + dcp_rank

Ranks beyond one per head hold replicas; ranks of one decode-context-parallel (DCP) group hold the same heads and share
the tokens, dealt out block by block: logical block i lies on dcp rank i % dcp_size, as entry i // dcp_size of the
request's block table.

Source: the producer layout of the reference connector, dcp innermost. An older document has dcp outermost; a peer
states its dcp_rank, so that the two are never mixed.
"""

from __future__ import annotations

from attrs import frozen

from gk_core.errors import LayoutError

__all__ = ["RankGrid"]


@frozen(kw_only=True)
class RankGrid:
    """TP ranks of one engine as head groups x replicas x DCP ranks.

    >>> g = RankGrid(num_kv_heads=8, tp_size=32, dcp_size=2)
    >>> g.heads_per_rank, g.num_head_groups, g.replicas
    (1, 8, 2)
    >>> g.head_group(13), g.replica(13), g.dcp_rank(13)
    (3, 0, 1)

    Attributes:
        num_kv_heads: of the model.
        tp_size: ranks.
        dcp_size: ranks that share one head's tokens; divides tp_size.

    Raises:
        LayoutError: sizes below 1, or that deal no whole number of heads or replicas to each rank.
    """

    num_kv_heads: int
    tp_size: int
    dcp_size: int

    def __attrs_post_init__(self) -> None:
        for name in ("num_kv_heads", "tp_size", "dcp_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.tp_size % self.dcp_size:
            raise LayoutError(f"dcp_size must divide tp_size, got dcp_size {self.dcp_size} and tp_size {self.tp_size}")
        group = self.tp_size // self.dcp_size
        if self.num_kv_heads % group and group % self.num_kv_heads:
            raise LayoutError(
                f"tp_size {self.tp_size} / dcp_size {self.dcp_size} = {group} ranks must divide num_kv_heads "
                f"{self.num_kv_heads} or be a multiple of it"
            )

    @property
    def heads_per_rank(self) -> int:
        """KV heads that one rank holds."""
        return max(1, self.num_kv_heads * self.dcp_size // self.tp_size)

    @property
    def num_head_groups(self) -> int:
        """Distinct sets of heads."""
        return self.num_kv_heads // self.heads_per_rank

    @property
    def replicas(self) -> int:
        """Ranks that hold the same heads of the same tokens."""
        return self.tp_size // (self.dcp_size * self.num_head_groups)

    def head_group(self, rank: int) -> int:
        """Which set of heads a rank holds: heads group * heads_per_rank onwards."""
        return self._checked(rank) // (self.dcp_size * self.replicas)

    def replica(self, rank: int) -> int:
        """Which copy of them."""
        return self._checked(rank) // self.dcp_size % self.replicas

    def dcp_rank(self, rank: int) -> int:
        """Which share of the tokens."""
        return self._checked(rank) % self.dcp_size

    def rank_of(self, *, head_group: int, replica: int, dcp_rank: int) -> int:
        """The rank at a place of the grid."""
        return (head_group * self.replicas + replica) * self.dcp_size + dcp_rank

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.tp_size:
            raise LayoutError(f"rank {rank} is outside 0..{self.tp_size - 1}")
        return rank
