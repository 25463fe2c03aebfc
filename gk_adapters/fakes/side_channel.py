"""FakeSideChannel and FakeSideChannelServer: requests and replies over a shared switchboard, answered at once.

>>> board = FakeSwitchboard()
>>> server = FakeSideChannelServer(board, host="prefill", port=5600)
>>> endpoint = server.serve(handler=lambda message: message.upper())
>>> FakeSideChannel(board).request(endpoint=endpoint, message=b"hello", timeout_seconds=1.0)
b'HELLO'
>>> board.silence(endpoint)
>>> FakeSideChannel(board).request(endpoint=endpoint, message=b"hello", timeout_seconds=1.0)
Traceback (most recent call last):
...
gk_core.errors.TransferTimeoutError: no reply from prefill:5600 within 1 s
"""

from __future__ import annotations

from collections.abc import Callable

from gk_core.errors import GkError, PeerLostError, TransferError, TransferTimeoutError
from gk_core.ports import Endpoint, SideChannel, SideChannelServer

__all__ = ["FakeSideChannel", "FakeSideChannelServer", "FakeSwitchboard"]

_FIRST_FREE_PORT = 49152


class FakeSwitchboard:
    """Who listens where, and what is wrong with the line.

    Attributes:
        num_requests: requests that reached a handler.
    """

    def __init__(self) -> None:
        self._handlers: dict[Endpoint, Callable[[bytes], bytes]] = {}
        self._silent: set[Endpoint] = set()
        self._garble: dict[Endpoint, Callable[[bytes], bytes]] = {}
        self.num_requests = 0

    def silence(self, endpoint: Endpoint, silent: bool = True) -> None:
        """Requests to it get no reply any more (or get one again)."""
        (self._silent.add if silent else self._silent.discard)(endpoint)

    def garble(self, endpoint: Endpoint, change: Callable[[bytes], bytes] | None) -> None:
        """Pass its replies through `change`; None ends that."""
        if change is None:
            self._garble.pop(endpoint, None)
        else:
            self._garble[endpoint] = change

    def listen(self, endpoint: Endpoint, handler: Callable[[bytes], bytes]) -> Endpoint:
        """For servers: take an endpoint; port 0 takes a free one.

        Raises:
            TransferError: somebody listens there.
        """
        if endpoint.port == 0:
            used = {e.port for e in self._handlers}
            port = next(p for p in range(_FIRST_FREE_PORT, 65536) if p not in used)
            endpoint = Endpoint(host=endpoint.host, port=port)
        if endpoint in self._handlers:
            raise TransferError(f"cannot bind {endpoint.host}:{endpoint.port}: in use")
        self._handlers[endpoint] = handler
        return endpoint

    def hang_up(self, endpoint: Endpoint) -> None:
        """For servers: give an endpoint back."""
        self._handlers.pop(endpoint, None)

    def call(self, endpoint: Endpoint, message: bytes, timeout_seconds: float) -> bytes:
        """For clients: see `SideChannel.request`."""
        where = f"{endpoint.host}:{endpoint.port}"
        if endpoint in self._silent:
            raise TransferTimeoutError(f"no reply from {where} within {timeout_seconds:g} s")
        handler = self._handlers.get(endpoint)
        if handler is None:
            raise PeerLostError(f"nobody listens on {where}")
        self.num_requests += 1
        try:
            reply = handler(bytes(message))
        except GkError as error:
            raise PeerLostError(f"{where} refused: {error}") from error
        except Exception as error:
            raise PeerLostError(f"{where} refused: internal error ({type(error).__name__})") from error
        return self._garble.get(endpoint, bytes)(reply)


class FakeSideChannel(SideChannel):
    """Client half.

    Args:
        board: switchboard.
    """

    def __init__(self, board: FakeSwitchboard) -> None:
        self._board = board
        self._closed = False

    def request(self, *, endpoint: Endpoint, message: bytes, timeout_seconds: float) -> bytes:
        """See `SideChannel.request`; never really waits."""
        if self._closed:
            raise TransferError("the side channel is closed")
        return self._board.call(endpoint, message, timeout_seconds)

    def close(self) -> None:
        """See `SideChannel.close`."""
        self._closed = True


class FakeSideChannelServer(SideChannelServer):
    """Listening half; the handler runs inside the client's call.

    Args:
        board: switchboard.
        host, port: where to listen; port 0 takes a free one.
    """

    def __init__(self, board: FakeSwitchboard, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._board = board
        self._wanted = Endpoint(host=host, port=port)
        self._endpoint: Endpoint | None = None
        self._closed = False

    def serve(self, *, handler: Callable[[bytes], bytes]) -> Endpoint:
        """See `SideChannelServer.serve`.

        Raises:
            TransferError: the endpoint is in use, or this server has served before.
        """
        if self._endpoint is not None or self._closed:
            raise TransferError("a side channel server serves once; make a new one")
        self._endpoint = self._board.listen(self._wanted, handler)
        return self._endpoint

    def close(self) -> None:
        """See `SideChannelServer.close`."""
        self._closed = True
        if self._endpoint is not None:
            self._board.hang_up(self._endpoint)
            self._endpoint = None
