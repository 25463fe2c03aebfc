"""Two engines on a fake fabric, ready to talk: what the end-to-end tests of hand-off and pull start from.

The model is two layers, one KV head, head size 2, blocks of 16 tokens and a window of 16 (so that short prompts cross
it); the numbers of `FakeKernel` apply.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from attrs import define, field

from gk_adapters.fakes import (
    VOCAB_SIZE,
    FakeBlockPool,
    FakeCallBuilder,
    FakeClock,
    FakeFabric,
    FakeKernel,
    FakeKVCache,
    FakePrefill,
    FakeSampler,
    FakeSideChannel,
    FakeSideChannelServer,
    FakeSwitchboard,
    FakeTensor,
    FakeTransport,
    greedy_tokens,
)
from gk_adapters.peer_directory import DirectorySettings, HandshakeServer, NoticeMailbox, PeerDirectory
from gk_core.decode_engine import DecodeEngine
from gk_core.decode_request import DecodeEvent, DecodeRequest, DecodeSettings, RequestFinished, TokenEmitted
from gk_core.decode_step import AttentionControl, ControlShape, DecodeRow, build_attention_control
from gk_core.disaggregation import Role
from gk_core.hand_off import HandOff
from gk_core.handshake import PeerHello
from gk_core.kv_layout import KByteOrder, KVLayout
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import ModelGeometry, YarnRope, alternating_kinds
from gk_core.peer_layout import PeerLayout, describe_rank
from gk_core.ports import Endpoint, Metrics
from gk_core.prefill_engine import PrefillEngine, PrefillSettings
from gk_core.pull import PullSettings

__all__ = [
    "Consumer",
    "CountingMetrics",
    "Producer",
    "World",
    "make_fake_layout",
    "make_pull_settings",
    "make_request",
    "make_small_geometry",
    "make_tokens",
]

WINDOW = 16

ControlBuilder = Callable[[Sequence[DecodeRow | None], ControlShape], AttentionControl]


class CountingMetrics(Metrics):
    """Counters and observed values, to look at."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.values: dict[str, list[float]] = {}

    def count(self, *, name: str, value: float = 1.0) -> None:
        """See `Metrics.count`."""
        self.counts[name] += int(value)

    def observe(self, *, name: str, value: float) -> None:
        """See `Metrics.observe`."""
        self.values.setdefault(name, []).append(value)


def make_small_geometry(*, sliding_window: int = WINDOW, num_layers: int = 2, num_kv_heads: int = 1) -> ModelGeometry:
    """The model above."""
    return ModelGeometry(
        num_layers=num_layers, hidden_size=6, intermediate_size=10, num_q_heads=num_kv_heads * 3,
        num_kv_heads=num_kv_heads, head_size=2, num_experts=5, experts_per_token=4, sliding_window=sliding_window,
        vocab_size=VOCAB_SIZE, max_position=4096, attention_kinds=alternating_kinds(num_layers),
        rope=YarnRope(theta=150_000.0, factor=32.0, original_max_position=4096),
    )  # fmt: skip


def make_fake_layout(
    *,
    num_blocks: int = 40,
    block_size: int = 16,
    k_byte_order: KByteOrder = KByteOrder.TOKEN_MAJOR,
    num_layers: int = 2,
    num_kv_heads: int = 1,
) -> KVLayout:
    """The cache above: one byte per element."""
    return KVLayout(
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_size=2,
        dtype=KVDtype.FP8_E4M3FN,
        k_byte_order=k_byte_order,
    )


def make_tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt; the same for the same count and seed."""
    rng = random.Random(seed * 1_000_003 + count)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def make_pull_settings(
    *,
    deadline_seconds: float = 20.0,
    claim_interval_seconds: float = 3.0,
    reply_timeout_seconds: float = 1.0,
    max_attempts: int = 2,
    confirm_after_read: bool = False,
) -> PullSettings:
    """Short times, to go with a lease of ten seconds."""
    return PullSettings(
        deadline_seconds=deadline_seconds,
        claim_interval_seconds=claim_interval_seconds,
        reply_timeout_seconds=reply_timeout_seconds,
        max_attempts=max_attempts,
        confirm_after_read=confirm_after_read,
    )


@define(eq=False)
class Producer:
    """A prefill engine and everything it stands on."""

    engine: PrefillEngine
    engine_id: str
    cache: FakeKVCache
    pool: FakeBlockPool
    model: FakePrefill
    transport: FakeTransport
    server: FakeSideChannelServer
    endpoint: Endpoint
    metrics: CountingMetrics
    layout: PeerLayout
    total: int


@define(eq=False)
class Consumer:
    """A decode engine and everything it stands on; `events` are all that its polls returned."""

    engine: DecodeEngine[FakeTensor]
    cache: FakeKVCache
    pool: FakeBlockPool
    kernel: FakeKernel
    transport: FakeTransport
    directory: PeerDirectory
    metrics: CountingMetrics
    layout: PeerLayout
    total: int
    events: list[DecodeEvent] = field(factory=list)

    def poll(self) -> tuple[DecodeEvent, ...]:
        """Poll once and keep what came."""
        events = self.engine.poll()
        self.events += events
        return events

    def finished(self, request_id: str) -> list[RequestFinished]:
        """Outcomes of one request."""
        return [e for e in self.events if isinstance(e, RequestFinished) and e.request_id == request_id]

    def emitted(self, request_id: str) -> tuple[int, ...]:
        """Tokens of one request, as they were streamed."""
        return tuple(e.token_id for e in self.events if isinstance(e, TokenEmitted) and e.request_id == request_id)


class World:
    """A clock, a network and the engines on it.

    Args:
        fabric: network; a perfect one by default.
        geometry: model.
    """

    def __init__(self, *, fabric: FakeFabric | None = None, geometry: ModelGeometry | None = None) -> None:
        self.clock = FakeClock()
        self.fabric = fabric or FakeFabric()
        self.board = FakeSwitchboard()
        self.geometry = geometry or make_small_geometry()

    def producer(
        self,
        *,
        engine_id: str = "P1",
        name: str = "prefill",
        port: int = 5600,
        layout: KVLayout | None = None,
        settings: PrefillSettings | None = None,
        checksums: bool = False,
        refused_tokens: frozenset[int] = frozenset(),
        base_address: int = 0x10_0000,
        first_generation: int = 1,
        tp_size: int = 1,
        tp_rank: int = 0,
    ) -> Producer:
        """A producer that listens; rank r of an engine of several listens on port + r."""
        layout = layout or make_fake_layout()
        cache = FakeKVCache(layout, base_address=base_address)
        pool = FakeBlockPool(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            sliding_window=self.geometry.sliding_window,
        )
        total = pool.num_free_blocks()
        described = describe_rank(
            self.geometry, layout, engine_id=engine_id, role=Role.PREFILL, tp_size=tp_size, tp_rank=tp_rank
        )
        transport = FakeTransport(self.fabric, name=name, memories=cache.memories)
        hello = PeerHello(
            layout=described, agent_metadata=transport.register(regions=cache.regions), regions=cache.regions
        )
        host = name.partition("/")[0]
        server = FakeSideChannelServer(self.board, host=host, port=port + tp_rank)
        answers = HandshakeServer(hellos={tp_rank: hello}, transports={tp_rank: transport})
        server.serve(handler=answers.handle)
        endpoint = Endpoint(host=host, port=port)
        metrics = CountingMetrics()
        model = FakePrefill(cache, refused_tokens=refused_tokens, first_head=tp_rank * layout.num_kv_heads)
        engine = PrefillEngine(
            layout=described,
            endpoint=endpoint,
            pool=pool,
            model=model,
            mailbox=NoticeMailbox(port=transport, metrics=metrics),
            clock=self.clock,
            settings=settings or PrefillSettings(lease_seconds=10.0, max_lease_seconds=60.0, max_num_batched_tokens=48),
            metrics=metrics,
            block_bytes=cache if checksums else None,
            first_generation=first_generation,
        )
        return Producer(engine, engine_id, cache, pool, model, transport, server, endpoint, metrics, described, total)

    def consumer(
        self,
        *,
        engine_id: str = "D1",
        name: str = "decode",
        num_rows: int = 4,
        layout: KVLayout | None = None,
        max_model_len: int = 512,
        settings: DecodeSettings | None = None,
        nan_tokens: frozenset[int] = frozenset(),
        refused_tokens: frozenset[int] = frozenset(),
        base_address: int = 0x90_0000,
        build_control: ControlBuilder = build_attention_control,
        pool: FakeBlockPool | None = None,
        start_id: str = "",
    ) -> Consumer:
        """A consumer that knows nobody yet."""
        layout = layout or make_fake_layout(num_blocks=50)
        cache = FakeKVCache(layout, base_address=base_address)
        pool = pool or FakeBlockPool(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            sliding_window=self.geometry.sliding_window,
        )
        total = pool.num_free_blocks()
        shape = ControlShape(
            num_rows=num_rows,
            block_size=layout.block_size,
            sliding_window=self.geometry.sliding_window,
            max_model_len=max_model_len,
        )
        described = describe_rank(self.geometry, layout, engine_id=engine_id, role=Role.DECODE, tp_size=1, tp_rank=0)
        transport = FakeTransport(self.fabric, name=name, memories=cache.memories)
        hello = PeerHello(
            layout=described, agent_metadata=transport.register(regions=cache.regions), regions=cache.regions
        )
        directory = PeerDirectory(
            hello=hello,
            channel=FakeSideChannel(self.board),
            transport=transport,
            clock=self.clock,
            settings=DirectorySettings(background=False),
        )
        metrics = CountingMetrics()
        kernel = FakeKernel(layout, shape, nan_tokens=nan_tokens, refused_tokens=refused_tokens)
        engine = DecodeEngine(
            layout=described,
            shape=shape,
            pool=pool,
            transport=transport,
            mailbox=NoticeMailbox(port=transport, metrics=metrics),
            peers=directory,
            kernel=kernel,
            builder=FakeCallBuilder(cache, shape),
            sampler=FakeSampler(),
            clock=self.clock,
            settings=settings or DecodeSettings(pull=make_pull_settings()),
            metrics=metrics,
            block_bytes=cache,
            build_control=build_control,
            start_id=start_id,
        )
        return Consumer(engine, cache, pool, kernel, transport, directory, metrics, described, total)

    def run(
        self,
        producers: Sequence[Producer],
        consumers: Sequence[Consumer],
        *,
        seconds: float = 0.0,
        most: int = 400,
        until: Callable[[], bool] | None = None,
    ) -> None:
        """Poll everybody, `seconds` of the clock apart, until the consumers have nothing left to do."""
        for _ in range(most):
            for consumer in consumers:
                consumer.poll()
            for producer in producers:
                if not producer.transport.is_dead:
                    producer.engine.poll()
            if until() if until else not any(c.engine.has_work for c in consumers):
                return
            self.clock.advance(seconds)
        raise AssertionError(f"still at work after {most} polls")

    def expected(self, prompt: Sequence[int], count: int, layout: KVLayout) -> tuple[int, ...]:
        """The tokens that a right engine generates."""
        return greedy_tokens(prompt, layout, sliding_window=self.geometry.sliding_window, count=count)


def make_request(
    hand_off: HandOff | None,
    prompt: Sequence[int],
    *,
    request_id: str = "r",
    max_new_tokens: int = 5,
    eos_ids: frozenset[int] = frozenset(),
) -> DecodeRequest:
    """A request for `max_new_tokens` tokens."""
    return DecodeRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        hand_off=hand_off,
    )
