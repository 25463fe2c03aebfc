"""A small proxy for read-mode disaggregated serving: prefill first, then decode pulls, the client sees one server.

For each completion it asks a prefill server for one token with `do_remote_decode`, takes the `kv_transfer_params` of
the answer, and sends the client's own request with them to a decode server, whose answer it passes on, streamed or
whole. Servers are taken in turn; one that cannot be reached is passed over. A client that goes away ends its upstream
request at once. The one token that the prefill server samples is never shown: it belongs to a position that the decode
server computes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from attrs import field, frozen, mutable
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gk_core.errors import LayoutError, RequestError

__all__ = ["ProxyCounters", "ProxySettings", "build_proxy", "decode_body", "prefill_body"]

_MAX_BODY_BYTES = 32 * 1024 * 1024
_DISCONNECT_POLL_SECONDS = 0.1
_DROPPED_FROM_PREFILL = (
    "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "min_tokens", "max_completion_tokens", "n",
    "best_of", "echo", "stop", "kv_transfer_params",
)  # fmt: skip
_PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@frozen(kw_only=True)
class ProxySettings:
    """Where the servers are.

    Attributes:
        prefill_urls, decode_urls: base URLs, without a path; used in turn.
        connect_timeout_seconds: to give up on a server and try the next.
    """

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    connect_timeout_seconds: float = 5.0

    def __attrs_post_init__(self) -> None:
        for name, urls in (("prefill", self.prefill_urls), ("decode", self.decode_urls)):
            if not urls:
                raise LayoutError(f"the proxy needs at least one {name} server URL, got none")
            for url in urls:
                if not url.startswith(("http://", "https://")):
                    raise LayoutError(f"{name} server URL must start with http:// or https://, got {url!r}")


@mutable
class ProxyCounters:
    """What the proxy did; read by /health."""

    completed: int = 0
    failed: int = 0
    aborted: int = 0


@mutable
class _Turn:
    """Round robin over base URLs; every call starts one further on."""

    urls: tuple[str, ...]
    next_index: int = field(default=0)

    def order(self) -> tuple[str, ...]:
        start = self.next_index % len(self.urls)
        self.next_index += 1
        return self.urls[start:] + self.urls[:start]


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: one token, not streamed, KV kept for a remote decode."""
    kept = {key: value for key, value in body.items() if key not in _DROPPED_FROM_PREFILL}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": dict(_PREFILL_PARAMS)}


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The client's own request with the prefill server's parameters, and never the client's."""
    kept = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return {**kept, "kv_transfer_params": dict(kv_transfer_params)} if kv_transfer_params else kept


def build_proxy(settings: ProxySettings, *, transport: httpx.AsyncBaseTransport | None = None) -> Starlette:
    """The proxy as an ASGI application.

    Args:
        settings: where the servers are.
        transport: what carries upstream requests; None is the network.
    """
    proxy = _Proxy(settings, transport)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await proxy.client.aclose()

    return Starlette(
        routes=[
            Route("/v1/completions", proxy.completions, methods=["POST"]),
            Route("/v1/chat/completions", proxy.completions, methods=["POST"]),
            Route("/v1/models", proxy.models, methods=["GET"]),
            Route("/health", proxy.health, methods=["GET"]),
        ],
        lifespan=lifespan,
    )


class _Proxy:
    def __init__(self, settings: ProxySettings, transport: httpx.AsyncBaseTransport | None) -> None:
        # No read timeout: a long generation is silent for as long as it takes.
        timeout = httpx.Timeout(None, connect=settings.connect_timeout_seconds)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport, trust_env=False)
        self.prefill = _Turn(settings.prefill_urls)
        self.decode = _Turn(settings.decode_urls)
        self.counters = ProxyCounters()

    async def completions(self, request: Request) -> Response:
        try:
            body = await _read_body(request)
        except RequestError as error:
            self.counters.failed += 1
            return _error(400, str(error))
        work = asyncio.ensure_future(self._serve(request, body))
        response = await _unless_disconnected(request, work)
        if response is None:
            self.counters.aborted += 1
            return _error(499, "the client closed the connection")
        return response

    async def _serve(self, request: Request, body: dict[str, Any]) -> Response:
        path, headers = request.url.path, _forwarded(request)
        answer = await self._first_reachable(self.prefill, path, prefill_body(body), headers, stream=False)
        if isinstance(answer, Response):
            return answer
        if answer.status_code != 200:
            self.counters.failed += 1
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        try:
            params = answer.json().get("kv_transfer_params")
        except (ValueError, AttributeError):
            self.counters.failed += 1
            return _error(502, "the prefill server's answer is not a JSON object")
        if params is not None and not isinstance(params, dict):
            self.counters.failed += 1
            return _error(502, "the prefill server's kv_transfer_params is not an object")
        upstream = await self._first_reachable(self.decode, path, decode_body(body, params), headers, stream=True)
        if isinstance(upstream, Response):
            return upstream
        if body.get("stream"):
            return _PassedOn(self._passed_on(upstream), upstream)
        try:
            content = await upstream.aread()
        except httpx.HTTPError as error:
            self.counters.failed += 1
            return _error(502, f"the decode server broke off: {type(error).__name__}")
        finally:
            await upstream.aclose()
        self._tally(upstream.status_code)
        return Response(content, upstream.status_code, media_type=upstream.headers.get("content-type"))

    async def _passed_on(self, upstream: httpx.Response) -> AsyncIterator[bytes]:
        """Chunks as they come. Leaving early, for whatever reason, closes the upstream request."""
        finished = False
        try:
            async for chunk in upstream.aiter_raw():
                yield chunk
            finished = True
            self._tally(upstream.status_code)
        except httpx.HTTPError as error:
            finished = True
            self.counters.failed += 1
            yield b"data: " + json.dumps({"error": {"message": f"decode server broke off: {error}"}}).encode() + b"\n\n"
        finally:
            if not finished:
                self.counters.aborted += 1
            await upstream.aclose()

    async def _first_reachable(
        self, turn: _Turn, path: str, body: dict[str, Any], headers: dict[str, str], *, stream: bool
    ) -> httpx.Response | Response:
        failures = []
        for url in turn.order():
            try:
                message = self.client.build_request("POST", url + path, json=body, headers=headers)
                return await self.client.send(message, stream=stream)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failures.append(f"{url}: {type(error).__name__}")
            except httpx.HTTPError as error:
                # The server may have begun to work on it; asking another would do the work twice.
                failures.append(f"{url}: {type(error).__name__}")
                break
        self.counters.failed += 1
        return _error(502, "no server could be reached: " + ", ".join(failures))

    def _tally(self, status: int) -> None:
        if status == 200:
            self.counters.completed += 1
        else:
            self.counters.failed += 1

    async def models(self, request: Request) -> Response:
        for url in self.decode.order():
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.client.get(url + "/v1/models", headers=_forwarded(request))
                return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        return _error(502, "no decode server could be reached")

    async def health(self, _: Request) -> Response:
        """200 when at least one server of each kind answers, else 503; says which do."""
        urls = [*self.prefill.urls, *self.decode.urls]
        up = dict(zip(urls, await asyncio.gather(*(self._is_up(url) for url in urls)), strict=True))
        ready = any(up[u] for u in self.prefill.urls) and any(up[u] for u in self.decode.urls)
        counters = self.counters
        return JSONResponse(
            {
                "ready": ready,
                "prefill": {u: up[u] for u in self.prefill.urls},
                "decode": {u: up[u] for u in self.decode.urls},
                "completed": counters.completed,
                "failed": counters.failed,
                "aborted": counters.aborted,
            },
            200 if ready else 503,
        )

    async def _is_up(self, url: str) -> bool:
        try:
            return (await self.client.get(url + "/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False


class _PassedOn(StreamingResponse):
    """An upstream stream that is closed with ours, also where the client left before the first chunk."""

    def __init__(self, chunks: AsyncIterator[bytes], upstream: httpx.Response) -> None:
        super().__init__(chunks, upstream.status_code, media_type=upstream.headers.get("content-type"))
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._upstream.aclose()


async def _read_body(request: Request) -> dict[str, Any]:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MAX_BODY_BYTES:
            raise RequestError(f"the request body is over {_MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    try:
        body = json.loads(b"".join(chunks))
    except ValueError as error:
        raise RequestError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the request body must be a JSON object, got {type(body).__name__}")
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)
    if several or body.get("n") not in (None, 1):
        # One set of KV blocks is handed over once; several sequences would each claim it.
        raise RequestError("one prompt and n = 1 per request: send several prompts as several requests")
    return body


async def _unless_disconnected(request: Request, work: asyncio.Future[Response]) -> Response | None:
    """The work's result, or None when the client left first; the work is then cancelled."""
    while True:
        done, _ = await asyncio.wait({work}, timeout=_DISCONNECT_POLL_SECONDS)
        if done:
            return work.result()
        if await request.is_disconnected():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            return None


def _forwarded(request: Request) -> dict[str, str]:
    wanted = ("authorization", "x-request-id")
    return {name: request.headers[name] for name in wanted if name in request.headers}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "gk_proxy_error", "code": status}}, status)
