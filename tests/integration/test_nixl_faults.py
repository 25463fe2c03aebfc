"""Faults over real NIXL between real processes: the survivor keeps serving, every block comes back, and no token is
built on an incomplete pull.

Two servers run for all tests here; a test that ends one starts another. UCX moves their bytes by TCP, as between two
machines: a process that is stopped sends nothing, so a read from it stays under way for as long as a test wants.
"""

from __future__ import annotations

import random
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from gk_adapters.cli.servers import StartedServer
from gk_adapters.decode_job import Prompt, run_in_process
from gk_adapters.nodes import CacheSettings, DecodeNode, PrefillNode, local_wirings
from gk_adapters.services import ServiceClient
from gk_adapters.torch_model import load_torch_model
from gk_adapters.zmq_side_channel import ZmqSideChannel
from gk_core.errors import PeerLostError
from gk_core.metrics import LEASES_EXPIRED, PULLS_ABORTED, NullMetrics
from tools.recall_prompts import make_prompt

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-recall"
NUM_BLOCKS, NEW_TOKENS = 64, 4
PULL_SECONDS, LEASE_SECONDS = 6.0, 6.0
PATIENCE_SECONDS = 120.0
FLAGS = [
    "--checkpoint", str(MODEL), "--num-blocks", str(NUM_BLOCKS), "--num-rows", "4", "--metrics-port", "0",
]  # fmt: skip
PROMPT = make_prompt(seed=7, length_tokens=300, distance=200).token_ids


def eventually(check: Callable[[], Any], what: str) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := check()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:g} s: {what}"
        time.sleep(0.005)
    return answer


class Cluster:
    """A prefill and a decode server with switchable faults, and a client that asks them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[str, StartedServer] = {}
        self.channel = ZmqSideChannel()
        self.prefill_port = 0
        self.count = 0

    def start(self) -> None:
        """Start whichever server does not run; a producer comes back to the port that it had."""
        if "prefill" not in self.servers:
            self._spawn("prefill", ["--lease-seconds", f"{LEASE_SECONDS}", "--handshake-port", str(self.prefill_port)])
        if "decode" not in self.servers:
            self._spawn("decode", ["--pull-seconds", f"{PULL_SECONDS}"])
        for server in self.servers.values():
            server.endpoint()
        self.prefill_port = int(self.servers["prefill"].facts["handshake"].rpartition(":")[2])

    def _spawn(self, role: str, flags: list[str]) -> None:
        folder = self.folder / role
        folder.mkdir(exist_ok=True)
        for switch in folder.iterdir():
            switch.unlink()
        self.servers[role] = StartedServer(
            f"{role}-server",
            [*FLAGS, *flags],
            program=(sys.executable, "-m", "tests.integration.fault_server"),
            env={"GK_TEST_FAULTS": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"},
        )

    def kill(self, role: str) -> None:
        """As a crash does it."""
        server = self.servers.pop(role)
        server.process.kill()
        server.stop()

    def stop(self) -> None:
        self.channel.close()
        for server in self.servers.values():
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
            server.stop()

    def ask(self, role: str, **request: object) -> dict[str, Any]:
        client = ServiceClient(channel=self.channel, endpoint=self.servers[role].endpoint(), timeout_seconds=30.0)
        return client.ask(**request)

    def stop_process(self, role: str) -> None:
        """Freeze it; every thread of it has stopped when this returns."""
        process = psutil.Process(self.servers[role].process.pid)
        process.suspend()
        tasks = Path(f"/proc/{process.pid}/task")
        eventually(
            lambda: all(t.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T" for t in tasks.iterdir()),
            f"{role} has stopped",
        )

    def go_on(self, role: str) -> None:
        psutil.Process(self.servers[role].process.pid).resume()

    def switch(self, role: str, name: str, text: str = "") -> Path:
        path = self.folder / role / name
        path.write_text(text)
        return path

    def name(self) -> str:
        self.count += 1
        return f"request-{self.count}"

    def offer(self, prompt: tuple[int, ...] = PROMPT) -> dict[str, Any]:
        """Prefill; the hand-off."""
        name = self.name()
        self.ask("prefill", do="submit", request_id=name, prompt=list(prompt))
        answer = eventually(
            lambda: (a := self.ask("prefill", do="result", request_id=name)).get("pending") is None and a, "a prefill"
        )
        hand_off = answer["hand_off"]
        assert isinstance(hand_off, dict)
        return hand_off

    def submit(self, hand_off: dict[str, Any] | None, prompt: tuple[int, ...] = PROMPT) -> str:
        name = self.name()
        self.ask(
            "decode", do="submit", request_id=name, prompt=list(prompt), max_new_tokens=NEW_TOKENS, hand_off=hand_off
        )
        return name

    def result(self, name: str) -> dict[str, Any]:
        """Once it has finished."""

        def finished() -> Any:
            answer = self.ask("decode", do="result", request_id=name, after=0)
            return answer if answer["finished"] is not None else None

        answer = eventually(finished, f"the end of {name}")
        assert isinstance(answer, dict)
        return answer

    def held_pull(self) -> str:
        """A request whose pull has begun and whose read nobody has posted yet."""
        for mark in ("holding", "flying"):
            (self.folder / "decode" / mark).unlink(missing_ok=True)
        self.switch("decode", "hold")
        name = self.submit(self.offer())
        eventually((self.folder / "decode" / "holding").exists, "a read that is held")
        return name

    def let_go(self) -> None:
        (self.folder / "decode" / "hold").unlink()

    def frozen_pull(self) -> str:
        """A request whose read NIXL has posted and sees under way: its producer was stopped just before."""
        name = self.held_pull()
        self.stop_process("prefill")
        self.let_go()
        eventually((self.folder / "decode" / "flying").exists, "a read under way")
        assert self.free_blocks("decode") < NUM_BLOCKS - 1
        answer = self.ask("decode", do="result", request_id=name, after=0)
        assert (answer["finished"], answer["tokens"]) == (None, [])
        return name

    def free_blocks(self, role: str) -> int:
        status = self.ask(role, do="status")
        assert status["num_blocks"] == NUM_BLOCKS
        return int(status["free_blocks"])

    def is_whole(self, role: str) -> bool:
        """Used + free = total, with nothing used: all but the null block are free, nothing is leased or under way."""
        status = self.ask(role, do="status")
        assert status["num_blocks"] == NUM_BLOCKS
        return not (status.get("leases") or status.get("has_work")) and status["free_blocks"] == NUM_BLOCKS - 1

    def require_whole(self, *roles: str) -> None:
        for role in roles or tuple(self.servers):
            eventually(partial(self.is_whole, role), f"all blocks of {role} are free")

    def metric(self, role: str, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.servers[role].facts['metrics']}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def require_service(self, tokens: tuple[int, ...]) -> None:
        """One request from end to end, pulled whole and right; then everything is free on both sides."""
        answer = self.result(self.submit(self.offer()))
        wanted = {"tokens": list(tokens), "error": "", "transferred_tokens": len(PROMPT) - 1, "recomputed_tokens": 0}
        assert {key: answer[key] for key in wanted} == wanted
        self.require_whole()


def require_no_token(answer: dict[str, Any], *says: str) -> None:
    assert answer["finished"] == "failed"
    assert answer["tokens"] == []
    for text in says:
        assert text in answer["error"]


@pytest.fixture(scope="module")
def tokens() -> tuple[int, ...]:
    """What the prompt continues with, by one process that moves nothing over a network."""
    model = load_torch_model(MODEL, model_dtype="float32")
    to_prefill, to_decode = local_wirings()
    cache = CacheSettings(num_blocks=NUM_BLOCKS)
    producer = PrefillNode(model=model, cache=cache, wiring=to_prefill, metrics=NullMetrics())
    consumer = DecodeNode(model=model, cache=cache, wiring=to_decode, metrics=NullMetrics())
    prompt = Prompt(token_ids=PROMPT, max_new_tokens=NEW_TOKENS, eos_ids=frozenset())
    (result,) = run_in_process(producer, consumer, [prompt], lambda index, token: None)
    for node in (producer, consumer):
        node.close()
    return tuple(result.token_ids)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("faults"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    running.start()
    return running


def test_two_hundred_aborts_at_random_moments_leave_both_sides_whole(cluster: Cluster, tokens: tuple[int, ...]) -> None:
    """Before, during and after pulls and steps, each tenth with its read held up; what was not aborted has tokens."""
    choose = random.Random(3)
    aborted = cluster.metric("decode", PULLS_ABORTED)
    waiting: list[str] = []
    names = []

    def cancel(name: str) -> None:
        waiting.remove(name)
        cluster.ask("decode", do="cancel", request_id=name)

    for i in range(200):
        if i % 10 == 0:
            names.append(cluster.held_pull())
            cluster.ask("decode", do="cancel", request_id=names[-1])
            cluster.let_go()
            continue
        prompt = PROMPT[: choose.randint(2, 200)]
        names.append(cluster.submit(cluster.offer(prompt), prompt))
        waiting.append(names[-1])
        for _ in range(choose.randrange(4)):
            cluster.ask("decode", do="status")
        while waiting and choose.random() < 0.6:
            cancel(choose.choice(waiting))
    for name in tuple(waiting):
        cancel(name)
    cluster.require_whole()
    results = [cluster.result(name) for name in names]
    ended = Counter((r["finished"], len(r["tokens"]) == NEW_TOKENS, r["error"]) for r in results)
    assert set(ended) <= {("cancelled", False, ""), ("length", True, "")}
    assert ended["cancelled", False, ""] >= 100, ended
    assert cluster.metric("decode", PULLS_ABORTED) - aborted >= 20
    cluster.require_service(tokens)


@pytest.mark.parametrize(("role", "lost"), [("decode", "Claim"), ("prefill", "ClaimReply")])
def test_bytes_that_arrived_without_a_proof_give_no_token(
    cluster: Cluster, tokens: tuple[int, ...], role: str, lost: str
) -> None:
    """Claims or their answers are lost: the reads end well, nobody says that the blocks were still the request's."""
    drop = cluster.switch(role, "drop", lost)
    require_no_token(cluster.result(cluster.submit(cluster.offer())), "not complete")
    drop.unlink()
    cluster.require_whole()
    cluster.require_service(tokens)


def test_a_lost_release_costs_the_producer_no_more_than_the_lease(cluster: Cluster, tokens: tuple[int, ...]) -> None:
    """The request is served; the producer's blocks come back when the lease is over."""
    drop = cluster.switch("decode", "drop", "Release")
    expired = cluster.metric("prefill", LEASES_EXPIRED)
    answer = cluster.result(cluster.submit(cluster.offer()))
    assert (answer["tokens"], answer["transferred_tokens"]) == (list(tokens), len(PROMPT) - 1)
    assert cluster.ask("prefill", do="status")["leases"] == 1
    drop.unlink()
    cluster.require_whole()
    assert cluster.metric("prefill", LEASES_EXPIRED) == expired + 1
    cluster.require_service(tokens)


def test_a_side_channel_that_stops_answering_fails_its_own_request_only(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """It takes connections and says nothing; others are served meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hand_off = cluster.offer()
        lost = cluster.submit({**hand_off, "remote_port": silent.getsockname()[1]})
        answer = cluster.result(cluster.submit(cluster.offer()))
        assert (answer["tokens"], answer["transferred_tokens"]) == (list(tokens), len(PROMPT) - 1)
        require_no_token(cluster.result(lost), "no reply")
    cluster.require_whole()
    cluster.require_service(tokens)


def test_a_producer_that_freezes_mid_pull_gives_no_token_and_serves_again_when_it_thaws(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """The request fails at its deadline; its blocks stay until the read is quiet, because its bytes do land when the
    producer goes on; meanwhile the consumer serves what needs no producer, from other blocks."""
    name = cluster.frozen_pull()
    try:
        require_no_token(cluster.result(name), "not complete within")
        alone = cluster.result(cluster.submit(None))
        assert (alone["tokens"], alone["recomputed_tokens"]) == (list(tokens), len(PROMPT) - 1)
        assert cluster.free_blocks("decode") < NUM_BLOCKS - 1
    finally:
        cluster.go_on("prefill")
    cluster.require_whole()
    cluster.require_service(tokens)


def test_a_producer_killed_mid_pull_leaves_a_consumer_that_serves_its_successor(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """Its read is under way and ends with it. The successor has the port and another engine id; hand-offs of the old
    one are refused by both names."""
    stale = cluster.offer()
    name = cluster.frozen_pull()
    cluster.kill("prefill")
    require_no_token(cluster.result(name))
    cluster.require_whole("decode")
    cluster.start()
    cluster.require_service(tokens)
    successor = cluster.servers["prefill"].facts["engine_id"]
    refused = cluster.result(cluster.submit({**stale, "remote_port": cluster.prefill_port}))
    require_no_token(refused, stale["remote_engine_id"], successor)
    cluster.require_whole()


def test_a_consumer_killed_mid_pull_leaves_a_producer_that_serves_its_successor(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """It dies with its read posted and the bytes on their way to it; the dead reader's lease runs out.

    Not tried: a producer that has yet to answer a read over TCP when its reader dies. UCX 1.23 ends the producer's
    process then ("Fatal: unexpected error: Endpoint timeout").
    """
    expired = cluster.metric("prefill", LEASES_EXPIRED)
    cluster.held_pull()
    cluster.switch("decode", "stop")
    cluster.let_go()
    eventually((cluster.folder / "decode" / "flying").exists, "a read that is posted")
    assert cluster.ask("prefill", do="status")["leases"] == 1
    cluster.kill("decode")
    cluster.require_whole("prefill")
    assert cluster.metric("prefill", LEASES_EXPIRED) == expired + 1
    cluster.start()
    cluster.require_service(tokens)


def test_a_server_that_cannot_start_says_why() -> None:
    """One line, its own."""
    server = StartedServer("decode-server", ["--checkpoint", str(MODEL), "--num-blocks", "1"])
    try:
        with pytest.raises(PeerLostError, match=r"gk decode-server did not start: gk: error: .*num_blocks"):
            server.endpoint()
    finally:
        server.stop()
