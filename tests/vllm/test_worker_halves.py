"""Leases and pulls of two workers: right bytes or a named failure, every block accounted for, on any network."""

from __future__ import annotations

import random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.fakes import FakeFabric, FaultRates, NoticeFate, ReadFate
from gk_adapters.vllm.transfer_orders import LeaseOrder, PullOrder
from gk_core.errors import LayoutError
from gk_core.kv_layout import KByteOrder
from gk_core.ports import ReadState
from gk_core.transfer_plan import GroupBlocks
from tests.builders import make_fake_layout, make_pull_settings
from tests.vllm.worker_pair import BLOCK, LEASE_SECONDS, ConsumerWorker, Pair, ProducerWorker

pytestmark = pytest.mark.vllm


def assert_arrived(
    consumer: ConsumerWorker, order: PullOrder, stamped: dict[tuple[str, int], bytes], *, from_logical: int = 0
) -> None:
    """Every offered block lies where the request's tables say, byte for byte."""
    for (kind, logical), data in stamped.items():
        if logical >= from_logical:
            assert consumer.bytes_of(order, kind, logical) == data, (kind, logical)


@pytest.mark.parametrize("prompt_len", [2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100])
def test_a_pull_brings_every_block_and_frees_the_producers(prompt_len: int) -> None:
    """Around every boundary of blocks and window of 16."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, stamped = producer.offer(prompt_len, request_id="p")
    producer.leases.grant(lease)
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=6)
    assert consumer.results["d"].reason == ""
    assert consumer.results["d"].missing_ids == frozenset()
    assert_arrived(consumer, order, stamped)
    assert producer.ended == ["p"]
    assert not consumer.pulls.has_work
    assert producer.leases.num_leases == 0


def test_a_claim_that_comes_before_its_lease_waits_for_it() -> None:
    """The scheduler's answer reached the client before its order reached the worker."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    first, lease_0, _ = producer.offer(20, request_id="p0")
    producer.leases.grant(lease_0)
    hand_off, lease, stamped = producer.offer(40, request_id="p1")
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=4, seconds=0.1)
    assert consumer.results == {}
    producer.leases.grant(lease)
    pair.run(producer, consumer, rounds=4, seconds=0.1)
    assert consumer.results["d"].reason == ""
    assert_arrived(consumer, order, stamped)
    assert first.generation + 1 == hand_off.generation


def test_a_claim_for_a_lease_that_never_comes_is_refused() -> None:
    """After five seconds; until then it costs nothing but the wait."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, _, _ = producer.offer(40, request_id="p")
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=4, seconds=1.0)
    assert consumer.results == {}
    pair.run(producer, consumer, rounds=4, seconds=1.0)
    assert "unknown_request" in consumer.results["d"].reason
    assert consumer.results["d"].missing_ids == order.awaited_ids(BLOCK)


def test_generations_follow_each_other() -> None:
    """An order that skips one is a fault of the program."""
    producer = ProducerWorker(Pair())
    _, lease, _ = producer.offer(20, request_id="p")
    producer.leases.grant(lease)
    with pytest.raises(LayoutError, match="generation 102 does not follow 100"):
        producer.leases.grant(evolve(lease, request_id="q", generation=102))


def test_a_read_that_ends_after_its_lease_is_thrown_away() -> None:
    """The producer has overwritten the blocks by then; the bytes came, and are not used."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, _ = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    pair.fabric.script_reads(ReadFate(polls=3))
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.fabric.script_notices(NoticeFate(), *[NoticeFate(copies=0)] * 2)
    consumer.poll()
    pair.clock.advance(LEASE_SECONDS + 1)
    producer.poll()
    assert producer.ended == ["p"]
    pair.run(producer, consumer, rounds=10, seconds=1.0)
    assert consumer.results["d"].reason != ""
    assert consumer.results["d"].missing_ids == order.awaited_ids(BLOCK)


def test_a_waiting_offers_lease_is_kept_warm() -> None:
    """A request waits for room four times as long as a lease; its pull then is good."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, stamped = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    offered = consumer.offered(hand_off, request_id="d")
    consumer.pulls.wait(offered)
    pair.run(producer, consumer, rounds=40, seconds=1.0)
    assert producer.ended == []
    order = consumer.order(offered)
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=4)
    assert consumer.results["d"].reason == ""
    assert_arrived(consumer, order, stamped)


def test_leases_end_in_any_order() -> None:
    """Claims move the first lease on; the second, granted later, expires before it."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    offers = [producer.offer(20, request_id=name) for name in ("kept", "forgotten")]
    for _, lease, _ in offers:
        producer.leases.grant(lease)
    consumer.pulls.wait(consumer.offered(offers[0][0], request_id="d"))
    pair.run(producer, consumer, rounds=15, seconds=1.0)
    assert producer.ended == ["forgotten"]


def test_a_declined_offer_is_given_back_at_once() -> None:
    """Long before its lease is over."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, _ = producer.offer(20, request_id="p")
    producer.leases.grant(lease)
    consumer.pulls.decline(consumer.offered(hand_off, request_id="d"))
    pair.run(producer, consumer, rounds=3)
    assert producer.ended == ["p"]
    assert not consumer.pulls.has_work


def test_an_aborted_pull_is_reported_when_it_is_quiet_and_not_before() -> None:
    """Its blocks are being written as long as the read is under way."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, _ = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    pair.fabric.script_reads(ReadFate(polls=6))
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=2)
    consumer.pulls.abort("d")
    pair.run(producer, consumer, rounds=2)
    assert consumer.results == {}
    pair.run(producer, consumer, rounds=6)
    assert consumer.results["d"].reason == "aborted"
    assert producer.ended == ["p"]


def test_an_abort_before_the_producer_was_found_is_reported_at_once() -> None:
    """And harmless for a request that has no pull."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, _ = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    consumer.pulls.abort("d")
    consumer.pulls.abort("nobody")
    pair.run(producer, consumer, rounds=3)
    assert consumer.results["d"].missing_ids == order.awaited_ids(BLOCK)
    assert producer.ended == ["p"]


def test_a_read_that_never_ends_gives_its_blocks_back_at_twice_the_deadline() -> None:
    """A frozen producer answers nothing and closes nothing; the next request finds it again."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    deadline = make_pull_settings().deadline_seconds
    hand_off, lease, _ = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    pair.fabric.script_reads(ReadFate(end=ReadState.PENDING))
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=3)
    pair.clock.advance(2 * deadline - 0.5)
    pair.run(None, consumer, rounds=3)
    assert consumer.results == {}
    pair.clock.advance(0.5)
    pair.run(None, consumer, rounds=3)
    assert consumer.results["d"].missing_ids == order.awaited_ids(BLOCK)
    assert f"not complete within {deadline:g} s" in consumer.results["d"].reason
    hand_off, lease, _ = producer.offer(40, request_id="p2")
    producer.leases.grant(lease)
    consumer.pulls.start(consumer.order(consumer.offered(hand_off, request_id="d2")))
    pair.run(producer, consumer, rounds=8)
    assert consumer.results["d2"].reason == ""


def test_a_dead_producer_fails_its_pulls_and_no_others() -> None:
    """P1 dies with a read under way; P2's pull is good."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, _ = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    pair.fabric.script_reads(ReadFate(end=ReadState.PENDING))
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=3)
    pair.fabric.kill("prefill")
    pair.run(None, consumer, rounds=3)
    assert consumer.results["d"].missing_ids == order.awaited_ids(BLOCK)
    other = ProducerWorker(pair, engine_id="P2", name="prefill-2")
    hand_off, lease, stamped = other.offer(40, request_id="p")
    other.leases.grant(lease)
    order = consumer.order(consumer.offered(hand_off, request_id="e"))
    consumer.pulls.start(order)
    pair.run(other, consumer, rounds=6, seconds=0.5)
    assert consumer.results["e"].reason == ""
    assert_arrived(consumer, order, stamped)


def test_a_producer_that_was_started_again_under_its_name_is_found_again() -> None:
    """The old start's agent is gone: at most the first pull fails, and by name; the next has the new start's bytes."""
    pair = Pair()
    first, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, _ = first.offer(40, request_id="p")
    first.leases.grant(lease)
    consumer.pulls.start(consumer.order(consumer.offered(hand_off, request_id="before")))
    pair.run(first, consumer, rounds=6, seconds=0.5)
    assert consumer.results["before"].reason == ""
    pair.fabric.kill("prefill")
    pair.board.hang_up(first.endpoint)
    again = ProducerWorker(pair)
    for request_id in ("d1", "d2"):
        hand_off, lease, stamped = again.offer(40, request_id=request_id)
        again.leases.grant(lease)
        order = consumer.order(consumer.offered(hand_off, request_id=request_id))
        consumer.pulls.start(order)
        pair.run(again, consumer, rounds=8, seconds=0.5)
    assert consumer.results["d1"].reason == "" or consumer.results["d1"].missing_ids
    assert consumer.results["d2"].reason == ""
    assert_arrived(consumer, order, stamped)


@pytest.mark.parametrize("keep_asking", [False, True])
def test_a_producer_that_is_not_there_yet_is_asked_again_where_asked_to(keep_asking: bool) -> None:
    """pull_again finds it once it is up; otherwise the first failure is the answer."""
    pair = Pair()
    consumer = ConsumerWorker(pair, keep_asking=keep_asking)
    elsewhere = Pair()
    hand_off, lease, stamped = ProducerWorker(elsewhere).offer(40, request_id="p")
    order = consumer.order(consumer.offered(hand_off, request_id="d"))
    consumer.pulls.start(order)
    pair.run(None, consumer, rounds=5, seconds=1.0)
    assert ("d" in consumer.results) is not keep_asking
    producer = ProducerWorker(pair)
    _, lease, stamped = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    pair.run(producer, consumer, rounds=8, seconds=0.5)
    if keep_asking:
        assert consumer.results["d"].reason == ""
        assert_arrived(consumer, order, stamped)
    else:
        assert "prefill" in consumer.results["d"].reason


def test_asking_again_ends_at_the_deadline() -> None:
    """Twenty seconds here."""
    pair = Pair()
    consumer = ConsumerWorker(pair, keep_asking=True)
    hand_off, _, _ = ProducerWorker(Pair()).offer(40, request_id="p")
    consumer.pulls.start(consumer.order(consumer.offered(hand_off, request_id="d")))
    pair.run(None, consumer, rounds=30, seconds=1.0)
    assert consumer.results["d"].missing_ids


def test_peers_with_other_caches_are_refused_by_field() -> None:
    """Packed K on one side: named, with both values, and nothing is read."""
    pair = Pair()
    producer = ProducerWorker(pair)
    consumer = ConsumerWorker(pair, layout=make_fake_layout(num_blocks=60, k_byte_order=KByteOrder.PAIR_PACKED))
    hand_off, lease, _ = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    consumer.pulls.start(consumer.order(consumer.offered(hand_off, request_id="d")))
    pair.run(producer, consumer, rounds=3)
    assert "k_byte_order: ours pair_packed, theirs token_major" in consumer.results["d"].reason


def test_cached_blocks_are_neither_read_nor_reported_missing() -> None:
    """Two blocks of three are here: the third comes, and when the pull fails only that one counts as missing."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, stamped = producer.offer(48, request_id="p")
    producer.leases.grant(lease)
    order = consumer.order(consumer.offered(hand_off, request_id="d"), num_cached_tokens=32)
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=5)
    assert consumer.results["d"].reason == ""
    assert_arrived(consumer, order, stamped, from_logical=2)
    assert set(consumer.bytes_of(order, "full_attention", 0)) == {0}
    full = next(g for g in order.local if g.kind.value == "full_attention")
    assert full.block_ids[0] not in order.awaited_ids(BLOCK)
    assert full.block_ids[2] in order.awaited_ids(BLOCK)


def test_more_tokens_than_are_on_offer_are_refused() -> None:
    """A scheduler that asks for what nobody has gets a failure, not somebody else's block."""
    pair = Pair()
    producer, consumer = ProducerWorker(pair), ConsumerWorker(pair)
    hand_off, lease, _ = producer.offer(40, request_id="p")
    producer.leases.grant(lease)
    order = evolve(consumer.order(consumer.offered(hand_off, request_id="d")), num_tokens=60)
    consumer.pulls.start(order)
    pair.run(producer, consumer, rounds=3)
    assert "60 tokens are wanted, 39 are on offer" in consumer.results["d"].reason


def test_awaited_ids_leave_out_nulls_and_the_cached_front() -> None:
    """Sliding [0, 0, 7], full [4, 5, 6], one block of 16 cached: 5, 6 and 7 are awaited."""
    pair = Pair()
    hand_off, _, _ = ProducerWorker(pair).offer(48, request_id="p")
    consumer = ConsumerWorker(pair)
    order = consumer.order(consumer.offered(hand_off, request_id="d"), num_cached_tokens=16)
    kinds = [g.kind for g in order.local]
    order = evolve(
        order,
        local=(
            GroupBlocks(kind=kinds[0], first_logical=0, block_ids=(0, 0, 7)),
            GroupBlocks(kind=kinds[1], first_logical=0, block_ids=(4, 5, 6)),
        ),
    )
    assert order.awaited_ids(16) == {5, 6, 7}


@given(seed=st.integers(0, 2**32), rates=st.sampled_from(["calm", "rough", "wild"]))
@settings(max_examples=60, deadline=None)
def test_whatever_the_network_does_a_good_pull_has_the_right_bytes(seed: int, rates: str) -> None:
    """Random requests, aborts, declines and faults: each pull ends once, good ones are byte-exact, all leases end."""
    rng = random.Random(seed)
    faults = {
        "calm": FaultRates(read_polls=3, notice_delay=2),
        "rough": FaultRates(read_fails=0.2, read_polls=4, notice_lost=0.2, notice_doubled=0.2, notice_delay=2),
        "wild": FaultRates(
            read_fails=0.3, read_polls=9, notice_lost=0.5, notice_doubled=0.3, notice_overtakes=0.5, notice_delay=4
        ),
    }[rates]
    pair = Pair(FakeFabric(rates=faults, seed=seed))
    layout = make_fake_layout(num_blocks=400)
    producer, consumer = ProducerWorker(pair, layout=layout), ConsumerWorker(pair, layout=layout)
    orders: dict[str, PullOrder] = {}
    stamps: dict[str, dict[tuple[str, int], bytes]] = {}
    late: list[LeaseOrder] = []
    for i in range(6):
        hand_off, lease, stamped = producer.offer(rng.randrange(2, 80), request_id=f"p{i}")
        if rng.random() < 0.3 or late:
            late.append(lease)
        else:
            producer.leases.grant(lease)
        offered = consumer.offered(hand_off, request_id=f"d{i}")
        if rng.random() < 0.2:
            consumer.pulls.decline(offered)
            continue
        consumer.pulls.wait(offered)
        pair.run(producer, consumer, rounds=rng.randrange(3), seconds=rng.random())
        orders[f"d{i}"], stamps[f"d{i}"] = consumer.order(offered), stamped
        consumer.pulls.start(orders[f"d{i}"])
        pair.run(producer, consumer, rounds=rng.randrange(4), seconds=rng.random() * 3)
        if rng.random() < 0.2:
            consumer.pulls.abort(f"d{i}")
    for lease in late:
        producer.leases.grant(lease)
    for _ in range(80):
        pair.run(producer, consumer, rounds=1, seconds=0.5)
        for request_id, result in consumer.results.items():
            if result.reason == "" and request_id in stamps:
                assert_arrived(consumer, orders[request_id], stamps.pop(request_id))
    assert set(consumer.results) == set(orders)
    for request_id, result in consumer.results.items():
        assert result.missing_ids == (orders[request_id].awaited_ids(BLOCK) if result.reason else frozenset())
    assert sorted(producer.ended) == [f"p{i}" for i in range(6)]
    if rates == "calm":
        assert all(r.reason in ("", "aborted") or "unknown" in r.reason for r in consumer.results.values())
