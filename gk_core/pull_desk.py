"""Pull desk: every pull of one consumer rank, from its plan until its blocks are free of writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, frozen

from gk_core.errors import RequestError
from gk_core.hand_off import HandOff
from gk_core.integrity import BlockBytes, require_checksums, wrong_bytes
from gk_core.metrics import (
    PEERS_LOST,
    PULL_BYTES,
    PULL_READS,
    PULL_SECONDS,
    PULLS_ABORTED,
    PULLS_DONE,
    PULLS_FAILED,
    TRANSFERRED_TOKENS,
)
from gk_core.model_geometry import AttentionKind
from gk_core.notices import ClaimReply, ProducerFailure
from gk_core.peer_layout import PeerLayout
from gk_core.peers import Mailbox, PeerEngine, PeerResolver
from gk_core.ports import GroupTables, KVTransport, Metrics, PeerKey
from gk_core.pull import Pull, PullEnd, PullFault, PullOutcome, PullSettings
from gk_core.pull_run import PullRun
from gk_core.transfer_plan import GroupBlocks, TransferPlan, plan_pull

__all__ = ["PullDesk", "PullReport", "groups_of_tables"]

_PEER_FAULTS = (PullFault.PEER_LOST, PullFault.READ_FAILED, PullFault.TIMEOUT)


@frozen(kw_only=True)
class PullReport:
    """What happened to one pull.

    Attributes:
        pull_id: which.
        outcome: in the one report in which it ended, else None.
        free_key: the caller's name of blocks that nobody wants and nothing writes any more, "" when there are none.
    """

    pull_id: str
    outcome: PullOutcome | None
    free_key: str


@define(eq=False)
class _Transfer:
    run: PullRun
    plan: TransferPlan
    num_new_tokens: int
    pool_key: str
    pull_id: str
    engine_id: str
    started_at: float
    let_go: bool = False


class PullDesk:
    """Starts pulls, carries them out, and keeps their blocks until they are quiet.

    Args:
        layout: this rank.
        transport, mailbox, peers, metrics: ports.
        settings: times and limits of each pull.
        cache: this rank's bytes, to check hand-offs that carry checksums.
    """

    def __init__(
        self,
        *,
        layout: PeerLayout,
        transport: KVTransport,
        mailbox: Mailbox,
        peers: PeerResolver,
        metrics: Metrics,
        settings: PullSettings,
        cache: BlockBytes | None,
    ) -> None:
        self._layout = layout
        self._key = PeerKey(engine_id=layout.engine_id, rank=layout.tp_rank)
        self._transport, self._mailbox, self._peers, self._metrics = transport, mailbox, peers, metrics
        self._settings = settings
        self._cache = cache
        self._transfers: list[_Transfer] = []

    @property
    def has_work(self) -> bool:
        """Whether a pull is under way or its blocks are still being written."""
        return bool(self._transfers)

    def start(
        self,
        *,
        offer: HandOff,
        peer: PeerEngine,
        local: tuple[GroupBlocks, ...],
        num_tokens: int,
        num_cached_tokens: int = 0,
        pool_key: str,
        pull_id: str,
        digest: str,
        now: float,
    ) -> None:
        """Plan a pull of an offer's first `num_tokens` into our blocks; the next `poll` posts it.

        Args:
            offer, peer: what is read, and where.
            local: our blocks by group.
            num_tokens: tokens that will be here after the pull.
            num_cached_tokens: tokens at the front that are here already.
            pool_key: the caller's name for these blocks, not "".
            pull_id: never used again.
            digest: of what we were told to read.
            now: seconds.

        Raises:
            RequestError: the offer does not pair with our blocks, or its checksums with its blocks; nothing was begun.
        """
        if num_tokens > offer.num_tokens:
            raise RequestError(f"{num_tokens} tokens are wanted, {offer.num_tokens} are on offer")
        plan = plan_pull(
            peer.map, local=local, remote=offer.groups, num_tokens=num_tokens, num_cached_tokens=num_cached_tokens
        )
        verify = self._verifier(offer, peer, plan)
        pull = Pull(
            engine_id=offer.engine_id,
            request_id=offer.request_id,
            generation=offer.generation,
            readers=peer.readers(self._key, pull_id),
            reads=plan.reads,
            now=now,
            settings=self._settings,
            digest=digest,
            verify=verify is not None,
        )
        run = PullRun(
            pull=pull,
            engine_id=offer.engine_id,
            transport=self._transport,
            mailbox=self._mailbox,
            metrics=self._metrics,
            verify=verify,
        )
        self._transfers.append(
            _Transfer(
                run=run,
                plan=plan,
                num_new_tokens=num_tokens - num_cached_tokens,
                pool_key=pool_key,
                pull_id=pull_id,
                engine_id=offer.engine_id,
                started_at=now,
            )
        )

    def abort(self, pull_id: str) -> None:
        """Nobody wants it any more; its end and its blocks are reported as ever. Harmless when unknown."""
        for transfer in self._transfers:
            if transfer.pull_id == pull_id:
                transfer.run.abort()

    def notice(self, notice: ClaimReply | ProducerFailure) -> bool:
        """Pass on what a producer said; whether it was for a pull of ours."""
        for transfer in self._transfers:
            if transfer.pull_id == notice.pull_id:
                transfer.run.notice(notice)
                return True
        return False

    def poll(self, *, now: float) -> tuple[PullReport, ...]:
        """Move every pull on."""
        reports = []
        for transfer in tuple(self._transfers):
            outcome = transfer.run.poll(now=now)
            if outcome is not None:
                self._ended(transfer, outcome, now)
            free_key = ""
            if transfer.run.is_quiet:
                self._transfers.remove(transfer)
                final = transfer.run.outcome
                free_key = "" if final is not None and final.end is PullEnd.DONE else transfer.pool_key
            if outcome is not None or free_key:
                reports.append(PullReport(pull_id=transfer.pull_id, outcome=outcome, free_key=free_key))
        self._drop_dead_peers(now)
        return tuple(reports)

    def _ended(self, transfer: _Transfer, outcome: PullOutcome, now: float) -> None:
        if outcome.end is PullEnd.DONE:
            self._metrics.count(name=PULLS_DONE)
            self._metrics.count(name=PULL_BYTES, value=transfer.plan.num_bytes)
            self._metrics.count(name=TRANSFERRED_TOKENS, value=transfer.num_new_tokens)
            self._metrics.observe(name=PULL_SECONDS, value=now - transfer.started_at)
            self._metrics.observe(name=PULL_READS, value=sum(len(r.runs) for r in transfer.plan.reads))
            return
        self._metrics.count(name=PULLS_ABORTED if outcome.end is PullEnd.ABORTED else PULLS_FAILED)
        if outcome.fault in _PEER_FAULTS:
            self._metrics.count(name=PEERS_LOST)
            self._peers.forget(engine_id=transfer.engine_id)

    def _drop_dead_peers(self, now: float) -> None:
        """Let go of a peer from which a read is still under way long after its pull has ended, and nothing else is.

        A transport that can take the read back then ends it, and its blocks come back; over one that cannot they come
        back when the peer goes on or ends. A living peer is found again by the next request. Twice the deadline,
        because a read that ends by itself lets its producer be told, and one that is cut off leaves a lease to run out.
        """
        grace = 2 * self._settings.deadline_seconds
        at_work = {t.engine_id for t in self._transfers if t.run.outcome is None}
        for transfer in self._transfers:
            if transfer.let_go or transfer.engine_id in at_work or now < transfer.started_at + grace:
                continue
            transfer.let_go = True
            for rank in sorted({read.remote_rank for read in transfer.plan.reads}):
                self._transport.disconnect(peer=PeerKey(engine_id=transfer.engine_id, rank=rank))
            self._peers.forget(engine_id=transfer.engine_id)
            self._metrics.count(name=PEERS_LOST)

    def _verifier(self, offer: HandOff, peer: PeerEngine, plan: TransferPlan) -> Callable[[], str] | None:
        cache = self._cache
        if not offer.checksums or cache is None:
            return None
        sums = require_checksums(offer.groups, offer.checksums, peer.layout)
        return lambda: wrong_bytes(plan, ours=self._layout, theirs=peer.layout, sums=sums, cache=cache)


def groups_of_tables(tables: GroupTables, kinds: Sequence[AttentionKind]) -> tuple[GroupBlocks, ...]:
    """A request's whole tables, one after the other as the cache groups are."""
    by_kind = {AttentionKind.SLIDING: tables.sliding, AttentionKind.FULL: tables.full}
    return tuple(GroupBlocks(kind=kind, first_logical=0, block_ids=by_kind[kind].block_ids) for kind in kinds)
