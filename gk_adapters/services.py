"""A prefill node and a decode node as services: one thread that runs the engine, and messages that ask it for things.

Messages are JSON objects, `{"do": what, ...}`, over a side channel of their own beside the handshake's: one request,
one reply, never waiting for work to be done. A client asks again until it is.

    prefill   submit  request_id, prompt              -> accepted
              result  request_id                      -> hand_off, or pending, or error
    decode    submit  request_id, prompt, max_new_tokens, eos_ids, hand_off (or null)
                                                      -> accepted
              result  request_id, after               -> tokens from that index on, finished (a reason or null), error
              cancel  request_id                      -> cancelled
    both      status                                  -> engine id, blocks in all and free, leases

Everything in a message is untrusted; what is wrong with it is said to its sender and touches nobody else.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attrs import define, field

from gk_adapters.nodes import DecodeNode, PrefillNode
from gk_core.decode_request import DecodeRequest, RequestFinished, TokenEmitted
from gk_core.errors import CapacityError, GkError, RequestError
from gk_core.hand_off import HandOff, parse_kv_transfer_params, to_kv_transfer_params
from gk_core.ports import Endpoint, SideChannel

__all__ = ["DecodeService", "PrefillService", "ServiceClient"]

_IDLE_SECONDS = 0.001
_REMEMBERED_RESULTS = 4096
_MAX_PROMPT_TOKENS = 1_000_000


class _Loop:
    """A thread that runs jobs handed to it, and polls in between."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def post(self, job: Callable[[], None]) -> None:
        if self.failure is not None:
            raise RequestError(f"the service has stopped: {self.failure}")
        self._jobs.put(job)

    def turn(self) -> bool:
        """One round of the engine; whether there was anything to do."""
        raise NotImplementedError

    def step(self) -> bool:
        """Run the jobs that wait, then one round of the engine; whether there was anything to do.

        The thread does this all the time; call it where no thread was started.
        """
        busy = False
        while not self._jobs.empty():
            self._jobs.get()()
            busy = True
        return self.turn() or busy

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.step():
                    self._stop.wait(_IDLE_SECONDS)
        except BaseException as error:
            # The engine's own bug: say so to every later caller instead of going silent.
            self.failure = error
            raise


@define
class _PrefillResult:
    hand_off: HandOff | None = None
    error: str = ""

    @property
    def is_over(self) -> bool:
        return self.hand_off is not None or bool(self.error)


class PrefillService(_Loop):
    """Runs a prefill node; give `handle` to a `SideChannelServer`."""

    def __init__(self, node: PrefillNode) -> None:
        super().__init__("gk-prefill")
        self.node = node
        self._results: OrderedDict[str, _PrefillResult] = OrderedDict()
        self._waiting: list[tuple[str, tuple[int, ...]]] = []
        self._lock = threading.Lock()

    def handle(self, message: bytes) -> bytes:
        """Answer one message.

        Raises:
            RequestError: not a message, or one that cannot be served.
        """
        request = _object(message)
        return _dispatch(request, {"submit": self._submit, "result": self._result, "status": self._status})

    def turn(self) -> bool:
        """See `_Loop.turn`."""
        ended = self.node.engine.poll()
        waiting, self._waiting = self._waiting, []
        for request_id, prompt in waiting:
            self._prefill(request_id, prompt)
        return bool(ended) or len(self._waiting) < len(waiting)

    def _submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        request_id, prompt = _text(request, "request_id"), _token_ids(request, "prompt")
        with self._lock:
            _enter(self._results, request_id, _PrefillResult())
        self.post(lambda: self._waiting.append((request_id, prompt)))
        return {"accepted": True}

    def _prefill(self, request_id: str, prompt: tuple[int, ...]) -> None:
        try:
            result = _PrefillResult(hand_off=self.node.engine.submit(request_id=request_id, token_ids=prompt))
        except CapacityError as error:
            if self.node.engine.leases:
                # Blocks come back when their readers are done; the request keeps its place.
                self._waiting.append((request_id, prompt))
                return
            result = _PrefillResult(error=str(error))
        except GkError as error:
            result = _PrefillResult(error=str(error))
        with self._lock:
            self._results[request_id] = result

    def _result(self, request: Mapping[str, Any]) -> dict[str, Any]:
        request_id = _text(request, "request_id")
        with self._lock:
            result = self._results.get(request_id)
        if result is None:
            raise RequestError(f"request {request_id!r} is unknown")
        if result.error:
            return {"error": result.error}
        if result.hand_off is None:
            return {"pending": True}
        return {"hand_off": to_kv_transfer_params(result.hand_off)}

    def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"engine_id": self.node.engine_id, "leases": len(self.node.engine.leases), **_pool_counts(self.node)}


@define
class _DecodeResult:
    tokens: list[int] = field(factory=list)
    finished: str | None = None
    error: str = ""
    transferred_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def is_over(self) -> bool:
        return self.finished is not None


class DecodeService(_Loop):
    """Runs a decode node; give `handle` to a `SideChannelServer`."""

    def __init__(self, node: DecodeNode) -> None:
        super().__init__("gk-decode")
        self.node = node
        self._results: OrderedDict[str, _DecodeResult] = OrderedDict()
        self._lock = threading.Lock()

    def handle(self, message: bytes) -> bytes:
        """Answer one message.

        Raises:
            RequestError: not a message, or one that cannot be served.
        """
        handlers = {"submit": self._submit, "result": self._result, "cancel": self._cancel, "status": self._status}
        return _dispatch(_object(message), handlers)

    def turn(self) -> bool:
        """See `_Loop.turn`."""
        engine = self.node.engine
        events = engine.poll()
        with self._lock:
            for event in events:
                result = self._results.get(event.request_id)
                if result is None:
                    continue
                if isinstance(event, TokenEmitted):
                    result.tokens.append(event.token_id)
                elif isinstance(event, RequestFinished):
                    result.finished, result.error = event.reason.value, event.error
                    result.transferred_tokens = event.transferred_tokens
                    result.recomputed_tokens = event.recomputed_tokens
        return bool(events)

    def _submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        params = request.get("hand_off")
        offer = None if params is None else parse_kv_transfer_params(params)
        try:
            decode = DecodeRequest(
                request_id=_text(request, "request_id"),
                prompt=_token_ids(request, "prompt"),
                max_new_tokens=_count(request, "max_new_tokens"),
                eos_ids=frozenset(_token_ids({"eos_ids": request.get("eos_ids", [])}, "eos_ids", empty=True)),
                hand_off=offer,
            )
            with self._lock:
                _enter(self._results, decode.request_id, _DecodeResult())
        except GkError:
            if offer is not None:
                # Its producer must not wait for a reader that will never come.
                declined = offer
                self.post(lambda: self.node.engine.decline(declined))
            raise
        self.post(lambda: self._start(decode))
        return {"accepted": True}

    def _start(self, request: DecodeRequest) -> None:
        try:
            self.node.engine.submit(request)
        except GkError as error:
            with self._lock:
                self._results[request.request_id] = _DecodeResult(finished="refused", error=str(error))

    def _result(self, request: Mapping[str, Any]) -> dict[str, Any]:
        request_id, after = _text(request, "request_id"), _count(request, "after", least=0)
        with self._lock:
            result = self._results.get(request_id)
            if result is None:
                raise RequestError(f"request {request_id!r} is unknown")
            return {
                "tokens": result.tokens[after:],
                "finished": result.finished,
                "error": result.error,
                "transferred_tokens": result.transferred_tokens,
                "recomputed_tokens": result.recomputed_tokens,
            }

    def _cancel(self, request: Mapping[str, Any]) -> dict[str, Any]:
        request_id = _text(request, "request_id")
        self.post(lambda: self.node.engine.cancel(request_id=request_id))
        return {"cancelled": True}

    def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "engine_id": self.node.engine_id,
            "has_work": self.node.engine.has_work,
            **_pool_counts(self.node),
        }


class ServiceClient:
    """Asks a service.

    Args:
        channel: side channel.
        endpoint: the service's control address.
        timeout_seconds: of one request.
    """

    def __init__(self, *, channel: SideChannel, endpoint: Endpoint, timeout_seconds: float = 10.0) -> None:
        self._channel = channel
        self._endpoint = endpoint
        self._timeout = timeout_seconds

    def ask(self, **request: object) -> dict[str, Any]:
        """One request, one reply.

        Raises:
            PeerLostError: refused, or nobody there.
            TransferTimeoutError: no reply in time.
        """
        reply = self._channel.request(
            endpoint=self._endpoint, message=json.dumps(request).encode(), timeout_seconds=self._timeout
        )
        return _object(reply)


R = TypeVar("R", _PrefillResult, _DecodeResult)


def _enter(results: OrderedDict[str, R], request_id: str, result: R) -> None:
    """Remember one more request; the oldest that is over makes room.

    Raises:
        RequestError: the id is known.
        CapacityError: every request that is remembered is still under way.
    """
    if request_id in results:
        raise RequestError(f"request {request_id!r} is known already; use another id")
    if len(results) >= _REMEMBERED_RESULTS:
        over = next((name for name, known in results.items() if known.is_over), None)
        if over is None:
            raise CapacityError(f"{len(results)} requests are under way already; try again later")
        del results[over]
    results[request_id] = result


def _pool_counts(node: PrefillNode | DecodeNode) -> dict[str, int]:
    pool = node.pool
    return {"num_blocks": pool.num_blocks, "free_blocks": pool.num_free_blocks()}


def _dispatch(
    request: Mapping[str, Any], handlers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]
) -> bytes:
    what = request.get("do")
    handler = handlers.get(what) if isinstance(what, str) else None
    if handler is None:
        raise RequestError(f"'do' must be one of {sorted(handlers)}, got {str(what)[:40]!r}")
    return json.dumps(handler(request)).encode()


def _object(message: bytes) -> dict[str, Any]:
    try:
        value = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise RequestError(f"a message is a JSON object, got {type(value).__name__}")
    return value


def _text(request: Mapping[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise RequestError(f"{key} must be a string of 1..256 characters")
    return value


def _count(request: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    value = request.get(key)
    if type(value) is not int or not least <= value <= _MAX_PROMPT_TOKENS:
        raise RequestError(f"{key} must be an integer {least}..{_MAX_PROMPT_TOKENS}, got {str(value)[:40]!r}")
    return value


def _token_ids(request: Mapping[str, Any], key: str, *, empty: bool = False) -> tuple[int, ...]:
    value = request.get(key)
    if not isinstance(value, list) or not (empty or value) or len(value) > _MAX_PROMPT_TOKENS:
        raise RequestError(f"{key} must be a list of 1..{_MAX_PROMPT_TOKENS} token ids")
    if any(type(t) is not int for t in value):
        raise RequestError(f"{key} must hold integers only")
    return tuple(value)
