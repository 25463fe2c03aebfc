"""The producer: what it offers, how long it keeps it, and that one bad request harms no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from gk_adapters.peer_directory import NoticeMailbox
from gk_core.errors import CapacityError, LayoutError, RequestError, UnsupportedError
from gk_core.hand_off import HandOff
from gk_core.integrity import BlockBytes
from gk_core.lease import LeaseEnd
from gk_core.metrics import LEASES_EXPIRED, NOTICES_IGNORED, NOTICES_LOST, PREFILL_TOKENS, REQUESTS_REFUSED
from gk_core.model_geometry import AttentionKind
from gk_core.notices import Claim, ClaimReply, ClaimVerdict, ProducerFailure, Reader, Release, ReleaseKind
from gk_core.peer_layout import PeerLayout
from gk_core.ports import GroupTables, PeerKey, PrefillModel
from gk_core.prefill_engine import PrefillEngine, PrefillSettings
from tests.builders import Consumer, Producer, World, make_fake_layout, make_small_geometry, make_tokens

ME = Reader(key=PeerKey(engine_id="D1", rank=0), pull_id="1")


def make_pair() -> tuple[World, Producer, Consumer, NoticeMailbox]:
    """A producer, and a consumer's mailbox that is connected to it, to send notices by hand."""
    world = World()
    producer, consumer = world.producer(), world.consumer()
    consumer.directory.resolve(engine_id="P1", endpoint=producer.endpoint)
    return world, producer, consumer, NoticeMailbox(port=consumer.transport)


def make_engine(
    world: World,
    producer: Producer,
    layout: PeerLayout,
    *,
    model: PrefillModel | None = None,
    block_bytes: BlockBytes | None = None,
) -> PrefillEngine:
    """Another engine over a producer's parts."""
    return PrefillEngine(
        layout=layout,
        endpoint=producer.endpoint,
        pool=producer.pool,
        model=model or producer.model,
        mailbox=NoticeMailbox(port=producer.transport),
        clock=world.clock,
        settings=PrefillSettings(max_num_batched_tokens=16),
        block_bytes=block_bytes,
    )


def claim(hand_off: HandOff, digest: str) -> Claim:
    return Claim(
        engine_id=hand_off.engine_id,
        request_id=hand_off.request_id,
        generation=hand_off.generation,
        reader=ME,
        sequence=9,
        digest=digest,
    )


def release(hand_off: HandOff, kind: ReleaseKind = ReleaseKind.DONE) -> Release:
    return Release(
        engine_id=hand_off.engine_id,
        request_id=hand_off.request_id,
        generation=hand_off.generation,
        reader=ME,
        kind=kind,
    )


def key(producer: Producer) -> PeerKey:
    return PeerKey(engine_id=producer.engine_id, rank=0)


def offered(hand_off: HandOff) -> dict[AttentionKind, range]:
    """Logical blocks of each group."""
    return {g.kind: range(g.first_logical, g.first_logical + len(g.block_ids)) for g in hand_off.groups}


class TestOffer:
    """What a hand-off holds."""

    @pytest.mark.parametrize(
        ("block_size", "n", "sliding", "full"),
        [
            (128, 127, range(1), range(1)),
            (128, 254, range(2), range(2)),
            (128, 255, range(2), range(2)),
            (128, 256, range(1, 2), range(2)),
            (128, 383, range(1, 3), range(3)),
            (16, 143, range(9), range(9)),
            (64, 191, range(3), range(3)),
            (256, 383, range(2), range(2)),
        ],
    )
    def test_it_offers_the_blocks_that_the_last_tokens_query_reads(
        self, block_size: int, n: int, sliding: range, full: range
    ) -> None:
        """Window 128; the lengths at which counting N computed tokens would lose a block among them."""
        world = World(geometry=make_small_geometry(sliding_window=128))
        producer = world.producer(layout=make_fake_layout(block_size=block_size, num_blocks=60))
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(n))
        assert offered(hand_off) == {AttentionKind.SLIDING: sliding, AttentionKind.FULL: full}
        assert hand_off.num_tokens == n - 1

    def test_it_names_everything_that_the_consumer_needs_to_find_it(self) -> None:
        """Whole value, literally; 17 tokens, 16 move, blocks of 16, window 16."""
        world = World()
        producer = world.producer()
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(17))
        assert evolve(hand_off, groups=()) == HandOff(
            engine_id="P1", request_id="r", generation=1, num_tokens=16, groups=(), host="prefill", port=5600,
            block_size=16, tp_size=1, dcp_size=1,
        )  # fmt: skip
        tables = producer.pool.tables(request_id="r")
        assert [g.block_ids for g in hand_off.groups] == [tables.sliding.block_ids, tables.full.block_ids]

    def test_a_prompt_of_one_token_is_handed_off_without_blocks_or_lease(self) -> None:
        """There is nothing to move."""
        producer = World().producer()
        hand_off = producer.engine.submit(request_id="r", token_ids=(7,))
        assert (hand_off.num_tokens, hand_off.generation) == (0, 0)
        assert [g.block_ids for g in hand_off.groups] == [(), ()]
        assert producer.engine.leases == ()
        assert producer.pool.num_free_blocks() == producer.total
        assert producer.model.chunks == []

    def test_all_but_the_last_token_are_computed_in_chunks(self) -> None:
        """101 tokens, chunks of 48: 48, 48 and 4."""
        producer = World().producer()
        producer.engine.submit(request_id="r", token_ids=make_tokens(101))
        assert producer.model.chunks == [(0, 48), (48, 48), (96, 4)]
        assert producer.metrics.counts[PREFILL_TOKENS] == 100

    def test_blocks_behind_the_window_go_back_before_the_lease_begins(self) -> None:
        """96 tokens, window 16: 6 full blocks and the sliding one that the next query reads stay; the last chunk, of 48
        tokens, had 4 sliding ones."""
        producer = World().producer()
        producer.engine.submit(request_id="r", token_ids=make_tokens(97))
        assert producer.total - producer.pool.num_free_blocks() == 6 + 1

    def test_checksums_come_along_when_the_engine_can_read_its_blocks(self) -> None:
        """One per block, half and head: 2 regions, 1 head."""
        producer = World().producer(checksums=True)
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(34))
        assert [len(c) for c in hand_off.checksums] == [2 * len(g.block_ids) for g in hand_off.groups]
        assert [len(g.block_ids) for g in hand_off.groups] == [2, 3]


class TestRefusal:
    """A request that cannot be served leaves nothing behind and harms no other."""

    @pytest.mark.parametrize(
        ("request_id", "tokens", "why"),
        [
            ("r", (), "a prompt has 1..131072 tokens, got 0"),
            ("r", (1, 251), "token id 251 at position 1 is outside 0..250"),
            ("r", (-1, 1), "token id -1 at position 0 is outside 0..250"),
            ("", (1, 2), "request id must be 1..256 characters"),
            ("a b", (1, 2), "request id must be 1..256 characters"),
            ("x" * 257, (1, 2), "request id must be 1..256 characters"),
            ("taken", (1, 2), "request 'taken' has a lease already"),
        ],
    )
    def test_a_bad_request_is_refused_by_name_before_anything_is_taken(
        self, request_id: str, tokens: tuple[int, ...], why: str
    ) -> None:
        """And counted."""
        producer = World().producer()
        producer.engine.submit(request_id="taken", token_ids=make_tokens(5))
        free = producer.pool.num_free_blocks()
        with pytest.raises(RequestError, match=why):
            producer.engine.submit(request_id=request_id, token_ids=tokens)
        assert producer.pool.num_free_blocks() == free
        assert producer.metrics.counts[REQUESTS_REFUSED] == 1

    def test_a_request_that_the_model_refuses_in_its_second_chunk_gives_its_blocks_back(self) -> None:
        """And the next one is served."""
        producer = World().producer(refused_tokens=frozenset({99}))
        tokens = [1] * 60
        tokens[50] = 99
        with pytest.raises(LayoutError, match="token 99"):
            producer.engine.submit(request_id="bad", token_ids=tokens)
        assert producer.pool.num_free_blocks() == producer.total
        assert producer.engine.submit(request_id="good", token_ids=[1] * 60).generation == 1

    def test_a_full_cache_is_a_capacity_error_and_works_again_after_a_release(self) -> None:
        """15 usable blocks: 100 tokens take 9, the second prompt must wait."""
        world = World()
        producer = world.producer(layout=make_fake_layout(num_blocks=16))
        producer.engine.submit(request_id="a", token_ids=make_tokens(101))
        with pytest.raises(CapacityError):
            producer.engine.submit(request_id="b", token_ids=make_tokens(101))
        assert producer.total - producer.pool.num_free_blocks() == 9
        world.clock.advance(10.0)
        producer.engine.poll()
        producer.engine.submit(request_id="b", token_ids=make_tokens(101))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("max_num_batched_tokens", 0), ("max_model_len", 0), ("lease_seconds", 0.0), ("lease_seconds", 601.0)],
    )
    def test_a_setting_out_of_range_is_refused_by_name(self, name: str, value: Any) -> None:
        """Naming field and value."""
        with pytest.raises(LayoutError, match=name):
            evolve(PrefillSettings(), **{name: value})

    def test_context_parallel_prefill_and_checksums_over_ranks_are_refused_at_start(self) -> None:
        """This engine does neither."""
        world = World()
        producer = world.producer()
        with pytest.raises(UnsupportedError, match="dcp_size 2"):
            make_engine(world, producer, evolve(producer.layout, tp_size=2, dcp_size=2))
        two_ranks = evolve(producer.layout, num_kv_heads=2, num_q_heads=2, tp_size=2)
        with pytest.raises(UnsupportedError, match="checksums"):
            make_engine(world, producer, two_ranks, block_bytes=producer.cache)


class TestLife:
    """From hand-off to free blocks."""

    def test_a_release_frees_the_blocks(self) -> None:
        """By the producer's request id."""
        _, producer, _, mailbox = make_pair()
        hand_off = producer.engine.submit(request_id="r-bb", token_ids=make_tokens(40))
        mailbox.send(peer=key(producer), notice=release(hand_off))
        (ended,) = producer.engine.poll()
        assert (ended.lease.request_id, ended.end) == ("r-bb", LeaseEnd.RELEASED)
        assert producer.pool.num_free_blocks() == producer.total
        assert producer.engine.poll() == ()

    def test_a_claim_is_answered_and_moves_the_expiry(self) -> None:
        """Granted at 0 for 10, claimed at 6: still held at 15.9, expired at 16."""
        world, producer, _, mailbox = make_pair()
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(40))
        (lease,) = producer.engine.leases
        world.clock.advance(6.0)
        mailbox.send(peer=key(producer), notice=claim(hand_off, lease.digest))
        producer.engine.poll()
        (reply,) = mailbox.take()
        assert isinstance(reply, ClaimReply)
        assert (reply.verdict, reply.valid_seconds, reply.sequence) == (ClaimVerdict.HELD, 10.0, 9)
        world.clock.advance(9.9)
        assert producer.engine.poll() == ()
        world.clock.advance(0.1)
        assert [e.end for e in producer.engine.poll()] == [LeaseEnd.EXPIRED]
        assert producer.metrics.counts[LEASES_EXPIRED] == 1
        assert producer.pool.num_free_blocks() == producer.total

    def test_a_claim_for_other_blocks_or_another_prompt_is_refused(self) -> None:
        """The digest is of tokens and blocks; a changed hand-off has another."""
        _, producer, _, mailbox = make_pair()
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(40))
        mailbox.send(peer=key(producer), notice=claim(hand_off, "00" * 32))
        producer.engine.poll()
        (reply,) = mailbox.take()
        assert isinstance(reply, ClaimReply)
        assert reply.verdict is ClaimVerdict.WRONG_OFFER
        assert producer.metrics.counts[NOTICES_IGNORED] == 1

    def test_cancelling_an_offer_that_nobody_claimed_frees_it_at_once(self) -> None:
        """Twice and for strangers it is harmless."""
        producer = World().producer()
        producer.engine.submit(request_id="r", token_ids=make_tokens(40))
        for request_id in ("r", "r", "stranger"):
            producer.engine.cancel(request_id=request_id)
        assert producer.pool.num_free_blocks() == producer.total
        assert [e.end for e in producer.engine.poll()] == [LeaseEnd.FAILED]

    def test_stopping_tells_every_reader_and_keeps_its_blocks_until_it_lets_go(self) -> None:
        """Blocks are not reused under a read."""
        _, producer, _, mailbox = make_pair()
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(40))
        free = producer.pool.num_free_blocks()
        (lease,) = producer.engine.leases
        mailbox.send(peer=key(producer), notice=claim(hand_off, lease.digest))
        producer.engine.poll()
        mailbox.take()
        producer.engine.cancel_all(reason="cache lost")
        (told,) = mailbox.take()
        assert isinstance(told, ProducerFailure)
        assert (told.request_id, told.pull_id, told.reason) == ("r", "1", "cache lost")
        assert producer.pool.num_free_blocks() == free
        mailbox.send(peer=key(producer), notice=release(hand_off, ReleaseKind.FAILED))
        assert [e.end for e in producer.engine.poll()] == [LeaseEnd.FAILED]
        assert producer.pool.num_free_blocks() == producer.total

    def test_an_answer_to_a_reader_that_has_gone_is_counted_and_harms_nothing(self) -> None:
        """Its lease runs out."""
        world, producer, consumer, mailbox = make_pair()
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(40))
        mailbox.send(peer=key(producer), notice=claim(hand_off, ""))
        world.fabric.kill(consumer.transport.name)
        producer.engine.poll()
        assert producer.metrics.counts[NOTICES_LOST] == 1
        world.clock.advance(10.0)
        assert len(producer.engine.poll()) == 1

    def test_notices_that_are_not_for_a_producer_are_ignored(self) -> None:
        """And garbage is dropped before it reaches the engine."""
        _, producer, consumer, mailbox = make_pair()
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(40))
        stray = ProducerFailure(
            engine_id="P1", request_id="r", generation=hand_off.generation, pull_id="1", rank=0, reason="?"
        )
        mailbox.send(peer=key(producer), notice=stray)
        consumer.transport.send_notice(peer=key(producer), payload=b"\xff\x00garbage")
        assert producer.engine.poll() == ()
        assert producer.metrics.counts[NOTICES_IGNORED] == 1
        assert producer.metrics.counts["gk_notices_bad_total"] == 1

    def test_notices_are_answered_between_the_chunks_of_a_long_prompt(self) -> None:
        """A claim that arrives while another prompt is being computed does not wait for its end."""
        world, producer, _, mailbox = make_pair()
        hand_off = producer.engine.submit(request_id="r", token_ids=make_tokens(40))
        (lease,) = producer.engine.leases
        heard: list[int] = []

        class Watching(PrefillModel):
            """Sends a claim while it computes its first chunk, and looks for the answer in later ones."""

            def prefill(self, *, token_ids: Sequence[int], start_position: int, tables: GroupTables) -> None:
                if start_position == 0:
                    mailbox.send(peer=key(producer), notice=claim(hand_off, lease.digest))
                heard.append(len(mailbox.take()))

        engine = make_engine(world, producer, producer.layout, model=Watching())
        engine.submit(request_id="long", token_ids=make_tokens(49))
        assert heard == [0, 1, 0]
