"""The consumer: right tokens or none, one outcome per request, and a fault that stays with its request."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from gk_adapters.fakes import FakeBlockPool, FakeFabric, FaultRates, NoticeFate, ReadFate
from gk_adapters.peer_directory import NoticeMailbox
from gk_core.decode_request import (
    DecodeRequest,
    DecodeSettings,
    FailedPull,
    FinishReason,
    RequestFinished,
    TokenEmitted,
    blocks_at_most,
)
from gk_core.decode_step import ControlShape
from gk_core.errors import CapacityError, LayoutError, RequestError
from gk_core.hand_off import HandOff
from gk_core.lease import EndedLease, LeaseEnd
from gk_core.metrics import (
    DECODE_STEPS,
    NOTICES_IGNORED,
    PEERS_LOST,
    PULL_BYTES,
    PULL_READS,
    PULL_RETRIES,
    PULL_SECONDS,
    PULLS_ABORTED,
    PULLS_DONE,
    PULLS_FAILED,
    RECOMPUTED_TOKENS,
    REQUESTS_REFUSED,
    TRANSFERRED_TOKENS,
)
from gk_core.notices import Claim, ClaimReply, ClaimVerdict, ProducerFailure, Reader
from gk_core.ports import GroupTables, PeerKey, ReadState
from tests.builders import Consumer, Producer, World, make_fake_layout, make_pull_settings, make_request, make_tokens

REPLAY = DecodeSettings(on_failed_pull=FailedPull.REPLAY, pull=make_pull_settings())
STALL = ReadFate(end=ReadState.PENDING)


def make_pair(**consumer: Any) -> tuple[World, Producer, Consumer]:
    world = World()
    return world, world.producer(), world.consumer(**consumer)


def offer(producer: Producer, prompt: tuple[int, ...], request_id: str = "p") -> HandOff:
    return producer.engine.submit(request_id=request_id, token_ids=prompt)


def all_free(*sides: Producer | Consumer) -> bool:
    return all(side.pool.num_free_blocks() == side.total for side in sides)


class TestGoodWay:
    """Hand-off in, tokens out."""

    @pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 100])
    def test_every_prompt_length_gives_the_hand_formulas_tokens(self, n: int) -> None:
        """Window 16, block 16: lengths around each edge; blocks come home on both sides."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(n)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt, max_new_tokens=20))
        world.run([producer], [consumer])
        (finished,) = consumer.finished("r")
        assert finished == RequestFinished(
            request_id="r",
            reason=FinishReason.LENGTH,
            error="",
            token_ids=world.expected(prompt, 20, consumer.cache.layout),
            transferred_tokens=n - 1,
            recomputed_tokens=0,
        )
        assert consumer.emitted("r") == finished.token_ids
        assert all_free(producer, consumer)

    def test_tokens_are_streamed_one_by_one_and_counted_from_zero(self) -> None:
        """Three tokens, then the outcome in the same poll as the last."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt, max_new_tokens=3))
        polls = []
        while consumer.engine.has_work:
            polls.append(consumer.poll())
            producer.engine.poll()
        a, b, c = world.expected(prompt, 3, consumer.cache.layout)
        assert [[e for e in p if isinstance(e, TokenEmitted)] for p in polls if p] == [
            [TokenEmitted(request_id="r", token_id=a, index=0)],
            [TokenEmitted(request_id="r", token_id=b, index=1)],
            [TokenEmitted(request_id="r", token_id=c, index=2)],
        ]
        assert isinstance(polls[-1][-1], RequestFinished)

    def test_an_end_token_ends_the_answer_and_is_part_of_it(self) -> None:
        """The third right token is named as an end token."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        right = world.expected(prompt, 10, consumer.cache.layout)
        stop = next(i for i, t in enumerate(right) if i >= 2 and t not in right[:i])
        request = make_request(
            offer(producer, prompt), prompt, max_new_tokens=10, eos_ids=frozenset({right[stop], 9999})
        )
        consumer.engine.submit(request)
        world.run([producer], [consumer])
        (finished,) = consumer.finished("r")
        assert (finished.reason, finished.token_ids) == (FinishReason.EOS, right[: stop + 1])

    def test_several_requests_share_the_rows_and_do_not_disturb_each_other(self) -> None:
        """Seven requests of different lengths over four rows, each as if alone."""
        world, producer, consumer = make_pair(layout=make_fake_layout(num_blocks=80))
        prompts = {f"r{n}": make_tokens(n) for n in (1, 5, 17, 33, 40, 48, 50)}
        for i, (request_id, prompt) in enumerate(prompts.items()):
            consumer.engine.submit(
                make_request(
                    offer(producer, prompt, request_id), prompt, request_id=request_id, max_new_tokens=3 + 2 * i
                )
            )
        world.run([producer], [consumer])
        for i, (request_id, prompt) in enumerate(prompts.items()):
            assert consumer.emitted(request_id) == world.expected(prompt, 3 + 2 * i, consumer.cache.layout)
        assert all_free(producer, consumer)
        rows = consumer.metrics.values["gk_decode_rows"]
        assert max(rows) == 4
        assert consumer.metrics.counts[DECODE_STEPS] == len(rows)

    def test_a_request_without_a_hand_off_computes_its_prompt_here(self) -> None:
        """One step per prompt token; the last one is not counted as recomputed."""
        world, _, consumer = make_pair()
        prompt = make_tokens(37)
        consumer.engine.submit(make_request(None, prompt))
        world.run([], [consumer])
        (finished,) = consumer.finished("r")
        assert finished.token_ids == world.expected(prompt, 5, consumer.cache.layout)
        assert (finished.transferred_tokens, finished.recomputed_tokens) == (0, 36)
        assert consumer.metrics.counts[RECOMPUTED_TOKENS] == 36

    def test_a_good_pull_is_measured(self) -> None:
        """33 tokens: 32 move, in 2 full blocks and 1 sliding one, 2 regions, 32 bytes each."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(33)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        world.run([producer], [consumer], seconds=0.25)
        counts, values = consumer.metrics.counts, consumer.metrics.values
        assert (counts[PULLS_DONE], counts[PULLS_FAILED], counts[PULLS_ABORTED]) == (1, 0, 0)
        assert counts[PULL_BYTES] == 3 * 2 * 32
        assert counts[TRANSFERRED_TOKENS] == 32
        assert values[PULL_SECONDS] == [0.25]
        assert len(values[PULL_READS]) == 1

    def test_one_registration_serves_any_number_of_requests(self) -> None:
        """100 requests, one register call on either side."""
        world, producer, consumer = make_pair()
        for i in range(100):
            prompt = make_tokens(20, seed=i)
            consumer.engine.submit(make_request(offer(producer, prompt), prompt, request_id=f"r{i}"))
            world.run([producer], [consumer])
        assert (producer.transport.register_calls, consumer.transport.register_calls) == (1, 1)
        assert len([e for e in consumer.events if isinstance(e, RequestFinished)]) == 100


class TestNames:
    """Each side knows a request by its own id."""

    def test_a_producer_hears_its_own_id_on_every_rank(self) -> None:
        """'r-aa' here is 'r-bb' there; rank 1 holds a copy of rank 0's head and is only told."""
        world = World()
        ranks = [
            world.producer(name=f"prefill/{r}", tp_size=2, tp_rank=r, base_address=0x10_0000 * (r + 1)) for r in (0, 1)
        ]
        consumer = world.consumer()
        prompt = make_tokens(20)
        first, second = (offer(rank, prompt, "r-bb") for rank in ranks)
        assert first == second
        consumer.engine.submit(make_request(first, prompt, request_id="r-aa"))
        told: list[tuple[int, str, LeaseEnd]] = []
        for _ in range(9):
            consumer.poll()
            for rank, producer in enumerate(ranks):
                told += [(rank, e.lease.request_id, e.end) for e in producer.engine.poll()]
        assert told == [(0, "r-bb", LeaseEnd.RELEASED), (1, "r-bb", LeaseEnd.RELEASED)]
        assert consumer.emitted("r-aa") == world.expected(prompt, 5, consumer.cache.layout)
        assert all_free(*ranks, consumer)


class TestRefusals:
    """What can never be served is refused at once, by name, and its producer is told."""

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"prompt": ()}, "a prompt has at least 1 token"),
            ({"prompt": (1, 251)}, "token id 251 at position 1 is outside 0..250"),
            ({"prompt": (1, -1)}, "token id -1 at position 1"),
            ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
            ({"max_new_tokens": 493}, "exceed max_model_len 512"),
            ({"prompt": make_tokens(19)}, "a hand-off for a prompt of 19 tokens has 18 tokens of KV, got 19"),
        ],
    )
    def test_a_bad_request_is_refused_and_its_producer_is_told_once(self, change: dict[str, Any], why: str) -> None:
        """The offer goes back as rejected; nothing was allocated here."""
        _, producer, consumer = make_pair()
        good = make_request(offer(producer, make_tokens(20)), make_tokens(20))
        with pytest.raises(RequestError, match=why):
            consumer.engine.submit(evolve(good, **change))
        ended: list[EndedLease] = []
        for _ in range(3):
            consumer.poll()
            ended += producer.engine.poll()
        assert [(e.lease.request_id, e.end) for e in ended] == [("p", LeaseEnd.REJECTED)]
        assert consumer.metrics.counts[REQUESTS_REFUSED] == 1
        assert all_free(producer, consumer)
        assert not consumer.engine.has_work
        assert consumer.events == []

    def test_a_request_that_the_whole_cache_could_not_hold_is_refused(self) -> None:
        """9 blocks in all; 130 tokens may need 9 full and 3 sliding ones."""
        _, _, consumer = make_pair(layout=make_fake_layout(num_blocks=10))
        with pytest.raises(RequestError, match="may need 12 blocks, the whole cache has 9"):
            consumer.engine.submit(make_request(None, make_tokens(130), max_new_tokens=2))

    def test_an_id_that_is_being_served_is_refused_and_the_first_goes_on(self) -> None:
        """And the second offer is given back."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt, "p1"), prompt))
        with pytest.raises(RequestError, match="is being served already"):
            consumer.engine.submit(make_request(offer(producer, prompt, "p2"), prompt))
        world.run([producer], [consumer])
        assert consumer.emitted("r") == world.expected(prompt, 5, consumer.cache.layout)
        assert all_free(producer, consumer)

    def test_one_offer_for_two_requests_serves_the_first_and_refuses_the_second(self) -> None:
        """Refusing the second does not take the blocks from under the first."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        hand_off = offer(producer, prompt)
        consumer.engine.submit(make_request(hand_off, prompt, request_id="a"))
        with pytest.raises(RequestError, match="is in use already"):
            consumer.engine.submit(make_request(hand_off, prompt, request_id="b"))
        world.run([producer], [consumer])
        assert consumer.emitted("a") == world.expected(prompt, 5, consumer.cache.layout)

    def test_an_offer_that_contradicts_its_producer_fails_before_any_block_is_taken(self) -> None:
        """Another block size than the producer's."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        hand_off = evolve(offer(producer, prompt), block_size=32)
        consumer.engine.submit(make_request(hand_off, prompt))
        consumer.poll()
        (finished,) = consumer.finished("r")
        assert "remote_block_size must be the producer's 16, got 32" in finished.error
        assert consumer.pool.evicted == ()
        world.run([producer], [consumer])
        producer.engine.poll()
        assert all_free(producer, consumer)

    def test_negative_max_ahead_is_refused(self) -> None:
        """Naming the value."""
        with pytest.raises(LayoutError, match="max_ahead must be >= 0, got -1"):
            DecodeSettings(max_ahead=-1)


class TestRoom:
    """Requests wait for blocks and rows; what was admitted never has to give way."""

    def test_requests_wait_their_turn_when_the_cache_is_small(self) -> None:
        """Room for about two at a time; all six are served, in order of admission."""
        world, producer, consumer = make_pair(layout=make_fake_layout(num_blocks=14))
        prompts = {f"r{i}": make_tokens(33, seed=i) for i in range(6)}
        for request_id, prompt in prompts.items():
            consumer.engine.submit(
                make_request(offer(producer, prompt, request_id), prompt, request_id=request_id, max_new_tokens=10)
            )
        world.run([producer], [consumer], seconds=0.1)
        order = [e.request_id for e in consumer.events if isinstance(e, RequestFinished)]
        assert order == list(prompts)
        for request_id, prompt in prompts.items():
            assert consumer.emitted(request_id) == world.expected(prompt, 10, consumer.cache.layout)
        assert all_free(producer, consumer)

    def test_a_request_waits_while_those_before_it_may_still_grow_into_the_room(self) -> None:
        """13 blocks; each request begins with 2 and may grow to 7: one at a time, though four would fit at first."""
        world, producer, consumer = make_pair(layout=make_fake_layout(num_blocks=14))
        prompts = {f"r{i}": make_tokens(16, seed=i) for i in range(4)}
        for request_id, prompt in prompts.items():
            consumer.engine.submit(
                make_request(offer(producer, prompt, request_id), prompt, request_id=request_id, max_new_tokens=40)
            )
        world.run([producer], [consumer], seconds=0.1)
        for request_id, prompt in prompts.items():
            assert consumer.emitted(request_id) == world.expected(prompt, 40, consumer.cache.layout)
        assert all_free(producer, consumer)

    def test_a_small_request_does_not_overtake_a_large_one_for_ever(self) -> None:
        """The large one is next in line and gets its room when the first has finished."""
        world, producer, consumer = make_pair(layout=make_fake_layout(num_blocks=14))
        for request_id, n in (("first", 60), ("large", 100), ("small", 2)):
            prompt = make_tokens(n)
            consumer.engine.submit(
                make_request(offer(producer, prompt, request_id), prompt, request_id=request_id, max_new_tokens=4)
            )
        world.run([producer], [consumer], seconds=0.1)
        order = [e.request_id for e in consumer.events if isinstance(e, RequestFinished)]
        assert order == ["first", "large", "small"]

    def test_a_request_that_waits_longer_than_its_lease_keeps_it_warm(self) -> None:
        """Leases of 10 s; one row, no blocks ahead; the second waits for 25 s and is still pulled."""
        world, producer, consumer = make_pair(
            num_rows=1, settings=DecodeSettings(pull=make_pull_settings(), max_ahead=0)
        )
        first, second = make_tokens(20, seed=1), make_tokens(20, seed=2)
        consumer.engine.submit(make_request(offer(producer, first, "a"), first, request_id="a", max_new_tokens=50))
        consumer.engine.submit(make_request(offer(producer, second, "b"), second, request_id="b"))
        world.run([producer], [consumer], seconds=0.5)
        (finished,) = consumer.finished("b")
        assert (finished.reason, finished.transferred_tokens) == (FinishReason.LENGTH, 19)

    def test_a_request_whose_lease_ends_while_it_waits_ends_at_once(self) -> None:
        """The producer withdraws it; the waiting request does not wait on."""
        world, producer, consumer = make_pair(
            num_rows=1, settings=DecodeSettings(pull=make_pull_settings(), max_ahead=0)
        )
        first, second = make_tokens(20, seed=1), make_tokens(20, seed=2)
        consumer.engine.submit(make_request(offer(producer, first, "a"), first, request_id="a", max_new_tokens=50))
        consumer.engine.submit(make_request(offer(producer, second, "b"), second, request_id="b"))
        producer.engine.cancel(request_id="b")
        world.run([producer], [consumer], seconds=0.5, until=lambda: bool(consumer.finished("b")))
        assert "producer_failed" in consumer.finished("b")[0].error
        assert consumer.finished("a") == []

    @pytest.mark.parametrize(
        ("tokens", "block_size", "window", "blocks"),
        [(1, 16, 16, 2), (16, 16, 16, 2), (17, 16, 16, 4), (48, 16, 16, 6), (130, 16, 16, 12), (1000, 128, 128, 11)],
    )
    def test_the_most_blocks_of_a_request_are_its_full_ones_and_a_windows(
        self, tokens: int, block_size: int, window: int, blocks: int
    ) -> None:
        """16-token windows touch 2 blocks of 16, and a third is held until the next step; so 3."""
        shape = ControlShape(num_rows=1, block_size=block_size, sliding_window=window, max_model_len=2048)
        assert blocks_at_most(tokens, shape) == blocks


class TestCancel:
    """A request may be given up at any moment: one outcome, and blocks come home on both sides."""

    @pytest.mark.parametrize("polls", [0, 1, 2, 3, 5, 8, 12])
    def test_cancelling_after_any_number_of_polls(self, polls: int) -> None:
        """The read takes six polls, so this hits waiting, pulling, running and finished."""
        world, producer, consumer = make_pair()
        world.fabric.script_reads(ReadFate(polls=6))
        prompt = make_tokens(33)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt, max_new_tokens=4))
        for _ in range(polls):
            consumer.poll()
            producer.engine.poll()
        consumer.engine.cancel(request_id="r")
        consumer.engine.cancel(request_id="r")
        world.run([producer], [consumer])
        (finished,) = consumer.finished("r")
        assert finished.reason is (FinishReason.LENGTH if polls == 12 else FinishReason.CANCELLED)
        assert consumer.emitted("r") == finished.token_ids
        right = world.expected(prompt, 4, consumer.cache.layout)
        assert finished.token_ids == right[: len(finished.token_ids)]
        producer.engine.poll()
        assert all_free(producer, consumer)

    def test_blocks_of_a_cancelled_pull_stay_until_its_read_is_quiet(self) -> None:
        """The outcome comes at once; the blocks come with the end of the read; the id may be used again meanwhile."""
        world, producer, consumer = make_pair()
        world.fabric.script_reads(STALL)
        prompt = make_tokens(33)
        consumer.engine.submit(make_request(offer(producer, prompt, "a"), prompt))
        consumer.poll()
        consumer.engine.cancel(request_id="r")
        assert [e.reason for e in consumer.poll() if isinstance(e, RequestFinished)] == [FinishReason.CANCELLED]
        held = consumer.total - consumer.pool.num_free_blocks()
        assert held > 0
        consumer.engine.submit(make_request(offer(producer, prompt, "b"), prompt))
        world.run([producer], [consumer], until=lambda: len(consumer.finished("r")) == 2)
        assert consumer.emitted("r") == world.expected(prompt, 5, consumer.cache.layout)
        assert consumer.total - consumer.pool.num_free_blocks() == held
        world.fabric.kill("prefill")
        consumer.poll()
        assert all_free(consumer)
        assert consumer.metrics.counts[PULLS_ABORTED] == 1

    def test_cancelling_a_waiting_request_gives_its_offer_back(self) -> None:
        """Nothing was read; the producer hears that it was rejected."""
        _, producer, consumer = make_pair()
        prompt = make_tokens(33)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        consumer.engine.cancel(request_id="r")
        consumer.poll()
        assert [e.end for e in producer.engine.poll()] == [LeaseEnd.REJECTED]

    def test_cancelling_a_stranger_is_harmless(self) -> None:
        """No event."""
        _, _, consumer = make_pair()
        consumer.engine.cancel(request_id="stranger")
        assert consumer.poll() == ()


class TestIsolation:
    """One bad row harms no other."""

    @pytest.mark.parametrize("kind", ["nan_tokens", "refused_tokens"])
    def test_a_row_that_the_model_cannot_serve_ends_alone(self, kind: str) -> None:
        """Three rows; the middle one is fed token 250 as its last prompt token."""
        world, producer, consumer = make_pair(**{kind: frozenset({250})})
        prompts = {"a": make_tokens(20), "bad": (*make_tokens(29), 250), "c": make_tokens(40)}
        for request_id, prompt in prompts.items():
            consumer.engine.submit(make_request(offer(producer, prompt, request_id), prompt, request_id=request_id))
        world.run([producer], [consumer])
        (bad,) = consumer.finished("bad")
        assert (bad.reason, bad.token_ids) == (FinishReason.FAILED, ())
        assert ("NaN" if kind == "nan_tokens" else "refuse") in bad.error
        for request_id in ("a", "c"):
            right = world.expected(prompts[request_id], 5, consumer.cache.layout)
            if 250 not in right:
                assert consumer.emitted(request_id) == right
        assert all_free(producer, consumer)

    def test_a_failed_pull_ends_its_request_and_no_other(self) -> None:
        """The first read fails twice, the second one is fine."""
        world, producer, consumer = make_pair()
        failed = ReadFate(end=ReadState.FAILED)
        prompts = {"a": make_tokens(20), "b": make_tokens(40)}
        for request_id, prompt in prompts.items():
            consumer.engine.submit(make_request(offer(producer, prompt, request_id), prompt, request_id=request_id))
        world.fabric.script_reads(failed, ReadFate(), failed)
        world.run([producer], [consumer])
        assert consumer.finished("a")[0].reason is FinishReason.FAILED
        assert "read 0 from P1/0 failed" in consumer.finished("a")[0].error
        assert consumer.emitted("b") == world.expected(prompts["b"], 5, consumer.cache.layout)
        assert consumer.metrics.counts[PULL_RETRIES] == 1
        assert consumer.metrics.counts[PULLS_FAILED] == 1
        assert all_free(producer, consumer)

    def test_a_read_that_fails_once_is_tried_again(self) -> None:
        """And the request never notices."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(40)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        world.fabric.script_reads(ReadFate(end=ReadState.FAILED))
        world.run([producer], [consumer])
        assert consumer.emitted("r") == world.expected(prompt, 5, consumer.cache.layout)


class TestSharedPool:
    """Somebody else draws on the same pool."""

    def test_a_row_that_finds_no_block_ends_alone(self) -> None:
        """Blocks are gone when 'a' reaches its third block; 'b' does not need one and goes on."""
        world, producer, consumer = make_pair()
        a, b = make_tokens(32), make_tokens(2)
        for request_id, prompt in (("a", a), ("b", b)):
            consumer.engine.submit(
                make_request(offer(producer, prompt, request_id), prompt, request_id=request_id, max_new_tokens=4)
            )
        world.run([producer], [consumer], until=lambda: len(consumer.emitted("b")) == 1)
        taken = consumer.pool.num_free_blocks() * 16
        consumer.pool.grow(request_id="outside", num_computed_tokens=0, num_new_tokens=taken // 2)
        world.run([producer], [consumer])
        (failed,) = consumer.finished("a")
        assert failed.reason is FinishReason.FAILED
        assert "sliding and" in failed.error
        assert consumer.emitted("b") == world.expected(b, 4, consumer.cache.layout)
        consumer.pool.free(request_id="outside")
        assert all_free(consumer)

    def test_a_pool_that_changes_its_mind_makes_a_request_wait(self) -> None:
        """`grow` refuses although there seemed to be room: nothing is lost, it is tried again."""

        class Fickle(FakeBlockPool):
            refusals = 2

            def grow(self, *, request_id: str, num_computed_tokens: int, num_new_tokens: int) -> GroupTables:
                if self.refusals:
                    self.refusals -= 1
                    raise CapacityError("not now")
                return super().grow(
                    request_id=request_id, num_computed_tokens=num_computed_tokens, num_new_tokens=num_new_tokens
                )

        world = World()
        consumer = world.consumer(pool=Fickle(num_blocks=50, block_size=16, sliding_window=16))
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(None, prompt))
        world.run([], [consumer])
        assert consumer.emitted("r") == world.expected(prompt, 5, consumer.cache.layout)


class TestStrayNotices:
    """What is not for a pull of ours changes nothing."""

    def test_notices_for_nobody_and_of_the_wrong_kind_are_counted(self) -> None:
        """A claim, a reply to an unknown pull, and a reply about another lease to a waiting request."""
        world, producer, consumer = make_pair(
            num_rows=1, settings=DecodeSettings(pull=make_pull_settings(), max_ahead=0)
        )
        first, second = make_tokens(20, seed=1), make_tokens(20, seed=2)
        consumer.engine.submit(make_request(offer(producer, first, "a"), first, request_id="a", max_new_tokens=9))
        consumer.engine.submit(make_request(offer(producer, second, "b"), second, request_id="b"))
        consumer.poll()
        key = PeerKey(engine_id="D1", rank=0)
        reply = ClaimReply(
            engine_id="P1", request_id="a", generation=1, pull_id="77", sequence=0, rank=0,
            verdict=ClaimVerdict.LEASE_OVER,
        )  # fmt: skip
        claim = Claim(engine_id="P1", request_id="a", generation=1, reader=Reader(key=key, pull_id="1"), sequence=1)
        mailbox = NoticeMailbox(port=producer.transport)
        for notice in (claim, reply, evolve(reply, pull_id="2")):
            mailbox.send(peer=key, notice=notice)
        consumer.poll()
        assert consumer.metrics.counts[NOTICES_IGNORED] == 3
        world.run([producer], [consumer])
        for request_id, prompt, count in (("a", first, 9), ("b", second, 5)):
            assert consumer.emitted(request_id) == world.expected(prompt, count, consumer.cache.layout)


class TestReplay:
    """With REPLAY a failed pull costs time and never a wrong token."""

    def test_the_prompt_is_computed_here_when_its_kv_does_not_come(self) -> None:
        """Both attempts fail; 39 tokens are recomputed, none counted as transferred."""
        world, producer, consumer = make_pair(settings=REPLAY)
        prompt = make_tokens(40)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        world.fabric.script_reads(*[ReadFate(end=ReadState.FAILED)] * 2)
        world.run([producer], [consumer])
        (finished,) = consumer.finished("r")
        assert finished.token_ids == world.expected(prompt, 5, consumer.cache.layout)
        assert (finished.transferred_tokens, finished.recomputed_tokens) == (0, 39)
        assert consumer.metrics.counts[TRANSFERRED_TOKENS] == 0
        assert all_free(producer, consumer)

    def test_a_replay_takes_other_blocks_while_the_read_is_still_under_way(self) -> None:
        """A stalled read keeps its blocks; the replay's tokens are right although the read lands later."""
        world, producer, consumer = make_pair(settings=REPLAY)
        prompt = make_tokens(40)
        hand_off = offer(producer, prompt)
        consumer.engine.submit(make_request(hand_off, prompt, max_new_tokens=8))
        world.fabric.script_reads(ReadFate(polls=30))
        consumer.poll()
        producer.engine.poll()
        producer.engine.cancel(request_id="p", reason="cache lost")
        world.run([producer], [consumer])
        (finished,) = consumer.finished("r")
        assert finished.token_ids == world.expected(prompt, 8, consumer.cache.layout)
        assert finished.recomputed_tokens == 39
        producer.engine.poll()
        assert all_free(producer, consumer)

    def test_a_producer_that_cannot_be_found_does_not_fail_the_request(self) -> None:
        """Nobody listens at the offer's endpoint."""
        world, producer, consumer = make_pair(settings=REPLAY)
        prompt = make_tokens(20)
        hand_off = evolve(offer(producer, prompt), port=1)
        consumer.engine.submit(make_request(hand_off, prompt))
        world.run([producer], [consumer])
        assert consumer.emitted("r") == world.expected(prompt, 5, consumer.cache.layout)


class TestProducerTrouble:
    """The consumer hears of it, or notices by itself."""

    def test_the_producers_failure_ends_the_request_in_one_poll(self) -> None:
        """Others go on."""
        world, producer, consumer = make_pair()
        a, b = make_tokens(20), make_tokens(40)
        world.fabric.script_reads(ReadFate(polls=50))
        consumer.engine.submit(make_request(offer(producer, a, "a"), a, request_id="a"))
        consumer.engine.submit(make_request(offer(producer, b, "b"), b, request_id="b"))
        consumer.poll()
        producer.engine.poll()
        producer.engine.cancel(request_id="a", reason="device lost")
        consumer.poll()
        assert [(f.reason, "device lost" in f.error) for f in consumer.finished("a")] == [(FinishReason.FAILED, True)]
        world.run([producer], [consumer])
        assert consumer.emitted("b") == world.expected(b, 5, consumer.cache.layout)

    def test_a_side_channel_that_does_not_answer_fails_only_those_who_need_it(self) -> None:
        """One producer is silent, the other serves; the silent one is not asked again and again."""
        world = World()
        good, silent = world.producer(), world.producer(engine_id="P2", name="mute", port=5700, base_address=0x50_0000)
        consumer = world.consumer()
        world.board.silence(silent.endpoint)
        a, b = make_tokens(20), make_tokens(40)
        consumer.engine.submit(make_request(offer(silent, a), a, request_id="a"))
        consumer.engine.submit(make_request(offer(good, b), b, request_id="b"))
        world.run([good, silent], [consumer])
        assert "no reply from mute:5700" in consumer.finished("a")[0].error
        assert consumer.emitted("b") == world.expected(b, 5, consumer.cache.layout)
        world.clock.advance(20.0)
        silent.engine.poll()
        assert all_free(good, silent, consumer)

    def test_without_answers_to_claims_a_pull_fails_at_its_deadline(self) -> None:
        """All notices of the producer are lost although every byte arrived."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        world.fabric.rates = FaultRates(notice_lost=1.0)
        world.run([producer], [consumer], seconds=1.0)
        (finished,) = consumer.finished("r")
        assert "not complete within 20 s" in finished.error
        assert finished.token_ids == ()
        assert all_free(consumer)

    def test_a_lost_release_costs_time_and_no_block(self) -> None:
        """Claim and reply arrive, the release does not: the lease runs out."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        world.fabric.script_notices(NoticeFate(), NoticeFate(), NoticeFate(copies=0))
        world.run([producer], [consumer])
        producer.engine.poll()
        assert not all_free(producer)
        world.clock.advance(10.0)
        assert [e.end for e in producer.engine.poll()] == [LeaseEnd.EXPIRED]
        assert all_free(producer, consumer)

    def test_a_read_that_never_ends_gives_its_blocks_back_after_a_grace(self) -> None:
        """Aborted at once; at 39 s still held, at 40 s the peer is let go; what it says of the pull after that changes
        nothing; afterwards it is found again."""
        world, producer, consumer = make_pair()
        world.fabric.script_reads(STALL)
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        consumer.poll()
        consumer.engine.cancel(request_id="r")
        world.clock.advance(39.0)
        consumer.poll()
        assert not all_free(consumer)
        world.clock.advance(1.0)
        consumer.poll()
        consumer.poll()
        assert all_free(consumer)
        assert not consumer.engine.has_work
        late = ProducerFailure(engine_id="P1", request_id="p", generation=1, pull_id="1", rank=0, reason="late")
        before, ignored = list(consumer.events), consumer.metrics.counts[NOTICES_IGNORED]
        NoticeMailbox(port=producer.transport).send(peer=PeerKey(engine_id="D1", rank=0), notice=late)
        consumer.poll()
        assert (consumer.events, consumer.metrics.counts[NOTICES_IGNORED]) == (before, ignored + 1)
        assert all_free(consumer)
        producer.engine.poll()
        consumer.engine.submit(make_request(offer(producer, prompt, "again"), prompt, request_id="s"))
        world.run([producer], [consumer])
        assert consumer.emitted("s") == world.expected(prompt, 5, consumer.cache.layout)

    def test_blocks_stay_while_a_transport_that_cannot_take_reads_back_may_write_to_them(self) -> None:
        """Let go of at 40 s and still held at 400; then the peer dies, and they come back."""
        world = World(fabric=FakeFabric(disconnect_ends_reads=False))
        producer, consumer = world.producer(), world.consumer()
        world.fabric.script_reads(STALL)
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        consumer.poll()
        held = consumer.pool.num_free_blocks()
        for _ in range(10):
            world.clock.advance(40.0)
            consumer.poll()
        assert len(consumer.finished("r")) == 1
        assert consumer.pool.num_free_blocks() == held < consumer.total
        assert consumer.metrics.counts[PEERS_LOST] == 2
        world.fabric.kill("prefill")
        consumer.poll()
        assert all_free(consumer)
        assert not consumer.engine.has_work

    def test_a_read_that_never_ends_takes_no_other_read_with_it(self) -> None:
        """While another pull from the same peer is under way, the peer is kept."""
        world, producer, consumer = make_pair()
        world.fabric.script_reads(STALL, ReadFate(polls=3))
        a, b = make_tokens(20), make_tokens(40)
        consumer.engine.submit(make_request(offer(producer, a, "a"), a, request_id="a"))
        consumer.poll()
        consumer.engine.cancel(request_id="a")
        world.clock.advance(45.0)
        producer.engine.poll()
        consumer.engine.submit(make_request(offer(producer, b, "b"), b, request_id="b"))
        world.run([producer], [consumer], until=lambda: bool(consumer.finished("b")))
        assert consumer.emitted("b") == world.expected(b, 5, consumer.cache.layout)
        world.run([producer], [consumer])
        assert all_free(consumer)

    def test_a_hand_off_of_a_producer_that_was_started_anew_is_refused_by_both_ids(self) -> None:
        """It answers as P2; the offer is P1's."""
        world, producer, consumer = make_pair()
        prompt = make_tokens(20)
        hand_off = offer(producer, prompt)
        world.fabric.kill("prefill")
        producer.server.close()
        again = world.producer(engine_id="P2")
        consumer.engine.submit(make_request(hand_off, prompt))
        world.run([again], [consumer])
        error = consumer.finished("r")[0].error
        assert "P1" in error
        assert "P2" in error

    def test_a_producer_that_comes_back_under_the_same_name_and_id_is_found_again(self) -> None:
        """Known, then killed and restarted: the planned request fails, the next one shakes hands anew; a second
        producer goes on with the handshake that it had."""
        world, producer, consumer = make_pair()
        other = world.producer(engine_id="P2", name="other", port=5700, base_address=0x50_0000)
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt, request_id="before"))
        consumer.engine.submit(make_request(offer(other, prompt), prompt, request_id="other before"))
        world.run([producer, other], [consumer])
        assert world.board.num_requests == 2
        old = offer(producer, prompt, "old")
        world.fabric.kill("prefill")
        producer.server.close()
        again = world.producer(first_generation=1000)
        consumer.engine.submit(make_request(old, prompt, request_id="planned"))
        world.run([again], [consumer])
        assert consumer.finished("planned")[0].reason is FinishReason.FAILED
        consumer.engine.submit(make_request(offer(again, prompt, "old"), prompt, request_id="after"))
        world.run([again], [consumer])
        assert world.board.num_requests == 3
        consumer.engine.submit(make_request(offer(other, prompt, "q"), prompt, request_id="other after"))
        world.run([again, other], [consumer])
        assert world.board.num_requests == 3
        for request_id in ("before", "after", "other before", "other after"):
            assert consumer.emitted(request_id) == world.expected(prompt, 5, consumer.cache.layout)
        for one in (again, other):
            one.engine.poll()
        assert all_free(again, other, consumer)

    def test_a_peer_that_does_not_fit_is_refused_naming_the_field(self) -> None:
        """Block 32 there, 16 here."""
        world = World()
        producer = world.producer(layout=make_fake_layout(block_size=32))
        consumer = world.consumer()
        prompt = make_tokens(20)
        consumer.engine.submit(make_request(offer(producer, prompt), prompt))
        world.run([producer], [consumer])
        assert "kernel_block_size: ours 16, theirs 32" in consumer.finished("r")[0].error


def test_requests_are_plain_values() -> None:
    """Defaults: no end tokens, no hand-off."""
    request = DecodeRequest(request_id="r", prompt=(1,), max_new_tokens=1)
    assert (request.eos_ids, request.hand_off) == (frozenset(), None)
