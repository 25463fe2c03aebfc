"""Handshakes: who answers, who fits, who is remembered, and that nobody waits for a silent peer."""

from __future__ import annotations

import threading

import msgspec
import pytest
from attrs import evolve

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
from gk_adapters.peer_directory import (
    DirectorySettings,
    HandshakeServer,
    NoticeMailbox,
    PeerDirectory,
    endpoint_of_rank,
)
from gk_core.disaggregation import Role
from gk_core.errors import PeerLostError, PeerMismatchError, RequestError, TransferTimeoutError
from gk_core.handshake import PeerHello
from gk_core.notices import ProducerFailure
from gk_core.peer_layout import describe_rank
from gk_core.peers import PeerEngine
from gk_core.ports import Endpoint, PeerKey, SideChannel
from tests.builders import CountingMetrics, make_fake_layout, make_small_geometry

WHERE = Endpoint(host="p", port=5600)
NOTICE = ProducerFailure(engine_id="P1", request_id="r", generation=1, pull_id="1", rank=0, reason="gone")


class Net:
    """A fabric, a switchboard, a clock, and ranks that listen."""

    def __init__(self, *, num_kv_heads: int = 2) -> None:
        self.fabric, self.board, self.clock = FakeFabric(), FakeSwitchboard(), FakeClock()
        self.geometry = make_small_geometry(num_kv_heads=num_kv_heads)
        self.servers: dict[str, FakeSideChannelServer] = {}

    def rank(
        self, role: Role, engine_id: str, *, tp: int = 1, rank: int = 0, block_size: int = 16, name: str = ""
    ) -> tuple[PeerHello, FakeTransport]:
        """One rank's transport, registered, and what it says of itself."""
        heads = self.geometry.num_kv_heads // tp
        layout = make_fake_layout(num_kv_heads=heads, block_size=block_size)
        cache = FakeKVCache(layout)
        transport = FakeTransport(self.fabric, name=name or f"{engine_id}/{rank}", memories=cache.memories)
        described = describe_rank(self.geometry, layout, engine_id=engine_id, role=role, tp_size=tp, tp_rank=rank)
        blob = transport.register(regions=cache.regions)
        return PeerHello(layout=described, agent_metadata=blob, regions=cache.regions), transport

    def listen(
        self, engine_id: str = "P1", *, tp: int = 1, block_size: int = 16, max_peers: int = 1024
    ) -> list[HandshakeServer]:
        """All ranks of a producer, each on its own port."""
        answering = []
        for rank in range(tp):
            hello, transport = self.rank(Role.PREFILL, engine_id, tp=tp, rank=rank, block_size=block_size)
            server = HandshakeServer(hellos={rank: hello}, transports={rank: transport}, max_peers=max_peers)
            channel = FakeSideChannelServer(self.board, host=WHERE.host, port=WHERE.port + rank)
            channel.serve(handler=server.handle)
            self.servers[f"{engine_id}/{rank}"] = channel
            answering.append(server)
        return answering

    def directory(
        self, engine_id: str = "D1", *, channel: SideChannel | None = None, background: bool = False, name: str = ""
    ) -> tuple[PeerDirectory, FakeTransport]:
        """A consumer's directory."""
        hello, transport = self.rank(Role.DECODE, engine_id, name=name)
        return PeerDirectory(
            hello=hello,
            channel=channel or FakeSideChannel(self.board),
            transport=transport,
            clock=self.clock,
            settings=DirectorySettings(timeout_seconds=2.0, retry_after_seconds=1.0, background=background),
        ), transport


def contradicting(hello: PeerHello, change: str) -> bytes:
    """A hello as no honest peer writes it: its regions and its block counts do not go together."""
    envelope = msgspec.msgpack.decode(encode_hello(hello))
    body = msgspec.msgpack.decode(envelope["body"])
    match change:
        case "one block more":
            body["layout"]["num_blocks"] += 1
        case "as many blocks as fit the field":
            body["layout"]["num_blocks"] = 2**31 - 1
        case "a wider stride":
            body["regions"][0][1] += 1
        case "a region less":
            body["regions"].pop()
        case "a region twice":
            body["regions"][1] = body["regions"][0]
        case "a block length for each but one region":
            body["layout"]["block_bytes"].pop()
    return bytes(msgspec.msgpack.encode({**envelope, "body": msgspec.msgpack.encode(body)}))


CONTRADICTIONS = [
    ("one block more", "regions overlap"),
    ("as many blocks as fit the field", "regions overlap"),
    ("a wider stride", "regions overlap"),
    ("a region less", "need 2 regions as in block_bytes, got 1"),
    ("a region twice", "regions overlap"),
    ("a block length for each but one region", "need 1 regions as in block_bytes, got 2"),
]


def found(peer: PeerEngine | None) -> PeerEngine:
    assert peer is not None
    return peer


class TestResolve:
    """The asking side."""

    def test_a_peer_is_asked_once_and_then_known(self) -> None:
        """Second time no request."""
        net = Net()
        net.listen()
        directory, _ = net.directory()
        peer = found(directory.resolve(engine_id="P1", endpoint=WHERE))
        assert (peer.engine_id, peer.layout.engine_id, peer.num_readers) == ("P1", "P1", (1,))
        assert directory.resolve(engine_id="P1", endpoint=WHERE) is peer
        assert net.board.num_requests == 1

    def test_every_rank_that_holds_our_heads_is_asked_and_connected(self) -> None:
        """Two ranks of one head each; both then hear notices."""
        net = Net()
        net.listen(tp=2)
        directory, transport = net.directory()
        peer = found(directory.resolve(engine_id="P1", endpoint=WHERE))
        assert [rank.tp_rank for rank in peer.map.ranks] == [0, 1]
        assert net.board.num_requests == 2
        for rank in (0, 1):
            transport.send_notice(peer=PeerKey(engine_id="P1", rank=rank), payload=b"x")

    def test_nothing_is_connected_while_one_rank_is_missing(self) -> None:
        """Half a peer is none."""
        net = Net()
        net.listen(tp=2)
        net.board.silence(endpoint_of_rank(WHERE, 1))
        directory, transport = net.directory()
        with pytest.raises(TransferTimeoutError):
            directory.resolve(engine_id="P1", endpoint=WHERE)
        with pytest.raises(PeerLostError):
            transport.send_notice(peer=PeerKey(engine_id="P1", rank=0), payload=b"x")

    def test_both_ids_are_named_when_somebody_else_answers(self) -> None:
        """Expected P0, got P1."""
        net = Net()
        net.listen("P1")
        directory, _ = net.directory()
        with pytest.raises(PeerMismatchError, match=r"engine_id: ours .*P0.*, theirs .*P1"):
            directory.resolve(engine_id="P0", endpoint=WHERE)

    def test_a_peer_that_does_not_fit_is_refused_naming_the_field_on_both_sides(self) -> None:
        """Block 32 there: the asker gets the names, the server counts."""
        net = Net()
        (server,) = net.listen(block_size=32)
        directory, _ = net.directory()
        with pytest.raises(PeerMismatchError, match="kernel_block_size: ours 16, theirs 32"):
            directory.resolve(engine_id="P1", endpoint=WHERE)
        assert server.refused == 1

    def test_a_failure_is_told_to_all_who_ask_and_asked_anew_only_after_a_while(self) -> None:
        """Within a second the same error without a request; then the peer is back."""
        net = Net()
        net.listen()
        net.board.silence(WHERE)
        directory, _ = net.directory()
        for _ in range(3):
            with pytest.raises(TransferTimeoutError):
                directory.resolve(engine_id="P1", endpoint=WHERE)
        net.board.silence(WHERE, False)
        with pytest.raises(TransferTimeoutError):
            directory.resolve(engine_id="P1", endpoint=WHERE)
        assert net.board.num_requests == 0
        net.clock.advance(1.0)
        found(directory.resolve(engine_id="P1", endpoint=WHERE))
        assert net.board.num_requests == 1

    def test_one_peers_trouble_is_not_anothers(self) -> None:
        """A known peer answers while another is silent."""
        net = Net()
        net.listen()
        directory, _ = net.directory()
        with pytest.raises(PeerLostError, match="nobody listens"):
            directory.resolve(engine_id="P9", endpoint=Endpoint(host="q", port=1))
        found(directory.resolve(engine_id="P1", endpoint=WHERE))

    @pytest.mark.parametrize("reply", [b"", b"\x00", b"garbage", b"\xff" * 1000])
    def test_a_garbled_answer_is_a_typed_error(self, reply: bytes) -> None:
        """Not a hello."""
        net = Net()
        net.listen()
        net.board.garble(WHERE, lambda _: reply)
        directory, _ = net.directory()
        with pytest.raises(PeerLostError):
            directory.resolve(engine_id="P1", endpoint=WHERE)

    @pytest.mark.parametrize(("change", "why"), CONTRADICTIONS, ids=[c for c, _ in CONTRADICTIONS])
    def test_an_answer_whose_regions_contradict_its_block_counts_is_refused(self, change: str, why: str) -> None:
        """By what contradicts what; nothing is connected."""
        net = Net()
        net.listen()
        hello, _ = net.rank(Role.PREFILL, "P1", name="another")
        directory, transport = net.directory()
        net.board.garble(WHERE, lambda _: contradicting(hello, change))
        with pytest.raises(PeerLostError, match=f"the peer's hello describes no cache: {why}"):
            directory.resolve(engine_id="P1", endpoint=WHERE)
        with pytest.raises(PeerLostError, match="not connected"):
            transport.send_notice(peer=PeerKey(engine_id="P1", rank=0), payload=b"x")

    def test_any_other_error_of_the_channel_ends_the_question_too(self) -> None:
        """Whoever asked does not wait for ever."""

        class Broken(SideChannel):
            def request(self, *, endpoint: Endpoint, message: bytes, timeout_seconds: float) -> bytes:
                raise ValueError("not ours")

            def close(self) -> None:
                return None

        directory, _ = Net().directory(channel=Broken())
        with pytest.raises(PeerLostError, match="ValueError: not ours"):
            directory.resolve(engine_id="P1", endpoint=WHERE)


class TestRestart:
    """Peers that come back."""

    def test_a_forgotten_peer_is_asked_again_and_new_metadata_replaces_the_old(self) -> None:
        """Same engine id, new agent: after `forget` notices reach the new one."""
        net = Net()
        net.listen()
        directory, transport = net.directory()
        directory.resolve(engine_id="P1", endpoint=WHERE)
        net.fabric.kill("P1/0")
        net.servers["P1/0"].close()
        net.listen()
        found(directory.resolve(engine_id="P1", endpoint=WHERE))
        with pytest.raises(PeerLostError, match="has gone"):
            transport.send_notice(peer=PeerKey(engine_id="P1", rank=0), payload=b"x")
        directory.forget(engine_id="P1")
        found(directory.resolve(engine_id="P1", endpoint=WHERE))
        transport.send_notice(peer=PeerKey(engine_id="P1", rank=0), payload=b"x")

    def test_forgetting_leaves_other_peers_and_open_questions_alone(self) -> None:
        """And strangers are harmless."""
        net = Net()
        net.listen()
        directory, _ = net.directory()
        found(directory.resolve(engine_id="P1", endpoint=WHERE))
        directory.forget(engine_id="P2")
        found(directory.resolve(engine_id="P1", endpoint=WHERE))
        assert net.board.num_requests == 1


class TestBackground:
    """With threads nobody waits."""

    def test_resolve_returns_at_once_and_later_knows(self) -> None:
        """None while the server takes its time; the peer afterwards; a second asker starts no second question."""
        net = Net()
        net.listen()
        gate, asked = threading.Event(), threading.Event()

        class Slow(FakeSideChannel):
            def request(self, *, endpoint: Endpoint, message: bytes, timeout_seconds: float) -> bytes:
                asked.set()
                gate.wait()
                return super().request(endpoint=endpoint, message=message, timeout_seconds=timeout_seconds)

        directory, _ = net.directory(channel=Slow(net.board), background=True)
        assert directory.resolve(engine_id="P1", endpoint=WHERE) is None
        asked.wait()
        assert directory.resolve(engine_id="P1", endpoint=WHERE) is None
        directory.forget(engine_id="P1")
        gate.set()
        peer = None
        while peer is None:
            peer = directory.resolve(engine_id="P1", endpoint=WHERE)
        assert (peer.engine_id, net.board.num_requests) == ("P1", 1)
        directory.close()
        directory.close()


class TestServer:
    """The answering side."""

    def test_an_asker_that_fits_can_be_answered_and_one_that_does_not_cannot(self) -> None:
        """Claims have to be answered."""
        net = Net()
        (server,) = net.listen()
        directory, transport = net.directory()
        directory.resolve(engine_id="P1", endpoint=WHERE)
        NoticeMailbox(port=server_port(server)).send(peer=PeerKey(engine_id="D1", rank=0), notice=NOTICE)
        assert NoticeMailbox(port=transport).take() == (NOTICE,)

    @pytest.mark.parametrize(
        ("message", "why"),
        [
            (b"", "more than 4 bytes"),
            (b"\0\0\0\0", "more than 4 bytes"),
            (b"\0\0\0\x05x", "rank 5 is not served here"),
            (b"\xff\xff\xff\xffx", "rank 4096 is not served here"),
        ],
    )
    def test_what_is_not_a_handshake_is_refused(self, message: bytes, why: str) -> None:
        """Typed, and the server lives on."""
        (server,) = Net().listen()
        with pytest.raises(RequestError, match=why):
            server.handle(message)

    @pytest.mark.parametrize(("change", "why"), CONTRADICTIONS, ids=[c for c, _ in CONTRADICTIONS])
    def test_an_asker_whose_regions_contradict_its_block_counts_is_refused(self, change: str, why: str) -> None:
        """It is told why, and is not connected; the next one is served."""
        net = Net()
        net.listen()
        hello, _ = net.rank(Role.DECODE, "D1")
        channel = FakeSideChannel(net.board)
        with pytest.raises(PeerLostError, match=f"p:5600 refused: the peer's hello describes no cache: {why}"):
            channel.request(
                endpoint=WHERE, message=(0).to_bytes(4, "big") + contradicting(hello, change), timeout_seconds=1.0
            )
        directory, _ = net.directory("D2")
        assert found(directory.resolve(engine_id="P1", endpoint=WHERE)).engine_id == "P1"

    def test_garbage_after_the_rank_is_refused(self) -> None:
        """Not a hello."""
        (server,) = Net().listen()
        with pytest.raises(PeerLostError):
            server.handle(b"\0\0\0\0garbage")

    def test_a_producer_that_asks_a_producer_is_not_connected(self) -> None:
        """Roles are checked; it is answered all the same, so that it can say why."""
        net = Net()
        (server,) = net.listen()
        hello, _ = net.rank(Role.PREFILL, "P2")
        assert server.handle(b"\0\0\0\0" + encode_hello(hello))
        assert server.refused == 1

    def test_the_peer_that_asked_longest_ago_makes_room(self) -> None:
        """Two places, three askers."""
        net = Net()
        (server,) = net.listen(max_peers=2)
        transports: dict[str, tuple[PeerHello, FakeTransport]] = {}
        for name in ("D1", "D2", "D1", "D3"):
            hello, transport = net.rank(Role.DECODE, name, name=name) if name not in transports else transports[name]
            transports[name] = (hello, transport)
            server.handle(b"\0\0\0\0" + encode_hello(hello))
        mailbox = NoticeMailbox(port=server_port(server))
        for name in ("D1", "D3"):
            mailbox.send(peer=PeerKey(engine_id=name, rank=0), notice=NOTICE)
        with pytest.raises(PeerLostError):
            mailbox.send(peer=PeerKey(engine_id="D2", rank=0), notice=NOTICE)


class TestMailbox:
    """Typed notices."""

    def test_garbage_is_counted_and_dropped_and_the_rest_arrives(self) -> None:
        """Between two good ones."""
        net = Net()
        (server,) = net.listen()
        directory, transport = net.directory()
        directory.resolve(engine_id="P1", endpoint=WHERE)
        port, key = server_port(server), PeerKey(engine_id="D1", rank=0)
        metrics = CountingMetrics()
        NoticeMailbox(port=port).send(peer=key, notice=NOTICE)
        for garbage in (b"", b"\x00", b"\xc1" * 50, b"x" * 5000):
            port.send_notice(peer=key, payload=garbage)
        NoticeMailbox(port=port).send(peer=key, notice=evolve(NOTICE, reason="again"))
        got = NoticeMailbox(port=transport, metrics=metrics).take()
        assert got == (NOTICE, evolve(NOTICE, reason="again"))
        assert metrics.counts == {"gk_notices_bad_total": 4}


def server_port(server: HandshakeServer) -> FakeTransport:
    """The producer's own transport."""
    (transport,) = server._transports.values()
    assert isinstance(transport, FakeTransport)
    return transport
