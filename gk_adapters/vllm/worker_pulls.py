"""Consumer half of a worker: offers kept warm, pulls carried out, and what became of each, reported once.

Strategy. The core's pull desk does the pulling; here are vLLM's orders before it and vLLM's reports after it. A pull is
reported when nothing writes to its blocks any more, for vLLM frees or fills them at that moment. It is good only where
the core's `Pull` says that it is done; in every other case its blocks are reported as not loaded.
"""

from __future__ import annotations

from attrs import define, frozen

from gk_adapters.vllm.transfer_orders import Offered, PullOrder
from gk_core.errors import GkError, TransferError
from gk_core.metrics import NOTICES_IGNORED, PULLS_ABORTED, PULLS_FAILED
from gk_core.notices import ClaimReply, ProducerFailure
from gk_core.offers import Offers
from gk_core.peer_layout import PeerLayout
from gk_core.peers import Mailbox, PeerResolver
from gk_core.ports import Clock, KVTransport, Metrics, PeerKey
from gk_core.pull import PullEnd, PullSettings
from gk_core.pull_desk import PullDesk

__all__ = ["PullResult", "WorkerPulls"]


@frozen(kw_only=True)
class PullResult:
    """A pull that is over and quiet.

    Attributes:
        request_id: ours.
        missing_ids: blocks that hold nothing usable; empty when the pull was good.
        reason: why it was not; empty when it was.
    """

    request_id: str
    missing_ids: frozenset[int]
    reason: str


@define(eq=False)
class _Waiting:
    offered: Offered
    asked_at: float


@define(eq=False)
class _Pulling:
    order: PullOrder
    since: float
    is_under_way: bool = False
    reason: str = ""


class WorkerPulls:
    """All pulls of one worker.

    Args:
        layout: what the handshake says of this rank.
        transport: moves blocks; its regions are registered already.
        mailbox, peers, clock, metrics: ports.
        settings: times and limits of each pull.
        keep_asking: whether a producer that cannot be reached is asked again until the pull's deadline.
    """

    def __init__(
        self,
        *,
        layout: PeerLayout,
        transport: KVTransport,
        mailbox: Mailbox,
        peers: PeerResolver,
        clock: Clock,
        metrics: Metrics,
        settings: PullSettings,
        keep_asking: bool = False,
    ) -> None:
        self._layout = layout
        self._clock, self._metrics, self._settings = clock, metrics, settings
        self._keep_asking = keep_asking
        self._desk = PullDesk(
            layout=layout,
            transport=transport,
            mailbox=mailbox,
            peers=peers,
            metrics=metrics,
            settings=settings,
            cache=None,
        )
        self._offers = Offers(
            key=PeerKey(engine_id=layout.engine_id, rank=layout.tp_rank),
            peers=peers,
            mailbox=mailbox,
            metrics=metrics,
            patience_seconds=settings.deadline_seconds,
        )
        self._waiting: dict[str, _Waiting] = {}
        self._pulling: dict[str, _Pulling] = {}
        self._results: list[PullResult] = []

    @property
    def has_work(self) -> bool:
        """Whether `poll` has anything left to do."""
        return bool(self._waiting or self._pulling or self._results or self._offers.has_work)

    def wait(self, offered: Offered) -> None:
        """Keep an offer warm for a request that waits for room; its producer is looked up meanwhile."""
        self._waiting[offered.request_id] = _Waiting(offered, asked_at=self._clock.now())

    def start(self, order: PullOrder) -> None:
        """Read an offer."""
        self._waiting.pop(order.offered.request_id, None)
        self._pulling[order.offered.request_id] = _Pulling(order, since=self._clock.now())

    def decline(self, offered: Offered) -> None:
        """Tell an offer's producer that nobody will read it."""
        self._waiting.pop(offered.request_id, None)
        self._offers.decline(offered.hand_off, offered.pull_id, now=self._clock.now())

    def abort(self, request_id: str) -> None:
        """Give a pull up; harmless when there is none. It is reported all the same, once it is quiet."""
        pulling = self._pulling.get(request_id)
        if pulling is None:
            return
        if pulling.is_under_way:
            self._desk.abort(pulling.order.offered.pull_id)
            return
        self._metrics.count(name=PULLS_ABORTED)
        self._drop(pulling, "aborted")

    def notice(self, notice: ClaimReply | ProducerFailure) -> None:
        """Something a producer said."""
        # Answers to keep-warm claims need no action: a lease that is gone shows when it is claimed for the pull.
        keeps_warm = isinstance(notice, ClaimReply) and notice.sequence == 0
        if not self._desk.notice(notice) and not keeps_warm:
            self._metrics.count(name=NOTICES_IGNORED)

    def poll(self) -> tuple[PullResult, ...]:
        """Move everything on without waiting; what became quiet since the last call."""
        now = self._clock.now()
        self._offers.send_declined(now=now)
        self._keep_warm(now)
        for pulling in tuple(self._pulling.values()):
            if not pulling.is_under_way:
                self._begin(pulling, now)
        self._move_pulls(now)
        done, self._results = tuple(self._results), []
        return done

    def _keep_warm(self, now: float) -> None:
        for waiting in self._waiting.values():
            offered = waiting.offered
            try:
                peer = self._offers.find(offered.hand_off)
            except GkError:
                continue  # said when the pull starts, if it still is so
            if peer is not None and now - waiting.asked_at >= self._settings.claim_interval_seconds:
                waiting.asked_at = now
                self._offers.keep_warm(offered.hand_off, peer, offered.pull_id, offered.digest)

    def _move_pulls(self, now: float) -> None:
        under_way = {p.order.offered.pull_id: p for p in self._pulling.values() if p.is_under_way}
        for report in self._desk.poll(now=now):
            pulling = under_way[report.pull_id]
            is_good = report.outcome is not None and report.outcome.end is PullEnd.DONE
            if report.outcome is not None:
                pulling.reason = report.outcome.reason
            if is_good or report.free_key:
                del self._pulling[pulling.order.offered.request_id]
                self._report(pulling, good=is_good)

    def _begin(self, pulling: _Pulling, now: float) -> None:
        hand_off = pulling.order.offered.hand_off
        overdue = now - pulling.since >= self._settings.deadline_seconds
        try:
            peer = self._offers.find(hand_off)
            if peer is None:
                if overdue:
                    raise TransferError(f"{hand_off.engine_id} was not reached in time")
                return
            order = pulling.order
            self._desk.start(
                offer=hand_off,
                peer=peer,
                local=order.local,
                num_tokens=order.num_tokens,
                num_cached_tokens=order.num_cached_tokens,
                pool_key=order.offered.pull_id,
                pull_id=order.offered.pull_id,
                digest=order.offered.digest,
                now=now,
            )
            pulling.is_under_way = True
        except TransferError as error:
            if overdue or not self._keep_asking:
                self._refuse(pulling, str(error))
        except GkError as error:
            self._refuse(pulling, str(error))

    def _refuse(self, pulling: _Pulling, reason: str) -> None:
        self._metrics.count(name=PULLS_FAILED)
        self._drop(pulling, reason)

    def _drop(self, pulling: _Pulling, reason: str) -> None:
        """End a pull that has read nothing."""
        offered = pulling.order.offered
        del self._pulling[offered.request_id]
        self._offers.decline(offered.hand_off, offered.pull_id, now=self._clock.now())
        pulling.reason = reason
        self._report(pulling, good=False)

    def _report(self, pulling: _Pulling, *, good: bool) -> None:
        missing = frozenset[int]() if good else pulling.order.awaited_ids(self._layout.block_size)
        request_id = pulling.order.offered.request_id
        self._results.append(PullResult(request_id=request_id, missing_ids=missing, reason=pulling.reason))
