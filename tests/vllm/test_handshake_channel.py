"""The handshake side channel, both ends: hostile messages, stock peers, and addresses that are not to be asked."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from gk_adapters.vllm.handshake_channel import GET_META, HandshakeChannel, HandshakeListener
from gk_adapters.vllm.served import free_ports
from gk_core.errors import PeerLostError, PeerMismatchError, TransferError, TransferTimeoutError
from gk_core.ports import Endpoint

pytestmark = pytest.mark.vllm

HELLO = b"our hello"
ASK_RANK_0 = (0).to_bytes(4, "big")


@contextlib.contextmanager
def listening(answers: dict[tuple[int, int], bytes]) -> Iterator[tuple[HandshakeListener, Endpoint]]:
    endpoint = Endpoint(host="127.0.0.1", port=free_ports(1)[0])
    listener = HandshakeListener(endpoint=endpoint, answers=answers)
    try:
        yield listener, endpoint
    finally:
        listener.close()


def payload(**more: object) -> bytes:
    return msgspec.msgpack.encode({"compatibility_hash": "abc", "agent_metadata_bytes": b"", **more})


def test_the_hello_of_the_rank_that_was_asked_for_comes_back() -> None:
    """Two ranks at one address."""
    answers = {(0, 0): payload(gk_hello=HELLO), (0, 1): payload(gk_hello=b"rank 1")}
    with listening(answers) as (_, endpoint):
        channel = HandshakeChannel()
        got = [
            channel.request(endpoint=endpoint, message=rank.to_bytes(4, "big") + b"more", timeout_seconds=10)
            for rank in (0, 1)
        ]
    assert got == [HELLO, b"rank 1"]


def test_a_rank_that_does_not_exist_is_an_error_and_no_silence() -> None:
    """The asker hears it at once."""
    with (
        listening({(0, 0): payload(gk_hello=HELLO)}) as (_, endpoint),
        pytest.raises(PeerLostError, match="no such rank"),
    ):
        HandshakeChannel().request(endpoint=endpoint, message=(7).to_bytes(4, "big"), timeout_seconds=10)


def test_a_stock_peer_is_refused_with_what_its_cache_is() -> None:
    """K and V of a token lie side by side: the message says so, names the backend, and what to do."""
    stock = msgspec.msgpack.encode(
        {"attn_backend_name": "CPU_ATTN", "kv_cache_layout": "HND", "block_lens": [65536, 65536], "engine_id": "x"}
    )
    answers = {(0, 0): payload(agent_metadata_bytes=stock)}
    with listening(answers) as (_, endpoint), pytest.raises(PeerMismatchError) as caught:
        HandshakeChannel().request(endpoint=endpoint, message=ASK_RANK_0, timeout_seconds=10)
    said = str(caught.value)
    for part in ("one K and one V region", "CPU_ATTN", "2 regions", "lie side by side", "with GkNixlConnector"):
        assert part in said


@pytest.mark.parametrize(
    "answer", [b"\xc1", b"\x01", msgspec.msgpack.encode([1, 2]), payload(gk_hello="text"), b"\x91" * 999]
)
def test_a_reply_that_is_none_is_a_typed_error(answer: bytes) -> None:
    """Whatever the other side sends."""
    with listening({(0, 0): answer}) as (_, endpoint), pytest.raises((PeerLostError, PeerMismatchError)):
        HandshakeChannel().request(endpoint=endpoint, message=ASK_RANK_0, timeout_seconds=10)


def test_the_listener_survives_random_messages() -> None:
    """Two hundred of them, of any framing; then a handshake is answered."""
    rng = random.Random(3)
    with listening({(0, 0): payload(gk_hello=HELLO)}) as (listener, endpoint):
        context = zmq.Context()
        try:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(f"tcp://127.0.0.1:{endpoint.port}")
            for _ in range(200):
                socket.send_multipart([rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 5))])
            socket.close()
            got = HandshakeChannel().request(endpoint=endpoint, message=ASK_RANK_0, timeout_seconds=20)
        finally:
            context.destroy(linger=1000)
        assert got == HELLO
        assert listener.dropped > 0


def test_a_message_of_another_kind_gets_no_answer() -> None:
    """Only handshakes are answered."""
    with listening({(0, 0): payload(gk_hello=HELLO)}) as (_, endpoint):
        context = zmq.Context()
        try:
            socket = context.socket(zmq.REQ)
            socket.setsockopt(zmq.RCVTIMEO, 300)
            socket.connect(f"tcp://127.0.0.1:{endpoint.port}")
            socket.send(msgspec.msgpack.encode((b"not " + GET_META, 0, 0)))
            with pytest.raises(zmq.Again):
                socket.recv_multipart()
        finally:
            context.destroy(linger=0)


def test_a_port_that_is_taken_is_said_at_once() -> None:
    """And what to set."""
    with listening({}) as (_, endpoint), pytest.raises(TransferError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        HandshakeListener(endpoint=endpoint, answers={})


def test_nobody_there_times_out() -> None:
    """Within the time given."""
    endpoint = Endpoint(host="127.0.0.1", port=free_ports(1)[0])
    with pytest.raises(TransferTimeoutError, match=r"within 0\.2 s"):
        HandshakeChannel().request(endpoint=endpoint, message=ASK_RANK_0, timeout_seconds=0.2)


def test_only_allowed_producers_are_asked() -> None:
    """An address from a client that is on no list hears nothing."""
    with listening({(0, 0): payload(gk_hello=HELLO)}) as (listener, endpoint):
        other = Endpoint(host="127.0.0.1", port=1)
        with pytest.raises(PeerLostError, match="gk_allowed_producers"):
            HandshakeChannel(allowed=frozenset({other})).request(
                endpoint=endpoint, message=ASK_RANK_0, timeout_seconds=1
            )
        allowed = HandshakeChannel(allowed=frozenset({endpoint}))
        assert allowed.request(endpoint=endpoint, message=ASK_RANK_0, timeout_seconds=10) == HELLO
        assert listener.dropped == 0
