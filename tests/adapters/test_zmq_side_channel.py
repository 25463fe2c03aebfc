"""The side channel against hostile clients: whatever arrives, the next honest request is answered."""

from __future__ import annotations

import hashlib
import hmac
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gk_adapters.peer_codec import decode_hand_off, decode_hello, encode_hand_off, encode_hello
from gk_adapters.peer_directory import HandshakeServer
from gk_adapters.zmq_side_channel import MAX_SKEW_SECONDS, ZmqSideChannel, ZmqSideChannelServer, is_loopback
from gk_core.disaggregation import Role
from gk_core.errors import GkError, LayoutError, PeerLostError, TransferTimeoutError, UnsupportedError
from gk_core.hand_off import HandOff
from gk_core.handshake import PeerHello
from gk_core.kv_layout import KByteOrder, layout_for
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.model_geometry import GPT_OSS_20B, AttentionKind
from gk_core.peer_layout import describe_rank
from gk_core.ports import Endpoint, KVTransport, PeerAgent, PeerKey, ReadHandle
from gk_core.region import KVRegion, regions_of_buffers
from gk_core.transfer_plan import GroupBlocks, RankRead

zmq = pytest.importorskip("zmq")

KEY = b"a shared secret of a test"
SECONDS = 10.0


@pytest.fixture
def server() -> Iterator[ZmqSideChannelServer]:
    one = ZmqSideChannelServer(key=KEY, max_message_bytes=100_000)
    yield one
    one.close()


@pytest.fixture
def client() -> Iterator[ZmqSideChannel]:
    one = ZmqSideChannel(key=KEY)
    yield one
    one.close()


def reverse(message: bytes) -> bytes:
    return message[::-1]


def send_frames(endpoint: Endpoint, *messages: list[bytes], wait_ms: int = 0) -> list[list[bytes]]:
    """Raw multipart messages; the replies that come within `wait_ms`."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(f"tcp://{endpoint.host}:{endpoint.port}")
    replies = []
    for frames in messages:
        peer.send_multipart(frames)
    while wait_ms and peer.poll(wait_ms):
        replies.append(peer.recv_multipart())
    peer.close(1000)
    context.term()
    return replies


def test_malformed_messages_get_no_answer_and_the_listener_goes_on(
    server: ZmqSideChannelServer, client: ZmqSideChannel
) -> None:
    """Empty, one byte, too few and too many frames, wrong magic, short nonce, no tag: seven dropped."""
    endpoint = server.serve(handler=reverse)
    nonce, now = bytes(16), int(time.time() * 1000).to_bytes(8, "big")
    bad = [
        [b""],
        [b"\x00"],
        [b"GK1", nonce],
        [b"GK1", nonce, now, b"x", bytes(32), b"more"],
        [b"GK2", nonce, now, b"x", bytes(32)],
        [b"GK1", b"short", now, b"x", bytes(32)],
        [b"GK1", nonce, now, b"x", b""],
    ]
    assert send_frames(endpoint, *bad, wait_ms=200) == []
    assert client.request(endpoint=endpoint, message=b"abc", timeout_seconds=SECONDS) == b"cba"
    assert server.num_dropped == len(bad)


@pytest.mark.parametrize("raw", [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096])
def test_bytes_that_are_not_zeromq_and_connections_left_open_harm_nobody(
    server: ZmqSideChannelServer, client: ZmqSideChannel, raw: bytes
) -> None:
    """Half-open connections stay open while others are served."""
    endpoint = server.serve(handler=reverse)
    with socket.create_connection((endpoint.host, endpoint.port)) as other:
        other.sendall(raw)
        assert client.request(endpoint=endpoint, message=b"abc", timeout_seconds=SECONDS) == b"cba"
    assert client.request(endpoint=endpoint, message=b"de", timeout_seconds=SECONDS) == b"ed"


def test_a_message_beyond_the_limit_never_reaches_the_handler(
    server: ZmqSideChannelServer, client: ZmqSideChannel
) -> None:
    """100,001 bytes; the sender waits in vain, the next one does not."""
    seen: list[int] = []

    def handler(message: bytes) -> bytes:
        seen.append(len(message))
        return b"ok"

    endpoint = server.serve(handler=handler)
    with pytest.raises(TransferTimeoutError):
        client.request(endpoint=endpoint, message=bytes(100_001), timeout_seconds=0.5)
    assert client.request(endpoint=endpoint, message=bytes(100_000), timeout_seconds=SECONDS) == b"ok"
    assert seen == [100_000]


def test_a_hundred_clients_at_once_each_get_their_own_answer(server: ZmqSideChannelServer) -> None:
    """One client object each, all asking together."""
    endpoint = server.serve(handler=reverse)
    answers: dict[int, bytes] = {}

    def ask(i: int) -> None:
        one = ZmqSideChannel(key=KEY)
        answers[i] = one.request(endpoint=endpoint, message=f"<{i}>".encode(), timeout_seconds=60.0)
        one.close()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: f"<{i}>".encode()[::-1] for i in range(100)}


def test_another_key_gets_no_answer_in_either_direction(server: ZmqSideChannelServer, client: ZmqSideChannel) -> None:
    """Nor does no key; the right one does."""
    endpoint = server.serve(handler=reverse)
    for key in (b"another secret, as long", None):
        stranger = ZmqSideChannel(key=key)
        with pytest.raises(TransferTimeoutError):
            stranger.request(endpoint=endpoint, message=b"x", timeout_seconds=0.3)
        stranger.close()
    assert client.request(endpoint=endpoint, message=b"ab", timeout_seconds=SECONDS) == b"ba"


def signed(nonce: bytes, seconds: float, payload: bytes) -> list[bytes]:
    stamp = int(seconds * 1000).to_bytes(8, "big")
    # The wire format, written out: magic, direction, nonce, time, payload.
    tag = hmac.new(KEY, b"GK1" + b"Q" + nonce + stamp + payload, hashlib.sha256).digest()
    return [b"GK1", nonce, stamp, payload, tag]


def test_a_recorded_request_cannot_be_replayed(server: ZmqSideChannelServer) -> None:
    """The same bytes twice, and genuine ones that are too old or too far ahead: one answer in all."""
    handled: list[bytes] = []

    def handler(message: bytes) -> bytes:
        handled.append(message)
        return b"ok"

    endpoint = server.serve(handler=handler)
    once = signed(b"n" * 16, time.time(), b"once")
    old = signed(b"o" * 16, time.time() - MAX_SKEW_SECONDS - 5, b"old")
    ahead = signed(b"a" * 16, time.time() + MAX_SKEW_SECONDS + 5, b"ahead")
    replies = send_frames(endpoint, once, once, old, ahead, wait_ms=500)
    assert handled == [b"once"]
    assert [r[:3] for r in replies] == [[b"GK1", b"n" * 16, b"\x00"]]
    assert server.num_dropped == 3


def test_other_machines_need_a_key_and_a_place_on_the_list() -> None:
    """192.0.2.0/24 is for documents; nothing is sent."""
    there = Endpoint(host="192.0.2.7", port=7002)
    with pytest.raises(UnsupportedError, match="needs a shared key"):
        ZmqSideChannelServer(host="192.0.2.7")
    for channel, says in (
        (ZmqSideChannel(allowed=(there,)), "needs a key"),
        (ZmqSideChannel(key=KEY), "allow-list"),
        (ZmqSideChannel(key=KEY, allowed=(Endpoint(host="192.0.2.7", port=7003),)), "allow-list"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            channel.request(endpoint=there, message=b"x", timeout_seconds=0.1)
        channel.close()
    listed = ZmqSideChannel(key=KEY, allowed=(there,))
    with pytest.raises((TransferTimeoutError, PeerLostError)):
        listed.request(endpoint=there, message=b"x", timeout_seconds=0.1)
    listed.close()


def test_short_keys_and_impossible_ports_are_refused() -> None:
    """15 bytes; 0 to ask, 65536 to bind."""
    with pytest.raises(LayoutError, match="at least 16"):
        ZmqSideChannel(key=b"fifteen bytes..")
    with pytest.raises(LayoutError, match="65535"):
        ZmqSideChannelServer(port=65536)
    channel = ZmqSideChannel()
    with pytest.raises(LayoutError, match="port"):
        channel.request(endpoint=Endpoint(host="127.0.0.1", port=0), message=b"", timeout_seconds=0.1)
    channel.close()


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "10.0.0.1", "localhost.example", "")),
    ],
)
def test_loopback_is_this_machine_only(host: str, wanted: bool) -> None:
    """A name that merely looks like it is not."""
    assert is_loopback(host) is wanted


# ---- fuzz


class Recorder(KVTransport):
    """Connects nobody and keeps every peer that a handshake would have connected."""

    def __init__(self) -> None:
        self.connected: list[PeerAgent] = []

    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        return b""

    def connect(self, *, peer: PeerAgent) -> None:
        self.connected.append(peer)

    def disconnect(self, *, peer: PeerKey) -> None:
        return None

    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        raise AssertionError("a handshake reads nothing")

    def close(self) -> None:
        return None


def make_hello(engine_id: str, role: Role, base: int) -> PeerHello:
    specs = honest_specs(GPT_OSS_20B, tp_size=8, block_size=16, dtype=KVDtype.FP8_E4M3FN)
    layout = layout_for(specs, num_blocks=9, k_byte_order=KByteOrder.TOKEN_MAJOR)
    bases = [base + layer // 2 * 2 * layout.half_bytes for layer in range(layout.num_layers)]
    return PeerHello(
        layout=describe_rank(GPT_OSS_20B, layout, engine_id=engine_id, role=role, tp_size=8, tp_rank=0),
        agent_metadata=b"agent",
        regions=regions_of_buffers(layout, bases),
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
                out[at] = choose.choice((0x00, 0x7F, 0x80, 0xC0, 0xC6, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF))
            case _:
                del out[at : at + choose.randrange(1, 9)]
    return bytes(out)


def fuzz(count: int) -> None:
    """Half hellos to a live listener, half hand-offs to their parser; now and then an honest request."""
    choose = random.Random(count)
    ours, theirs = make_hello("P", Role.PREFILL, 1 << 32), make_hello("D", Role.DECODE, 1 << 40)
    honest = (0).to_bytes(4, "big") + encode_hello(theirs)
    offer = encode_hand_off(make_hand_off())
    recorder = Recorder()
    server, channel = ZmqSideChannelServer(), ZmqSideChannel()
    endpoint = server.serve(handler=HandshakeServer(hellos={0: ours}, transports={0: recorder}).handle)
    refused, bugs = 0, []
    try:
        for i in range(count):
            try:
                if i % 2:
                    decode_hand_off(mutated(choose, offer))
                else:
                    channel.request(endpoint=endpoint, message=mutated(choose, honest), timeout_seconds=SECONDS)
            except GkError as error:
                refused += 1
                bugs += [str(error)] if "internal error" in str(error) else []
            if i % 500 == 0:
                reply = channel.request(endpoint=endpoint, message=honest, timeout_seconds=SECONDS)
                assert decode_hello(reply, ours=theirs.layout).layout == ours.layout
        assert server.num_dropped == 0
    finally:
        channel.close()
        server.close()
    assert bugs == []
    assert refused > count // 4
    for agent in recorder.connected:
        # Whatever was let through describes one cache: as many blocks everywhere as its layout says.
        assert len(agent.regions) == len(ours.regions)
        assert len({(r.num_blocks, r.block_bytes) for r in agent.regions}) == 1


def make_hand_off() -> HandOff:
    kinds = (AttentionKind.SLIDING, AttentionKind.FULL)
    return HandOff(
        engine_id="P",
        request_id="r",
        generation=7,
        num_tokens=40,
        groups=tuple(
            GroupBlocks(kind=k, first_logical=0, block_ids=(3 + i, 5 + i, 7 + i)) for i, k in enumerate(kinds)
        ),
        host="127.0.0.1",
        port=7002,
        block_size=16,
        tp_size=8,
        dcp_size=1,
    )


def test_spoilt_handshakes_and_hand_offs_end_in_typed_errors_and_the_listener_goes_on() -> None:
    """3,000 of them; the bug of a handler would show as an internal error."""
    fuzz(3_000)


@pytest.mark.slow
def test_a_hundred_thousand_spoilt_messages_do_no_harm() -> None:
    """The same, longer."""
    fuzz(100_000)
