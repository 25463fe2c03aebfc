"""The life of one pull: a consumer rank reads a request's blocks from every producer rank that holds them. Sans-I/O.

    planned -> reading -> proving -> (verifying) -> done
                    \\________\\_____________\\____-> failed | aborted, and quiet when no read is under way any more

Strategy
    A pull is done only when three things are known, each from its own source:
    1. every read says DONE (never a notice: a notice may overtake the data, or belong to another read);
    2. every producer rank that was read from has answered a claim with HELD, and that answer covers the moment at which
       we saw the last of its reads end;
    3. where checksums came along, the bytes here have them.
    What an answer covers: a claim asked at our time s and answered "valid for v seconds" was answered after s, so the
    blocks keep their bytes at least until s + v on any clock that runs as ours does; we believe `trust` of v. And as a
    generation never comes back to life, an answer to a claim that was asked after the last read had ended covers that
    read whatever the clocks say. With `confirm_after_read` only this second kind counts: one round trip more, no clock
    (for machines that may be suspended, where a clock can stand still). No answer, no token.
    The first fault decides. After it nothing is posted; blocks stay ours until every posted read is quiet, because a
    sibling may still be landing in them. An abort, a deadline, a refused lease or the producer's own failure is
    reported at once; a failed read is reported when its siblings are quiet, or at the deadline. Each producer rank is
    told once, by its own request id, when we read no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from attrs import define, field, frozen

from gk_core.errors import LayoutError
from gk_core.notices import Claim, ClaimReply, ClaimVerdict, PeerNotice, ProducerFailure, Reader, Release, ReleaseKind
from gk_core.ports import PeerKey, ReadState
from gk_core.transfer_plan import RankRead

__all__ = ["AddressedNotice", "Pull", "PullActions", "PullEnd", "PullFault", "PullOutcome", "PullSettings"]


class PullEnd(Enum):
    """How a pull ended."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


class PullFault(Enum):
    """Why a pull did not end well."""

    READ_FAILED = "read_failed"
    PEER_LOST = "peer_lost"
    LEASE_REFUSED = "lease_refused"
    PRODUCER_FAILED = "producer_failed"
    TIMEOUT = "timeout"
    CHECKSUM = "checksum"
    ABORTED = "aborted"


_WAITS_FOR_SIBLINGS = (PullFault.READ_FAILED, PullFault.PEER_LOST)


@frozen(kw_only=True)
class PullOutcome:
    """What the request's owner is told, once.

    Attributes:
        end: done, failed or aborted.
        fault: None exactly when done.
        reason: one line for people; empty when done.
    """

    end: PullEnd
    fault: PullFault | None
    reason: str


@frozen(kw_only=True)
class PullSettings:
    """Times and limits of a pull.

    Attributes:
        deadline_seconds: a pull that is not done by then has failed.
        claim_interval_seconds: between heartbeats while reads are under way; well below the producer's ttl.
        reply_timeout_seconds: after this an unanswered claim is asked again.
        max_attempts: posts of one read, the first included.
        trust: share of a promised validity that is believed; covers clocks that run apart.
        confirm_after_read: believe only claims that were asked after the last read ended.

    Raises:
        LayoutError: a number out of range.
    """

    deadline_seconds: float = 30.0
    claim_interval_seconds: float = 5.0
    reply_timeout_seconds: float = 1.0
    max_attempts: int = 2
    trust: float = 0.95
    confirm_after_read: bool = False

    def __attrs_post_init__(self) -> None:
        for name in ("deadline_seconds", "claim_interval_seconds", "reply_timeout_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise LayoutError(f"{name} must be a finite number > 0, got {value}")
        if self.max_attempts < 1:
            raise LayoutError(f"max_attempts must be >= 1, got {self.max_attempts}")
        if not 0 < self.trust <= 1:
            raise LayoutError(f"trust must be > 0 and <= 1, got {self.trust}")


@frozen(kw_only=True)
class AddressedNotice:
    """A notice and the producer rank it goes to."""

    peer: PeerKey
    notice: PeerNotice


@frozen(kw_only=True)
class PullActions:
    """What the owner has to do now, in this order.

    Attributes:
        posts: indices of `reads` to post.
        notices: to send; losing one is allowed.
        verify: compare the bytes that arrived with their checksums and call `verified`.
        ended: the outcome, once in a pull's life.
        quiet: nothing writes to our blocks any more; once, together with `ended` or later.
    """

    posts: tuple[int, ...] = ()
    notices: tuple[AddressedNotice, ...] = ()
    verify: bool = False
    ended: PullOutcome | None = None
    quiet: bool = False


@define
class _Read:
    peer: PeerKey
    state: ReadState | None = None  # None: to be posted
    attempts: int = 0
    ended_at: float = -math.inf


@define
class _SentClaim:
    at: float
    after_reads: bool


@define
class _Fence:
    """What we know of one producer rank's lease."""

    sent: dict[int, _SentClaim] = field(factory=dict)
    answered: int = -1
    proven_until: float = -math.inf


class Pull:
    """One consumer rank's pull of one request. Feed it what happened, then do what `advance` says.

    Args:
        engine_id, request_id, generation: the producer's lease, from the hand-off.
        readers: who we are, by producer rank (each waits for its own number of readers); the pull id must be new.
        reads: from the transfer plan; a rank whose reads have no runs is only told that we are done.
        now: seconds, our clock.
        settings: times and limits.
        digest: of what we were told to read; goes into each claim.
        verify: whether checksums came along.

    Raises:
        LayoutError: a read from a rank that has no reader.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        request_id: str,
        generation: int,
        readers: Mapping[int, Reader],
        reads: tuple[RankRead, ...],
        now: float,
        settings: PullSettings,
        digest: str = "",
        verify: bool = False,
    ) -> None:
        missing = sorted({r.remote_rank for r in reads} - set(readers))
        if missing:
            raise LayoutError(f"reads from ranks {missing} of {engine_id}, but no reader for them")
        self._lease = (engine_id, request_id, generation)
        self._readers = dict(readers)
        self._settings = settings
        self._digest = digest
        self._deadline = now + settings.deadline_seconds
        self._all_peers = tuple(PeerKey(engine_id=engine_id, rank=rank) for rank in self._readers)
        self.reads = reads
        self._reads = {
            i: _Read(peer=PeerKey(engine_id=engine_id, rank=r.remote_rank)) for i, r in enumerate(reads) if r.runs
        }
        self._fences = {read.peer: _Fence() for read in self._reads.values()}
        self._sequence = 0
        self._fault: PullFault | None = None
        self._reason = ""
        self._needs_verifying = verify and bool(self._reads)
        self._asked_to_verify = False
        self.outcome: PullOutcome | None = None
        """None until the pull has ended."""
        self.is_quiet = False
        """Whether the blocks are free of writes for good."""
        self.retries = 0
        """Reads that were posted again."""

    @property
    def pending(self) -> tuple[int, ...]:
        """Reads that were posted and have not ended."""
        return tuple(i for i, read in self._reads.items() if read.state is ReadState.PENDING)

    def read_state(self, index: int, state: ReadState, *, now: float) -> None:
        """A posted read says how it stands; also for a post that the transport refused."""
        read = self._reads[index]
        if read.state is ReadState.PENDING and state is not ReadState.PENDING:
            read.state, read.ended_at = state, now

    def claim_reply(self, reply: ClaimReply) -> None:
        """A producer rank's answer; anything that does not answer a claim of ours changes nothing."""
        engine_id, request_id, generation = self._lease
        fence = self._fences.get(PeerKey(engine_id=reply.engine_id, rank=reply.rank))
        if (
            fence is None
            or (reply.request_id, reply.generation) != (request_id, generation)
            or reply.pull_id != self._readers[reply.rank].pull_id
            or reply.sequence not in fence.sent
        ):
            return
        fence.answered = max(fence.answered, reply.sequence)
        asked = fence.sent[reply.sequence]
        if reply.verdict is ClaimVerdict.HELD:
            if asked.after_reads:
                fence.proven_until = math.inf
            elif not self._settings.confirm_after_read:
                until = asked.at + reply.valid_seconds * self._settings.trust
                fence.proven_until = max(fence.proven_until, until)
        else:
            self.fail(
                PullFault.LEASE_REFUSED,
                f"{engine_id}/{reply.rank} no longer holds request {request_id!r} generation {generation}: "
                f"{reply.verdict.value}",
            )

    def producer_failed(self, notice: ProducerFailure) -> None:
        """The producer withdrew the lease."""
        named = (notice.engine_id, notice.request_id, notice.generation)
        ours = self._readers.get(notice.rank)
        if named == self._lease and ours is not None and notice.pull_id == ours.pull_id:
            self.fail(PullFault.PRODUCER_FAILED, f"{notice.engine_id}/{notice.rank} failed: {notice.reason}")

    def fail(self, fault: PullFault, reason: str) -> None:
        """Something outside went wrong; the first fault decides and a finished pull is not changed."""
        if self._fault is None and self.outcome is None:
            self._fault, self._reason = fault, reason

    def abort(self) -> None:
        """The request's owner wants it no more."""
        self.fail(PullFault.ABORTED, "aborted")

    def verified(self, *, ok: bool, reason: str = "") -> None:
        """Result of the comparison that `PullActions.verify` asked for."""
        if ok:
            self._needs_verifying = False
        else:
            self.fail(PullFault.CHECKSUM, reason or "the bytes that arrived do not have the producer's checksum")

    def advance(self, *, now: float) -> PullActions:
        """Decide. Call after each change and at least once per `reply_timeout_seconds`."""
        if self.is_quiet:
            return PullActions()
        if self.outcome is None:
            self._look_for_faults(now)
        if self._fault is not None:
            return self._wind_down(now)
        posts = self._post()
        if posts or self.pending:
            return PullActions(posts=posts, notices=self._claims(now))
        if not all(self._is_proven(peer) for peer in self._fences):
            return PullActions(notices=self._claims(now))
        if self._needs_verifying:
            ask, self._asked_to_verify = not self._asked_to_verify, True
            return PullActions(verify=ask, notices=self._claims(now))
        self.outcome, self.is_quiet = PullOutcome(end=PullEnd.DONE, fault=None, reason=""), True
        return PullActions(notices=self._releases(ReleaseKind.DONE), ended=self.outcome, quiet=True)

    def _look_for_faults(self, now: float) -> None:
        if now >= self._deadline:
            self.fail(PullFault.TIMEOUT, f"not complete within {self._settings.deadline_seconds:g} s")
        for index, read in self._reads.items():
            if read.state is not ReadState.FAILED or self._fault is not None:
                continue
            if read.attempts >= self._settings.max_attempts:
                self.fail(PullFault.READ_FAILED, f"read {index} from {read.peer.engine_id}/{read.peer.rank} failed")
            else:
                read.state = None
                self.retries += 1

    def _wind_down(self, now: float) -> PullActions:
        quiet, ended = not self.pending, None
        at_once = quiet or now >= self._deadline or self._fault not in _WAITS_FOR_SIBLINGS
        if self.outcome is None and at_once:
            end = PullEnd.ABORTED if self._fault is PullFault.ABORTED else PullEnd.FAILED
            ended = self.outcome = PullOutcome(end=end, fault=self._fault, reason=self._reason)
        self.is_quiet = quiet
        return PullActions(notices=self._releases(ReleaseKind.FAILED) if quiet else (), ended=ended, quiet=quiet)

    def _post(self) -> tuple[int, ...]:
        posts = tuple(i for i, read in self._reads.items() if read.state is None)
        for index in posts:
            self._reads[index].state = ReadState.PENDING
            self._reads[index].attempts += 1
        return posts

    def _is_done(self, peer: PeerKey) -> bool:
        return all(r.state is ReadState.DONE for r in self._reads.values() if r.peer == peer)

    def _is_proven(self, peer: PeerKey) -> bool:
        """Whether all reads from a rank ended inside what it promised."""
        last_end = max(r.ended_at for r in self._reads.values() if r.peer == peer)
        return self._is_done(peer) and last_end <= self._fences[peer].proven_until

    def _claims(self, now: float) -> tuple[AddressedNotice, ...]:
        return tuple(
            AddressedNotice(peer=peer, notice=self._claim(peer, fence, now))
            for peer, fence in self._fences.items()
            if self._wants_claim(peer, fence, now)
        )

    def _wants_claim(self, peer: PeerKey, fence: _Fence, now: float) -> bool:
        if not fence.sent:
            return True
        sequence, last = next(reversed(fence.sent.items()))
        age = now - last.at
        if age >= self._settings.claim_interval_seconds:
            return True
        if fence.answered < sequence and age >= self._settings.reply_timeout_seconds:
            return True
        return not last.after_reads and self._is_done(peer) and not self._is_proven(peer)

    def _claim(self, peer: PeerKey, fence: _Fence, now: float) -> Claim:
        self._sequence += 1
        fence.sent[self._sequence] = _SentClaim(at=now, after_reads=self._is_done(peer))
        engine_id, request_id, generation = self._lease
        return Claim(
            engine_id=engine_id,
            request_id=request_id,
            generation=generation,
            reader=self._readers[peer.rank],
            sequence=self._sequence,
            digest=self._digest,
        )

    def _releases(self, kind: ReleaseKind) -> tuple[AddressedNotice, ...]:
        engine_id, request_id, generation = self._lease
        return tuple(
            AddressedNotice(
                peer=peer,
                notice=Release(
                    engine_id=engine_id,
                    request_id=request_id,
                    generation=generation,
                    reader=self._readers[peer.rank],
                    kind=kind,
                ),
            )
            for peer in self._all_peers
        )
