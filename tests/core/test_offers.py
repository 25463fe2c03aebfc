"""Hand-offs outside a pull: found, kept warm, declined, and never a reason to wait for ever."""

from __future__ import annotations

import pytest

from gk_core.errors import GkError, PeerLostError, RequestError, TransferError
from gk_core.hand_off import HandOff
from gk_core.metrics import NOTICES_LOST
from gk_core.notices import Claim, PeerNotice, Reader, Release, ReleaseKind
from gk_core.offers import Offers
from gk_core.peers import Mailbox, PeerEngine, PeerResolver, peer_engine
from gk_core.ports import Endpoint, PeerKey
from tests.builders import CountingMetrics, World, make_tokens

ME = PeerKey(engine_id="D1", rank=0)


class Answers(PeerResolver):
    """Gives one prepared answer after the other, the last one for ever."""

    def __init__(self, *answers: PeerEngine | GkError | None) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Endpoint]] = []

    def resolve(self, *, engine_id: str, endpoint: Endpoint) -> PeerEngine | None:
        self.asked.append((engine_id, endpoint))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, GkError):
            raise answer
        return answer

    def forget(self, *, engine_id: str) -> None:
        return None


class Outbox(Mailbox):
    """Keeps what was sent."""

    def __init__(self, error: TransferError | None = None) -> None:
        self.error = error
        self.sent: list[tuple[PeerKey, PeerNotice]] = []

    def send(self, *, peer: PeerKey, notice: PeerNotice) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append((peer, notice))

    def take(self) -> tuple[PeerNotice, ...]:
        return ()


def make_offer(tokens: int = 20) -> tuple[HandOff, PeerEngine]:
    world = World()
    producer = world.producer()
    hand_off = producer.engine.submit(request_id="r-bb", token_ids=make_tokens(tokens))
    return hand_off, peer_engine(world.consumer().layout, {0: producer.layout})


def make_offers(resolver: PeerResolver, outbox: Outbox) -> tuple[Offers, CountingMetrics]:
    metrics = CountingMetrics()
    return Offers(key=ME, peers=resolver, mailbox=outbox, metrics=metrics, patience_seconds=5.0), metrics


def test_a_declined_offer_is_told_once_its_producer_is_found() -> None:
    """Twice unknown, then found: one release, by the producer's request id."""
    hand_off, peer = make_offer()
    outbox = Outbox()
    offers, _ = make_offers(Answers(None, None, peer), outbox)
    offers.decline(hand_off, "7", now=0.0)
    for now, work in ((0.0, True), (4.9, True), (4.95, False), (6.0, False)):
        offers.send_declined(now=now)
        assert offers.has_work is work
    release = Release(
        engine_id="P1",
        request_id="r-bb",
        generation=1,
        reader=Reader(key=ME, pull_id="7"),
        kind=ReleaseKind.REJECTED,
    )
    assert outbox.sent == [(PeerKey(engine_id="P1", rank=0), release)]


def test_a_producer_that_is_never_found_is_given_up_after_a_while() -> None:
    """Patience 5 s; its lease runs out by itself."""
    hand_off, _ = make_offer()
    outbox = Outbox()
    offers, metrics = make_offers(Answers(None), outbox)
    offers.decline(hand_off, "7", now=0.0)
    work = []
    for now in (4.9, 5.0):
        offers.send_declined(now=now)
        work.append(offers.has_work)
    assert work == [True, False]
    assert (outbox.sent, metrics.counts[NOTICES_LOST]) == ([], 1)


@pytest.mark.parametrize("error", [PeerLostError("gone"), RequestError("bad")])
def test_a_producer_that_cannot_be_reached_is_given_up_at_once(error: GkError) -> None:
    """Whatever the reason."""
    hand_off, _ = make_offer()
    offers, metrics = make_offers(Answers(error), Outbox())
    offers.decline(hand_off, "7", now=0.0)
    offers.send_declined(now=0.0)
    assert (offers.has_work, metrics.counts[NOTICES_LOST]) == (False, 1)


def test_an_offer_of_nothing_needs_no_declining() -> None:
    """A one-token prompt has no lease."""
    hand_off, _ = make_offer(1)
    offers, _ = make_offers(Answers(None), Outbox())
    offers.decline(hand_off, "7", now=0.0)
    assert not offers.has_work


def test_a_notice_that_cannot_be_sent_is_counted() -> None:
    """And not tried again: the lease runs out."""
    hand_off, peer = make_offer()
    offers, metrics = make_offers(Answers(peer), Outbox(PeerLostError("gone")))
    offers.keep_warm(hand_off, peer, "7", "digest")
    offers.decline(hand_off, "7", now=0.0)
    offers.send_declined(now=0.0)
    assert (offers.has_work, metrics.counts[NOTICES_LOST]) == (False, 2)


def test_a_warming_claim_has_the_number_that_no_pull_ever_has() -> None:
    """Sequence 0: its answer can prove no read."""
    hand_off, peer = make_offer()
    outbox = Outbox()
    offers, _ = make_offers(Answers(peer), outbox)
    offers.keep_warm(hand_off, peer, "7", "digest")
    claim = Claim(
        engine_id="P1",
        request_id="r-bb",
        generation=1,
        reader=Reader(key=ME, pull_id="7"),
        sequence=0,
        digest="digest",
    )
    assert outbox.sent == [(PeerKey(engine_id="P1", rank=0), claim)]


def test_finding_asks_at_the_offers_endpoint_and_refuses_a_contradiction() -> None:
    """Host and port from the hand-off; None while unknown."""
    hand_off, peer = make_offer()
    resolver = Answers(None, peer)
    offers, _ = make_offers(resolver, Outbox())
    assert (offers.find(hand_off), offers.find(hand_off)) == (None, peer)
    assert resolver.asked == [("P1", Endpoint(host="prefill", port=5600))] * 2
