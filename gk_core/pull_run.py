"""One pull being carried out: a `Pull`'s decisions, done through the ports."""

from __future__ import annotations

from collections.abc import Callable

from gk_core.errors import GkError, PeerLostError, TransferError
from gk_core.metrics import NOTICES_LOST, PULL_RETRIES
from gk_core.notices import Claim, ClaimReply, ProducerFailure
from gk_core.peers import Mailbox
from gk_core.ports import KVTransport, Metrics, PeerKey, ReadHandle, ReadState
from gk_core.pull import AddressedNotice, Pull, PullFault, PullOutcome

__all__ = ["PullRun"]


class PullRun:
    """Posts, polls, proves and releases until nothing writes to our blocks any more.

    Args:
        pull: the state machine.
        engine_id: producer.
        transport, mailbox, metrics: ports.
        verify: compares the bytes that arrived and returns what is wrong with them, "" when nothing is.
    """

    def __init__(
        self,
        *,
        pull: Pull,
        engine_id: str,
        transport: KVTransport,
        mailbox: Mailbox,
        metrics: Metrics,
        verify: Callable[[], str] | None = None,
    ) -> None:
        self._pull = pull
        self._engine_id = engine_id
        self._transport = transport
        self._mailbox = mailbox
        self._metrics = metrics
        self._verify = verify
        self._handles: dict[int, ReadHandle] = {}
        self._retries = 0

    @property
    def outcome(self) -> PullOutcome | None:
        """None until the pull has ended."""
        return self._pull.outcome

    @property
    def is_quiet(self) -> bool:
        """Whether our blocks are free of writes for good."""
        return self._pull.is_quiet

    def notice(self, notice: ClaimReply | ProducerFailure) -> None:
        """Something the producer said."""
        if isinstance(notice, ClaimReply):
            self._pull.claim_reply(notice)
        else:
            self._pull.producer_failed(notice)

    def abort(self) -> None:
        """The owner wants it no more."""
        self._pull.abort()

    def poll(self, *, now: float) -> PullOutcome | None:
        """Look at every read and do what there is to do; the outcome in the one call in which the pull ends."""
        for index in self._pull.pending:
            handle = self._handles[index]
            state = handle.poll()
            if state is not ReadState.PENDING:
                handle.release()
                del self._handles[index]
            self._pull.read_state(index, state, now=now)
        ended: PullOutcome | None = None
        again = True
        while again:
            actions = self._pull.advance(now=now)
            again = actions.verify
            for index in actions.posts:
                again |= not self._post(index, now)
            for addressed in actions.notices:
                again |= not self._send(addressed)
            if actions.verify:
                wrong = self._verify() if self._verify is not None else ""
                self._pull.verified(ok=not wrong, reason=wrong)
            ended = ended or actions.ended
        if self._pull.retries > self._retries:
            self._metrics.count(name=PULL_RETRIES, value=self._pull.retries - self._retries)
            self._retries = self._pull.retries
        return ended

    def _post(self, index: int, now: float) -> bool:
        read = self._pull.reads[index]
        try:
            self._handles[index] = self._transport.read(
                peer=PeerKey(engine_id=self._engine_id, rank=read.remote_rank), read=read
            )
        except GkError as error:
            # A refused post moved nothing, so it is quiet. Only a transport's own hiccup is worth another attempt.
            if not isinstance(error, TransferError) or isinstance(error, PeerLostError):
                fault = PullFault.PEER_LOST if isinstance(error, PeerLostError) else PullFault.READ_FAILED
                self._pull.fail(fault, str(error))
            self._pull.read_state(index, ReadState.FAILED, now=now)
            return False
        return True

    def _send(self, addressed: AddressedNotice) -> bool:
        try:
            self._mailbox.send(peer=addressed.peer, notice=addressed.notice)
        except TransferError as error:
            self._metrics.count(name=NOTICES_LOST)
            if isinstance(addressed.notice, Claim) and isinstance(error, PeerLostError):
                self._pull.fail(PullFault.PEER_LOST, str(error))
                return False
        return True
