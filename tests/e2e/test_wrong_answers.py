"""Five ways in which others have answered with another request's bytes, and some more: no token here, and the reader
says why. Each runs with requests that fail and with requests that are replayed."""

from __future__ import annotations

import pytest
from attrs import evolve

from gk_adapters.fakes import FakeFabric, Landing, ReadFate
from gk_core.decode_request import DecodeSettings, FailedPull, FinishReason
from gk_core.errors import RequestError
from gk_core.hand_off import HandOff
from gk_core.metrics import PULL_BYTES, PULLS_DONE, PULLS_FAILED, TRANSFERRED_TOKENS
from gk_core.ports import ReadState
from gk_core.prefill_engine import PrefillSettings
from gk_core.transfer_plan import GroupBlocks
from tests.builders import Consumer, Producer, World, make_fake_layout, make_pull_settings, make_request, make_tokens

PROMPT = make_tokens(40, seed=1)
OTHER = make_tokens(40, seed=2)
BOTH = pytest.mark.parametrize("on_failed_pull", list(FailedPull))


def make_world(on_failed_pull: FailedPull, **settings: bool) -> tuple[World, Producer, Consumer]:
    world = World()
    chosen = DecodeSettings(on_failed_pull=on_failed_pull, pull=make_pull_settings(), **settings)
    return world, world.producer(checksums=settings.get("require_checksums", False)), world.consumer(settings=chosen)


def offer(producer: Producer, request_id: str = "p", prompt: tuple[int, ...] = PROMPT) -> HandOff:
    return producer.engine.submit(request_id=request_id, token_ids=prompt)


def change_block(hand_off: HandOff, group: int, entry: int, block_id: int) -> HandOff:
    """Another block id in one place."""
    ids = list(hand_off.groups[group].block_ids)
    ids[entry] = block_id
    groups: list[GroupBlocks] = list(hand_off.groups)
    groups[group] = evolve(groups[group], block_ids=tuple(ids))
    return evolve(hand_off, groups=tuple(groups))


def require_no_foreign_token(
    world: World, producer: Producer, consumer: Consumer, on_failed_pull: FailedPull, why: str
) -> None:
    """Run request 'r' to its end: it fails with a reason, or computes every token itself; either way nothing that was
    pulled was used, and the reader counted the failure."""
    used = consumer.metrics.counts[PULLS_DONE]
    world.run([producer], [consumer], seconds=0.25)
    (finished,) = consumer.finished("r")
    if on_failed_pull is FailedPull.FAIL:
        assert finished.reason is FinishReason.FAILED
        assert why in finished.error, finished.error
        assert finished.token_ids == consumer.emitted("r") == ()
    else:
        assert finished.token_ids == world.expected(PROMPT, 5, consumer.cache.layout)
        assert (finished.transferred_tokens, finished.recomputed_tokens) == (0, 39)
    assert consumer.metrics.counts[PULLS_DONE] == used
    assert consumer.metrics.counts[PULLS_FAILED] == 1
    world.clock.advance(100.0)
    producer.engine.poll()
    consumer.poll()
    assert consumer.pool.num_free_blocks() == consumer.total
    assert producer.pool.num_free_blocks() == producer.total


class TestTheFiveCases:
    """Unknown request, id out of range, reference used twice, used after recycling, lease over."""

    @BOTH
    def test_an_unknown_request(self, on_failed_pull: FailedPull) -> None:
        """Blocks of a live request under a name that the producer does not know."""
        world, producer, consumer = make_world(on_failed_pull)
        hand_off = evolve(offer(producer), request_id="stranger")
        consumer.engine.submit(make_request(hand_off, PROMPT))
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "unknown_request")

    @BOTH
    @pytest.mark.parametrize("block_id", [40, 41, 10_000, 2**31, 2**62])
    def test_a_block_id_out_of_range_in_the_right_shape(self, on_failed_pull: FailedPull, block_id: int) -> None:
        """The producer has blocks 0..39; no address is formed."""
        world, producer, consumer = make_world(on_failed_pull)
        hand_off = change_block(offer(producer), 1, 2, block_id)
        consumer.engine.submit(make_request(hand_off, PROMPT))
        require_no_foreign_token(
            world, producer, consumer, on_failed_pull, f"remote block id {block_id} does not exist; ids are below 40"
        )
        assert consumer.transport.reads_posted == 0

    @BOTH
    def test_one_reference_used_twice_here(self, on_failed_pull: FailedPull) -> None:
        """The first use is served; the second comes after it has finished."""
        world, producer, consumer = make_world(on_failed_pull)
        hand_off = offer(producer)
        consumer.engine.submit(make_request(hand_off, PROMPT, request_id="first"))
        world.run([producer], [consumer])
        assert consumer.emitted("first") == world.expected(PROMPT, 5, consumer.cache.layout)
        consumer.engine.submit(make_request(hand_off, PROMPT))
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "already_used")

    @BOTH
    def test_one_reference_used_by_two_engines_at_once(self, on_failed_pull: FailedPull) -> None:
        """The one that claims first is served, whoever reads first; the other learns it before any token."""
        world, producer, consumer = make_world(on_failed_pull)
        rival = world.consumer(engine_id="D2", name="rival", base_address=0x700_0000)
        hand_off = offer(producer)
        rival.engine.submit(make_request(hand_off, PROMPT, request_id="first"))
        consumer.engine.submit(make_request(hand_off, PROMPT))
        rival.poll()
        consumer.poll()
        assert consumer.transport.reads_posted == rival.transport.reads_posted == 1
        world.run([producer], [rival])
        assert rival.emitted("first") == world.expected(PROMPT, 5, rival.cache.layout)
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "already_used")

    @BOTH
    def test_a_reference_used_after_its_blocks_were_recycled(self, on_failed_pull: FailedPull) -> None:
        """The lease ran out and the same block ids, even the same request id, belong to another prompt."""
        world, producer, consumer = make_world(on_failed_pull)
        stale = offer(producer)
        world.clock.advance(10.0)
        producer.engine.poll()
        fresh = offer(producer, "p", OTHER)
        assert {b for g in fresh.groups for b in g.block_ids} & {b for g in stale.groups for b in g.block_ids}
        consumer.engine.submit(make_request(stale, PROMPT))
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "stale_generation")

    @BOTH
    def test_a_lease_that_is_over(self, on_failed_pull: FailedPull) -> None:
        """Nobody took the blocks yet; the reader cannot know that and does not use them."""
        world, producer, consumer = make_world(on_failed_pull)
        hand_off = offer(producer)
        world.clock.advance(10.0)
        producer.engine.poll()
        consumer.engine.submit(make_request(hand_off, PROMPT))
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "lease_over")

    @BOTH
    def test_a_lease_that_ends_while_the_read_is_under_way(self, on_failed_pull: FailedPull) -> None:
        """Freed at 30 s and reused; the read lands at 45 with the other prompt's bytes, and is thrown away."""
        world = World()
        producer = world.producer(settings=PrefillSettings(lease_seconds=30.0, max_lease_seconds=60.0))
        pull = make_pull_settings(deadline_seconds=60.0)
        consumer = world.consumer(settings=DecodeSettings(on_failed_pull=on_failed_pull, pull=pull))
        hand_off = offer(producer)
        consumer.engine.submit(make_request(hand_off, PROMPT))
        consumer.poll()
        # The claim is lost on its way: the producer never hears of the reader.
        producer.transport.take_notices()
        world.clock.advance(30.0)
        producer.engine.poll()
        assert producer.pool.num_free_blocks() == producer.total
        offer(producer, "other", OTHER)
        world.clock.advance(15.0)
        consumer.poll()
        assert consumer.transport.bytes_read > 0
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "lease_over")


class TestTampering:
    """A hand-off passes through a client; what the client changes does not pass."""

    @BOTH
    def test_a_block_of_another_live_request(self, on_failed_pull: FailedPull) -> None:
        """In range, leased, and not offered under this name: the claim's digest differs."""
        world, producer, consumer = make_world(on_failed_pull)
        mine, other = offer(producer), offer(producer, "other", OTHER)
        hand_off = change_block(mine, 1, 0, other.groups[1].block_ids[0])
        consumer.engine.submit(make_request(hand_off, PROMPT))
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "wrong_offer")

    @BOTH
    def test_another_prompt_of_the_same_length(self, on_failed_pull: FailedPull) -> None:
        """The answer to one prompt is not given for another."""
        world, producer, consumer = make_world(on_failed_pull)
        hand_off = offer(producer, "p", OTHER)
        consumer.engine.submit(make_request(hand_off, PROMPT))
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "wrong_offer")

    @BOTH
    @pytest.mark.parametrize("group", [0, 1])
    def test_groups_of_the_same_ids_cannot_be_exchanged(self, on_failed_pull: FailedPull, group: int) -> None:
        """The sliding group's ids in the full group's place: ids mean nothing without their group."""
        world, producer, consumer = make_world(on_failed_pull)
        hand_off = offer(producer)
        swapped = evolve(hand_off, groups=(hand_off.groups[1 - group], hand_off.groups[group]))
        if group == 1:
            swapped = evolve(
                hand_off,
                groups=tuple(
                    evolve(g, block_ids=o.block_ids, first_logical=o.first_logical)
                    for g, o in zip(hand_off.groups, reversed(hand_off.groups), strict=True)
                ),
            )
        consumer.engine.submit(make_request(swapped, PROMPT))
        why = "remote_group_kinds" if group == 0 else "logical blocks"
        require_no_foreign_token(world, producer, consumer, on_failed_pull, why)

    def test_an_id_that_no_machine_word_holds_is_refused_at_once(self) -> None:
        """2^63: a typed error and no crash."""
        world, producer, consumer = make_world(FailedPull.FAIL)
        with pytest.raises(RequestError, match=r"block ids of group full_attention must be below 2\^63"):
            consumer.engine.submit(make_request(change_block(offer(producer), 1, 0, 2**63), PROMPT))
        world.run([producer], [consumer])


class TestLyingTransport:
    """A transport that reports success and moves nothing is caught by checksums, where they are asked for."""

    @BOTH
    @pytest.mark.parametrize("landing", [Landing.NONE, Landing.HALF, Landing.LATE])
    def test_bytes_that_did_not_arrive_fail_the_pull(self, on_failed_pull: FailedPull, landing: Landing) -> None:
        """DONE with no bytes, with half of them, or before they land."""
        world, producer, consumer = make_world(on_failed_pull, require_checksums=True)
        world.fabric.script_reads(ReadFate(landing=landing, late_polls=50))
        consumer.engine.submit(make_request(offer(producer), PROMPT))
        require_no_foreign_token(world, producer, consumer, on_failed_pull, "does not have the checksum")

    def test_without_checksums_it_cannot_be_seen(self) -> None:
        """The same lie with checksums off gives a wrong token: so the test above tests something."""
        world, producer, consumer = make_world(FailedPull.FAIL)
        world.fabric.script_reads(ReadFate(landing=Landing.NONE))
        consumer.engine.submit(make_request(offer(producer), PROMPT))
        world.run([producer], [consumer])
        assert consumer.emitted("r") != world.expected(PROMPT, 5, consumer.cache.layout)

    def test_bytes_that_did_arrive_pass(self) -> None:
        """And are counted as transferred."""
        world, producer, consumer = make_world(FailedPull.FAIL, require_checksums=True)
        consumer.engine.submit(make_request(offer(producer), PROMPT))
        world.run([producer], [consumer])
        assert consumer.emitted("r") == world.expected(PROMPT, 5, consumer.cache.layout)
        assert consumer.metrics.counts[TRANSFERRED_TOKENS] == 39
        assert consumer.metrics.counts[PULL_BYTES] > 0

    def test_a_hand_off_that_lost_its_checksums_is_refused(self) -> None:
        """Leaving them out is no way around."""
        _, producer, consumer = make_world(FailedPull.FAIL, require_checksums=True)
        with pytest.raises(RequestError, match="checksums are required"):
            consumer.engine.submit(make_request(evolve(offer(producer), checksums=()), PROMPT))

    @pytest.mark.parametrize("drop", [0, 1])
    def test_checksums_in_the_wrong_number_are_refused(self, drop: int) -> None:
        """One list too few, or one sum too few."""
        world, producer, consumer = make_world(FailedPull.FAIL, require_checksums=True)
        hand_off = offer(producer)
        first, second = hand_off.checksums
        changed = (first,) if drop else (first, second[:-1])
        consumer.engine.submit(make_request(evolve(hand_off, checksums=changed), PROMPT))
        world.run([producer], [consumer])
        assert "checksums" in consumer.finished("r")[0].error


class TestTwoProducerRanks:
    """One consumer rank merges the heads of two producer ranks: two handles, two leases, one answer."""

    def make_ranks(self) -> tuple[World, list[Producer], Consumer]:
        from tests.builders import make_small_geometry

        world = World(fabric=FakeFabric(), geometry=make_small_geometry(num_kv_heads=2))
        ranks = [
            world.producer(
                name=f"prefill/{rank}", tp_size=2, tp_rank=rank, layout=make_fake_layout(num_kv_heads=1),
                base_address=0x10_0000 * (rank + 1),
            )
            for rank in (0, 1)
        ]  # fmt: skip
        return world, ranks, world.consumer(layout=make_fake_layout(num_kv_heads=2, num_blocks=50))

    def offer(self, ranks: list[Producer]) -> HandOff:
        """Ranks of one engine work in step: the same blocks and generations."""
        first, second = (offer(rank) for rank in ranks)
        assert first == second
        return first

    def test_heads_of_both_ranks_are_merged(self) -> None:
        """And both ranks get their blocks back."""
        world, ranks, consumer = self.make_ranks()
        consumer.engine.submit(make_request(self.offer(ranks), PROMPT))
        world.run(ranks, [consumer])
        assert consumer.emitted("r") == world.expected(PROMPT, 5, consumer.cache.layout)
        for rank in ranks:
            rank.engine.poll()
            assert rank.pool.num_free_blocks() == rank.total

    def test_blocks_stay_until_the_second_read_is_quiet_after_the_first_has_failed(self) -> None:
        """Failed and pending: held and not reported. Failed and done: reported once, released, both ranks told."""
        world, ranks, consumer = self.make_ranks()
        failed, slow = ReadFate(end=ReadState.FAILED), ReadFate(polls=6)
        world.fabric.script_reads(failed, slow, failed)
        consumer.engine.submit(make_request(self.offer(ranks), PROMPT))
        for _ in range(5):
            consumer.poll()
            assert consumer.finished("r") == []
            assert consumer.pool.num_free_blocks() < consumer.total
        world.run(ranks, [consumer])
        (finished,) = consumer.finished("r")
        assert "read 0 from P1/0 failed" in finished.error
        assert consumer.pool.num_free_blocks() == consumer.total
        for rank in ranks:
            rank.engine.poll()
            assert rank.pool.num_free_blocks() == rank.total

    def test_one_rank_that_never_answers_a_claim_is_enough_to_have_no_token(self) -> None:
        """The other rank's answer proves nothing of it."""
        world, ranks, consumer = self.make_ranks()
        consumer.engine.submit(make_request(self.offer(ranks), PROMPT))
        world.run(ranks[:1], [consumer], seconds=1.0)
        (finished,) = consumer.finished("r")
        assert "not complete within" in finished.error
        assert finished.token_ids == ()
