"""Decode engine, the consumer: admit -> pull -> step -> emit -> finish, over ports only.

Strategy
    waiting   the peer is looked up and its lease kept warm; nothing is allocated.
    pulling   blocks are held and being written by reads; the request has no row.
    ready     every byte is here and proven; waits for a free row.
    running   one row of each step.
    A request enters only if everything that was admitted can still grow to its longest, so no running request ever has
    to give its blocks up again. Blocks of one attempt have one pool key; a pull that ended but is not quiet keeps its
    key, and its blocks, until it is, whatever has become of its request meanwhile.
    A fault belongs to one request. Where a whole call is refused, the rows are tried one by one, and only those that
    are refused alone end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Generic, TypeVar

from attrs import define

from gk_core.block_table import NULL_BLOCK_ID
from gk_core.decode_request import (
    DecodeEvent,
    DecodeRequest,
    DecodeSettings,
    FailedPull,
    FinishReason,
    RequestFinished,
    TokenEmitted,
    blocks_at_most,
    require_servable,
)
from gk_core.decode_step import AttentionControl, ControlShape, DecodeRow, build_attention_control
from gk_core.errors import CapacityError, GkError, RequestError
from gk_core.hand_off import HandOff
from gk_core.integrity import BlockBytes, offer_digest
from gk_core.kernel_contract import TensorLike
from gk_core.metrics import (
    DECODE_TOKENS,
    NOTICES_IGNORED,
    PULLS_FAILED,
    RECOMPUTED_TOKENS,
    REQUESTS_FAILED,
    REQUESTS_FINISHED,
    REQUESTS_REFUSED,
    NullMetrics,
)
from gk_core.notices import ClaimReply, ClaimVerdict, ProducerFailure
from gk_core.offers import Offers, lease_of
from gk_core.peer_layout import PeerLayout
from gk_core.peers import Mailbox, PeerEngine, PeerResolver
from gk_core.ports import (
    BlockPool,
    CallBuilder,
    Clock,
    DecodeKernel,
    GroupTables,
    KVTransport,
    Metrics,
    PeerKey,
    Sampler,
)
from gk_core.pull import PullEnd
from gk_core.pull_desk import PullDesk, groups_of_tables
from gk_core.step_runner import StepRunner

__all__ = ["DecodeEngine"]

T = TypeVar("T", bound=TensorLike)


class _Phase(Enum):
    WAITING = "waiting"
    PULLING = "pulling"
    READY = "ready"
    RUNNING = "running"


@define(eq=False)
class _Live:
    """A request that has not finished."""

    request: DecodeRequest
    pull_id: str
    tokens: list[int]
    phase: _Phase = _Phase.WAITING
    pool_key: str = ""
    num_computed: int = 0
    offer: HandOff | None = None
    """What it still wants to pull; None from the start, or once that has failed."""
    digest: str = ""
    warm_at: float = 0.0
    transferred: int = 0
    recomputed: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.prompt_len :])

    @property
    def max_tokens(self) -> int:
        """Tokens that will ever be in the cache: the last one generated is not fed."""
        return self.prompt_len + self.request.max_new_tokens - 1


class DecodeEngine(Generic[T]):
    """One rank of a consumer.

    Args:
        layout: what the handshake says of this rank.
        shape: rows, block size, window, longest context.
        pool: block pool of this rank's cache.
        transport: moves blocks; its regions are registered already.
        mailbox: notices to and from producers.
        peers: finds producers.
        kernel, builder, sampler: the model.
        clock: time.
        settings: choices.
        metrics: where to count.
        block_bytes: the cache's bytes, to check hand-offs that carry checksums.
        build_control: rows -> control; an adapter may compute the same values faster.
        start_id: begins every pull id; random in every process that may be restarted under the same engine id, so that
            a late notice of its former life is not taken for one of this.
    """

    def __init__(
        self,
        *,
        layout: PeerLayout,
        shape: ControlShape,
        pool: BlockPool,
        transport: KVTransport,
        mailbox: Mailbox,
        peers: PeerResolver,
        kernel: DecodeKernel[T],
        builder: CallBuilder[T],
        sampler: Sampler[T],
        clock: Clock,
        settings: DecodeSettings | None = None,
        metrics: Metrics | None = None,
        block_bytes: BlockBytes | None = None,
        build_control: Callable[[Sequence[DecodeRow | None], ControlShape], AttentionControl] = (
            build_attention_control
        ),
        start_id: str = "",
    ) -> None:
        self._layout, self._shape = layout, shape
        self._pool, self._mailbox = pool, mailbox
        self._clock = clock
        self._settings = settings or DecodeSettings()
        self._metrics = metrics or NullMetrics()
        self._steps = StepRunner(
            shape=shape,
            kernel=kernel,
            builder=builder,
            sampler=sampler,
            metrics=self._metrics,
            build_control=build_control,
        )
        self._key = PeerKey(engine_id=layout.engine_id, rank=layout.tp_rank)
        self._capacity = pool.num_free_blocks()
        self._live: dict[str, _Live] = {}
        self._rows: list[_Live | None] = [None] * shape.num_rows
        self._ready: deque[_Live] = deque()
        self._desk = PullDesk(
            layout=layout,
            transport=transport,
            mailbox=mailbox,
            peers=peers,
            metrics=self._metrics,
            settings=self._settings.pull,
            cache=block_bytes,
        )
        self._offers = Offers(
            key=self._key,
            peers=peers,
            mailbox=mailbox,
            metrics=self._metrics,
            patience_seconds=self._settings.pull.deadline_seconds,
        )
        self._events: list[DecodeEvent] = []
        self._counter = 0
        self._start_id = start_id

    @property
    def has_work(self) -> bool:
        """Whether `poll` has anything left to do or to say."""
        return bool(self._live or self._desk.has_work or self._offers.has_work or self._events)

    def submit(self, request: DecodeRequest) -> None:
        """Take a request; what becomes of it comes out of `poll`.

        Raises:
            RequestError: it can never be served; the producer of its hand-off is told.
        """
        self._counter += 1
        pull_id = f"{self._start_id}{self._counter}"
        try:
            self._check(request)
            offer = request.hand_off if request.hand_off is not None and request.hand_off.num_tokens else None
            digest = offer_digest(request.prompt[:-1], offer.groups) if offer is not None else ""
        except RequestError:
            self._metrics.count(name=REQUESTS_REFUSED)
            if request.hand_off is not None:
                self.decline(request.hand_off)
            raise
        self._live[request.request_id] = _Live(
            request=request,
            pull_id=pull_id,
            tokens=list(request.prompt),
            offer=offer,
            digest=digest,
            warm_at=self._clock.now(),
        )

    def decline(self, hand_off: HandOff) -> None:
        """Tell the producer of an offer that it will not be read here, whatever came with it being no request.

        Harmless while a request here reads the same offer.
        """
        if self._reader_of(hand_off) is None:
            self._counter += 1
            self._offers.decline(hand_off, f"{self._start_id}{self._counter}", now=self._clock.now())

    def cancel(self, *, request_id: str) -> None:
        """Give a request up, at any moment; harmless when it is over or unknown."""
        live = self._live.get(request_id)
        if live is None:
            return
        if live.phase is _Phase.WAITING and live.offer is not None:
            self._offers.decline(live.offer, live.pull_id, now=self._clock.now())
        self._finish(live, FinishReason.CANCELLED)

    def poll(self) -> tuple[DecodeEvent, ...]:
        """Move everything on by as much as is possible without waiting, one decode step included."""
        now = self._clock.now()
        self._read_notices()
        self._offers.send_declined(now=now)
        self._admit(now)
        self._move_pulls(now)
        self._fill_rows()
        self._step()
        events, self._events = tuple(self._events), []
        return events

    # ---- taking requests in

    def _check(self, request: DecodeRequest) -> None:
        if request.request_id in self._live:
            raise RequestError(f"request {request.request_id!r} is being served already; use another id")
        require_servable(request, vocab_size=self._layout.vocab_size, shape=self._shape, capacity=self._capacity)
        hand_off = request.hand_off
        if hand_off is None or not hand_off.num_tokens:
            return
        if self._reader_of(hand_off) is not None:
            raise RequestError(
                f"the hand-off of request {hand_off.request_id!r} generation {hand_off.generation} is in use already; "
                "prefill again"
            )
        if self._settings.require_checksums and not hand_off.checksums:
            raise RequestError("checksums are required here and the hand-off carries none")

    def _reader_of(self, hand_off: HandOff) -> _Live | None:
        """The request here that reads the same offer."""
        lease = lease_of(hand_off)
        return next((x for x in self._live.values() if x.offer and lease_of(x.offer) == lease), None)

    def _room_for(self, live: _Live) -> bool:
        admitted = [x for x in self._live.values() if x.phase is not _Phase.WAITING]
        if len(admitted) >= self._shape.num_rows + self._settings.max_ahead:
            return False
        owed = sum(max(blocks_at_most(x.max_tokens, self._shape) - self._held(x.pool_key), 0) for x in admitted)
        return blocks_at_most(live.max_tokens, self._shape) + owed <= self._pool.num_free_blocks()

    def _held(self, pool_key: str) -> int:
        tables = self._pool.tables(request_id=pool_key)
        return sum(b != NULL_BLOCK_ID for t in (tables.full, tables.sliding) for b in t.block_ids)

    def _admit(self, now: float) -> None:
        blocked = False
        for live in tuple(self._live.values()):
            if live.phase is not _Phase.WAITING:
                continue
            peer = None
            if live.offer is not None:
                peer = self._look_up(live, live.offer, now)
                if peer is None:
                    continue
            # First come, first served: a large request is not overtaken for ever by small ones.
            blocked = blocked or not self._room_for(live) or not self._enter(live, peer, now)

    def _look_up(self, live: _Live, offer: HandOff, now: float) -> PeerEngine | None:
        """The offer's producer, None when there is none or none yet; meanwhile its lease is kept warm."""
        try:
            peer = self._offers.find(offer)
        except GkError as error:
            if isinstance(error, RequestError):
                self._offers.decline(offer, live.pull_id, now=now)
            self._not_pulled(live, str(error))
            return None
        if peer is not None and now - live.warm_at >= self._settings.pull.claim_interval_seconds:
            live.warm_at = now
            self._offers.keep_warm(offer, peer, live.pull_id, live.digest)
        return peer

    def _enter(self, live: _Live, peer: PeerEngine | None, now: float) -> bool:
        """Take blocks; False when there are none, and the request waits on."""
        self._counter += 1
        pool_key = f"{live.request.request_id}#{self._counter}"
        num_computed = live.offer.num_tokens if live.offer is not None else 0
        try:
            tables = self._pool.grow(request_id=pool_key, num_computed_tokens=num_computed, num_new_tokens=1)
        except CapacityError:
            return False
        live.pool_key, live.num_computed = pool_key, num_computed
        if live.offer is None or peer is None:
            self._become_ready(live)
        else:
            self._start_pull(live, live.offer, peer, tables, now)
        return True

    # ---- pulling

    def _start_pull(self, live: _Live, offer: HandOff, peer: PeerEngine, tables: GroupTables, now: float) -> None:
        try:
            self._desk.start(
                offer=offer,
                peer=peer,
                local=groups_of_tables(tables, self._layout.group_kinds),
                num_tokens=offer.num_tokens,
                pool_key=live.pool_key,
                pull_id=live.pull_id,
                digest=live.digest,
                now=now,
            )
        except GkError as error:
            self._pool.free(request_id=live.pool_key)
            self._offers.decline(offer, live.pull_id, now=now)
            self._not_pulled(live, str(error))
            return
        live.phase = _Phase.PULLING

    def _move_pulls(self, now: float) -> None:
        pulling = {x.pull_id: x for x in self._live.values() if x.phase is _Phase.PULLING}
        for report in self._desk.poll(now=now):
            live = pulling.get(report.pull_id)
            if report.outcome is not None and live is not None:
                if report.outcome.end is PullEnd.DONE:
                    live.transferred = live.num_computed
                    self._become_ready(live)
                else:
                    self._pull_failed(live, report.outcome.reason)
            if report.free_key:
                self._pool.free(request_id=report.free_key)

    def _not_pulled(self, live: _Live, reason: str) -> None:
        """A pull that could not even begin counts as a failed one."""
        self._metrics.count(name=PULLS_FAILED)
        self._pull_failed(live, reason)

    def _pull_failed(self, live: _Live, reason: str) -> None:
        """The request's KV will not come; blocks of the attempt are no longer the request's affair."""
        live.pool_key = ""
        if self._settings.on_failed_pull is FailedPull.FAIL:
            self._finish(live, FinishReason.FAILED, f"the prompt's KV could not be pulled: {reason}")
            return
        live.phase, live.offer = _Phase.WAITING, None

    # ---- stepping

    def _become_ready(self, live: _Live) -> None:
        live.phase = _Phase.READY
        self._ready.append(live)

    def _fill_rows(self) -> None:
        for index, row in enumerate(self._rows):
            if row is None and self._ready:
                self._rows[index] = live = self._ready.popleft()
                live.phase = _Phase.RUNNING

    def _step(self) -> None:
        rows: list[DecodeRow | None] = [None] * len(self._rows)
        for index, live in enumerate(self._rows):
            if live is None:
                continue
            try:
                tables = self._pool.grow(
                    request_id=live.pool_key, num_computed_tokens=live.num_computed, num_new_tokens=1
                )
            except GkError as error:
                self._finish(live, FinishReason.FAILED, str(error))
                continue
            rows[index] = DecodeRow(position=live.num_computed, full_table=tables.full, sliding_table=tables.sliding)
        fed = tuple(0 if live is None else live.tokens[live.num_computed] for live in self._rows)
        for index, result in enumerate(self._steps.run(rows, fed)):
            owner = self._rows[index]
            if owner is None or result is None:
                continue
            if isinstance(result, GkError):
                self._finish(owner, FinishReason.FAILED, str(result))
            else:
                self._advance(owner, result)

    def _advance(self, live: _Live, token: int) -> None:
        position = live.num_computed
        live.num_computed += 1
        if position < live.prompt_len - 1:
            live.recomputed += 1
            self._metrics.count(name=RECOMPUTED_TOKENS)
            return
        live.tokens.append(token)
        count = len(live.tokens) - live.prompt_len
        self._metrics.count(name=DECODE_TOKENS)
        self._events.append(TokenEmitted(request_id=live.request.request_id, token_id=token, index=count - 1))
        if token in live.request.eos_ids:
            self._finish(live, FinishReason.EOS)
        elif count == live.request.max_new_tokens:
            self._finish(live, FinishReason.LENGTH)

    # ---- ends

    def _finish(self, live: _Live, reason: FinishReason, error: str = "") -> None:
        del self._live[live.request.request_id]
        if live in self._ready:
            self._ready.remove(live)
        self._rows = [None if row is live else row for row in self._rows]
        if live.phase is _Phase.PULLING and live.pool_key:
            # The blocks go back when the pull is quiet.
            self._desk.abort(live.pull_id)
        elif live.pool_key:
            self._pool.free(request_id=live.pool_key)
        done = reason in (FinishReason.EOS, FinishReason.LENGTH)
        if done or reason is FinishReason.FAILED:
            self._metrics.count(name=REQUESTS_FINISHED if done else REQUESTS_FAILED)
        self._events.append(
            RequestFinished(
                request_id=live.request.request_id,
                reason=reason,
                error=error,
                token_ids=live.generated,
                transferred_tokens=live.transferred,
                recomputed_tokens=live.recomputed,
            )
        )

    # ---- notices

    def _read_notices(self) -> None:
        for notice in self._mailbox.take():
            if not isinstance(notice, (ClaimReply, ProducerFailure)):
                self._metrics.count(name=NOTICES_IGNORED)
                continue
            if self._desk.notice(notice):
                continue
            waiting = next((x for x in self._live.values() if x.pull_id == notice.pull_id), None)
            if waiting is not None and waiting.phase is _Phase.WAITING and waiting.offer is not None:
                self._notice_while_waiting(waiting, waiting.offer, notice)
            else:
                self._metrics.count(name=NOTICES_IGNORED)

    def _notice_while_waiting(self, live: _Live, offer: HandOff, notice: ClaimReply | ProducerFailure) -> None:
        if (notice.engine_id, notice.request_id, notice.generation) != lease_of(offer):
            self._metrics.count(name=NOTICES_IGNORED)
        elif isinstance(notice, ProducerFailure) or notice.verdict is not ClaimVerdict.HELD:
            why = notice.reason if isinstance(notice, ProducerFailure) else notice.verdict.value
            self._offers.decline(offer, live.pull_id, now=self._clock.now())
            self._not_pulled(live, f"{notice.engine_id}/{notice.rank}: {why}")
