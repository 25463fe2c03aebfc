"""Prefill engine, the producer: prefill all but the last prompt token, lease the blocks, hand them off.

Strategy
    One request at a time, in chunks; between chunks the engine answers notices, so a long prompt delays no other
    request's proof by more than a chunk. What fails before the hand-off leaves nothing behind. After it the lease
    decides: blocks go back when an `EndedLease` says so, and for no other reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable
from gk_core.disaggregation import needed_range, transfer_tokens
from gk_core.errors import LayoutError, RequestError, TransferError, UnsupportedError
from gk_core.hand_off import MAX_ID_LENGTH, HandOff
from gk_core.integrity import BlockBytes, group_checksums, offer_digest
from gk_core.lease import EndedLease, Lease, LeaseBook, LeaseEnd
from gk_core.metrics import (
    LEASES_ENDED,
    LEASES_EXPIRED,
    LEASES_GRANTED,
    NOTICES_IGNORED,
    NOTICES_LOST,
    PREFILL_TOKENS,
    REQUESTS_FAILED,
    REQUESTS_REFUSED,
    NullMetrics,
)
from gk_core.model_geometry import AttentionKind
from gk_core.notices import Claim, ClaimVerdict, PeerNotice, Release
from gk_core.peer_layout import PeerLayout
from gk_core.peers import Mailbox
from gk_core.ports import BlockPool, Clock, Endpoint, GroupTables, Metrics, PeerKey, PrefillModel
from gk_core.transfer_plan import GroupBlocks

__all__ = ["PrefillEngine", "PrefillSettings"]


@frozen(kw_only=True)
class PrefillSettings:
    """Limits of a prefill engine.

    Attributes:
        max_num_batched_tokens: tokens of one chunk.
        max_model_len: longest prompt plus its answer; tokens.
        lease_seconds: how long blocks wait for a reader, and how far each claim moves that.
        max_lease_seconds: a lease ends this long after its grant, whatever is claimed.

    Raises:
        LayoutError: a number out of range.
    """

    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    lease_seconds: float = 30.0
    max_lease_seconds: float = 600.0

    def __attrs_post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not (math.isfinite(self.max_lease_seconds) and 0 < self.lease_seconds <= self.max_lease_seconds):
            raise LayoutError(
                f"lease_seconds must be > 0 and <= max_lease_seconds {self.max_lease_seconds}, got {self.lease_seconds}"
            )


class PrefillEngine:
    """One rank of a producer.

    Args:
        layout: what the handshake says of this rank.
        endpoint: where its side channel listens.
        pool: block pool of this rank's cache.
        model: fills blocks.
        mailbox: notices to and from decode engines.
        clock: time.
        settings: limits.
        metrics: where to count.
        block_bytes: the cache's bytes; given, each hand-off carries checksums.
        first_generation: see `LeaseBook`; random in every process that may be restarted.

    Raises:
        UnsupportedError: context parallelism, or checksums on more than one rank.
    """

    def __init__(
        self,
        *,
        layout: PeerLayout,
        endpoint: Endpoint,
        pool: BlockPool,
        model: PrefillModel,
        mailbox: Mailbox,
        clock: Clock,
        settings: PrefillSettings | None = None,
        metrics: Metrics | None = None,
        block_bytes: BlockBytes | None = None,
        first_generation: int = 1,
    ) -> None:
        if layout.dcp_size != 1:
            raise UnsupportedError(f"this engine prefills without context parallelism, got dcp_size {layout.dcp_size}")
        if block_bytes is not None and layout.tp_size != 1:
            raise UnsupportedError(f"checksums are of one rank's bytes; use tp_size 1 (got {layout.tp_size}) or none")
        self._layout = layout
        self._endpoint = endpoint
        self._pool = pool
        self._model = model
        self._mailbox = mailbox
        self._clock = clock
        self._settings = settings or PrefillSettings()
        self._metrics = metrics or NullMetrics()
        self._bytes = block_bytes
        self._book = LeaseBook(
            engine_id=layout.engine_id,
            rank=layout.tp_rank,
            max_lifetime_seconds=self._settings.max_lease_seconds,
            first_generation=first_generation,
        )
        self._ended: list[EndedLease] = []

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Requests whose blocks wait for a reader, in order of grant."""
        return self._book.live

    def submit(self, *, request_id: str, token_ids: Sequence[int]) -> HandOff:
        """Prefill N - 1 of N tokens and offer them. Blocks until computed.

        A prompt of one token gives a hand-off without blocks and without a lease: there is nothing to move.

        Raises:
            RequestError: the id or the tokens cannot be served, or the id holds a lease.
            CapacityError: no blocks now; try again after `poll` has freed some.
            GkError: the model refused; nothing of the request is left.
        """
        try:
            self._check(request_id, token_ids)
        except RequestError:
            self._metrics.count(name=REQUESTS_REFUSED)
            raise
        num_tokens = transfer_tokens(len(token_ids))
        if num_tokens == 0:
            return self._hand_off(request_id, 0, 0, ())
        try:
            tables = self._prefill(request_id, token_ids[:num_tokens])
            groups = tuple(self._offered(kind, tables, num_tokens) for kind in self._layout.group_kinds)
            checksums = tuple(group_checksums(g, self._layout, self._bytes) for g in groups) if self._bytes else ()
            lease = self._book.grant(
                request_id=request_id,
                blocks=tuple(tuple(BlockId(b) for b in g.block_ids) for g in groups),
                now=self._clock.now(),
                ttl=self._settings.lease_seconds,
                digest=offer_digest(token_ids[:num_tokens], groups),
            )
        except BaseException as error:
            self._pool.free(request_id=request_id)
            if isinstance(error, Exception):
                self._metrics.count(name=REQUESTS_FAILED)
            raise
        self._metrics.count(name=LEASES_GRANTED)
        return self._hand_off(request_id, lease.generation, num_tokens, groups, checksums)

    def poll(self) -> tuple[EndedLease, ...]:
        """Answer notices, free what nobody will read any more, and say what ended since the last call."""
        for notice in self._mailbox.take():
            self._answer(notice)
        for ended in self._book.sweep(now=self._clock.now()):
            self._free(ended)
        done, self._ended = tuple(self._ended), []
        return done

    def cancel(self, *, request_id: str, reason: str = "cancelled") -> None:
        """Withdraw one offer; a reader that has claimed it is told. Harmless when there is none."""
        outcome = self._book.withdraw(request_id=request_id, reason=reason, now=self._clock.now())
        if isinstance(outcome, EndedLease):
            self._free(outcome)
        elif outcome is not None:
            self._send(outcome.reader.key, outcome.notice)

    def cancel_all(self, *, reason: str) -> None:
        """Withdraw every offer: this engine is about to stop, or its cache is lost."""
        for lease in self._book.live:
            self.cancel(request_id=lease.request_id, reason=reason)

    def _check(self, request_id: str, token_ids: Sequence[int]) -> None:
        if not (0 < len(request_id) <= MAX_ID_LENGTH and request_id.isprintable() and " " not in request_id):
            raise RequestError(
                f"request id must be 1..{MAX_ID_LENGTH} characters without blanks, got {request_id[:64]!a}"
            )
        if any(lease.request_id == request_id for lease in self._book.live):
            raise RequestError(f"request {request_id!r} has a lease already; finish it or use another id")
        if not 0 < len(token_ids) <= self._settings.max_model_len:
            raise RequestError(f"a prompt has 1..{self._settings.max_model_len} tokens, got {len(token_ids)}")
        for position, token in enumerate(token_ids):
            if not 0 <= token < self._layout.vocab_size:
                raise RequestError(
                    f"token id {token} at position {position} is outside 0..{self._layout.vocab_size - 1}"
                )

    def _prefill(self, request_id: str, token_ids: Sequence[int]) -> GroupTables:
        total, step = len(token_ids), self._settings.max_num_batched_tokens
        for start in range(0, total, step):
            if start:
                # What ends here is reported by the next poll().
                for notice in self._mailbox.take():
                    self._answer(notice)
            chunk = token_ids[start : start + step]
            tables = self._pool.grow(request_id=request_id, num_computed_tokens=start, num_new_tokens=len(chunk))
            self._model.prefill(token_ids=chunk, start_position=start, tables=tables)
        self._metrics.count(name=PREFILL_TOKENS, value=total)
        # Give back what the next query no longer reads: a chunk is longer than a window.
        return self._pool.grow(request_id=request_id, num_computed_tokens=total, num_new_tokens=0)

    def _offered(self, kind: AttentionKind, tables: GroupTables, num_tokens: int) -> GroupBlocks:
        """Blocks of one group that the reader needs, and no others."""
        sliding = kind is AttentionKind.SLIDING
        table: BlockTable = tables.sliding if sliding else tables.full
        window = self._layout.sliding_window if sliding else None
        needed = needed_range(num_tokens, window, table.block_size)
        ids = table.block_ids[needed.start : needed.stop]
        if len(ids) != len(needed) or NULL_BLOCK_ID in ids:
            raise LayoutError(
                f"the pool gave up a {kind.value} block of logical blocks {needed.start}..{needed.stop - 1} that the "
                "last token's query reads"
            )
        return GroupBlocks(kind=kind, first_logical=needed.start, block_ids=tuple(ids))

    def _hand_off(
        self,
        request_id: str,
        generation: int,
        num_tokens: int,
        groups: tuple[GroupBlocks, ...],
        checksums: tuple[tuple[int, ...], ...] = (),
    ) -> HandOff:
        return HandOff(
            engine_id=self._layout.engine_id,
            request_id=request_id,
            generation=generation,
            num_tokens=num_tokens,
            groups=groups
            or tuple(GroupBlocks(kind=k, first_logical=0, block_ids=()) for k in self._layout.group_kinds),
            host=self._endpoint.host,
            port=self._endpoint.port,
            block_size=self._layout.block_size,
            tp_size=self._layout.tp_size,
            dcp_size=self._layout.dcp_size,
            checksums=checksums,
        )

    def _answer(self, notice: PeerNotice) -> None:
        now = self._clock.now()
        if isinstance(notice, Claim):
            reply = self._book.claim(notice, now=now)
            if reply.verdict is not ClaimVerdict.HELD:
                self._metrics.count(name=NOTICES_IGNORED)
            self._send(notice.reader.key, reply)
        elif isinstance(notice, Release):
            result = self._book.release(notice, now=now)
            if result.verdict is not ClaimVerdict.HELD:
                self._metrics.count(name=NOTICES_IGNORED)
            if result.ended is not None:
                self._free(result.ended)
        else:
            self._metrics.count(name=NOTICES_IGNORED)

    def _send(self, peer: PeerKey, notice: PeerNotice) -> None:
        try:
            self._mailbox.send(peer=peer, notice=notice)
        except TransferError:
            self._metrics.count(name=NOTICES_LOST)

    def _free(self, ended: EndedLease) -> None:
        self._pool.free(request_id=ended.lease.request_id)
        self._metrics.count(name=LEASES_ENDED)
        if ended.end is LeaseEnd.EXPIRED:
            self._metrics.count(name=LEASES_EXPIRED)
        self._ended.append(ended)
