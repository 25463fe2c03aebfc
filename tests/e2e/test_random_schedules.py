"""Random schedules over the fakes: whatever goes wrong, no wrong token, no lost block, one outcome per request."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from attrs import define, evolve

from gk_adapters.fakes import FakeFabric, FaultRates
from gk_core.decode_request import DecodeSettings, FailedPull, FinishReason
from gk_core.errors import CapacityError, RequestError
from gk_core.hand_off import HandOff
from gk_core.prefill_engine import PrefillSettings
from gk_core.transfer_plan import GroupBlocks
from tests.builders import Consumer, Producer, World, make_fake_layout, make_pull_settings, make_request, make_tokens

FIRST_GENERATION = 1_000
NEW_TOKENS = 3


@define(eq=False)
class Offer:
    """A hand-off and the prompt it is honest about."""

    hand_off: HandOff
    prompt: tuple[int, ...]


class Schedule:
    """One run: random faults, random actions, then a quiet end in which everything must come home."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        rates = FaultRates(
            read_fails=rng.choice([0.0, 0.15]),
            read_stalls=rng.choice([0.0, 0.1]),
            read_lies=rng.choice([0.0, 0.2]),
            read_polls=rng.choice([1, 4]),
            notice_lost=rng.choice([0.0, 0.3]),
            notice_doubled=rng.choice([0.0, 0.3]),
            notice_overtakes=rng.choice([0.0, 0.3]),
            notice_delay=rng.choice([0, 3]),
        )
        self.checksums = rates.read_lies > 0.0 or rng.random() < 0.3
        self.world = World(fabric=FakeFabric(rates=rates, seed=seed, disconnect_ends_reads=rng.choice([True, False])))
        self.starts = 0
        self.producers = {name: self.start_producer(name) for name in ("p0", "p1")[: rng.choice([1, 2])]}
        self.consumers = [self.start_consumer(name) for name in ("d0", "d1")[: rng.choice([1, 1, 2])]]
        self.offers: list[Offer] = []
        self.prompts: dict[tuple[int, str], tuple[int, ...]] = {}
        self.counts: Counter[str] = Counter()

    def start_producer(self, name: str) -> Producer:
        """A fresh start under a name; half of the restarts even keep the engine id."""
        self.starts += 1
        index = int(name[1])
        return self.world.producer(
            engine_id=f"{name}-{self.rng.choice([0, self.starts])}",
            name=name,
            port=5600 + index,
            layout=make_fake_layout(num_blocks=16),
            settings=PrefillSettings(lease_seconds=10.0, max_lease_seconds=40.0, max_num_batched_tokens=32),
            checksums=self.checksums,
            base_address=0x10_0000 * (1 + index),
            first_generation=FIRST_GENERATION * self.starts,
        )

    def start_consumer(self, name: str) -> Consumer:
        """A consumer with few blocks and rows, so that requests wait; a restart keeps the engine id."""
        self.starts += 1
        settings = DecodeSettings(
            on_failed_pull=self.rng.choice([FailedPull.FAIL, FailedPull.REPLAY]),
            pull=make_pull_settings(confirm_after_read=self.rng.random() < 0.3),
            max_ahead=self.rng.choice([0, 2]),
            require_checksums=self.checksums,
        )
        index = int(name[1])
        return self.world.consumer(
            engine_id=name,
            name=name,
            num_rows=2,
            layout=make_fake_layout(num_blocks=24),
            settings=settings,
            base_address=0x900_0000 * (1 + index),
            start_id=f"{self.starts}.",
        )

    def act(self) -> None:
        """One random thing."""
        rng, number = self.rng, len(self.prompts)
        action = rng.choices(
            ["poll", "prefill", "decode", "again", "tampered", "cancel", "withdraw", "restart", "crash", "time"],
            [10, 3, 4, 1, 1, 1, 0.5, 0.4, 0.3, 2],
        )[0]
        self.counts[action] += 1
        producer = rng.choice(list(self.producers.values()))
        index = rng.randrange(len(self.consumers))
        if action == "prefill":
            self.prefill(producer)
        elif action == "decode" and self.offers:
            self.decode(index, self.offers.pop(rng.randrange(len(self.offers))), keep=rng.random() < 0.2)
        elif action == "again" and self.offers:
            self.decode(index, rng.choice(self.offers), keep=True)
        elif action == "tampered" and self.offers:
            offer = rng.choice(self.offers)
            self.decode(index, Offer(self.tampered(offer.hand_off), offer.prompt), keep=True)
        elif action == "cancel" and number:
            self.consumers[index].engine.cancel(request_id=f"r{rng.randrange(number)}")
        elif action == "withdraw" and self.offers:
            producer.engine.cancel(request_id=rng.choice(self.offers).hand_off.request_id)
        elif action == "restart":
            self.restart(rng.choice(list(self.producers)))
        elif action == "crash":
            self.crash(index)
        elif action == "time":
            self.world.clock.advance(rng.choice([0.5, 2.0, 12.0]))
        self.poll()

    def restart(self, name: str) -> None:
        """A producer dies and comes back."""
        self.world.fabric.kill(name)
        self.producers[name].server.close()
        self.producers[name] = self.start_producer(name)

    def crash(self, index: int) -> None:
        """A consumer dies and comes back; its requests died with it, and what they had said was right."""
        dead = self.consumers[index]
        self.world.fabric.kill(dead.transport.name)
        for (at, request_id), prompt in list(self.prompts.items()):
            if at == index:
                said = dead.emitted(request_id)
                assert said == self.world.expected(prompt, NEW_TOKENS, dead.cache.layout)[: len(said)]
                self.prompts[-2, request_id] = self.prompts.pop((at, request_id))
        self.consumers[index] = self.start_consumer(f"d{index}")

    def poll(self) -> None:
        """Everybody once, in random order."""
        everybody: list[Consumer | Producer] = [*self.consumers, *self.producers.values()]
        self.rng.shuffle(everybody)
        for one in everybody:
            if isinstance(one, Producer):
                one.engine.poll()
            else:
                one.poll()

    def prefill(self, producer: Producer) -> None:
        """Offer a prompt; the producer may be full."""
        prompt = make_tokens(self.rng.choice([1, 2, 15, 16, 17, 31, 32, 33, 40]), seed=self.rng.randrange(50))
        request_id = f"p{self.rng.randrange(6)}"
        try:
            hand_off = producer.engine.submit(request_id=request_id, token_ids=prompt)
        except (CapacityError, RequestError):
            self.counts["not prefilled"] += 1
            return
        self.offers.append(Offer(hand_off, prompt))

    def decode(self, index: int, offer: Offer, *, keep: bool) -> None:
        """Submit an offer; `keep` leaves it for a second use."""
        if keep and offer not in self.offers:
            self.offers.append(offer)
        request_id = f"r{len(self.prompts)}"
        request = make_request(offer.hand_off, offer.prompt, request_id=request_id, max_new_tokens=NEW_TOKENS)
        try:
            self.consumers[index].engine.submit(request)
        except RequestError:
            self.counts["refused"] += 1
            self.prompts[-1, request_id] = ()
            return
        self.prompts[index, request_id] = offer.prompt

    def tampered(self, hand_off: HandOff) -> HandOff:
        """What a wrong client makes of a hand-off."""
        rng = self.rng
        kind = rng.choice(["request", "generation", "engine", "range", "foreign", "first", "swap", "checksums"])
        if kind == "checksums":
            return evolve(hand_off, checksums=())
        if kind == "request":
            return evolve(hand_off, request_id=f"p{rng.randrange(9)}")
        if kind == "generation":
            return evolve(hand_off, generation=hand_off.generation + rng.choice([-1, 1, 500]))
        if kind == "engine":
            return evolve(hand_off, engine_id="p0-0")
        groups: list[GroupBlocks] = list(hand_off.groups)
        if kind == "swap":
            return evolve(hand_off, groups=tuple(reversed(groups)))
        which = rng.randrange(2)
        if kind in ("range", "foreign") and groups[which].block_ids:
            other = rng.choice([16, 99, 2**30]) if kind == "range" else rng.randrange(1, 16)
            ids = (*groups[which].block_ids[:-1], other)
            groups[which] = evolve(groups[which], block_ids=ids)
        else:
            groups[which] = evolve(groups[which], first_logical=groups[which].first_logical + 5)
        return evolve(hand_off, groups=tuple(groups))

    def wind_down(self) -> None:
        """The network turns perfect, time passes, and all come home; stalled reads too, once their peer is let go, or
        has been started anew where letting go ends no read."""
        self.world.fabric.rates = FaultRates()
        for turn in range(200):
            if turn == 100 and not self.world.fabric.disconnect_ends_reads:
                for name in self.producers:
                    self.restart(name)
            self.poll()
            self.world.clock.advance(0.5)
            if not any(c.engine.has_work for c in self.consumers):
                break
        self.world.clock.advance(100.0)
        self.poll()
        assert not any(c.engine.has_work for c in self.consumers)

    def check(self) -> None:
        """Blocks, outcomes, tokens."""
        for producer in self.producers.values():
            assert producer.engine.leases == ()
            assert producer.pool.num_free_blocks() == producer.total
        for consumer in self.consumers:
            assert consumer.pool.num_free_blocks() == consumer.total
        for (index, request_id), prompt in self.prompts.items():
            if index < 0:
                assert all(not c.finished(request_id) for c in self.consumers)
                continue
            consumer = self.consumers[index]
            (finished,) = consumer.finished(request_id)
            right = self.world.expected(prompt, NEW_TOKENS, consumer.cache.layout)
            assert finished.token_ids == consumer.emitted(request_id)
            assert finished.token_ids == right[: len(finished.token_ids)], (request_id, finished, right)
            assert (finished.reason is FinishReason.LENGTH) is (len(finished.token_ids) == NEW_TOKENS)
            assert bool(finished.error) is (finished.reason is FinishReason.FAILED)
            self.counts[finished.reason.value] += 1


def run_schedules(seeds: range) -> Counter[str]:
    """Run them and count what happened, so that a schedule which tests nothing is noticed."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            for _ in range(40):
                schedule.act()
            schedule.wind_down()
            schedule.check()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        counts += schedule.counts
    return counts


def test_three_hundred_schedules_give_no_wrong_token_and_lose_no_block() -> None:
    """Seeds 0..299, and all outcomes do occur."""
    counts = run_schedules(range(300))
    for outcome, least in (
        ("length", 300),
        ("failed", 100),
        ("cancelled", 20),
        ("refused", 20),
        ("restart", 100),
        ("crash", 50),
    ):
        assert counts[outcome] >= least, counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", range(0, 10_000, 1000))
def test_ten_thousand_schedules_give_no_wrong_token_and_lose_no_block(start: int) -> None:
    """Seeds 0..9999."""
    run_schedules(range(start, start + 1000))
