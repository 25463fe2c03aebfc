"""What every side channel has to do. Subclass and give `make_server` and `make_client`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gk_core.errors import LayoutError, PeerLostError, TransferError, TransferTimeoutError
from gk_core.ports import Endpoint, SideChannel, SideChannelServer

SECONDS = 10.0


class SideChannelContract:
    """One server, one client, small messages."""

    def make_server(self) -> SideChannelServer:
        """A server that has not begun to serve, on an address that is free."""
        raise NotImplementedError

    def make_client(self) -> SideChannel:
        """A client that can reach it."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _closing(self) -> Iterator[None]:
        self.open: list[SideChannel | SideChannelServer] = []
        yield
        for one in reversed(self.open):
            one.close()

    @pytest.fixture
    def client(self) -> SideChannel:
        client = self.make_client()
        self.open.append(client)
        return client

    def serve(self, handler: object = None) -> Endpoint:
        """A server that answers with the message reversed."""
        server = self.make_server()
        self.open.append(server)
        return server.serve(handler=handler if callable(handler) else lambda message: message[::-1])

    @pytest.mark.parametrize("message", [b"", b"\x00", b"hello", bytes(range(256)), b"x" * 100_000])
    def test_a_request_gets_the_handlers_reply(self, client: SideChannel, message: bytes) -> None:
        """Any bytes, none included, as they were."""
        endpoint = self.serve()
        assert client.request(endpoint=endpoint, message=message, timeout_seconds=SECONDS) == message[::-1]

    def test_requests_are_answered_one_after_the_other(self, client: SideChannel) -> None:
        """Each gets its own reply."""
        endpoint = self.serve()
        for i in range(20):
            sent = f"message {i}".encode()
            assert client.request(endpoint=endpoint, message=sent, timeout_seconds=SECONDS) == sent[::-1]

    def test_a_server_says_where_it_listens(self, client: SideChannel) -> None:
        """Two servers, two endpoints, two answers."""
        first, second = self.serve(lambda _: b"first"), self.serve(lambda _: b"second")
        assert first != second
        for endpoint, reply in ((first, b"first"), (second, b"second")):
            assert client.request(endpoint=endpoint, message=b"?", timeout_seconds=SECONDS) == reply

    @pytest.mark.parametrize("error", [LayoutError("no such rank"), ValueError("bug"), KeyError("bug")])
    def test_a_handler_that_raises_answers_that_one_request_only(self, client: SideChannel, error: Exception) -> None:
        """The asker gets a typed error, the next one its reply."""

        def handler(message: bytes) -> bytes:
            if message == b"bad":
                raise error
            return b"fine"

        endpoint = self.serve(handler)
        with pytest.raises(PeerLostError):
            client.request(endpoint=endpoint, message=b"bad", timeout_seconds=SECONDS)
        assert client.request(endpoint=endpoint, message=b"good", timeout_seconds=SECONDS) == b"fine"

    def test_the_reason_of_our_own_errors_reaches_the_asker_and_that_of_bugs_does_not(
        self, client: SideChannel
    ) -> None:
        """A bug's text may hold anything; its kind is enough."""

        def handler(message: bytes) -> bytes:
            raise LayoutError("rank 9 is not served here") if message == b"ours" else ValueError("secret")

        endpoint = self.serve(handler)
        with pytest.raises(PeerLostError, match="rank 9 is not served here"):
            client.request(endpoint=endpoint, message=b"ours", timeout_seconds=SECONDS)
        with pytest.raises(PeerLostError, match="ValueError") as caught:
            client.request(endpoint=endpoint, message=b"bug", timeout_seconds=SECONDS)
        assert "secret" not in str(caught.value)

    def test_nobody_there_is_a_typed_error_in_time(self, client: SideChannel) -> None:
        """A server that has closed."""
        server = self.make_server()
        endpoint = server.serve(handler=lambda _: b"")
        server.close()
        with pytest.raises((PeerLostError, TransferTimeoutError)):
            client.request(endpoint=endpoint, message=b"?", timeout_seconds=0.2)

    def test_closing_twice_is_harmless_and_a_closed_client_refuses(self, client: SideChannel) -> None:
        """With a typed error."""
        endpoint = self.serve()
        for _ in range(2):
            client.close()
        with pytest.raises(TransferError):
            client.request(endpoint=endpoint, message=b"?", timeout_seconds=SECONDS)

    def test_a_server_may_be_closed_twice_and_serves_once(self) -> None:
        """It does not begin again."""
        server = self.make_server()
        server.serve(handler=lambda _: b"")
        with pytest.raises(TransferError):
            server.serve(handler=lambda _: b"")
        for _ in range(2):
            server.close()

    def test_several_threads_may_ask_at_once(self, client: SideChannel) -> None:
        """Each gets the reply to its own message."""
        endpoint = self.serve()
        wrong: list[bytes] = []

        def ask(i: int) -> None:
            for j in range(5):
                sent = f"{i}/{j}".encode()
                if client.request(endpoint=endpoint, message=sent, timeout_seconds=SECONDS) != sent[::-1]:
                    wrong.append(sent)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
