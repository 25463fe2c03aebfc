"""A pull carried out: what the ports say becomes what the state machine knows."""

from __future__ import annotations

import pytest

from gk_core.errors import GkError, LayoutError, PeerLostError, TransferError
from gk_core.metrics import NOTICES_LOST, PULL_RETRIES
from gk_core.notices import ClaimReply, ClaimVerdict, PeerNotice, Reader
from gk_core.peers import Mailbox
from gk_core.ports import KVTransport, PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.pull import Pull, PullEnd, PullFault, PullOutcome
from gk_core.pull_run import PullRun
from gk_core.region import KVRegion
from gk_core.transfer_plan import BlockRun, HeadSlice, RankRead
from tests.builders import CountingMetrics, make_pull_settings

SLICE = HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=8)


class Handle(ReadHandle):
    """Says what it is told to say, and remembers that it was let go."""

    def __init__(self, *states: ReadState) -> None:
        self.states = list(states)
        self.released = False

    def poll(self) -> ReadState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def release(self) -> None:
        self.released = True


class Transport(KVTransport):
    """Gives prepared handles or errors, one for each post."""

    def __init__(self, *answers: Handle | GkError) -> None:
        self.answers = list(answers)
        self.posts: list[PeerKey] = []

    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        self.posts.append(peer)
        answer = self.answers.pop(0)
        if isinstance(answer, GkError):
            raise answer
        return answer

    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        return b""

    def connect(self, *, peer: PeerAgent) -> None:
        return None

    def disconnect(self, *, peer: PeerKey) -> None:
        return None

    def close(self) -> None:
        return None


class Outbox(Mailbox):
    """Keeps what was sent, or refuses."""

    def __init__(self, error: TransferError | None = None) -> None:
        self.error = error
        self.sent: list[str] = []

    def send(self, *, peer: PeerKey, notice: PeerNotice) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(type(notice).__name__)

    def take(self) -> tuple[PeerNotice, ...]:
        return ()


def make_run(
    transport: Transport, *, mailbox: Outbox | None = None, attempts: int = 2, reads: int = 1
) -> tuple[PullRun, Outbox, CountingMetrics]:
    mailbox, metrics = mailbox or Outbox(), CountingMetrics()
    pull = Pull(
        engine_id="P",
        request_id="r",
        generation=1,
        readers={rank: Reader(key=PeerKey(engine_id="D", rank=0), pull_id="1") for rank in range(reads)},
        reads=tuple(
            RankRead(remote_rank=rank, head_slice=SLICE, runs=(BlockRun(local_start=1, remote_start=1, count=1),))
            for rank in range(reads)
        ),
        now=0.0,
        settings=make_pull_settings(max_attempts=attempts),
    )
    run = PullRun(pull=pull, engine_id="P", transport=transport, mailbox=mailbox, metrics=metrics)
    return run, mailbox, metrics


def held(sequence: int) -> ClaimReply:
    return ClaimReply(
        engine_id="P", request_id="r", generation=1, pull_id="1", sequence=sequence, rank=0,
        verdict=ClaimVerdict.HELD, valid_seconds=10.0,
    )  # fmt: skip


def test_a_good_read_is_posted_claimed_polled_let_go_and_released_once() -> None:
    """One post, one claim, one release; the handle is freed."""
    handle = Handle(ReadState.PENDING, ReadState.DONE)
    run, mailbox, _ = make_run(Transport(handle))
    assert run.poll(now=0.0) is None
    run.notice(held(1))
    assert run.poll(now=0.1) is None
    assert not handle.released
    assert run.poll(now=0.2) == PullOutcome(end=PullEnd.DONE, fault=None, reason="")
    assert (handle.released, run.is_quiet, mailbox.sent) == (True, True, ["Claim", "Release"])
    assert run.poll(now=0.3) is None


@pytest.mark.parametrize(
    ("error", "fault", "posts"),
    [
        (PeerLostError("gone"), PullFault.PEER_LOST, 1),
        (LayoutError("block 9 is outside"), PullFault.READ_FAILED, 1),
        (TransferError("busy"), PullFault.READ_FAILED, 2),
    ],
)
def test_only_a_transports_own_hiccup_is_worth_another_post(error: GkError, fault: PullFault, posts: int) -> None:
    """A lost peer stays lost and a wrong block stays wrong; both end the pull in the same poll, quiet."""
    transport = Transport(error, error)
    run, _, metrics = make_run(transport)
    ended = run.poll(now=0.0)
    assert ended is not None
    assert (ended.fault, run.is_quiet, len(transport.posts)) == (fault, True, posts)
    assert metrics.counts[PULL_RETRIES] == posts - 1


def test_a_refused_post_beside_one_under_way_waits_for_it() -> None:
    """The second post is refused; the first read ends two polls later, then the pull is quiet."""
    handle = Handle(ReadState.PENDING, ReadState.PENDING, ReadState.DONE)
    run, _, _ = make_run(Transport(handle, PeerLostError("gone")), reads=2)
    outcomes = [run.poll(now=0.1 * i) for i in range(4)]
    assert [o is not None for o in outcomes] == [False, False, False, True]
    assert handle.released


def test_a_claim_that_cannot_reach_its_peer_ends_the_pull() -> None:
    """No answer can ever come; the read is waited for all the same."""
    handle = Handle(ReadState.PENDING, ReadState.DONE)
    run, _, metrics = make_run(Transport(handle), mailbox=Outbox(PeerLostError("gone")))
    assert run.poll(now=0.0) is None
    assert run.poll(now=0.1) is None
    ended = run.poll(now=0.2)
    assert ended is not None
    assert ended.fault is PullFault.PEER_LOST
    assert metrics.counts[NOTICES_LOST] >= 1


def test_a_claim_that_the_transport_drops_is_asked_again() -> None:
    """An error that is not the peer's end costs one claim and no pull."""
    handle = Handle(ReadState.PENDING)
    mailbox = Outbox(TransferError("queue full"))
    run, _, metrics = make_run(Transport(handle), mailbox=mailbox)
    assert run.poll(now=0.0) is None
    mailbox.error = None
    run.poll(now=1.0)
    assert (run.outcome, mailbox.sent, metrics.counts[NOTICES_LOST]) == (None, ["Claim"], 1)


def test_an_abort_releases_the_handle_when_it_is_quiet() -> None:
    """Outcome at once, handle and release notice later."""
    handle = Handle(ReadState.PENDING, ReadState.FAILED)
    run, mailbox, _ = make_run(Transport(handle))
    run.poll(now=0.0)
    run.abort()
    ended = run.poll(now=0.1)
    assert ended is not None
    assert (ended.end, run.is_quiet, handle.released) == (PullEnd.ABORTED, False, False)
    assert run.poll(now=0.2) is None
    assert (run.is_quiet, handle.released, mailbox.sent) == (True, True, ["Claim", "Release"])
