"""Transfer plan: which bytes of which remote blocks land in which local blocks.

Planning is pure: adapters execute a plan without knowing models, heads or ranks.
"""

from __future__ import annotations

from attrs import frozen

from gk_core.errors import LayoutError

__all__ = ["BlockRun", "HeadSlice", "RankRead", "TransferPlan"]


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


@frozen(kw_only=True)
class BlockRun:
    """`count` consecutive block ids on both sides.

    Attributes:
        local_start, remote_start: first block id here and there.
        count: blocks.
    """

    local_start: int
    remote_start: int
    count: int

    def __attrs_post_init__(self) -> None:
        if self.local_start < 0 or self.remote_start < 0 or self.count < 1:
            raise LayoutError(f"a block run needs ids >= 0 and count >= 1, got {self}")


@frozen(kw_only=True)
class RankRead:
    """What one local rank reads from one remote rank, in every region.

    Attributes:
        remote_rank: TP rank of the peer.
        head_slice: bytes of each block.
        runs: ascending by local block id, coalesced, never overlapping; empty means notify only.
    """

    remote_rank: int
    head_slice: HeadSlice
    runs: tuple[BlockRun, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks read in each region."""
        return sum(run.count for run in self.runs)


@frozen(kw_only=True)
class TransferPlan:
    """All reads of one pull by one local rank.

    Attributes:
        reads: one or more per remote rank.
        num_regions: regions that each read touches, K and V.
    """

    reads: tuple[RankRead, ...]
    num_regions: int

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.num_regions * sum(r.num_blocks * r.head_slice.length_bytes for r in self.reads)
