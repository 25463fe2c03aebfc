"""Leases: what a producer keeps, for how long, and who may end it."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.block_table import BlockId
from gk_core.errors import LayoutError, RequestError
from gk_core.lease import AddressedFailure, EndedLease, LeaseBook, LeaseEnd
from gk_core.notices import Claim, ClaimReply, ClaimVerdict, ProducerFailure, Reader, Release, ReleaseKind
from gk_core.ports import PeerKey

BLOCKS = ((BlockId(3), BlockId(4)), (BlockId(9),))


def make_book(max_lifetime: float = 1000.0, remember: int = 16) -> LeaseBook:
    return LeaseBook(engine_id="P1", rank=2, max_lifetime_seconds=max_lifetime, remember=remember)


def make_reader(pull_id: str = "pull-1", engine_id: str = "D1", rank: int = 0, num_readers: int = 1) -> Reader:
    return Reader(key=PeerKey(engine_id=engine_id, rank=rank), pull_id=pull_id, num_readers=num_readers)


def make_claim(
    request_id: str = "r",
    generation: int = 1,
    *,
    reader: Reader | None = None,
    engine_id: str = "P1",
    sequence: int = 7,
) -> Claim:
    return Claim(
        engine_id=engine_id,
        request_id=request_id,
        generation=generation,
        reader=reader or make_reader(),
        sequence=sequence,
    )


def make_release(
    request_id: str = "r",
    generation: int = 1,
    *,
    reader: Reader | None = None,
    kind: ReleaseKind = ReleaseKind.DONE,
    engine_id: str = "P1",
) -> Release:
    return Release(
        engine_id=engine_id, request_id=request_id, generation=generation, reader=reader or make_reader(), kind=kind
    )


def ids(ended: tuple[EndedLease, ...]) -> list[tuple[str, LeaseEnd]]:
    return [(e.lease.request_id, e.end) for e in ended]


class TestGrant:
    """A lease is granted once per request and carries a generation that is never used twice."""

    def test_generations_count_up_over_all_requests(self) -> None:
        """1, 2, then 3 for the first request again."""
        book = make_book()
        first = book.grant(request_id="a", blocks=BLOCKS, now=0.0, ttl=30.0)
        second = book.grant(request_id="b", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.release(make_release("a", 1), now=1.0)
        third = book.grant(request_id="a", blocks=BLOCKS, now=2.0, ttl=30.0)
        assert [x.generation for x in (first, second, third)] == [1, 2, 3]
        assert (third.blocks, third.granted_at, third.expires_at) == (BLOCKS, 2.0, 32.0)

    def test_a_request_that_holds_a_lease_gets_no_second_one(self) -> None:
        """Its first lease is not disturbed."""
        book = make_book()
        book.grant(request_id="a", blocks=BLOCKS, now=0.0, ttl=30.0)
        with pytest.raises(RequestError, match="'a' has a lease already"):
            book.grant(request_id="a", blocks=(), now=0.0, ttl=30.0)
        assert [(x.request_id, x.generation, x.blocks) for x in book.live] == [("a", 1, BLOCKS)]

    @pytest.mark.parametrize("ttl", [0.0, -1.0, 1000.5, float("nan")])
    def test_a_ttl_outside_the_longest_life_is_refused(self, ttl: float) -> None:
        """Nothing is granted and no generation is spent."""
        book = make_book()
        with pytest.raises(RequestError, match="ttl must be > 0 and <= 1000"):
            book.grant(request_id="a", blocks=BLOCKS, now=0.0, ttl=ttl)
        assert book.grant(request_id="a", blocks=BLOCKS, now=0.0, ttl=1.0).generation == 1

    @pytest.mark.parametrize("lifetime", [0.0, 86401.0])
    def test_a_longest_life_outside_one_day_is_refused(self, lifetime: float) -> None:
        """A promise never exceeds what a reply may carry."""
        with pytest.raises(LayoutError, match="max_lifetime_seconds"):
            make_book(lifetime)


class TestSweep:
    """Every expired lease goes, whatever stands before it."""

    def test_a_heartbeat_on_the_first_lease_does_not_shield_the_second(self) -> None:
        """A and B end at 30; at 25 A moves to 55; the sweep at 40 frees B and keeps A."""
        book = make_book()
        book.grant(request_id="A", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.grant(request_id="B", blocks=BLOCKS, now=0.0, ttl=30.0)
        assert book.claim(make_claim("A", 1), now=25.0).valid_seconds == 30.0
        assert ids(book.sweep(now=40.0)) == [("B", LeaseEnd.EXPIRED)]
        assert [(x.request_id, x.expires_at) for x in book.live] == [("A", 55.0)]

    def test_a_long_lease_granted_first_does_not_shield_a_short_one(self) -> None:
        """X lives 480 s, Y 30 s: at 31 Y goes."""
        book = make_book()
        book.grant(request_id="X", blocks=BLOCKS, now=0.0, ttl=480.0)
        book.grant(request_id="Y", blocks=BLOCKS, now=0.0, ttl=30.0)
        assert ids(book.sweep(now=31.0)) == [("Y", LeaseEnd.EXPIRED)]

    def test_a_lease_is_over_at_its_expiry_not_after_it(self) -> None:
        """29.999 keeps, 30 frees, and only once."""
        book = make_book()
        book.grant(request_id="A", blocks=BLOCKS, now=0.0, ttl=30.0)
        assert book.sweep(now=29.999) == ()
        assert ids(book.sweep(now=30.0)) == [("A", LeaseEnd.EXPIRED)]
        assert book.sweep(now=31.0) == ()

    def test_claims_do_not_prolong_a_lease_past_its_longest_life(self) -> None:
        """Granted at 0 with a longest life of 100: a claim at 90 is valid for 10 seconds, not 30."""
        book = make_book(max_lifetime=100.0)
        book.grant(request_id="A", blocks=BLOCKS, now=0.0, ttl=30.0)
        for now, valid in ((25.0, 30.0), (50.0, 30.0), (75.0, 25.0), (90.0, 10.0)):
            assert book.claim(make_claim("A", 1), now=now).valid_seconds == valid
        assert ids(book.sweep(now=100.0)) == [("A", LeaseEnd.EXPIRED)]

    def test_a_late_claim_never_shortens_a_lease(self) -> None:
        """A claim at the very start leaves a lease whose ttl was longer than the rest of its life alone."""
        book = make_book(max_lifetime=40.0)
        book.grant(request_id="A", blocks=BLOCKS, now=0.0, ttl=40.0)
        assert book.claim(make_claim("A", 1), now=10.0).valid_seconds == 30.0


class TestClaim:
    """A claim is answered with a verdict; only HELD changes anything."""

    def test_a_held_claim_echoes_everything_the_asker_needs(self) -> None:
        """Whole reply, literally."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        assert book.claim(make_claim(sequence=41), now=4.0) == ClaimReply(
            engine_id="P1",
            request_id="r",
            generation=1,
            pull_id="pull-1",
            sequence=41,
            rank=2,
            verdict=ClaimVerdict.HELD,
            valid_seconds=30.0,
        )

    @pytest.mark.parametrize(
        ("claim", "verdict"),
        [
            (make_claim("stranger"), ClaimVerdict.UNKNOWN_REQUEST),
            (make_claim(generation=2), ClaimVerdict.STALE_GENERATION),
            (make_claim(engine_id="P0"), ClaimVerdict.WRONG_ENGINE),
            (make_claim(reader=make_reader("pull-2")), ClaimVerdict.ALREADY_USED),
            (make_claim(reader=make_reader(engine_id="D2")), ClaimVerdict.ALREADY_USED),
            (make_claim(reader=make_reader(num_readers=2)), ClaimVerdict.CONFLICT),
        ],
    )
    def test_a_claim_that_does_not_fit_is_refused_counted_and_changes_nothing(
        self, claim: Claim, verdict: ClaimVerdict
    ) -> None:
        """The lease was claimed by pull-1 of D1 with one reader."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.claim(make_claim(), now=1.0)
        before = book.live
        reply = book.claim(claim, now=2.0)
        assert (reply.verdict, reply.valid_seconds) == (verdict, 0.0)
        assert book.live == before
        assert book.ignored == {verdict: 1}

    def test_a_claim_for_other_blocks_or_tokens_than_were_offered_is_refused(self) -> None:
        """Told by the digest; it binds the lease to nobody, and the honest reader is served."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0, digest="offered")
        for digest in ("", "altered"):
            claim = evolve(make_claim(reader=make_reader("liar")), digest=digest)
            assert book.claim(claim, now=1.0).verdict is ClaimVerdict.WRONG_OFFER
        assert [(x.reader, x.expires_at) for x in book.live] == [(None, 30.0)]
        assert book.claim(evolve(make_claim(), digest="offered"), now=2.0).verdict is ClaimVerdict.HELD

    def test_a_claim_after_the_end_is_refused_by_how_the_lease_ended(self) -> None:
        """Expired, used, withdrawn, forgotten: four verdicts."""
        book = make_book(remember=3)
        for name in ("forgotten", "expired", "used", "withdrawn"):
            book.grant(request_id=name, blocks=BLOCKS, now=0.0, ttl=5.0 if name == "expired" else 30.0)
        book.release(make_release("forgotten", 1), now=1.0)
        book.sweep(now=6.0)
        book.release(make_release("used", 3), now=7.0)
        book.withdraw(request_id="withdrawn", reason="gone", now=8.0)
        verdicts = {
            name: book.claim(make_claim(name, generation), now=9.0).verdict
            for generation, name in enumerate(("forgotten", "expired", "used", "withdrawn"), start=1)
        }
        assert verdicts == {
            "forgotten": ClaimVerdict.UNKNOWN_REQUEST,
            "expired": ClaimVerdict.LEASE_OVER,
            "used": ClaimVerdict.ALREADY_USED,
            "withdrawn": ClaimVerdict.PRODUCER_FAILED,
        }

    def test_an_expired_lease_that_was_not_swept_yet_is_over_all_the_same(self) -> None:
        """A promise cannot be made anew once it has run out."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        assert book.claim(make_claim(), now=30.0).verdict is ClaimVerdict.LEASE_OVER
        assert book.release(make_release(), now=30.0).ended is None
        assert ids(book.sweep(now=30.0)) == [("r", LeaseEnd.EXPIRED)]

    def test_an_old_generation_is_refused_after_the_request_id_came_back(self) -> None:
        """The same id with new blocks: the reader of the old hand-off learns it."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.sweep(now=30.0)
        book.grant(request_id="r", blocks=((BlockId(7),), ()), now=31.0, ttl=30.0)
        assert book.claim(make_claim("r", 1), now=32.0).verdict is ClaimVerdict.STALE_GENERATION
        assert book.claim(make_claim("r", 2), now=32.0).verdict is ClaimVerdict.HELD


class TestRelease:
    """The last reader's release ends the lease; nothing else does."""

    def test_one_reader_ends_it_at_once(self) -> None:
        """And a second notice of the same release is ignored and counted."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        ended = book.release(make_release(), now=1.0).ended
        assert ended is not None
        assert (ended.lease.blocks, ended.end) == (BLOCKS, LeaseEnd.RELEASED)
        again = book.release(make_release(), now=2.0)
        assert (again.verdict, again.ended) == (ClaimVerdict.ALREADY_USED, None)
        assert book.ignored == {ClaimVerdict.ALREADY_USED: 1}

    def test_three_reading_ranks_must_all_let_go(self) -> None:
        """Rank 4 twice counts once; 4, 5 and 9 are three."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        ends = [
            book.release(make_release(reader=make_reader(rank=rank, num_readers=3)), now=1.0).ended
            for rank in (4, 4, 5, 9)
        ]
        assert [e is not None for e in ends] == [False, False, False, True]

    def test_one_failed_rank_makes_the_end_a_failure(self) -> None:
        """The blocks are free either way; the operator sees the difference."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.release(make_release(reader=make_reader(rank=0, num_readers=2), kind=ReleaseKind.FAILED), now=1.0)
        ended = book.release(make_release(reader=make_reader(rank=1, num_readers=2)), now=1.0).ended
        assert ended is not None
        assert ended.end is LeaseEnd.CONSUMER_FAILED

    def test_a_rejection_counts_for_all_ranks(self) -> None:
        """The request was refused before any of 8 ranks read: one notice is enough."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        ended = book.release(make_release(reader=make_reader(num_readers=8), kind=ReleaseKind.REJECTED), now=1.0).ended
        assert ended is not None
        assert ended.end is LeaseEnd.REJECTED

    def test_another_pull_cannot_end_a_claimed_lease(self) -> None:
        """Its first reader may still be reading."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.claim(make_claim(), now=1.0)
        for kind in ReleaseKind:
            result = book.release(make_release(reader=make_reader("pull-2"), kind=kind), now=2.0)
            assert (result.verdict, result.ended) == (ClaimVerdict.ALREADY_USED, None)
        assert book.release(make_release(), now=3.0).ended is not None

    @pytest.mark.parametrize(
        ("release", "verdict"),
        [
            (make_release("stranger"), ClaimVerdict.UNKNOWN_REQUEST),
            (make_release(generation=0), ClaimVerdict.STALE_GENERATION),
            (make_release(engine_id="P2"), ClaimVerdict.WRONG_ENGINE),
        ],
    )
    def test_a_release_that_does_not_fit_is_ignored(self, release: Release, verdict: ClaimVerdict) -> None:
        """An unknown request, an old generation, a former start of the producer."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        assert book.release(release, now=1.0).verdict is verdict
        assert len(book.live) == 1


class TestWithdraw:
    """The producer's own failure reaches the reader, and keeps the promise that was made to it."""

    def test_an_unclaimed_lease_ends_at_once(self) -> None:
        """Nobody was promised anything."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        ended = book.withdraw(request_id="r", reason="cancelled", now=1.0)
        assert isinstance(ended, EndedLease)
        assert ended.end is LeaseEnd.FAILED

    def test_a_claimed_lease_tells_its_reader_and_waits_for_the_release(self) -> None:
        """Blocks are not free before the reader let go; further claims are refused."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.claim(make_claim(), now=1.0)
        told = book.withdraw(request_id="r", reason="device lost", now=2.0)
        assert told == AddressedFailure(
            reader=make_reader(),
            notice=ProducerFailure(
                engine_id="P1", request_id="r", generation=1, pull_id="pull-1", rank=2, reason="device lost"
            ),
        )
        assert book.claim(make_claim(), now=3.0).verdict is ClaimVerdict.PRODUCER_FAILED
        assert book.sweep(now=4.0) == ()
        ended = book.release(make_release(), now=5.0).ended
        assert ended is not None
        assert ended.end is LeaseEnd.FAILED

    def test_a_claimed_lease_whose_reader_is_silent_ends_with_the_promise(self) -> None:
        """Claimed at 1 for 30 s: free at 31, not before."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.claim(make_claim(), now=1.0)
        book.withdraw(request_id="r", reason="device lost", now=2.0)
        assert book.sweep(now=30.9) == ()
        assert ids(book.sweep(now=31.0)) == [("r", LeaseEnd.FAILED)]

    def test_withdrawing_twice_or_a_stranger_does_nothing(self) -> None:
        """One failure notice, not two."""
        book = make_book()
        book.grant(request_id="r", blocks=BLOCKS, now=0.0, ttl=30.0)
        book.claim(make_claim(), now=1.0)
        assert book.withdraw(request_id="r", reason="x", now=2.0) is not None
        assert book.withdraw(request_id="r", reason="x", now=2.0) is None
        assert book.withdraw(request_id="stranger", reason="x", now=2.0) is None


class TestValues:
    """Numbers from a peer are checked where the value is made."""

    @pytest.mark.parametrize(("rank", "num_readers"), [(-1, 1), (4096, 1), (0, 0), (0, 4097)])
    def test_a_reader_out_of_range_is_refused(self, rank: int, num_readers: int) -> None:
        """Ranks 0..4095, 1..4096 readers."""
        with pytest.raises(RequestError):
            make_reader(rank=rank, num_readers=num_readers)

    @pytest.mark.parametrize("valid", [-0.1, 86400.1, float("nan"), float("inf")])
    def test_a_promise_that_no_clock_could_keep_is_refused(self, valid: float) -> None:
        """Not negative, at most a day, finite."""
        with pytest.raises(RequestError, match="valid_seconds"):
            ClaimReply(
                engine_id="P", request_id="r", generation=1, pull_id="p", sequence=1, rank=0,
                verdict=ClaimVerdict.HELD, valid_seconds=valid,
            )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_promise_is_kept_whatever_happens(data: st.DataObject) -> None:
    """After HELD with v seconds, no lease of that pull ends before v are over unless that pull itself let go."""
    book = make_book(max_lifetime=60.0)
    now, promised, freed = 0.0, dict[tuple[str, int], tuple[float, tuple[str, str]]](), 0
    granted = 0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.5, 4.0, 9.0]))
        name = data.draw(st.sampled_from(["a", "b"]))
        generation = data.draw(st.integers(max(1, granted - 2), max(1, granted)))
        reader = make_reader(data.draw(st.sampled_from(["p", "q"])), rank=data.draw(st.integers(0, 1)), num_readers=2)
        action = data.draw(st.sampled_from(["grant", "claim", "release", "withdraw", "sweep"]))
        ended: list[EndedLease] = []
        by_reader = False
        if action == "grant" and name not in {x.request_id for x in book.live}:
            granted = book.grant(request_id=name, blocks=BLOCKS, now=now, ttl=10.0).generation
        elif action == "claim":
            reply = book.claim(make_claim(name, generation, reader=reader), now=now)
            if reply.verdict is ClaimVerdict.HELD:
                promised[name, generation] = (now + reply.valid_seconds, reader.pull)
        elif action == "release":
            result = book.release(make_release(name, generation, reader=reader), now=now)
            ended = [result.ended] if result.ended else []
            by_reader = True
        elif action == "withdraw":
            outcome = book.withdraw(request_id=name, reason="x", now=now)
            ended = [outcome] if isinstance(outcome, EndedLease) else []
        elif action == "sweep":
            ended = list(book.sweep(now=now))
        for e in ended:
            freed += 1
            until, pull = promised.get((e.lease.request_id, e.lease.generation), (0.0, ("", "")))
            assert now >= until or (by_reader and pull == reader.pull)
    assert granted == freed + len(book.live)
