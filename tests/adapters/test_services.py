"""Nodes as services: what a client asks, what it hears, and that one client's nonsense is nobody else's trouble.

Both engines are stepped by hand, so nothing here waits; the last test runs the threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from gk_adapters import services
from gk_adapters.fakes import FakeSideChannel, FakeSideChannelServer, FakeSwitchboard
from gk_adapters.nodes import CacheSettings, DecodeNode, PrefillNode, local_wirings
from gk_adapters.services import DecodeService, PrefillService, ServiceClient
from gk_adapters.torch_model import TorchModel, load_torch_model
from gk_core.decode_request import DecodeSettings
from gk_core.errors import CapacityError, PeerLostError, RequestError
from gk_core.lease import EndedLease, LeaseEnd
from gk_core.metrics import REQUESTS_REFUSED
from gk_core.prefill_engine import PrefillSettings
from tests.builders import CountingMetrics

MODEL = Path(__file__).parents[2] / "models" / "tiny-recall"
PROMPT = list(range(5, 45))
NEW_TOKENS = 3
NUM_BLOCKS = 18


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load_torch_model(MODEL, model_dtype="float32")


class Site:
    """A prefill and a decode service in one process, and what the producer's leases came to."""

    def __init__(self, model: TorchModel, *, decode_model: TorchModel | None = None, num_blocks: int = NUM_BLOCKS):
        cache = CacheSettings(num_blocks=num_blocks, block_size=16, max_model_len=600, num_rows=3)
        to_prefill, to_decode = local_wirings()
        self.metrics = CountingMetrics()
        self.prefill = PrefillService(
            PrefillNode(
                model=model, cache=cache, wiring=to_prefill, metrics=CountingMetrics(),
                settings=PrefillSettings(max_model_len=cache.max_model_len),
            )
        )  # fmt: skip
        self.decode = DecodeService(
            DecodeNode(
                model=decode_model or model, cache=cache, wiring=to_decode, metrics=self.metrics,
                settings=DecodeSettings(),
            )
        )  # fmt: skip
        self.ended: list[EndedLease] = []
        poll = self.prefill.node.engine.poll

        def watched() -> tuple[EndedLease, ...]:
            ended = poll()
            self.ended += ended
            return ended

        setattr(self.prefill.node.engine, "poll", watched)  # noqa: B010  (mypy forbids assigning to a method)

    def close(self) -> None:
        self.decode.node.close()
        self.prefill.node.close()

    def ask(self, service: PrefillService | DecodeService, **request: object) -> dict[str, Any]:
        answer = json.loads(service.handle(json.dumps(request).encode()))
        assert isinstance(answer, dict)
        return answer

    def step_until(self, check: Callable[[], Any]) -> Any:
        """The first true answer, with both services stepped in between."""
        for _ in range(20_000):
            if answer := check():
                return answer
            self.decode.step()
            self.prefill.step()
        raise AssertionError("it never came true")

    def offer(self, request_id: str = "p", prompt: list[int] = PROMPT) -> dict[str, Any]:
        self.ask(self.prefill, do="submit", request_id=request_id, prompt=prompt)
        answer = self.step_until(
            lambda: "pending" not in (a := self.ask(self.prefill, do="result", request_id=request_id)) and a
        )
        hand_off = answer["hand_off"]
        assert isinstance(hand_off, dict)
        return hand_off

    def submit(self, hand_off: object, request_id: str = "r", **change: object) -> dict[str, Any]:
        request: dict[str, object] = {
            "do": "submit", "request_id": request_id, "prompt": PROMPT, "max_new_tokens": NEW_TOKENS,
            "hand_off": hand_off,
        }  # fmt: skip
        return self.ask(self.decode, **{**request, **change})

    def result(self, request_id: str = "r", after: int = 0) -> dict[str, Any]:
        """Once it is over."""
        return dict(
            self.step_until(
                lambda: (
                    (a := self.ask(self.decode, do="result", request_id=request_id, after=after))["finished"]
                    is not None
                    and a
                )
            )
        )

    def require_whole(self) -> None:
        """Used + free = total and nothing used: all but the null block are free; nothing is on lease."""
        self.step_until(lambda: not self.prefill.node.engine.leases and not self.decode.node.engine.has_work)
        for service in (self.prefill, self.decode):
            status = self.ask(service, do="status")
            assert (status["num_blocks"], status["free_blocks"]) == (NUM_BLOCKS, NUM_BLOCKS - 1)


@pytest.fixture(scope="module")
def tokens(model: TorchModel) -> list[int]:
    """What the prompt continues with, computed by the decode side alone."""
    site = Site(model)
    site.submit(None)
    answer = site.result()
    site.close()
    assert answer["recomputed_tokens"] == 39
    return list(answer["tokens"])


@pytest.fixture
def site(model: TorchModel) -> Iterator[Site]:
    one = Site(model)
    yield one
    one.close()


def test_a_prompt_goes_from_one_service_to_the_other_and_comes_back_as_tokens(site: Site, tokens: list[int]) -> None:
    """Accepted, pending, hand-off; accepted, tokens, finished; then everything is free."""
    assert site.ask(site.prefill, do="submit", request_id="p", prompt=PROMPT) == {"accepted": True}
    assert site.ask(site.prefill, do="result", request_id="p") == {"pending": True}
    site.prefill.step()
    hand_off = site.ask(site.prefill, do="result", request_id="p")["hand_off"]
    assert site.ask(site.prefill, do="status")["leases"] == 1
    assert site.submit(hand_off) == {"accepted": True}
    answer = site.result()
    assert (answer["finished"], answer["error"]) == ("length", "")
    assert (answer["transferred_tokens"], answer["recomputed_tokens"]) == (39, 0)
    assert answer["tokens"] == tokens
    assert site.result(after=1)["tokens"] == answer["tokens"][1:]
    assert site.result(after=9)["tokens"] == []
    site.require_whole()
    assert [e.end for e in site.ended] == [LeaseEnd.RELEASED]


BAD_MESSAGES: list[tuple[bytes, str]] = [
    (b"", "not JSON: JSONDecodeError"),
    (b"\x00", "not JSON"),
    (b"\xff\xfe\xfd", "not JSON: UnicodeDecodeError"),
    (b"[" * 100_000, "not JSON: RecursionError"),
    (b'{"do": ' + b"9" * 5000 + b"}", "not JSON: ValueError"),
    (b"[]", "a message is a JSON object, got list"),
    (b"{}", "'do' must be one of .*'status', 'submit'.*, got 'None'"),
    (b'{"do": ["submit"]}', "'do' must be one of"),
    (b'{"do": "submit"}', "request_id must be a string of 1..256 characters"),
    (b'{"do": "submit", "request_id": 7, "prompt": [1]}', "request_id must be a string"),
    (b'{"do": "submit", "request_id": "", "prompt": [1]}', "request_id must be a string"),
    (b'{"do": "submit", "request_id": "%s", "prompt": [1]}' % (b"x" * 257), "request_id must be a string"),
    (b'{"do": "submit", "request_id": "x", "prompt": "1, 2"}', "prompt must be a list of 1..1000000 token ids"),
    (b'{"do": "submit", "request_id": "x", "prompt": []}', "prompt must be a list"),
    (b'{"do": "submit", "request_id": "x", "prompt": [1, true]}', "prompt must hold integers only"),
    (b'{"do": "submit", "request_id": "x", "prompt": [1, 2.0]}', "prompt must hold integers only"),
    (b'{"do": "result", "request_id": "nobody", "after": 0}', "request 'nobody' is unknown"),
]


@pytest.mark.parametrize(("message", "why"), BAD_MESSAGES, ids=[str(i) for i in range(len(BAD_MESSAGES))])
def test_a_bad_message_is_refused_by_both_services_and_leaves_nothing(site: Site, message: bytes, why: str) -> None:
    """Said to its sender; no request, no thread and no block has anything to do with it."""
    for service in (site.prefill, site.decode):
        with pytest.raises(RequestError, match=why):
            service.handle(message)
    assert not site.decode.node.engine.has_work
    site.require_whole()


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, r"max_new_tokens must be an integer 1\.\.1000000, got '0'"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
    ({"eos_ids": ["x"]}, "eos_ids must hold integers only"),
    ({"eos_ids": None}, "eos_ids must be a list"),
    ({"prompt": []}, "prompt must be a list"),
    ({"request_id": None}, "request_id must be a string"),
]


@pytest.mark.parametrize(("change", "why"), BAD_FIELDS, ids=[str(c) for c, _ in BAD_FIELDS])
def test_a_request_refused_before_it_reaches_the_engine_gives_its_offer_back(
    site: Site, change: dict[str, Any], why: str
) -> None:
    """One release to the producer at once, not the end of a lease half a minute later."""
    with pytest.raises(RequestError, match=why):
        site.submit(site.offer(), **change)
    site.require_whole()
    assert [(e.lease.request_id, e.end) for e in site.ended] == [("p", LeaseEnd.REJECTED)]


def test_a_request_refused_by_the_engine_ends_as_refused_and_gives_its_offer_back(site: Site) -> None:
    """A token that the model does not have: accepted as a message, refused as a request, with the reason."""
    site.submit(site.offer(), prompt=[*PROMPT[:-1], 10**9])
    answer = site.result()
    assert (answer["finished"], answer["tokens"]) == ("refused", [])
    assert "token id 1000000000 at position 39" in answer["error"]
    assert site.metrics.counts[REQUESTS_REFUSED] == 1
    site.require_whole()
    assert [e.end for e in site.ended] == [LeaseEnd.REJECTED]


def without(hand_off: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in hand_off.items() if k != key}


BAD_OFFERS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("no engine", lambda h: without(h, "remote_engine_id"), "remote_engine_id is missing from kv_transfer_params"),
    ("a list", lambda h: [h], "kv_transfer_params must be a mapping, got list"),
    ("a word for a port", lambda h: {**h, "remote_port": "abc"}, "remote_port must be an int 1..65535, got 'abc'"),
    (
        "one group",
        lambda h: {**h, "remote_block_ids": h["remote_block_ids"][:1]},
        "one entry per group, got 1, 2 and 2",
    ),
    (
        "a bool for a block",
        lambda h: {**h, "remote_block_ids": [[True], [1]]},
        "block id must be an int >= 0, got True",
    ),
]


@pytest.mark.parametrize(("change", "why"), [b[1:] for b in BAD_OFFERS], ids=[b[0] for b in BAD_OFFERS])
def test_parameters_that_are_no_hand_off_are_their_own_requests_trouble(
    site: Site, tokens: list[int], change: Callable[[dict[str, Any]], object], why: str
) -> None:
    """A typed error for it; the request beside it, pulled at the same time, is served."""
    bad, good = site.offer("bad"), site.offer("good")
    site.submit(good, "good")
    site.decode.step()
    with pytest.raises(RequestError, match=why):
        site.submit(change(bad), "bad")
    answer = site.result("good")
    assert (answer["finished"], answer["transferred_tokens"]) == ("length", 39)
    assert answer["tokens"] == tokens
    with pytest.raises(RequestError, match="request 'bad' is unknown"):
        site.ask(site.decode, do="result", request_id="bad", after=0)


def test_a_request_id_serves_once(site: Site, tokens: list[int]) -> None:
    """On both services; the second offer goes back, the first request goes on."""
    first, second = site.offer("first"), site.offer("second")
    with pytest.raises(RequestError, match="'first' is known already"):
        site.ask(site.prefill, do="submit", request_id="first", prompt=PROMPT)
    site.submit(first)
    with pytest.raises(RequestError, match="'r' is known already"):
        site.submit(second)
    with pytest.raises(RequestError, match="'r' is known already"):
        site.submit(first)
    assert site.result()["tokens"] == tokens
    site.require_whole()
    assert {e.lease.request_id: e.end for e in site.ended} == {
        "first": LeaseEnd.RELEASED, "second": LeaseEnd.REJECTED,
    }  # fmt: skip


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_cancelled_request_ends_and_everything_comes_home(site: Site, steps: int) -> None:
    """At any moment; a stranger is cancelled without harm."""
    site.submit(site.offer(), max_new_tokens=60)
    for _ in range(steps):
        site.decode.step()
        site.prefill.step()
    for name in ("r", "nobody"):
        assert site.ask(site.decode, do="cancel", request_id=name) == {"cancelled": True}
    assert site.result()["finished"] == "cancelled"
    site.require_whole()


def test_a_prompt_waits_for_blocks_and_one_that_can_never_have_them_is_refused(site: Site) -> None:
    """17 blocks: two prompts of 6 each on lease leave too few for a third; 500 tokens never fit."""
    first, _ = site.offer("a"), site.offer("b", PROMPT[:-1])
    site.ask(site.prefill, do="submit", request_id="c", prompt=PROMPT)
    for _ in range(20):
        site.prefill.step()
    assert site.ask(site.prefill, do="result", request_id="c") == {"pending": True}
    site.submit(first)
    answer = site.step_until(lambda: "pending" not in (a := site.ask(site.prefill, do="result", request_id="c")) and a)
    assert answer["hand_off"]["remote_num_tokens"] == 39
    for name in ("b", "c"):
        site.prefill.node.engine.cancel(request_id=name)
    site.ask(site.prefill, do="submit", request_id="huge", prompt=[7] * 500)
    site.result()
    answer = site.step_until(
        lambda: "pending" not in (a := site.ask(site.prefill, do="result", request_id="huge")) and a
    )
    assert set(answer) == {"error"}
    site.require_whole()


def test_what_prefill_refuses_is_its_result(site: Site) -> None:
    """An id that no hand-off may carry, and a token that does not exist."""
    for name, prompt, why in (("two words", PROMPT, "without blanks"), ("x", [10**9], "token id 1000000000")):
        site.ask(site.prefill, do="submit", request_id=name, prompt=prompt)
        site.prefill.step()
        assert why in site.ask(site.prefill, do="result", request_id=name)["error"]


def test_only_requests_that_are_over_are_forgotten(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two: a third waits for one of them to finish, and takes its place."""
    monkeypatch.setattr(services, "_REMEMBERED_RESULTS", 2)
    for name in ("a", "b"):
        site.submit(None, name, prompt=PROMPT[:9])
    with pytest.raises(CapacityError, match="2 requests are under way already"):
        site.submit(None, "c", prompt=PROMPT[:9])
    site.result("a")
    site.result("b")
    site.submit(None, "c", prompt=PROMPT[:9])
    with pytest.raises(RequestError, match="request 'a' is unknown"):
        site.ask(site.decode, do="result", request_id="a", after=0)
    assert len(site.result("b")["tokens"]) == len(site.result("c")["tokens"]) == NEW_TOKENS


def test_engines_with_other_weights_are_refused_by_name(model: TorchModel) -> None:
    """The same shapes: nothing but the name of the weights can tell."""
    site = Site(model, decode_model=evolve(model, weights_id="tuned"))
    site.submit(site.offer())
    answer = site.result()
    assert (answer["finished"], answer["tokens"]) == ("failed", [])
    assert f"weights_id: ours tuned, theirs {model.weights_id}" in answer["error"]
    assert site.ask(site.decode, do="status")["free_blocks"] == NUM_BLOCKS - 1
    site.close()


def test_a_client_hears_a_refusal_as_a_lost_peer_with_its_reason(site: Site) -> None:
    """Over a side channel, like everything a client asks; the next request is answered."""
    board = FakeSwitchboard()
    endpoint = FakeSideChannelServer(board, port=7000).serve(handler=site.decode.handle)
    client = ServiceClient(channel=FakeSideChannel(board), endpoint=endpoint)
    with pytest.raises(PeerLostError, match="refused: request 'nobody' is unknown"):
        client.ask(do="result", request_id="nobody", after=0)
    assert client.ask(do="status")["engine_id"] == site.decode.node.engine_id


def test_a_service_whose_engine_fails_says_so_to_every_later_caller(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its thread; a client is not left to wait for an answer that nobody works on."""
    site = Site(model)
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    def broken() -> tuple[EndedLease, ...]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(site.prefill.node.engine, "poll", broken)
    site.prefill.start()
    site.prefill._thread.join(30.0)
    assert isinstance(site.prefill.failure, ZeroDivisionError)
    with pytest.raises(RequestError, match="the service has stopped: a bug"):
        site.ask(site.prefill, do="submit", request_id="p", prompt=PROMPT)
    site.prefill.stop()
    site.close()
