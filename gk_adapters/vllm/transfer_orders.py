"""What the connector's scheduler half tells its worker half, step by step, as plain values that can be pickled."""

from __future__ import annotations

from attrs import frozen

from gk_core.block_table import NULL_BLOCK_ID
from gk_core.hand_off import HandOff
from gk_core.transfer_plan import GroupBlocks

__all__ = ["LeaseOrder", "Offered", "PullOrder", "TransferOrders"]


@frozen(kw_only=True)
class LeaseOrder:
    """Keep a finished request's blocks for a reader.

    Attributes:
        request_id: ours, the producer's.
        generation: of the lease; orders come with ascending ones, without gaps.
        groups: blocks on offer.
        digest: `offer_digest` of what was offered.
        ttl_seconds: how long, and how far each claim moves that.
    """

    request_id: str
    generation: int
    groups: tuple[GroupBlocks, ...]
    digest: str
    ttl_seconds: float


@frozen(kw_only=True)
class Offered:
    """A producer's offer to one of our requests.

    Attributes:
        request_id: ours, the consumer's.
        hand_off: as the client brought it, checked.
        pull_id: the same on all our ranks, never used again.
        digest: of what we were told to read.
    """

    request_id: str
    hand_off: HandOff
    pull_id: str
    digest: str


@frozen(kw_only=True)
class PullOrder:
    """Read an offer into blocks that vLLM has allocated.

    Attributes:
        offered: what.
        local: the request's whole block tables, by group.
        num_tokens: tokens that will be here after the pull.
        num_cached_tokens: tokens at the front that are here already.
    """

    offered: Offered
    local: tuple[GroupBlocks, ...]
    num_tokens: int
    num_cached_tokens: int

    def awaited_ids(self, block_size: int) -> frozenset[int]:
        """Blocks that hold nothing until the pull is done; not those that came from the prefix cache."""
        cached = self.num_cached_tokens // block_size
        return frozenset(
            b for g in self.local for b in g.block_ids[max(cached - g.first_logical, 0) :] if b != NULL_BLOCK_ID
        )


@frozen(kw_only=True)
class TransferOrders:
    """One step's orders.

    Attributes:
        leases: of requests that finished here and are to be read elsewhere.
        waiting: offers to requests that wait for room; their leases are kept warm.
        pulls: to start.
        declined: offers that nobody will read.
        aborted: requests of ours whose pull is not wanted any more.
    """

    leases: tuple[LeaseOrder, ...] = ()
    waiting: tuple[Offered, ...] = ()
    pulls: tuple[PullOrder, ...] = ()
    declined: tuple[Offered, ...] = ()
    aborted: tuple[str, ...] = ()
