"""Leases: how long a producer keeps a request's blocks for whoever will read them. Sans-I/O; time is an argument.

Strategy
    A lease has a generation, a number that this producer never uses twice. It is granted for `ttl` seconds, made longer
    by claims, and ends exactly once: released by every reader of one pull, rejected, failed or expired. The caller
    frees the blocks when, and only when, an `EndedLease` says so.
    The first claim ties a lease to one pull, so no second use of the same hand-off can free blocks under the first. A
    HELD reply is a promise that the reader can build on: until `valid_seconds` are over, nothing but that pull's own
    release ends the lease. Failing or cancelling a claimed lease therefore tells the readers and waits.
    Only the last `remember` ended leases are known by name; older ones are UNKNOWN_REQUEST, which is refused just as
    well.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import Enum

from attrs import evolve, frozen

from gk_core.block_table import BlockId
from gk_core.errors import LayoutError, RequestError
from gk_core.notices import MAX_LEASE_SECONDS, Claim, ClaimReply, ClaimVerdict, ProducerFailure, Reader, Release
from gk_core.notices import ReleaseKind as Kind

__all__ = ["AddressedFailure", "EndedLease", "Lease", "LeaseBook", "LeaseEnd", "ReleaseResult"]


class LeaseEnd(Enum):
    """How a lease ended."""

    RELEASED = "released"
    CONSUMER_FAILED = "consumer_failed"
    REJECTED = "rejected"
    EXPIRED = "expired"
    FAILED = "failed"


@frozen(kw_only=True)
class Lease:
    """One request's blocks, kept for a consumer.

    Attributes:
        request_id: the producer's id.
        generation: the fence; from 1, never used twice by one producer.
        blocks: block ids by group.
        granted_at: seconds, the producer's clock.
        expires_at: seconds; the lease is over at this moment.
        ttl_seconds: how far ahead a claim moves `expires_at`.
        reader: first reader that claimed it, None while nobody has.
        released_ranks: consumer ranks that let go.
        any_failed: whether one of them let go without its bytes.
        withdrawn: reason for which the producer withdrew it, None while it is good.
        digest: `offer_digest` of what was offered; a claim for anything else is refused.
    """

    request_id: str
    generation: int
    blocks: tuple[tuple[BlockId, ...], ...]
    granted_at: float
    expires_at: float
    ttl_seconds: float
    reader: Reader | None = None
    released_ranks: frozenset[int] = frozenset()
    any_failed: bool = False
    withdrawn: str | None = None
    digest: str = ""


@frozen(kw_only=True)
class EndedLease:
    """A lease that is over: its blocks may be freed now."""

    lease: Lease
    end: LeaseEnd


@frozen(kw_only=True)
class ReleaseResult:
    """What became of a release.

    Attributes:
        verdict: HELD when it counted, or why it was ignored.
        ended: the lease, when this was the last release that it waited for.
    """

    verdict: ClaimVerdict
    ended: EndedLease | None = None


@frozen(kw_only=True)
class AddressedFailure:
    """A failure and the reader that must hear of it."""

    reader: Reader
    notice: ProducerFailure


class LeaseBook:
    """All leases of one producer rank.

    Attributes:
        ignored: notices that changed nothing, counted by why.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        rank: int = 0,
        max_lifetime_seconds: float = 3600.0,
        remember: int = 4096,
        first_generation: int = 1,
    ) -> None:
        """An empty book.

        Args:
            engine_id: of the serving instance.
            rank: producer rank.
            max_lifetime_seconds: a lease ends this long after its grant, whatever is claimed.
            remember: ended leases that are still known by name.
            first_generation: of the first lease. A random number below 2^62 keeps generations of two starts apart
                even where both have one engine id.

        Raises:
            LayoutError: the lifetime is not in (0, MAX_LEASE_SECONDS], or the generation not in 1..2^62.
        """
        if not 1 <= first_generation <= 2**62:
            raise LayoutError(f"first_generation must be 1..2^62, got {first_generation}")
        if not 0 < max_lifetime_seconds <= MAX_LEASE_SECONDS:
            raise LayoutError(
                f"max_lifetime_seconds must be > 0 and <= {MAX_LEASE_SECONDS}, got {max_lifetime_seconds}"
            )
        self._engine_id = engine_id
        self._rank = rank
        self._max_lifetime = max_lifetime_seconds
        self._remember = remember
        self._live: dict[str, Lease] = {}
        self._ended: OrderedDict[str, tuple[int, LeaseEnd]] = OrderedDict()
        self._last_generation = first_generation - 1
        self.ignored: Counter[ClaimVerdict] = Counter()

    @property
    def live(self) -> tuple[Lease, ...]:
        """Leases whose blocks must not be freed, in order of grant."""
        return tuple(self._live.values())

    def grant(
        self, *, request_id: str, blocks: tuple[tuple[BlockId, ...], ...], now: float, ttl: float, digest: str = ""
    ) -> Lease:
        """A new lease of `ttl` seconds.

        Raises:
            RequestError: the request has a lease already, or ttl is not in (0, max_lifetime_seconds].
        """
        if request_id in self._live:
            raise RequestError(f"request {request_id!r} has a lease already; finish it or use another id")
        if not 0 < ttl <= self._max_lifetime:
            raise RequestError(f"ttl must be > 0 and <= {self._max_lifetime} seconds, got {ttl}")
        self._last_generation += 1
        lease = Lease(
            request_id=request_id,
            generation=self._last_generation,
            blocks=blocks,
            granted_at=now,
            expires_at=now + ttl,
            ttl_seconds=ttl,
            digest=digest,
        )
        self._live[request_id] = lease
        return lease

    def claim(self, claim: Claim, *, now: float) -> ClaimReply:
        """Answer a claim; HELD also moves the expiry to now + ttl, never past the lease's longest life."""
        verdict = self._standing(claim, now)
        valid = 0.0
        if verdict is ClaimVerdict.HELD:
            lease = self._live[claim.request_id]
            until = min(now + lease.ttl_seconds, lease.granted_at + self._max_lifetime)
            self._live[claim.request_id] = evolve(lease, reader=lease.reader or claim.reader, expires_at=until)
            valid = until - now
        else:
            self.ignored[verdict] += 1
        return ClaimReply(
            engine_id=self._engine_id,
            request_id=claim.request_id,
            generation=claim.generation,
            pull_id=claim.reader.pull_id,
            sequence=claim.sequence,
            rank=self._rank,
            verdict=verdict,
            valid_seconds=valid,
        )

    def release(self, release: Release, *, now: float) -> ReleaseResult:
        """Count one rank's release; the last one ends the lease. Anything that does not fit is ignored and counted."""
        verdict = self._standing(release, now)
        if verdict is ClaimVerdict.PRODUCER_FAILED and release.request_id in self._live:
            verdict = ClaimVerdict.HELD  # a withdrawn lease waits for exactly this
        if verdict is ClaimVerdict.HELD and release.reader.key.rank in self._live[release.request_id].released_ranks:
            verdict = ClaimVerdict.ALREADY_USED
        if verdict is not ClaimVerdict.HELD:
            self.ignored[verdict] += 1
            return ReleaseResult(verdict=verdict)
        lease = self._live[release.request_id]
        lease = evolve(
            lease,
            reader=lease.reader or release.reader,
            released_ranks=lease.released_ranks | {release.reader.key.rank},
            any_failed=lease.any_failed or release.kind is not Kind.DONE,
        )
        self._live[release.request_id] = lease
        if release.kind is not Kind.REJECTED and len(lease.released_ranks) < release.reader.num_readers:
            return ReleaseResult(verdict=verdict)
        return ReleaseResult(verdict=verdict, ended=self._end(lease, _end_of(lease, release)))

    def withdraw(self, *, request_id: str, reason: str, now: float) -> EndedLease | AddressedFailure | None:
        """The producer's own failure or cancellation.

        An unclaimed lease ends at once. A claimed one refuses further claims, is to be reported to its reader, and ends
        when the reader lets go or the promise is over. None: there is no such lease, or it was withdrawn before.
        """
        lease = self._live.get(request_id)
        if lease is None or lease.withdrawn is not None:
            return None
        if lease.reader is None or now >= lease.expires_at:
            return self._end(lease, LeaseEnd.FAILED)
        self._live[request_id] = evolve(lease, withdrawn=reason)
        return AddressedFailure(
            reader=lease.reader,
            notice=ProducerFailure(
                engine_id=self._engine_id,
                request_id=request_id,
                generation=lease.generation,
                pull_id=lease.reader.pull_id,
                rank=self._rank,
                reason=reason,
            ),
        )

    def sweep(self, *, now: float) -> tuple[EndedLease, ...]:
        """End every lease that is over, whatever the order in which they were granted or extended."""
        over = [lease for lease in self._live.values() if now >= lease.expires_at]
        return tuple(self._end(x, LeaseEnd.EXPIRED if x.withdrawn is None else LeaseEnd.FAILED) for x in over)

    def _standing(self, notice: Claim | Release, now: float) -> ClaimVerdict:
        if notice.engine_id != self._engine_id:
            return ClaimVerdict.WRONG_ENGINE
        lease = self._live.get(notice.request_id)
        if lease is None:
            return self._memory_of(notice.request_id, notice.generation)
        if lease.generation != notice.generation:
            return ClaimVerdict.STALE_GENERATION
        if now >= lease.expires_at:
            return ClaimVerdict.LEASE_OVER
        if lease.reader is not None and lease.reader.pull != notice.reader.pull:
            return ClaimVerdict.ALREADY_USED
        if lease.reader is not None and lease.reader.num_readers != notice.reader.num_readers:
            return ClaimVerdict.CONFLICT
        if isinstance(notice, Claim) and notice.digest != lease.digest:
            return ClaimVerdict.WRONG_OFFER
        return ClaimVerdict.HELD if lease.withdrawn is None else ClaimVerdict.PRODUCER_FAILED

    def _memory_of(self, request_id: str, generation: int) -> ClaimVerdict:
        ended = self._ended.get(request_id)
        if ended is None:
            return ClaimVerdict.UNKNOWN_REQUEST
        if ended[0] != generation:
            return ClaimVerdict.STALE_GENERATION
        if ended[1] is LeaseEnd.EXPIRED:
            return ClaimVerdict.LEASE_OVER
        return ClaimVerdict.PRODUCER_FAILED if ended[1] is LeaseEnd.FAILED else ClaimVerdict.ALREADY_USED

    def _end(self, lease: Lease, end: LeaseEnd) -> EndedLease:
        del self._live[lease.request_id]
        self._ended[lease.request_id] = (lease.generation, end)
        self._ended.move_to_end(lease.request_id)
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)
        return EndedLease(lease=lease, end=end)


def _end_of(lease: Lease, release: Release) -> LeaseEnd:
    if lease.withdrawn is not None:
        return LeaseEnd.FAILED
    if release.kind is Kind.REJECTED:
        return LeaseEnd.REJECTED
    return LeaseEnd.CONSUMER_FAILED if lease.any_failed else LeaseEnd.RELEASED
