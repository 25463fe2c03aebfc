"""The side channel against hostile clients: whatever arrives, the next honest request is answered."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gk_adapters.zmq_side_channel import MAX_SKEW_SECONDS, ZmqSideChannel, ZmqSideChannelServer, is_loopback
from gk_core.errors import LayoutError, PeerLostError, TransferTimeoutError, UnsupportedError
from gk_core.ports import Endpoint

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


def test_many_genuine_requests_are_answered_and_none_of_them_twice(server: ZmqSideChannelServer) -> None:
    """100,500 within the time that a nonce is remembered, as a busy client asks; then the first and the last again."""
    now = time.time()
    requests = [signed(i.to_bytes(16, "big"), now - 30 + i % 60, b"x") for i in range(100_500)]
    assert all(server._reply(frames, reverse) for frames in requests)
    assert server._reply(requests[0], reverse) is None
    assert server._reply(requests[-1], reverse) is None


def test_nonces_are_forgotten_when_their_time_can_pass_no_more(
    server: ZmqSideChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two minutes later nothing of them is kept, and they are refused for their age."""
    now = time.time()
    old = [signed(i.to_bytes(16, "big"), now, b"x") for i in range(9)]
    assert all(server._reply(frames, reverse) for frames in old)
    monkeypatch.setattr(time, "time", lambda: now + 2 * MAX_SKEW_SECONDS + 2)
    assert server._reply(signed(b"n" * 16, now + 2 * MAX_SKEW_SECONDS, b"x"), reverse)
    assert sum(map(len, server._seen.values())) == 1
    assert [server._reply(frames, reverse) for frames in old] == [None] * 9


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
