"""Spoilt handshakes and hand-offs against a live side channel: typed errors only, the listener goes on, and no address
is formed outside memory that was registered."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gk_adapters.fakes import FakeClock
from gk_adapters.peer_codec import decode_hand_off, decode_hello, encode_hand_off, encode_hello
from gk_adapters.peer_directory import DirectorySettings, HandshakeServer, PeerDirectory
from gk_adapters.zmq_side_channel import ZmqSideChannel, ZmqSideChannelServer
from gk_core.disaggregation import Role
from gk_core.errors import GkError
from gk_core.hand_off import HandOff, require_offer
from gk_core.handshake import PeerHello
from gk_core.kv_layout import KByteOrder, layout_for
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.model_geometry import GPT_OSS_20B, AttentionKind
from gk_core.peer_layout import describe_rank
from gk_core.peers import PeerEngine
from gk_core.ports import KVTransport, PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.region import KVRegion, block_descriptor, regions_of_buffers, strided_run
from gk_core.transfer_plan import GroupBlocks, RankRead, plan_pull

pytest.importorskip("zmq")

SECONDS = 10.0
KINDS = (AttentionKind.SLIDING, AttentionKind.FULL)
P_BASE, D_BASE, BUFFERS, NUM_BLOCKS, BLOCK_SIZE = 1 << 32, 1 << 40, 12, 9, 16
BUFFER_BYTES = 2 * NUM_BLOCKS * BLOCK_SIZE * 64


class AddressBook(KVTransport, ReadHandle):
    """A transport that moves nothing, forms every address that a real one would form, and judges each.

    Attributes:
        formed: addresses by whose memory they lie in; "outside" must stay 0.
        connected: peers that a handshake let through.
    """

    def __init__(self, base: int) -> None:
        self.regions: tuple[KVRegion, ...] = ()
        self.base = base
        self.connected: dict[PeerKey, PeerAgent] = {}
        self.formed: Counter[str] = Counter()

    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        self.regions = regions
        return b"agent"

    def connect(self, *, peer: PeerAgent) -> None:
        self.connected[peer.key] = peer
        for region in peer.regions:
            row = strided_run(region, offset_bytes=0, length_bytes=region.block_bytes)
            last = row.address + (row.count - 1) * row.stride_bytes + row.length_bytes
            inside = region.base_address <= row.address and last <= region.end_address <= 2**64
            self.formed["rows" if inside else "outside"] += 1

    def disconnect(self, *, peer: PeerKey) -> None:
        self.connected.pop(peer, None)

    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        cut = read.head_slice
        for ours, theirs in zip(self.regions, self.connected[peer].regions, strict=True):
            for run in read.runs:
                for i in range(run.count):
                    here = block_descriptor(
                        ours, run.local_start + i, offset_bytes=cut.local_offset_bytes, length_bytes=cut.length_bytes
                    )
                    there = block_descriptor(
                        theirs,
                        run.remote_start + i,
                        offset_bytes=cut.remote_offset_bytes,
                        length_bytes=cut.length_bytes,
                    )
                    # Ours by what was allocated, theirs by what they said: a real transport holds them to that.
                    in_ours = self.base <= here.address <= self.base + BUFFERS * BUFFER_BYTES - here.length_bytes
                    in_theirs = theirs.base_address <= there.address <= theirs.end_address - there.length_bytes
                    null = run.local_start == 0 or run.remote_start == 0
                    self.formed["reads" if in_ours and in_theirs and not null else "outside"] += 1
        return self

    def poll(self) -> ReadState:
        return ReadState.DONE

    def release(self) -> None:
        return None

    def close(self) -> None:
        return None


def make_hello(engine_id: str, role: Role, base: int) -> PeerHello:
    specs = honest_specs(GPT_OSS_20B, tp_size=8, block_size=BLOCK_SIZE, dtype=KVDtype.FP8_E4M3FN)
    layout = layout_for(specs, num_blocks=NUM_BLOCKS, k_byte_order=KByteOrder.TOKEN_MAJOR)
    assert 2 * layout.half_bytes == BUFFER_BYTES
    bases = [base + layer // 2 * BUFFER_BYTES for layer in range(layout.num_layers)]
    return PeerHello(
        layout=describe_rank(GPT_OSS_20B, layout, engine_id=engine_id, role=role, tp_size=8, tp_rank=0),
        agent_metadata=b"agent",
        regions=regions_of_buffers(layout, bases),
    )


def make_offer() -> HandOff:
    ids = ((1, 2, 3), (4, 5, 8))
    return HandOff(
        engine_id="P",
        request_id="r",
        generation=7,
        num_tokens=40,
        groups=tuple(GroupBlocks(kind=k, first_logical=0, block_ids=i) for k, i in zip(KINDS, ids, strict=True)),
        host="127.0.0.1",
        port=7002,
        block_size=BLOCK_SIZE,
        tp_size=8,
        dcp_size=1,
    )


def mutated(choose: random.Random, data: bytes) -> bytes:
    """Flip, cut, double, insert, or replace by noise."""
    out = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(out)) if out else 0
        match choose.randrange(6):
            case 0 if out:
                out[at] ^= 1 << choose.randrange(8)
            case 1:
                del out[at:]
            case 2:
                out[at:at] = out[at : at + choose.randrange(64)]
            case 3:
                out[at:at] = choose.randbytes(choose.randrange(1, 9))
            case 4 if out:
                out[at] = choose.choice((0x00, 0x01, 0x08, 0x7F, 0x80, 0xC0, 0xC6, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF))
            case _:
                del out[at : at + choose.randrange(1, 9)]
    return bytes(out)


def nudged(choose: random.Random, data: bytes) -> bytes:
    """One small number set to another: what most often still decodes."""
    out = bytearray(data)
    out[choose.choice([i for i, byte in enumerate(data) if byte < 0x20])] = choose.randrange(0x20)
    return bytes(out)


class Fuzz:
    """A producer's listener, a liar's listener, and a consumer that asks both and reads what it is offered."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.ours, self.theirs = make_hello("P", Role.PREFILL, P_BASE), make_hello("D", Role.DECODE, D_BASE)
        self.honest = (0).to_bytes(4, "big") + encode_hello(self.theirs)
        self.answer, self.offer = encode_hello(self.ours), encode_hand_off(make_offer())
        self.books = (AddressBook(P_BASE), AddressBook(D_BASE))
        for book, hello in zip(self.books, (self.ours, self.theirs), strict=True):
            book.register(regions=hello.regions)
        self.server, self.liar, self.channel = ZmqSideChannelServer(), ZmqSideChannelServer(), ZmqSideChannel()
        answering = HandshakeServer(hellos={0: self.ours}, transports={0: self.books[0]})
        self.endpoint = self.server.serve(handler=answering.handle)
        self.lying = self.liar.serve(handler=lambda _: self.spoilt(self.answer))
        self.clock = FakeClock()
        self.directory = PeerDirectory(
            hello=self.theirs, channel=self.channel, transport=self.books[1], clock=self.clock,
            settings=DirectorySettings(timeout_seconds=SECONDS, background=False),
        )  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.bugs: list[str] = []

    def close(self) -> None:
        for part in (self.directory, self.channel, self.server, self.liar):
            part.close()

    def spoilt(self, data: bytes) -> bytes:
        return (mutated if self.choose.random() < 0.5 else nudged)(self.choose, data)

    def step(self, i: int) -> None:
        """One spoilt message: a request, an answer, or a hand-off."""
        kind = ("request", "answer", "hand-off")[i % 3]
        try:
            if kind == "request":
                message = self.spoilt(self.honest)
                self.channel.request(endpoint=self.endpoint, message=message, timeout_seconds=SECONDS)
            elif kind == "answer":
                self.clock.advance(2.0)
                self.directory.forget(engine_id="P")
                peer = self.directory.resolve(engine_id="P", endpoint=self.lying)
                assert peer is not None
                self.pull(peer, make_offer())
            else:
                offer = decode_hand_off(self.spoilt(self.offer))
                peer = self.directory.resolve(engine_id="P", endpoint=self.endpoint)
                assert peer is not None
                self.pull(peer, offer)
        except GkError as error:
            self.counts[f"{kind} refused"] += 1
            self.bugs += [str(error)] if "internal error" in str(error) else []
        else:
            self.counts[f"{kind} accepted"] += 1

    def pull(self, peer: PeerEngine, offer: HandOff) -> None:
        """As an engine does it: refuse contradictions, plan into our own blocks, post."""
        require_offer(offer, peer.layout)
        mine = tuple(
            GroupBlocks(kind=k, first_logical=0, block_ids=ids)
            for k, ids in zip(KINDS, ((2, 4, 6), (8, 1, 3)), strict=True)
        )
        plan = plan_pull(peer.map, local=mine, remote=offer.groups, num_tokens=offer.num_tokens)
        for read in plan.reads:
            self.books[1].read(peer=PeerKey(engine_id=offer.engine_id, rank=read.remote_rank), read=read)

    def require_answer(self) -> None:
        """The listener answers an honest request."""
        reply = self.channel.request(endpoint=self.endpoint, message=self.honest, timeout_seconds=SECONDS)
        assert decode_hello(reply, ours=self.theirs.layout).layout == self.ours.layout


def fuzz(count: int) -> None:
    world = Fuzz(seed=count)
    try:
        for i in range(count):
            world.step(i)
            if i % 500 == 0:
                world.require_answer()
        world.require_answer()
        assert world.server.num_dropped == world.liar.num_dropped == 0
    finally:
        world.close()
    assert world.bugs == []
    formed = world.books[0].formed + world.books[1].formed
    assert formed["outside"] == 0
    # A fuzz that gets nothing past the decoders would count no address at all.
    assert min(formed["rows"], formed["reads"]) > count // 2, formed
    for kind in ("request", "answer", "hand-off"):
        assert world.counts[f"{kind} refused"] > count // 12, world.counts
        assert world.counts[f"{kind} accepted"] > count // 100, world.counts


def test_spoilt_messages_end_in_typed_errors_form_no_address_outside_and_the_listener_goes_on() -> None:
    """3,000 of them; the bug of a handler would show as an internal error."""
    fuzz(3_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_spoilt_messages_do_no_harm() -> None:
    """The same, longer."""
    fuzz(100_000)


def test_an_address_outside_would_be_counted() -> None:
    """A consumer whose memory lies elsewhere than its regions say."""
    world = Fuzz(seed=1)
    try:
        world.books[1].base += BUFFER_BYTES
        peer = world.directory.resolve(engine_id="P", endpoint=world.endpoint)
        assert peer is not None
        world.pull(peer, make_offer())
        assert world.books[1].formed["outside"] > 0
    finally:
        world.close()
