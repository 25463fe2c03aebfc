"""A deployment on loopback: a native prefill server, a giga-kernel decode server, the proxy in front.

The prefill server also is the single engine that answers are compared with: asked without transfer parameters and with
a cache salt, it computes everything itself and shares no cached block with what it prefills for others.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import define, evolve

from gk_adapters.vllm.boundary_sweep import Targets
from gk_adapters.vllm.served import Server, free_ports, post_json
from gk_adapters.vllm.server_command import ServerKind, ServerSettings

__all__ = ["DECODE_BLOCKS", "MAX_BATCHED", "MAX_LEN", "Deployment", "eventually", "running_deployment"]

MAX_LEN, MAX_BATCHED = 1024, 512
DECODE_BLOCKS = 48
"""Of the decode server: few, so that requests wait for room and are preempted."""

QUIET = {
    "TORCHDYNAMO_DISABLE": "1",
    "NIXL_LOG_LEVEL": "WARN",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "INFO",
}
"""vLLM compiles one helper of its log-probabilities for ten seconds; nothing else is gained by that here. The level, so
that the servers' logs say what the tests read in them, whatever the tests' own process has set."""


@define(eq=False)
class Deployment:
    """Running servers."""

    prefill: Server
    decode: Server
    proxy: subprocess.Popen[bytes]
    proxy_url: str
    model: str
    logs: Path

    @property
    def targets(self) -> Targets:
        """For a boundary sweep."""
        return Targets(prefill=self.prefill.url, decode=self.decode.url, single=self.prefill.url, model=self.model)

    def body(self, prompt: list[int], *, max_tokens: int = 8) -> dict[str, Any]:
        """A completion request that returns token ids and log-probabilities."""
        return completion_body(self.model, prompt, max_tokens=max_tokens)

    def offer(self, prompt: list[int]) -> dict[str, Any]:
        """What the prefill server hands out for a prompt."""
        asked = self.body(prompt, max_tokens=1)
        asked["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        params = post_json(f"{self.prefill.url}/v1/completions", asked)["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    def beside(self, decode: Server) -> Deployment:
        """The same with another decode server, which the proxy knows nothing of."""
        return evolve(self, decode=decode)

    def decoded(self, prompt: list[int], params: Any, *, max_tokens: int = 8, **more: Any) -> list[int]:
        """Tokens of the decode server."""
        asked = {**self.body(prompt, max_tokens=max_tokens), "kv_transfer_params": params, **more}
        return tokens_of(post_json(f"{self.decode.url}/v1/completions", asked))

    def alone(self, prompt: list[int], *, max_tokens: int = 8) -> list[int]:
        """Tokens of the single engine."""
        asked = {**self.body(prompt, max_tokens=max_tokens), "cache_salt": "alone"}
        return tokens_of(post_json(f"{self.prefill.url}/v1/completions", asked))

    def metric(self, server: Server, name: str) -> float:
        """Sum of one metric of a server.

        Raises:
            AssertionError: the server shows no such metric.
        """
        return metric_of(server, name)

    def restart_prefill(self) -> None:
        """Kill the prefill server without warning and start it anew at the same addresses."""
        self.prefill.stop(kill=True)
        self.prefill = Server(self.prefill.settings, log=self.logs / "prefill-again.log", env=QUIET)
        self.prefill.wait_until_up()

    def wait_until_idle(self) -> None:
        """Return once no server holds a block or a lease."""
        held = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        eventually(lambda: all(self.metric(s, n) == 0 for s in (self.prefill, self.decode) for n in held), 60)


def completion_body(model: str, prompt: list[int], *, max_tokens: int = 8) -> dict[str, Any]:
    """A completion request that returns token ids and log-probabilities."""
    return {
        "model": model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True,
    }  # fmt: skip


def metric_of(server: Server, name: str) -> float:
    """Sum of one metric of a server.

    Raises:
        AssertionError: the server shows no such metric.
    """
    told = [
        float(line.rpartition(" ")[2])
        for line in server.text("/metrics").splitlines()
        if re.match(rf"{re.escape(name)}(\{{|\s)", line)
    ]
    assert told, f"{server.url} has no metric {name}"
    return sum(told)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """Generated token ids."""
    return list(answer["choices"][0]["token_ids"])


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    """Ask until it holds.

    Raises:
        AssertionError: it never did.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.05)


def server_settings(checkpoint: Path, kind: ServerKind, ports: tuple[int, int], **more: Any) -> ServerSettings:
    """Small float32 servers for two cores."""
    base = ServerSettings(
        kind=kind, model=str(checkpoint), port=ports[0], side_channel_port=ports[1], dtype="float32",
        max_model_len=MAX_LEN, max_num_seqs=16, max_num_batched_tokens=MAX_BATCHED, cpu_cache_gib=1,
        cpu_cores="nobind", lease_seconds=20,
    )  # fmt: skip
    return evolve(base, **more)


@contextlib.contextmanager
def running_deployment(checkpoint: Path, logs: Path) -> Iterator[Deployment]:
    """Started side by side, ended by pid whatever happens."""
    ports = free_ports(5)
    prefill = server_settings(checkpoint, ServerKind.PREFILL, (ports[0], ports[1]))
    decode = server_settings(
        checkpoint, ServerKind.DECODE, (ports[2], ports[3]), extra=("--num-gpu-blocks-override", str(DECODE_BLOCKS))
    )
    with contextlib.ExitStack() as stack:
        servers = []
        for settings in (prefill, decode):
            server = Server(settings, log=logs / f"{settings.kind.value}.log", env=QUIET)
            stack.callback(server.stop)
            servers.append(server)
        proxy = _started_proxy(servers, ports[4], logs)
        stack.callback(_end, proxy)
        for server in servers:
            server.wait_until_up()
        running = Deployment(
            prefill=servers[0], decode=servers[1], proxy=proxy, proxy_url=f"http://127.0.0.1:{ports[4]}",
            model=str(checkpoint), logs=logs,
        )  # fmt: skip
        stack.callback(lambda: running.prefill.stop())
        eventually(lambda: _answers(f"{running.proxy_url}/health"), 60)
        yield running


def _started_proxy(servers: list[Server], port: int, logs: Path) -> subprocess.Popen[bytes]:
    args = ["--prefill", servers[0].url, "--decode", servers[1].url, "--port", str(port)]
    with (logs / "proxy.log").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", "from gk_adapters.cli.main import run; run()", "proxy", *args],
            stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ),
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
