"""Decode mesh: TP x DP ranks and the expert groups over them; who owns which heads, rows and experts.

Rank r is DP replica r // tp_size and TP rank r % tp_size. Groups are tuples of tuples, as collectives take them.
"""

from __future__ import annotations

from attrs import frozen

from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_spec import kv_heads_per_rank

__all__ = ["DecodeMesh", "even_split", "shard_range"]

Groups = tuple[tuple[int, ...], ...]


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` contiguous shares that differ by at most one, larger ones first.

    >>> even_split(128, 3)
    (43, 43, 42)
    """
    if parts < 1:
        raise LayoutError(f"cannot split into {parts} parts; need >= 1")
    return tuple(total // parts + (1 if i < total % parts else 0) for i in range(parts))


def shard_range(total: int, parts: int, index: int) -> range:
    """Items of share `index`.

    >>> shard_range(128, 128, 77)
    range(77, 78)
    """
    if not 0 <= index < parts:
        raise LayoutError(f"share {index} is outside 0..{parts - 1}")
    sizes = even_split(total, parts)
    start = sum(sizes[:index])
    return range(start, start + sizes[index])


@frozen(kw_only=True)
class DecodeMesh:
    """Ranks of one decode engine.

    Attributes:
        tp_size: ranks that share one replica's attention heads.
        dp_size: replicas, each with its own requests.
        ep_size: ranks over which the experts are dealt; 1, or all ranks.
    """

    tp_size: int
    dp_size: int = 1
    ep_size: int = 1

    def __attrs_post_init__(self) -> None:
        for name in ("tp_size", "dp_size", "ep_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.ep_size != self.world_size:
            raise UnsupportedError(
                f"experts are dealt over all ranks: ep_size must be tp_size * dp_size = "
                f"{self.world_size}, got {self.ep_size}"
            )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.dp_size

    @property
    def tp_groups(self) -> Groups:
        """One group per replica: ((0..7), (8..15), ...) for TP8."""
        return tuple(tuple(range(r * self.tp_size, (r + 1) * self.tp_size)) for r in range(self.dp_size))

    @property
    def ep_groups(self) -> Groups:
        """One group of all ranks."""
        return (tuple(range(self.world_size)),)

    def tp_rank(self, rank: int) -> int:
        """Place of a rank inside its replica."""
        return self._checked(rank) % self.tp_size

    def dp_rank(self, rank: int) -> int:
        """Replica of a rank."""
        return self._checked(rank) // self.tp_size

    def q_heads(self, rank: int, num_q_heads: int) -> range:
        """Query heads of a rank.

        >>> DecodeMesh(tp_size=8, dp_size=16, ep_size=128).q_heads(9, 64)
        range(8, 16)
        """
        if num_q_heads % self.tp_size:
            raise LayoutError(f"{num_q_heads} query heads do not divide over tp_size {self.tp_size}")
        per = num_q_heads // self.tp_size
        return range(self.tp_rank(rank) * per, (self.tp_rank(rank) + 1) * per)

    def kv_heads(self, rank: int, num_kv_heads: int) -> range:
        """KV heads of a rank; ranks beyond one per head hold replicas.

        >>> DecodeMesh(tp_size=16, ep_size=16).kv_heads(5, 8)
        range(2, 3)
        """
        per = kv_heads_per_rank(num_kv_heads, self.tp_size)
        replicas = max(1, self.tp_size // num_kv_heads)
        first = self.tp_rank(rank) // replicas * per
        return range(first, first + per)

    def experts(self, rank: int, num_experts: int) -> range:
        """Experts of a rank; expert r on rank r for EP128 and 128 experts.

        Raises:
            UnsupportedError: fewer experts than ranks.
        """
        if num_experts < self.ep_size:
            raise UnsupportedError(
                f"{num_experts} experts over ep_size {self.ep_size} leaves ranks without an expert; use fewer ranks"
            )
        return shard_range(num_experts, self.ep_size, self._checked(rank))

    def rows(self, rank: int, rows_per_replica: int) -> range:
        """Batch rows, counted over all replicas, whose hidden state a rank keeps between collectives.

        >>> DecodeMesh(tp_size=8, dp_size=2, ep_size=16).rows(9, 16)
        range(18, 20)

        Raises:
            LayoutError: rows do not divide over the TP ranks.
        """
        if rows_per_replica % self.tp_size:
            raise LayoutError(
                f"rows per replica must be a multiple of tp_size {self.tp_size}, got {rows_per_replica}; pad the batch"
            )
        per = rows_per_replica // self.tp_size
        first = self.dp_rank(rank) * rows_per_replica + self.tp_rank(rank) * per
        return range(first, first + per)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside 0..{self.world_size - 1}")
        return rank
