"""vLLM's handshake side channel, both ends: a listener that survives any message, and a client that reads gk's hello.

Wire form, vLLM's own: request (b"get_meta_msg", pp rank, tp rank) in msgpack over ZeroMQ REQ; reply two frames, a
msgpack map and the server's clock. gk's hello travels in that map under `gk_hello`, beside vLLM's compatibility hash;
stock peers ignore the key, and a reply without it comes from a stock peer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

from gk_core.errors import Mismatch, PeerLostError, PeerMismatchError, TransferError, TransferTimeoutError
from gk_core.ports import Endpoint, SideChannel

__all__ = ["GET_META", "HandshakeChannel", "HandshakeListener", "encode_payload"]

GET_META = b"get_meta_msg"

_log = logging.getLogger(__name__)
_MAX_REQUEST_BYTES = 4096
_MAX_REPLY_BYTES = 16 * 1024 * 1024
_POLL_MILLISECONDS = 200


class _Reply(msgspec.Struct):
    """What a vLLM worker says of itself; unknown keys are ignored."""

    compatibility_hash: str
    agent_metadata_bytes: bytes
    gk_hello: bytes = b""


class _StockMetadata(msgspec.Struct):
    """The part of a stock worker's metadata that explains a refusal."""

    attn_backend_name: str
    kv_cache_layout: str
    block_lens: list[int]


_request = msgspec.msgpack.Decoder(tuple[bytes, int, int])
_reply = msgspec.msgpack.Decoder(_Reply)
_stock = msgspec.msgpack.Decoder(_StockMetadata)


def encode_payload(payload: Any) -> bytes:
    """A worker's handshake payload, a dataclass of vLLM's, in wire form."""
    return msgspec.msgpack.encode(payload)


def _address(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host and not endpoint.host.startswith("[") else endpoint.host
    return f"tcp://{host}:{endpoint.port}"


class HandshakeListener:
    """Answers handshakes in the background, whatever arrives.

    Args:
        endpoint: where to listen.
        answers: encoded reply by (pp rank, tp rank).

    Raises:
        TransferError: the address cannot be bound.
    """

    def __init__(self, *, endpoint: Endpoint, answers: Mapping[tuple[int, int], bytes]) -> None:
        self._answers = dict(answers)
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0), (zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES), (zmq.RCVTIMEO, _POLL_MILLISECONDS),
            (zmq.SNDTIMEO, 0), (zmq.IPV6, int(":" in endpoint.host)),
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(_address(endpoint))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransferError(
                f"the handshake side channel cannot listen on {endpoint.host}:{endpoint.port}: {error}; give each "
                "server its own VLLM_NIXL_SIDE_CHANNEL_PORT"
            ) from error
        self.dropped = 0
        """Messages that were no handshake."""
        self._thread = threading.Thread(target=self._run, name="gk-handshake-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; harmless twice."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                frames = self._socket.recv_multipart()
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if self._stop.is_set() or error.errno == zmq.ETERM:
                    return
                continue
            try:
                self._answer(frames)
            except Exception as error:
                # Whatever it was, the next peer must still be answered.
                self.dropped += 1
                _log.debug("dropped a message on the handshake side channel: %s", type(error).__name__)

    def _answer(self, frames: list[bytes]) -> None:
        identity, empty, message = frames
        if empty:
            raise ValueError("not a REQ socket's framing")
        kind, pp_rank, tp_rank = _request.decode(message)
        if kind != GET_META:
            raise ValueError("not a handshake")
        # A rank that does not exist gets an empty reply, which no peer takes for metadata, rather than silence.
        answer = self._answers.get((pp_rank, tp_rank), b"")
        self._socket.send_multipart([identity, b"", answer, msgspec.msgpack.encode(time.perf_counter())])


class HandshakeChannel(SideChannel):
    """Asks a vLLM server for one worker's hello. A message's first four bytes are the rank that is asked for.

    Args:
        allowed: endpoints that may be asked; None means any. Endpoints come from clients, by way of the proxy.
    """

    def __init__(self, *, allowed: frozenset[Endpoint] | None = None) -> None:
        self._allowed = allowed

    def request(self, *, endpoint: Endpoint, message: bytes, timeout_seconds: float) -> bytes:
        """See `SideChannel.request`.

        Raises:
            PeerMismatchError: a stock connector answered; says what differs.
            PeerLostError: nobody there, an endpoint that is not allowed, or no handshake reply.
            TransferTimeoutError: no reply in time.
        """
        where = f"{endpoint.host}:{endpoint.port}"
        if self._allowed is not None and endpoint not in self._allowed:
            raise PeerLostError(f"{where} is not among gk_allowed_producers; nothing was sent there")
        rank = int.from_bytes(message[:4], "big")
        context = zmq.Context()
        try:
            socket = context.socket(zmq.REQ)
            for option, value in (
                (zmq.LINGER, 0), (zmq.MAXMSGSIZE, _MAX_REPLY_BYTES), (zmq.IPV6, int(":" in endpoint.host)),
                (zmq.RCVTIMEO, max(int(timeout_seconds * 1000), 1)), (zmq.SNDTIMEO, 1000),
            ):  # fmt: skip
                socket.setsockopt(option, value)
            socket.connect(_address(endpoint))
            socket.send(msgspec.msgpack.encode((GET_META, 0, rank)))
            frames = socket.recv_multipart()
        except zmq.Again:
            raise TransferTimeoutError(f"{where} did not answer a handshake within {timeout_seconds:g} s") from None
        except zmq.ZMQError as error:
            raise PeerLostError(f"{where} cannot be asked: {error}") from error
        finally:
            context.destroy(linger=0)
        return _hello_of(frames[0], where)

    def close(self) -> None:
        """Nothing is kept open."""


def _hello_of(data: bytes, where: str) -> bytes:
    if not data:
        raise PeerLostError(f"{where} serves no such rank")
    try:
        reply = _reply.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerLostError(f"{where} sent no handshake reply: {ascii(str(error))[1:-1][:200]}") from None
    if reply.gk_hello:
        return reply.gk_hello
    raise PeerMismatchError(
        (Mismatch(field="cache", ours="one K and one V region per group buffer", theirs=_stock_cache(reply)),)
    )


def _stock_cache(reply: _Reply) -> str:
    try:
        said = _stock.decode(reply.agent_metadata_bytes)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "a stock NIXL connector, whose metadata cannot be read"
    backend = ascii(said.attn_backend_name)[1:-1][:64]
    return (
        f"a stock NIXL connector over {backend}: {len(said.block_lens)} regions in which K and V of a token lie side "
        "by side in one content dimension, so there is no K region and no V region to read; start the producer with "
        "GkNixlConnector"
    )
