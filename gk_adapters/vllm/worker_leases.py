"""Producer half of a worker: leases granted by order, claims answered, ended leases reported.

Strategy. vLLM's scheduler hands a request's parameters to the client before its worker hears of the lease, so a quick
reader's claim may come first. A claim for a generation that has not been granted yet is kept for a moment and answered
when it is; any other claim is answered at once, whatever the answer.
"""

from __future__ import annotations

from attrs import frozen

from gk_adapters.vllm.transfer_orders import LeaseOrder
from gk_core.block_table import BlockId
from gk_core.errors import LayoutError, TransferError
from gk_core.lease import EndedLease, LeaseBook, LeaseEnd
from gk_core.metrics import LEASES_ENDED, LEASES_EXPIRED, LEASES_GRANTED, NOTICES_IGNORED, NOTICES_LOST
from gk_core.notices import Claim, ClaimVerdict, Release
from gk_core.peers import Mailbox
from gk_core.ports import Clock, Metrics, PeerKey

__all__ = ["WorkerLeases"]

_MAX_EARLY_CLAIMS = 4096


@frozen
class _Early:
    claim: Claim
    until: float


class WorkerLeases:
    """All leases of one worker.

    Args:
        key: engine and rank.
        mailbox, clock, metrics: ports.
        max_lifetime_seconds: a lease ends this long after its grant, whatever is claimed.
        patience_seconds: how long a claim that came early waits for its lease.
    """

    def __init__(
        self,
        *,
        key: PeerKey,
        mailbox: Mailbox,
        clock: Clock,
        metrics: Metrics,
        max_lifetime_seconds: float,
        patience_seconds: float = 5.0,
    ) -> None:
        self._key = key
        self._mailbox, self._clock, self._metrics = mailbox, clock, metrics
        self._max_lifetime = max_lifetime_seconds
        self._patience = patience_seconds
        self._book: LeaseBook | None = None
        self._last_generation = 0
        self._early: list[_Early] = []
        self._ended: set[str] = set()

    @property
    def num_leases(self) -> int:
        """Requests whose blocks wait for a reader."""
        return len(self._book.live) if self._book is not None else 0

    def grant(self, order: LeaseOrder) -> None:
        """Keep blocks, and answer whoever asked for them already.

        Raises:
            LayoutError: a generation that does not follow the last one.
        """
        if self._book is None:
            self._book = LeaseBook(
                engine_id=self._key.engine_id,
                rank=self._key.rank,
                max_lifetime_seconds=self._max_lifetime,
                first_generation=order.generation,
            )
        elif order.generation != self._last_generation + 1:
            raise LayoutError(f"generation {order.generation} does not follow {self._last_generation}")
        self._book.grant(
            request_id=order.request_id,
            blocks=tuple(tuple(BlockId(b) for b in g.block_ids) for g in order.groups),
            now=self._clock.now(),
            ttl=order.ttl_seconds,
            digest=order.digest,
        )
        self._last_generation = order.generation
        self._metrics.count(name=LEASES_GRANTED)

    def answer(self, notice: Claim | Release) -> None:
        """Something a reader said."""
        now = self._clock.now()
        if isinstance(notice, Claim):
            if notice.generation > self._last_generation and len(self._early) < _MAX_EARLY_CLAIMS:
                self._early.append(_Early(notice, now + self._patience))
            else:
                self._reply(notice, now)
            return
        result = self._known_book().release(notice, now=now)
        if result.verdict is not ClaimVerdict.HELD:
            self._metrics.count(name=NOTICES_IGNORED)
        if result.ended is not None:
            self._end(result.ended)

    def take_ended(self) -> set[str]:
        """Requests whose blocks may be freed; each once."""
        now = self._clock.now()
        early, self._early = self._early, []
        for waiting in early:
            if waiting.claim.generation <= self._last_generation or now >= waiting.until:
                self._reply(waiting.claim, now)
            else:
                self._early.append(waiting)
        for ended in self._known_book().sweep(now=now):
            self._end(ended)
        done, self._ended = self._ended, set()
        return done

    def _known_book(self) -> LeaseBook:
        """The book; before the first lease an empty one, in which every claim is unknown."""
        return self._book or LeaseBook(engine_id=self._key.engine_id, rank=self._key.rank)

    def _reply(self, claim: Claim, now: float) -> None:
        reply = self._known_book().claim(claim, now=now)
        if reply.verdict is not ClaimVerdict.HELD:
            self._metrics.count(name=NOTICES_IGNORED)
        try:
            self._mailbox.send(peer=claim.reader.key, notice=reply)
        except TransferError:
            self._metrics.count(name=NOTICES_LOST)

    def _end(self, ended: EndedLease) -> None:
        self._metrics.count(name=LEASES_ENDED)
        if ended.end is LeaseEnd.EXPIRED:
            self._metrics.count(name=LEASES_EXPIRED)
        self._ended.add(ended.lease.request_id)
