"""SideChannel over ZeroMQ: one request, one reply, on an address that is an input.

Wire format, both ways, as ZeroMQ frames:

    request   b"GK1", nonce (16 bytes), wall-clock milliseconds (8 bytes, big-endian), payload, tag (0 or 32 bytes)
    reply     b"GK1", nonce of the request, status (1 byte: 0 answer, 1 refusal text), payload, tag

With a key, the tag is HMAC-SHA256 over direction, nonce, time or status, and payload. A server refuses a request whose
time is more than `MAX_SKEW_SECONDS` from its own, or whose nonce it has seen within that time, so a recorded request
cannot be replayed; a reply is bound to its request by the nonce. On loopback no key is needed; on any other address the
key is required, and a client talks only to endpoints on its allow-list.

Whatever arrives, the listener goes on: frames of the wrong number or size are dropped, oversized ones never reach
memory, slow clients are not waited for.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gk_core.errors import (
    GkError,
    LayoutError,
    MissingDependencyError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
    UnsupportedError,
)
from gk_core.ports import Endpoint, SideChannel, SideChannelServer

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "MAX_SKEW_SECONDS",
    "MIN_KEY_BYTES",
    "ZmqSideChannel",
    "ZmqSideChannelServer",
    "is_loopback",
]

DEFAULT_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
MAX_SKEW_SECONDS = 60.0
MIN_KEY_BYTES = 16

_MAGIC = b"GK1"
_NONCE_BYTES = 16
_MAX_REFUSAL_BYTES = 512
_POLL_MILLISECONDS = 100
_ANSWER, _REFUSAL = b"\x00", b"\x01"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback; names other than localhost are not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class ZmqSideChannel(SideChannel):
    """Client half. One socket per request, so any thread may ask.

    Args:
        key: shared secret, at least 16 bytes; required for endpoints that are not loopback.
        allowed: endpoints that requests may go to; loopback is always allowed.
        max_message_bytes: largest reply taken.

    Raises:
        MissingDependencyError: pyzmq is not installed.
        LayoutError: the key is too short.
    """

    def __init__(
        self,
        *,
        key: bytes | None = None,
        allowed: tuple[Endpoint, ...] = (),
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._zmq = _zmq()
        self._key = _checked_key(key)
        self._allowed = frozenset(allowed)
        self._max_bytes = max_message_bytes
        self._context = self._zmq.Context()
        self._closed = False

    def request(self, *, endpoint: Endpoint, message: bytes, timeout_seconds: float) -> bytes:
        """See `SideChannel.request`.

        Raises:
            UnsupportedError: the endpoint is not loopback and either no key is set or it is not on the allow-list.
        """
        if self._closed:
            raise TransferError("the side channel is closed")
        self._require_allowed(endpoint)
        zmq = self._zmq
        where = f"{endpoint.host}:{endpoint.port}"
        nonce, stamp = os.urandom(_NONCE_BYTES), _now_bytes()
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
            socket.setsockopt(zmq.IPV6, ":" in endpoint.host)
            socket.connect(_address(endpoint))
            socket.send_multipart([_MAGIC, nonce, stamp, message, _tag(self._key, b"Q", nonce, stamp, message)])
            deadline = time.monotonic() + timeout_seconds
            while True:
                left = deadline - time.monotonic()
                if left <= 0 or not socket.poll(int(left * 1000) + 1):
                    raise TransferTimeoutError(f"no reply from {where} within {timeout_seconds:g} s")
                reply = self._opened(socket.recv_multipart(), nonce)
                if reply is not None:
                    break
        except zmq.ZMQError as error:
            raise PeerLostError(f"side channel to {where} failed: {error}") from error
        finally:
            socket.close(0)
        status, payload = reply
        if status == _REFUSAL:
            raise PeerLostError(f"{where} refused: {payload[:_MAX_REFUSAL_BYTES].decode(errors='replace')}")
        return payload

    def close(self) -> None:
        """See `SideChannel.close`."""
        if not self._closed:
            self._closed = True
            self._context.destroy(0)

    def _require_allowed(self, endpoint: Endpoint) -> None:
        if not 0 < endpoint.port < 65536:
            raise LayoutError(f"port must be 1..65535, got {endpoint.port}")
        if is_loopback(endpoint.host):
            return
        if self._key is None:
            raise UnsupportedError(f"{endpoint.host} is not loopback: a side channel between machines needs a key")
        if endpoint not in self._allowed:
            raise UnsupportedError(
                f"{endpoint.host}:{endpoint.port} is not on the side channel's allow-list; add it if it is a peer"
            )

    def _opened(self, frames: list[bytes], nonce: bytes) -> tuple[bytes, bytes] | None:
        """Status and payload of a reply to this nonce, or None for anything else."""
        if len(frames) != 5 or frames[0] != _MAGIC or frames[1] != nonce or frames[2] not in (_ANSWER, _REFUSAL):
            return None
        status, payload, tag = frames[2:]
        if not hmac.compare_digest(tag, _tag(self._key, b"A", nonce, status, payload)):
            return None
        return status, payload


class ZmqSideChannelServer(SideChannelServer):
    """Listening half.

    Args:
        host: address to bind, loopback by default.
        port: 0 takes a free one.
        key: shared secret; required unless the address is loopback.
        max_message_bytes: larger frames end the sender's connection before they are read.

    Raises:
        UnsupportedError: an address other than loopback without a key.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: bytes | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._zmq = _zmq()
        self._key = _checked_key(key)
        if not is_loopback(host) and key is None:
            raise UnsupportedError(f"binding {host}, which is not loopback, needs a shared key")
        if not 0 <= port < 65536:
            raise LayoutError(f"port must be 0..65535, got {port}")
        self._endpoint = Endpoint(host=host, port=port)
        self._max_bytes = max_message_bytes
        self._context = self._zmq.Context()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, set[bytes]] = {}
        self.num_dropped = 0
        """Messages that were not answered because they were not ours."""

    def serve(self, *, handler: Callable[[bytes], bytes]) -> Endpoint:
        """See `SideChannelServer.serve`.

        Raises:
            TransferError: the address cannot be bound, or the server runs already.
        """
        if self._thread is not None or self._stop.is_set():
            raise TransferError("a side channel server serves once; make a new one")
        zmq = self._zmq
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
        socket.setsockopt(zmq.IPV6, ":" in self._endpoint.host)
        socket.setsockopt(zmq.SNDTIMEO, 0)
        try:
            if self._endpoint.port:
                socket.bind(_address(self._endpoint))
                port = self._endpoint.port
            else:
                port = socket.bind_to_random_port(_address(self._endpoint).rpartition(":")[0])
        except zmq.ZMQError as error:
            socket.close(0)
            raise TransferError(f"cannot bind {self._endpoint.host}:{self._endpoint.port}: {error}") from error
        self._endpoint = Endpoint(host=self._endpoint.host, port=port)
        self._thread = threading.Thread(target=self._run, args=(socket, handler), name="gk-side-channel", daemon=True)
        self._thread.start()
        return self._endpoint

    def close(self) -> None:
        """See `SideChannelServer.close`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if not self._context.closed:
            self._context.destroy(0)

    def _run(self, socket: Any, handler: Callable[[bytes], bytes]) -> None:
        zmq = self._zmq
        try:
            while not self._stop.is_set():
                if not socket.poll(_POLL_MILLISECONDS):
                    continue
                frames = socket.recv_multipart()
                reply = self._reply(frames[1:], handler)
                if reply is None:
                    self.num_dropped += 1
                    continue
                try:
                    socket.send_multipart([frames[0], *reply])
                except zmq.ZMQError:
                    # The client has gone or does not read; its loss alone.
                    self.num_dropped += 1
        finally:
            socket.close(0)

    def _reply(self, frames: list[bytes], handler: Callable[[bytes], bytes]) -> list[bytes] | None:
        """Frames of the reply; None where the message is not a genuine, fresh request."""
        if len(frames) != 5 or frames[0] != _MAGIC or len(frames[1]) != _NONCE_BYTES or len(frames[2]) != 8:
            return None
        _, nonce, stamp, payload, tag = frames
        if not hmac.compare_digest(tag, _tag(self._key, b"Q", nonce, stamp, payload)):
            return None
        if self._key is not None and not self._is_fresh(nonce, stamp):
            return None
        try:
            status, answer = _ANSWER, handler(payload)
        except GkError as error:
            status, answer = _REFUSAL, str(error).encode()[:_MAX_REFUSAL_BYTES]
        except Exception as error:
            # A handler's own bug must not end the listener, nor tell a stranger more than its kind.
            status, answer = _REFUSAL, f"internal error ({type(error).__name__})".encode()
        return [_MAGIC, nonce, status, answer, _tag(self._key, b"A", nonce, status, answer)]

    def _is_fresh(self, nonce: bytes, stamp: bytes) -> bool:
        """Whether a genuine request is of this time and was not seen before.

        A replay has the stamp of what it repeats, so nonces are kept by the second of their stamp, for twice as long as
        that can pass: clocks are set back at times. Only holders of the key get here, so nothing limits their number.
        """
        now, stamped = time.time(), int.from_bytes(stamp, "big") / 1000
        if abs(now - stamped) > MAX_SKEW_SECONDS:
            return False
        for second in [s for s in self._seen if s < now - 2 * MAX_SKEW_SECONDS]:
            del self._seen[second]
        of_second = self._seen.setdefault(int(stamped), set())
        if nonce in of_second:
            return False
        of_second.add(nonce)
        return True


def _tag(key: bytes | None, direction: bytes, nonce: bytes, middle: bytes, payload: bytes) -> bytes:
    if key is None:
        return b""
    return hmac.new(key, b"".join((_MAGIC, direction, nonce, middle, payload)), hashlib.sha256).digest()


def _checked_key(key: bytes | None) -> bytes | None:
    if key is not None and len(key) < MIN_KEY_BYTES:
        raise LayoutError(f"the shared key must have at least {MIN_KEY_BYTES} bytes, got {len(key)}")
    return key


def _now_bytes() -> bytes:
    return int(time.time() * 1000).to_bytes(8, "big")


def _address(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host and not endpoint.host.startswith("[") else endpoint.host
    return f"tcp://{host}:{endpoint.port}"


def _zmq() -> Any:
    try:
        return import_module("zmq")
    except ImportError as error:
        raise MissingDependencyError("pyzmq is not installed: pip install 'gk-decode[nixl]'") from error
