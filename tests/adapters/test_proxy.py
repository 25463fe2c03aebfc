"""The proxy between real ASGI servers that behave as prefill and decode servers do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gk_adapters.proxy import ProxySettings, build_proxy, decode_body, prefill_body
from gk_core.errors import LayoutError

SCOPE = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
    "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": [],
    "scheme": "http", "server": ("proxy", 80), "client": ("c", 1), "root_path": "",
}  # fmt: skip
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "E1", "remote_block_ids": [[3], [4]]}


class Server:
    """One upstream: remembers bodies, answers as told."""

    def __init__(self, answer: Callable[[dict[str, Any]], Response]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer = answer
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.post, methods=["POST"]),
                Route("/v1/chat/completions", self.post, methods=["POST"]),
                Route("/v1/models", self.get),
                Route("/health", self.get),
            ]
        )

    async def post(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return self.answer(self.bodies[-1])

    async def get(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})


class Network(httpx.AsyncBaseTransport):
    """Routes by host name to ASGI applications; unknown hosts refuse the connection."""

    def __init__(self, **servers: Server) -> None:
        self.by_host = {name: httpx.ASGITransport(app=server.app) for name, server in servers.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host not in self.by_host:
            raise httpx.ConnectError("refused", request=request)
        return await self.by_host[request.url.host].handle_async_request(request)


def prefiller() -> Server:
    return Server(lambda _: JSONResponse({"choices": [{"text": "!"}], "kv_transfer_params": PARAMS}))


def decoder(text: str = "tokens") -> Server:
    def answer(body: dict[str, Any]) -> Response:
        if not body.get("stream"):
            return JSONResponse({"choices": [{"text": text}]})

        async def chunks() -> AsyncIterator[bytes]:
            for word in text.split():
                yield b"data: " + word.encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return Server(answer)


def client_of(
    network: Network, prefill: tuple[str, ...] = ("p",), decode: tuple[str, ...] = ("d",)
) -> httpx.AsyncClient:
    settings = ProxySettings(
        prefill_urls=tuple(f"http://{h}" for h in prefill), decode_urls=tuple(f"http://{h}" for h in decode)
    )
    app = build_proxy(settings, transport=network)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy")


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_prefill_gets_one_token_and_decode_gets_the_parameters() -> None:
    """The prefill request keeps KV for a remote decode; the decode request is the client's own plus the parameters."""
    p, d = prefiller(), decoder()

    async def go() -> httpx.Response:
        async with client_of(Network(p=p, d=d)) as client:
            return await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 7, "logprobs": 3})

    answer = run(go())
    assert answer.json()["choices"][0]["text"] == "tokens"
    assert p.bodies[0]["max_tokens"] == 1
    assert p.bodies[0]["stream"] is False
    assert p.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert "logprobs" not in p.bodies[0]
    assert d.bodies[0] == {"prompt": [1, 2], "max_tokens": 7, "logprobs": 3, "kv_transfer_params": PARAMS}


def test_a_stream_is_passed_on_chunk_by_chunk() -> None:
    """Server-sent events arrive unchanged."""

    async def go() -> str:
        async with client_of(Network(p=prefiller(), d=decoder("a b"))) as client:
            return (await client.post("/v1/chat/completions", json={"messages": [], "stream": True})).text

    assert run(go()) == "data: a\n\ndata: b\n\ndata: [DONE]\n\n"


def test_servers_are_taken_in_turn() -> None:
    """Two prefill and three decode servers share six requests evenly."""
    ps = {f"p{i}": prefiller() for i in range(2)}
    ds = {f"d{i}": decoder() for i in range(3)}

    async def go() -> None:
        async with client_of(Network(**ps, **ds), tuple(ps), tuple(ds)) as client:
            for _ in range(6):
                await client.post("/v1/completions", json={"prompt": "x"})

    run(go())
    assert [len(s.bodies) for s in ps.values()] == [3, 3]
    assert [len(s.bodies) for s in ds.values()] == [2, 2, 2]


def test_a_server_that_is_down_is_passed_over() -> None:
    """The next server in turn serves the request; with none left the answer is 502."""
    p, d = prefiller(), decoder()

    async def go(prefill: tuple[str, ...]) -> list[int]:
        async with client_of(Network(p=p, d=d), prefill) as client:
            return [(await client.post("/v1/completions", json={"prompt": "x"})).status_code for _ in range(2)]

    assert run(go(("gone", "p"))) == [200, 200]
    assert run(go(("gone",))) == [502, 502]


def test_a_prefill_refusal_reaches_the_client_and_no_decoder() -> None:
    """Status and body of the prefill server's refusal are the client's answer."""
    p, d = Server(lambda _: JSONResponse({"error": "too long"}, 400)), decoder()

    async def go() -> httpx.Response:
        async with client_of(Network(p=p, d=d)) as client:
            return await client.post("/v1/completions", json={"prompt": "x"})

    answer = run(go())
    assert (answer.status_code, answer.json()) == (400, {"error": "too long"})
    assert d.bodies == []


def test_a_clients_own_transfer_parameters_are_dropped() -> None:
    """Only the prefill server names blocks; a client cannot point a decoder at memory of its choice."""
    hostile = {"prompt": "x", "kv_transfer_params": {"remote_host": "10.0.0.1", "do_remote_prefill": True}}
    assert prefill_body(hostile)["kv_transfer_params"]["remote_host"] is None
    assert decode_body(hostile, PARAMS)["kv_transfer_params"] == PARAMS
    assert "kv_transfer_params" not in decode_body(hostile, None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (json.dumps({"prompt": ["a", "b"]}).encode(), "one prompt"),
        (json.dumps({"prompt": "a", "n": 2}).encode(), "n = 1"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_before_any_server(content: bytes, said: str) -> None:
    """400 with the reason; neither server hears of it."""
    p, d = prefiller(), decoder()

    async def go() -> httpx.Response:
        async with client_of(Network(p=p, d=d)) as client:
            return await client.post("/v1/completions", content=content)

    answer = run(go())
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert p.bodies == d.bodies == []


def test_a_token_id_prompt_is_one_prompt() -> None:
    """A list of integers is one prompt, not many."""

    async def go() -> int:
        async with client_of(Network(p=prefiller(), d=decoder())) as client:
            return (await client.post("/v1/completions", json={"prompt": [1, 2, 3]})).status_code

    assert run(go()) == 200


def test_health_needs_one_server_of_each_kind() -> None:
    """Ready with one of each; 503 with no decoder."""

    async def go(decode: tuple[str, ...]) -> httpx.Response:
        async with client_of(Network(p=prefiller(), d=decoder()), ("p", "gone"), decode) as client:
            return await client.get("/health")

    good, bad = run(go(("d",))), run(go(("gone",)))
    assert (good.status_code, good.json()["prefill"]) == (200, {"http://p": True, "http://gone": False})
    assert (bad.status_code, bad.json()["ready"]) == (503, False)


def test_a_client_that_leaves_ends_the_upstream_request() -> None:
    """Disconnecting during prefill cancels it and no decoder is asked."""
    cancelled = asyncio.Event()

    class Stuck(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError("unreachable")

    settings = ProxySettings(prefill_urls=("http://p",), decode_urls=("http://d",))
    app = build_proxy(settings, transport=Stuck())
    body = json.dumps({"prompt": "x"}).encode()
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(incoming, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def go() -> None:
        await asyncio.wait_for(app(SCOPE, receive, send), timeout=30)

    run(go())
    assert cancelled.is_set()
    assert sent[0]["status"] == 499


def test_a_client_that_leaves_before_the_first_chunk_ends_the_upstream_request() -> None:
    """The decode server has answered with headers; nobody has read a byte of its stream."""
    closed: list[str] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield b"data: token\n\n"
                await asyncio.sleep(0)

        async def aclose(self) -> None:
            closed.append("decode")

    class Servers(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "p":
                return httpx.Response(200, json={"kv_transfer_params": PARAMS})
            return httpx.Response(200, stream=Endless())

    settings = ProxySettings(prefill_urls=("http://p",), decode_urls=("http://d",))
    app = build_proxy(settings, transport=Servers())
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(incoming, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    async def go() -> None:
        await asyncio.wait_for(app(SCOPE, receive, send), timeout=30)

    run(go())
    assert closed == ["decode"]


def test_settings_refuse_urls_that_are_none() -> None:
    """A missing scheme or an empty list is named."""
    with pytest.raises(LayoutError, match="at least one decode"):
        ProxySettings(prefill_urls=("http://p",), decode_urls=())
    with pytest.raises(LayoutError, match="localhost:1"):
        ProxySettings(prefill_urls=("localhost:1",), decode_urls=("http://d",))
