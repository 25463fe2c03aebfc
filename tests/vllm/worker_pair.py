"""A producer's and a consumer's worker half on a fake network that moves real bytes, driven poll by poll."""

from __future__ import annotations

import random

from gk_adapters.fakes import (
    FakeClock,
    FakeFabric,
    FakeKVCache,
    FakeSideChannel,
    FakeSideChannelServer,
    FakeSwitchboard,
    FakeTransport,
)
from gk_adapters.peer_codec import encode_hello
from gk_adapters.peer_directory import DirectorySettings, HandshakeServer, NoticeMailbox, PeerDirectory
from gk_adapters.vllm.introductions import IntroducingTransport, take_notices
from gk_adapters.vllm.transfer_orders import LeaseOrder, Offered, PullOrder
from gk_adapters.vllm.worker_leases import WorkerLeases
from gk_adapters.vllm.worker_pulls import PullResult, WorkerPulls
from gk_core.disaggregation import Role, needed_range
from gk_core.hand_off import HandOff
from gk_core.handshake import PeerHello
from gk_core.integrity import offer_digest
from gk_core.kv_layout import KVHalf, KVLayout
from gk_core.model_geometry import AttentionKind
from gk_core.notices import Claim, Release
from gk_core.peer_layout import describe_rank
from gk_core.ports import Endpoint, PeerKey
from gk_core.transfer_plan import GroupBlocks
from tests.builders import (
    WINDOW,
    CountingMetrics,
    make_fake_layout,
    make_pull_settings,
    make_small_geometry,
    make_tokens,
)

__all__ = ["BLOCK", "LEASE_SECONDS", "ConsumerWorker", "Pair", "ProducerWorker"]

BLOCK, LEASE_SECONDS = 16, 10.0


class ProducerWorker:
    """A producer's worker half; freed blocks are overwritten at once, as a busy pool would."""

    def __init__(
        self, pair: Pair, *, engine_id: str = "P1", name: str = "prefill", layout: KVLayout | None = None
    ) -> None:
        self.engine_id = engine_id
        self.endpoint = Endpoint(host=name, port=5600)
        self.layout = layout or make_fake_layout()
        self.cache = FakeKVCache(self.layout, base_address=0x10_0000)
        self.metrics = CountingMetrics()
        self.transport = FakeTransport(pair.fabric, name=name, memories=self.cache.memories)
        described = describe_rank(
            make_small_geometry(), self.layout, engine_id=engine_id, role=Role.PREFILL, tp_size=1, tp_rank=0
        )
        hello = PeerHello(
            layout=described,
            agent_metadata=self.transport.register(regions=self.cache.regions),
            regions=self.cache.regions,
        )
        self.handshakes = HandshakeServer(hellos={0: hello}, transports={0: self.transport})
        # As in vLLM: the side channel hands out what was said at start-up and tells the worker nothing of who asked.
        server = FakeSideChannelServer(pair.board, host=name, port=self.endpoint.port)
        server.serve(handler=lambda message: encode_hello(hello))
        self.leases = WorkerLeases(
            key=PeerKey(engine_id=engine_id, rank=0),
            mailbox=NoticeMailbox(port=self.transport, metrics=self.metrics),
            clock=pair.clock,
            metrics=self.metrics,
            max_lifetime_seconds=60.0,
        )
        self.ended: list[str] = []
        self._rng = random.Random(5)
        self._next_block, self._next_generation = 1, 100
        self._blocks: dict[str, tuple[int, ...]] = {}

    def offer(self, prompt_len: int, *, request_id: str) -> tuple[HandOff, LeaseOrder, dict[tuple[str, int], bytes]]:
        """A hand-off of fresh blocks, the order for its lease, and its bytes by (group kind, logical block)."""
        tokens = prompt_len - 1
        groups, stamped = [], {}
        for kind, window in ((AttentionKind.SLIDING, WINDOW), (AttentionKind.FULL, None)):
            needed = needed_range(tokens, window, BLOCK)
            ids = tuple(range(self._next_block, self._next_block + len(needed)))
            self._next_block += len(needed)
            groups.append(GroupBlocks(kind=kind, first_logical=needed.start, block_ids=ids))
            for logical, block in zip(needed, ids, strict=True):
                stamped[kind.value, logical] = self.fill(block)
        self._blocks[request_id] = tuple(b for g in groups for b in g.block_ids)
        hand_off = HandOff(
            engine_id=self.engine_id, request_id=request_id, generation=self._next_generation, num_tokens=tokens,
            groups=tuple(groups), host=self.endpoint.host, port=self.endpoint.port, block_size=BLOCK, tp_size=1,
            dcp_size=1,
        )  # fmt: skip
        self._next_generation += 1
        order = LeaseOrder(
            request_id=request_id,
            generation=hand_off.generation,
            groups=hand_off.groups,
            digest=offer_digest(make_tokens(prompt_len)[:-1], hand_off.groups),
            ttl_seconds=LEASE_SECONDS,
        )
        return hand_off, order, stamped

    def fill(self, block: int) -> bytes:
        """New random bytes in every region of a block."""
        data = b""
        for buffer in range(self.layout.num_buffers):
            for half in KVHalf:
                part = self._rng.randbytes(self.layout.block_bytes)
                self.cache.block(buffer, half, block)[:] = part
                data += part
        return data

    def poll(self) -> None:
        """One round of the worker."""
        for notice in take_notices(port=self.transport, handshakes=self.handshakes, metrics=self.metrics):
            if isinstance(notice, Claim | Release):
                self.leases.answer(notice)
        for request_id in self.leases.take_ended():
            self.ended.append(request_id)
            for block in self._blocks[request_id]:
                self.fill(block)


class ConsumerWorker:
    """A consumer's worker half."""

    def __init__(self, pair: Pair, *, keep_asking: bool = False, layout: KVLayout | None = None) -> None:
        self.layout = layout or make_fake_layout(num_blocks=60)
        self.cache = FakeKVCache(self.layout, base_address=0x90_0000)
        self.metrics = CountingMetrics()
        self.transport = FakeTransport(pair.fabric, name="decode", memories=self.cache.memories)
        described = describe_rank(
            make_small_geometry(), self.layout, engine_id="D1", role=Role.DECODE, tp_size=1, tp_rank=0
        )
        hello = PeerHello(
            layout=described,
            agent_metadata=self.transport.register(regions=self.cache.regions),
            regions=self.cache.regions,
        )
        introducing = IntroducingTransport(transport=self.transport, notices=self.transport)
        introducing.hello = encode_hello(hello)
        self.directory = PeerDirectory(
            hello=hello,
            channel=FakeSideChannel(pair.board),
            transport=introducing,
            clock=pair.clock,
            settings=DirectorySettings(background=False),
            where=lambda endpoint, rank: endpoint,
        )
        self.pulls = WorkerPulls(
            layout=described,
            transport=self.transport,
            mailbox=NoticeMailbox(port=self.transport, metrics=self.metrics),
            peers=self.directory,
            clock=pair.clock,
            metrics=self.metrics,
            settings=make_pull_settings(),
            keep_asking=keep_asking,
        )
        self.results: dict[str, PullResult] = {}
        self._handshakes = HandshakeServer(hellos={0: hello}, transports={0: self.transport})
        self._next_block = 1
        self._count = 0

    def offered(self, hand_off: HandOff, *, request_id: str, prompt_len: int | None = None) -> Offered:
        """The offer as a scheduler half passes it on."""
        self._count += 1
        tokens = make_tokens(prompt_len or hand_off.num_tokens + 1)[: hand_off.num_tokens]
        digest = offer_digest(tokens, hand_off.groups)
        return Offered(request_id=request_id, hand_off=hand_off, pull_id=f"pull-{self._count}", digest=digest)

    def order(self, offered: Offered, *, num_cached_tokens: int = 0) -> PullOrder:
        """Fresh blocks for all of its tokens and one more, as vLLM's tables have them: sliding blocks null in front."""
        tokens = offered.hand_off.num_tokens
        local = []
        for kind, window in ((AttentionKind.SLIDING, WINDOW), (AttentionKind.FULL, None)):
            first = needed_range(tokens, window, BLOCK).start
            count = tokens // BLOCK + 1
            ids = (0,) * first + tuple(range(self._next_block, self._next_block + count - first))
            self._next_block += count - first
            local.append(GroupBlocks(kind=kind, first_logical=0, block_ids=ids))
        return PullOrder(offered=offered, local=tuple(local), num_tokens=tokens, num_cached_tokens=num_cached_tokens)

    def bytes_of(self, order: PullOrder, kind: str, logical: int) -> bytes:
        """What lies in the block that holds a logical block of a group."""
        group = next(g for g in order.local if g.kind.value == kind)
        block = group.block_ids[logical]
        return b"".join(
            bytes(self.cache.block(buffer, half, block)) for buffer in range(self.layout.num_buffers) for half in KVHalf
        )

    def poll(self) -> None:
        """One round of the worker."""
        for notice in take_notices(port=self.transport, handshakes=self._handshakes, metrics=self.metrics):
            if not isinstance(notice, Claim | Release):
                self.pulls.notice(notice)
        for result in self.pulls.poll():
            assert result.request_id not in self.results, "a pull was reported twice"
            self.results[result.request_id] = result


class Pair:
    """A clock, a network, and whoever is made over them."""

    def __init__(self, fabric: FakeFabric | None = None) -> None:
        self.clock, self.fabric, self.board = FakeClock(), fabric or FakeFabric(), FakeSwitchboard()

    def run(
        self, producer: ProducerWorker | None, consumer: ConsumerWorker, *, rounds: int, seconds: float = 0.0
    ) -> None:
        """Poll both, `seconds` of the clock apart."""
        for _ in range(rounds):
            consumer.poll()
            if producer is not None and not producer.transport.is_dead:
                producer.poll()
            self.clock.advance(seconds)
