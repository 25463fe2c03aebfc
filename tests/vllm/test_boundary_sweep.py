"""The boundary sweep against a small HTTP server that answers as vLLM does, and is wrong where it is told to be."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from gk_adapters.cli.boundary import boundary
from gk_adapters.vllm.boundary_sweep import (
    SweepSettings,
    Targets,
    lengths_with_neighbours,
    parse_lengths,
    prompt_of,
    sweep,
)
from gk_core.disaggregation import stock_rule_loses_a_block
from gk_core.errors import RequestError

pytestmark = pytest.mark.vllm


class Upstream:
    """What each kind of request is answered with.

    Attributes:
        offer: transfer parameters of prefill answers.
        wrong: {length: (token offset, log-probability offset)} of decode answers.
        wrong_once: lengths of `wrong` of which only the first prompt is answered so.
        broken: lengths that the decode server answers with 500.
    """

    def __init__(self) -> None:
        self.offer: dict[str, Any] | None = {"do_remote_prefill": True, "remote_generation": 7}
        self.wrong: dict[int, tuple[int, float]] = {}
        self.wrong_once: dict[int, list[int]] = {}
        self.broken: set[int] = set()
        self.seen: list[dict[str, Any]] = []

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(body)
        params, length = body.get("kv_transfer_params"), len(body["prompt"])
        tokens, logprobs = [length % 97, 5, 6], [-0.5, -0.25, -0.125]
        if params and params.get("do_remote_decode"):
            return {"choices": [{}], "kv_transfer_params": self.offer}
        once = self.wrong_once.get(length)
        if once == []:
            once.extend(body["prompt"])
        if params and length in self.wrong and once in (None, body["prompt"]):
            token, difference = self.wrong[length]
            tokens, logprobs = [tokens[0], tokens[1] + token, 6], [-0.5, -0.25 - difference, -0.125]
        return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}]}


@contextlib.contextmanager
def serving(upstream: Upstream) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            params = body.get("kv_transfer_params") or {}
            broken = len(body["prompt"]) in upstream.broken and not params.get("do_remote_decode")
            text = json.dumps({"error": "no"} if broken else upstream.answer(body)).encode()
            self.send_response(500 if broken else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def targets(url: str) -> Targets:
    return Targets(prefill=url, decode=url, single=url, model="m")


def test_equal_answers_are_no_difference() -> None:
    """And the report says whose offers they were."""
    with serving(Upstream()) as url:
        report = sweep(targets(url), SweepSettings(lengths=(1, 5, 255), workers=2))
    assert report.as_json() == {
        "lengths_checked": [1, 5, 255], "differing_lengths": [], "max_logprob_difference": 0.0, "connector": "gk",
        "rounding": 0.0, "rounding_lengths": [], "tolerance": 1e-4, "logprob_differences": {}, "errors": {},
    }  # fmt: skip


def test_other_tokens_log_probabilities_and_errors_are_each_a_difference() -> None:
    """255 gives another token, 256 the same tokens less surely, 257 nothing; 258 is off by less than the tolerance."""
    upstream = Upstream()
    upstream.offer = {"do_remote_prefill": True}
    upstream.wrong = {255: (1, 0.0), 256: (0, 0.03), 258: (0, 5e-5)}
    upstream.broken = {257}
    with serving(upstream) as url:
        report = sweep(targets(url), SweepSettings(lengths=(254, 255, 256, 257, 258)))
    assert report.differing_lengths == (255, 256, 257)
    assert report.max_logprob_difference == pytest.approx(0.03)
    assert report.connector == "stock"
    assert report.as_json()["logprob_differences"] == {"256": pytest.approx(0.03), "258": pytest.approx(5e-5)}
    assert report.as_json()["rounding"] == pytest.approx(5e-5)
    assert "answered 500" in report.as_json()["errors"]["257"]


def test_what_other_prompts_of_a_length_do_not_show_is_rounding() -> None:
    """255 is off with every prompt, 100 with the first of five; without confirmation both count."""
    upstream = Upstream()
    upstream.wrong = {255: (0, 0.1), 100: (1, 0.05)}
    upstream.wrong_once = {100: []}
    with serving(upstream) as url:
        report = sweep(targets(url), SweepSettings(lengths=(99, 100, 255), confirm=4))
        upstream.wrong_once = {100: []}
        strict = sweep(targets(url), SweepSettings(lengths=(99, 100, 255)))
    assert (report.differing_lengths, report.rounding_lengths) == ((255,), (100,))
    assert report.rounding == pytest.approx(0.05)
    assert (strict.differing_lengths, strict.rounding_lengths) == ((100, 255), ())


def test_the_offer_is_passed_on_whole_and_repeats_are_prefilled_anew() -> None:
    """One single answer, then prefill and decode per repeat."""
    upstream = Upstream()
    with serving(upstream) as url:
        sweep(targets(url), SweepSettings(lengths=(9,), repeats=2))
    warm_up, *asked = upstream.seen
    params = [b.get("kv_transfer_params") or {} for b in asked]
    assert [p.get("do_remote_decode", False) for p in params] == [False, True, False, True, False]
    assert [p for p in params if "remote_generation" in p] == [upstream.offer] * 2
    assert "kv_transfer_params" not in warm_up
    assert "cache_salt" in asked[0]


def test_prompts_are_the_same_each_time_and_share_a_prefix_where_asked() -> None:
    """255 tokens of a shared prefix are the first 255 of 256."""
    shared = SweepSettings(lengths=(), shared_prefix=True)
    assert prompt_of(shared, 256)[:255] == prompt_of(shared, 255)
    alone = SweepSettings(lengths=())
    assert prompt_of(alone, 256) == prompt_of(alone, 256)
    assert prompt_of(alone, 256)[:255] != prompt_of(alone, 255)
    assert {3 <= t < 500 for t in prompt_of(alone, 700)} == {True}


@pytest.mark.parametrize("text", ["", "a", "5-2", "0", "1-", "-3", "1,,2", "1-2-3", "9999999"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    """With what they must look like."""
    with pytest.raises(RequestError, match="lengths must"):
        parse_lengths(text)


def test_lengths_and_their_neighbours() -> None:
    """Ascending, once each, never below one."""
    assert parse_lengths("1-4,255,2") == (1, 2, 3, 4, 255)
    assert lengths_with_neighbours((1, 255)) == (1, 2, 254, 255, 256)


def test_the_command_names_the_lost_block_and_exits_with_1() -> None:
    """255 and 383 are lengths of the rule, 300 is not; JSON has the four keys."""
    upstream = Upstream()
    upstream.wrong = {255: (0, 0.1), 300: (1, 0.2), 383: (0, 0.1)}
    with serving(upstream) as url:
        args = ["--model", "m", "--servers", url, url, url, "--lengths", "254-256,300,383"]
        told = CliRunner().invoke(boundary, args)
        as_json = CliRunner().invoke(boundary, [*args, "--json"])
    assert told.exit_code == 1
    assert "lengths that differ: 255, 300, 383" in told.output
    assert "lost between prefill and decode at 255, 383 (window 128, block 128)" in " ".join(told.output.split())
    report = json.loads(as_json.output)
    assert {"lengths_checked", "differing_lengths", "max_logprob_difference", "connector"} <= set(report)
    assert report["differing_lengths"] == [255, 300, 383]


def test_the_command_names_no_lost_block_where_nobody_answered() -> None:
    """383 is a length of the rule, and an error is an error."""
    upstream = Upstream()
    upstream.broken = {383}
    with serving(upstream) as url:
        told = CliRunner().invoke(boundary, ["--model", "m", "--servers", url, url, url, "--lengths", "383"])
    assert told.exit_code == 1
    assert "lengths that differ: 383" in told.output
    assert "block is lost" not in told.output


def test_the_command_wants_servers_or_spawn() -> None:
    """Not both, not neither."""
    result = CliRunner().invoke(boundary, ["--model", "m"])
    assert isinstance(result.exception, RequestError)


def test_servers_need_the_name_of_their_model() -> None:
    """Only servers that are started here can be given a model that is made here."""
    result = CliRunner().invoke(boundary, ["--servers", "http://a", "http://b", "http://c"])
    assert isinstance(result.exception, RequestError)
    assert "--servers needs --model" in str(result.exception)


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("connector", "wrong"),
    [("gk", []), ("stock", [n for n in range(1, 701) if stock_rule_loses_a_block(n, 128, 128)])],
)
def test_the_whole_sweep_names_the_rules_lengths_on_stock_and_none_on_gk(connector: str, wrong: list[int]) -> None:
    """Three servers each, as a user starts them. gk in float32; stock in bfloat16, one prompt at a time."""
    workers = ["--workers", "4"] if connector == "gk" else []
    result = CliRunner().invoke(
        boundary, ["--spawn", "--connector", connector, "--lengths", "1-700", "--json", *workers]
    )
    assert isinstance(result.exception, SystemExit | None), result.exception
    report = json.loads(result.stdout)
    assert report["errors"] == {}
    assert report["connector"] == connector
    assert report["lengths_checked"] == list(range(1, 701))
    assert report["differing_lengths"] == wrong
    assert result.exit_code == (1 if wrong else 0)
    if not wrong:
        assert report["max_logprob_difference"] < 1e-4
