"""One pull: done only when proven, quiet before anything is released, and everybody is told once."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.block_table import BlockId
from gk_core.errors import LayoutError
from gk_core.lease import LeaseBook
from gk_core.notices import Claim, ClaimReply, ClaimVerdict, ProducerFailure, Reader, Release, ReleaseKind
from gk_core.ports import PeerKey, ReadState
from gk_core.pull import AddressedNotice, Pull, PullActions, PullEnd, PullFault, PullOutcome, PullSettings
from gk_core.transfer_plan import BlockRun, HeadSlice, RankRead

SLICE = HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=8)
RUN = BlockRun(local_start=1, remote_start=5, count=2)
ME = PeerKey(engine_id="D", rank=3)
PROMPT = PullSettings(deadline_seconds=20.0, claim_interval_seconds=5.0, reply_timeout_seconds=1.0, max_attempts=1)
DONE, FAILED, PENDING = ReadState.DONE, ReadState.FAILED, ReadState.PENDING


def make_read(rank: int = 0, *runs: BlockRun) -> RankRead:
    return RankRead(remote_rank=rank, head_slice=SLICE, runs=runs)


def make_pull(
    *ranks: int,
    settings: PullSettings = PROMPT,
    verify: bool = False,
    notify_only: tuple[int, ...] = (),
    now: float = 0.0,
) -> Pull:
    """A pull of request 'r-bb', generation 4, with one read from each rank."""
    return Pull(
        engine_id="P",
        request_id="r-bb",
        generation=4,
        readers={rank: Reader(key=ME, pull_id="pull-1", num_readers=rank + 1) for rank in (*ranks, *notify_only)},
        reads=tuple(make_read(rank, RUN) for rank in ranks) + tuple(make_read(rank) for rank in notify_only),
        now=now,
        settings=settings,
        verify=verify,
    )


def make_reply(
    sequence: int, *, rank: int = 0, valid: float = 10.0, verdict: ClaimVerdict = ClaimVerdict.HELD
) -> ClaimReply:
    return ClaimReply(
        engine_id="P",
        request_id="r-bb",
        generation=4,
        pull_id="pull-1",
        sequence=sequence,
        rank=rank,
        verdict=verdict,
        valid_seconds=valid if verdict is ClaimVerdict.HELD else 0.0,
    )


def claims(actions: PullActions) -> list[tuple[int, int]]:
    """(rank, sequence) of the claims to send."""
    return [(n.peer.rank, n.notice.sequence) for n in actions.notices if isinstance(n.notice, Claim)]


def releases(actions: PullActions) -> list[tuple[int, str, ReleaseKind]]:
    """(rank, request id, kind) of the releases to send."""
    return [(n.peer.rank, n.notice.request_id, n.notice.kind) for n in actions.notices if isinstance(n.notice, Release)]


class TestTheGoodWay:
    """planned -> reading -> proving -> done."""

    def test_a_pull_posts_its_reads_and_claims_its_lease_at_once(self) -> None:
        """The first advance says everything that has to be done now, literally."""
        actions = make_pull(2).advance(now=0.0)
        claim = Claim(
            engine_id="P",
            request_id="r-bb",
            generation=4,
            reader=Reader(key=ME, pull_id="pull-1", num_readers=3),
            sequence=1,
        )
        peer = PeerKey(engine_id="P", rank=2)
        assert actions == PullActions(posts=(0,), notices=(AddressedNotice(peer=peer, notice=claim),))

    def test_it_is_done_when_the_read_is_done_and_the_answer_covers_it(self) -> None:
        """Claimed at 0, valid 10 s, of which 9.5 are believed; the read ends at 9.5."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        pull.claim_reply(make_reply(1))
        assert pull.advance(now=1.0) == PullActions()
        pull.read_state(0, DONE, now=9.5)
        actions = pull.advance(now=9.5)
        assert actions.ended == PullOutcome(end=PullEnd.DONE, fault=None, reason="")
        assert actions.quiet
        assert releases(actions) == [(0, "r-bb", ReleaseKind.DONE)]
        assert pull.advance(now=9.6) == PullActions()

    def test_an_answer_before_the_read_ends_is_as_good_as_one_after_it(self) -> None:
        """A notice never ends a read: after the answer the pull still waits for DONE of its own handle."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        pull.claim_reply(make_reply(1))
        assert pull.advance(now=0.1).ended is None
        pull.read_state(0, DONE, now=0.2)
        assert pull.advance(now=0.2).ended is not None

    def test_every_rank_that_is_read_must_be_proven(self) -> None:
        """Two ranks: the answer of one proves nothing of the other."""
        pull = make_pull(0, 1)
        assert claims(pull.advance(now=0.0)) == [(0, 1), (1, 2)]
        for index in (0, 1):
            pull.read_state(index, DONE, now=0.1)
        pull.claim_reply(make_reply(1, rank=0))
        assert pull.advance(now=0.1).ended is None
        pull.claim_reply(make_reply(2, rank=1))
        actions = pull.advance(now=0.2)
        assert actions.ended is not None
        assert releases(actions) == [(0, "r-bb", ReleaseKind.DONE), (1, "r-bb", ReleaseKind.DONE)]

    def test_a_rank_of_which_nothing_is_read_is_released_and_not_claimed(self) -> None:
        """Notify only: it still hears that we are done."""
        pull = make_pull(0, notify_only=(7,))
        assert claims(pull.advance(now=0.0)) == [(0, 1)]
        pull.read_state(0, DONE, now=0.0)
        pull.claim_reply(make_reply(1))
        assert releases(pull.advance(now=0.0)) == [(0, "r-bb", ReleaseKind.DONE), (7, "r-bb", ReleaseKind.DONE)]

    def test_a_pull_of_nothing_is_done_at_once(self) -> None:
        """Every block was here already: one notice per rank, no read, no wait."""
        actions = make_pull(notify_only=(0, 1)).advance(now=0.0)
        assert (actions.posts, actions.quiet) == ((), True)
        assert [rank for rank, _, _ in releases(actions)] == [0, 1]


class TestTheFence:
    """A read that the lease does not cover is thrown away."""

    def test_a_read_that_ends_after_the_promise_is_asked_about_again(self) -> None:
        """Valid until 9.5 as believed; the read ends at 9.6; the new answer is that the lease is over."""
        pull = make_pull(0, settings=evolve(PROMPT, claim_interval_seconds=100.0))
        pull.advance(now=0.0)
        pull.claim_reply(make_reply(1))
        pull.read_state(0, DONE, now=9.6)
        actions = pull.advance(now=9.6)
        assert (actions.ended, claims(actions)) == (None, [(0, 2)])
        pull.claim_reply(make_reply(2, verdict=ClaimVerdict.LEASE_OVER))
        ended = pull.advance(now=9.7).ended
        assert ended is not None
        assert (ended.end, ended.fault) == (PullEnd.FAILED, PullFault.LEASE_REFUSED)
        assert ended.reason == "P/0 no longer holds request 'r-bb' generation 4: lease_over"

    def test_an_answer_to_a_claim_asked_after_the_read_proves_it_whatever_its_length(self) -> None:
        """Valid for 0 seconds still says: held when we asked, and we asked after the read had ended."""
        pull = make_pull(0, settings=evolve(PROMPT, claim_interval_seconds=100.0))
        pull.advance(now=0.0)
        pull.claim_reply(make_reply(1, valid=0.0))
        pull.read_state(0, DONE, now=9.6)
        assert claims(pull.advance(now=9.6)) == [(0, 2)]
        pull.claim_reply(make_reply(2, valid=0.0))
        ended = pull.advance(now=19.0).ended
        assert ended is not None
        assert ended.end is PullEnd.DONE

    def test_a_late_answer_counts_from_when_its_question_was_asked(self) -> None:
        """Asked at 0, valid 10, arrives at 9: it covers 9.5 and not 9.6."""
        for end, proven in ((9.5, True), (9.6, False)):
            pull = make_pull(0, settings=evolve(PROMPT, claim_interval_seconds=100.0, reply_timeout_seconds=100.0))
            pull.advance(now=0.0)
            pull.read_state(0, DONE, now=end)
            pull.claim_reply(make_reply(1))
            assert (pull.advance(now=end).ended is not None) is proven

    def test_with_confirmation_only_a_claim_asked_after_the_read_counts(self) -> None:
        """Even when both happen at the same moment of the clock."""
        pull = make_pull(0, settings=evolve(PROMPT, confirm_after_read=True))
        pull.advance(now=0.0)
        pull.claim_reply(make_reply(1, valid=1000.0))
        pull.read_state(0, DONE, now=0.0)
        actions = pull.advance(now=0.0)
        assert (actions.ended, claims(actions)) == (None, [(0, 2)])
        pull.claim_reply(make_reply(2))
        assert pull.advance(now=0.0).ended is not None

    def test_heartbeats_go_out_while_a_read_is_under_way(self) -> None:
        """Every 5 seconds when answered, every second when not."""
        pull = make_pull(0)
        sent = []
        for now in range(14):
            sent += [(now, sequence) for _, sequence in claims(pull.advance(now=float(now)))]
            if now < 6:
                pull.claim_reply(make_reply(max(s for _, s in sent)))
        assert sent == [(0, 1), (5, 2), (10, 3), (11, 4), (12, 5), (13, 6)]

    def test_without_any_answer_there_is_no_token(self) -> None:
        """All notices lost: the pull fails at its deadline although every byte is here."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        pull.read_state(0, DONE, now=0.1)
        assert pull.advance(now=19.9).ended is None
        ended = pull.advance(now=20.0).ended
        assert ended is not None
        assert (ended.end, ended.fault, ended.reason) == (
            PullEnd.FAILED,
            PullFault.TIMEOUT,
            "not complete within 20 s",
        )

    @pytest.mark.parametrize(
        "reply",
        [
            evolve(make_reply(1), engine_id="P2"),
            evolve(make_reply(1), request_id="r-aa"),
            evolve(make_reply(1), generation=5),
            evolve(make_reply(1), pull_id="pull-0"),
            make_reply(0),
            make_reply(2),
            make_reply(1, rank=1),
        ],
    )
    def test_an_answer_that_answers_no_claim_of_ours_changes_nothing(self, reply: ClaimReply) -> None:
        """Neither as proof nor, as a refusal, as a fault."""
        for verdict in (ClaimVerdict.HELD, ClaimVerdict.LEASE_OVER):
            pull = make_pull(0)
            pull.advance(now=0.0)
            pull.read_state(0, DONE, now=0.1)
            pull.claim_reply(evolve(reply, verdict=verdict))
            assert pull.advance(now=0.1).ended is None

    @pytest.mark.parametrize("verdict", [v for v in ClaimVerdict if v is not ClaimVerdict.HELD])
    def test_every_refusal_ends_the_pull_and_says_why(self, verdict: ClaimVerdict) -> None:
        """Unknown request, wrong engine, old generation, used twice, over, failed, contradiction."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        pull.read_state(0, DONE, now=0.1)
        pull.claim_reply(make_reply(1, verdict=verdict))
        ended = pull.advance(now=0.1).ended
        assert ended is not None
        assert ended.fault is PullFault.LEASE_REFUSED
        assert verdict.value in ended.reason


class TestFaults:
    """The first fault decides; blocks stay until every read is quiet."""

    def test_blocks_are_held_while_a_sibling_of_a_failed_read_is_under_way(self) -> None:
        """h0 failed, h1 pending: nothing is reported or released; h1 done: failed, once, and quiet."""
        pull = make_pull(0, 1)
        pull.advance(now=0.0)
        pull.read_state(0, FAILED, now=0.1)
        assert pull.advance(now=0.1) == PullActions()
        assert (pull.outcome, pull.is_quiet, pull.pending) == (None, False, (1,))
        pull.read_state(1, DONE, now=0.2)
        actions = pull.advance(now=0.2)
        assert actions.ended is not None
        assert (actions.ended.fault, actions.quiet) == (PullFault.READ_FAILED, True)
        assert [kind for _, _, kind in releases(actions)] == [ReleaseKind.FAILED, ReleaseKind.FAILED]
        assert pull.advance(now=0.3) == PullActions()

    def test_a_sibling_that_never_ends_is_reported_at_the_deadline_and_still_holds_its_blocks(self) -> None:
        """The client hears at 20; the blocks come back when the transport says so at 99."""
        pull = make_pull(0, 1)
        pull.advance(now=0.0)
        pull.read_state(0, FAILED, now=0.1)
        assert pull.advance(now=19.0).ended is None
        at_deadline = pull.advance(now=20.0)
        assert at_deadline.ended is not None
        assert (at_deadline.ended.fault, at_deadline.quiet, at_deadline.notices) == (PullFault.READ_FAILED, False, ())
        assert pull.advance(now=98.0) == PullActions()
        pull.read_state(1, FAILED, now=99.0)
        last = pull.advance(now=99.0)
        assert (last.ended, last.quiet, len(releases(last))) == (None, True, 2)

    def test_an_abort_is_reported_at_once_and_quiet_later(self) -> None:
        """Nothing new is posted meanwhile; a late success does not bring it back."""
        pull = make_pull(0, settings=evolve(PROMPT, max_attempts=3))
        pull.advance(now=0.0)
        pull.abort()
        first = pull.advance(now=0.1)
        assert first.ended == PullOutcome(end=PullEnd.ABORTED, fault=PullFault.ABORTED, reason="aborted")
        assert not first.quiet
        pull.claim_reply(make_reply(1))
        pull.read_state(0, DONE, now=0.2)
        second = pull.advance(now=0.2)
        assert (second.ended, second.quiet) == (None, True)
        assert releases(second) == [(0, "r-bb", ReleaseKind.FAILED)]

    def test_an_abort_before_the_first_post_posts_nothing_and_is_quiet_at_once(self) -> None:
        """And the producer is told, by its own id."""
        pull = make_pull(0)
        pull.abort()
        actions = pull.advance(now=0.0)
        assert (actions.posts, actions.quiet) == ((), True)
        assert releases(actions) == [(0, "r-bb", ReleaseKind.FAILED)]

    def test_an_abort_after_the_end_changes_nothing(self) -> None:
        """The outcome is what it was."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        pull.read_state(0, DONE, now=0.0)
        pull.claim_reply(make_reply(1))
        pull.advance(now=0.0)
        pull.abort()
        assert pull.advance(now=1.0) == PullActions()
        assert pull.outcome is not None
        assert pull.outcome.end is PullEnd.DONE

    def test_the_producers_failure_ends_the_pull_in_one_advance(self) -> None:
        """With its reason."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        told = ProducerFailure(
            engine_id="P", request_id="r-bb", generation=4, pull_id="pull-1", rank=0, reason="device lost"
        )
        for stray in (
            evolve(told, generation=3), evolve(told, pull_id="x"), evolve(told, engine_id="Q"), evolve(told, rank=5)
        ):  # fmt: skip
            pull.producer_failed(stray)
            assert pull.advance(now=0.1).ended is None
        pull.producer_failed(told)
        ended = pull.advance(now=0.1).ended
        assert ended is not None
        assert (ended.fault, ended.reason) == (PullFault.PRODUCER_FAILED, "P/0 failed: device lost")

    def test_the_first_fault_decides(self) -> None:
        """A refusal after an abort does not change what is reported."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        pull.abort()
        pull.claim_reply(make_reply(1, verdict=ClaimVerdict.LEASE_OVER))
        ended = pull.advance(now=0.1).ended
        assert ended is not None
        assert ended.fault is PullFault.ABORTED

    def test_a_failed_read_is_posted_again_until_its_attempts_are_used(self) -> None:
        """Three attempts: two retries, then the pull fails."""
        pull = make_pull(0, settings=evolve(PROMPT, max_attempts=3))
        posts = []
        for now in (0.0, 0.1, 0.2, 0.3):
            posts.append(pull.advance(now=now).posts)
            pull.read_state(0, FAILED, now=now)
        assert posts == [(0,), (0,), (0,), ()]
        assert (pull.retries, pull.outcome and pull.outcome.fault) == (2, PullFault.READ_FAILED)

    def test_only_the_read_that_failed_is_posted_again(self) -> None:
        """And a pull that succeeds at the second attempt is done like any other."""
        pull = make_pull(0, 1, settings=evolve(PROMPT, max_attempts=2))
        pull.advance(now=0.0)
        pull.read_state(0, DONE, now=0.1)
        pull.read_state(1, FAILED, now=0.1)
        assert pull.advance(now=0.1).posts == (1,)
        pull.read_state(1, DONE, now=0.2)
        pull.claim_reply(make_reply(1, rank=0))
        pull.claim_reply(make_reply(2, rank=1))
        ended = pull.advance(now=0.2).ended
        assert ended is not None
        assert ended.end is PullEnd.DONE

    def test_a_state_after_the_end_of_a_read_is_ignored(self) -> None:
        """DONE stays DONE."""
        pull = make_pull(0)
        pull.advance(now=0.0)
        pull.read_state(0, DONE, now=0.1)
        pull.read_state(0, FAILED, now=0.2)
        pull.claim_reply(make_reply(1))
        ended = pull.advance(now=0.2).ended
        assert ended is not None
        assert ended.end is PullEnd.DONE


class TestVerification:
    """Checksums are the last hurdle, when there are any."""

    def test_a_pull_with_checksums_asks_once_and_waits(self) -> None:
        """Done only after `verified`."""
        pull = make_pull(0, verify=True)
        pull.advance(now=0.0)
        pull.read_state(0, DONE, now=0.1)
        pull.claim_reply(make_reply(1))
        assert [pull.advance(now=0.1).verify for _ in range(2)] == [True, False]
        pull.verified(ok=True)
        ended = pull.advance(now=0.2).ended
        assert ended is not None
        assert ended.end is PullEnd.DONE

    def test_bytes_without_their_checksum_fail_the_pull(self) -> None:
        """A transport that reports success and moves nothing."""
        pull = make_pull(0, verify=True)
        pull.advance(now=0.0)
        pull.read_state(0, DONE, now=0.1)
        pull.claim_reply(make_reply(1))
        pull.advance(now=0.1)
        pull.verified(ok=False, reason="block 4 of region 1")
        actions = pull.advance(now=0.2)
        assert actions.ended == PullOutcome(end=PullEnd.FAILED, fault=PullFault.CHECKSUM, reason="block 4 of region 1")
        assert releases(actions) == [(0, "r-bb", ReleaseKind.FAILED)]


class TestValues:
    """Settings and readers are checked when they are made."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("deadline_seconds", 0.0), ("deadline_seconds", float("inf")), ("claim_interval_seconds", -1.0),
            ("reply_timeout_seconds", float("nan")), ("max_attempts", 0), ("trust", 0.0), ("trust", 1.01),
        ],
    )  # fmt: skip
    def test_a_setting_out_of_range_is_refused_by_name(self, name: str, value: Any) -> None:
        """Naming field and value."""
        with pytest.raises(LayoutError, match=name):
            PullSettings(**{name: value})

    def test_a_read_without_a_reader_is_refused(self) -> None:
        """Its rank could never be told that we are done."""
        with pytest.raises(LayoutError, match=r"reads from ranks \[1\] of P"):
            Pull(
                engine_id="P", request_id="r", generation=1, readers={}, reads=(make_read(1, RUN),), now=0.0,
                settings=PROMPT,
            )  # fmt: skip


MOMENTS = ("start", "posted", "answered", "done", "proven")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("second_read", [DONE, FAILED])
def test_an_abort_at_any_moment_gives_one_outcome_one_release_and_quiet(moment: str, second_read: ReadState) -> None:
    """Two reads, aborted between any two events."""
    pull = make_pull(0, 1)
    ended, quiet, released = [], 0, 0

    def advance() -> None:
        nonlocal quiet, released
        actions = pull.advance(now=0.5)
        ended.extend([actions.ended] if actions.ended else [])
        quiet += actions.quiet
        released += len(releases(actions))

    def event(name: str) -> None:
        if name == moment:
            pull.abort()
        if name == "answered":
            pull.claim_reply(make_reply(1, rank=0))
            pull.claim_reply(make_reply(2, rank=1))
        if name == "done" and 0 in pull.pending:
            pull.read_state(0, DONE, now=0.5)
        if name == "proven" and 1 in pull.pending:
            pull.read_state(1, second_read, now=0.5)
        advance()

    for name in MOMENTS:
        event(name)
    advance()
    assert (len(ended), quiet, released, pull.pending) == (1, 1, 2, ())
    assert ended[0].end is PullEnd.ABORTED


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_pull_is_done_only_while_the_producer_still_holds_the_blocks(data: st.DataObject) -> None:
    """Against a real LeaseBook with losses, delays, aborts and expiries: DONE implies that the lease had not ended when
    the last read did; and whatever happens there is at most one outcome, and quiet exactly when nothing is pending."""
    book = LeaseBook(engine_id="P", rank=0)
    book.grant(request_id="r-bb", blocks=((BlockId(1),),), now=0.0, ttl=data.draw(st.sampled_from([3.0, 8.0])))
    lease_over_at: float | None = None
    pull = Pull(
        engine_id="P",
        request_id="r-bb",
        generation=1,
        readers={0: Reader(key=ME, pull_id="pull-1")},
        reads=(make_read(0, RUN), make_read(0, RUN)),
        now=0.0,
        settings=evolve(PROMPT, max_attempts=2, confirm_after_read=data.draw(st.booleans())),
    )
    now, outcomes, last_done = 0.0, 0, 0.0
    replies: list[ClaimReply] = []
    for _ in range(60):
        now += data.draw(st.sampled_from([0.0, 0.25, 1.0, 4.0]))
        if lease_over_at is None and book.sweep(now=now):
            lease_over_at = now
        for index in pull.pending:
            state = data.draw(st.sampled_from([PENDING, PENDING, DONE, FAILED]))
            pull.read_state(index, state, now=now)
            last_done = now if state is DONE else last_done
        for reply in [r for r in replies if data.draw(st.booleans())]:
            pull.claim_reply(reply)
        if data.draw(st.integers(0, 19)) == 0:
            pull.abort()
        actions = pull.advance(now=now)
        outcomes += actions.ended is not None
        if actions.ended is not None and actions.ended.end is PullEnd.DONE:
            assert lease_over_at is None or lease_over_at > last_done
            assert book.live or lease_over_at is not None
        for addressed in actions.notices:
            if isinstance(addressed.notice, Claim) and data.draw(st.booleans()):
                replies.append(book.claim(addressed.notice, now=now))
            elif isinstance(addressed.notice, Release) and data.draw(st.booleans()):
                book.release(addressed.notice, now=now)
        assert outcomes <= 1
        assert pull.is_quiet is (outcomes == 1 and not pull.pending)
        if pull.is_quiet:
            break
