"""Faults over real NIXL between real processes: the survivor keeps serving, every block comes back, and no token is
built on an incomplete pull.

Two servers run for all tests here; a test that ends one starts another.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gk_adapters.cli.servers import StartedServer
from gk_adapters.decode_job import Prompt, run_in_process
from gk_adapters.nodes import CacheSettings, DecodeNode, PrefillNode, local_wirings
from gk_adapters.services import ServiceClient
from gk_adapters.torch_model import load_torch_model
from gk_adapters.zmq_side_channel import ZmqSideChannel
from gk_core.errors import PeerLostError
from gk_core.metrics import NullMetrics
from tools.recall_prompts import make_prompt

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-recall"
NUM_BLOCKS, NEW_TOKENS = 64, 4
PULL_SECONDS, LEASE_SECONDS = 4.0, 6.0
PATIENCE_SECONDS = 60.0
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

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        self.folder, self.env = folder, env or {}
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
            ["--checkpoint", str(MODEL), "--num-blocks", str(NUM_BLOCKS), "--num-rows", "4", *flags],
            program=(sys.executable, "-m", "tests.integration.fault_server"),
            env={"GK_TEST_FAULTS": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self.env},
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

    def signal(self, role: str, number: int) -> None:
        os.kill(self.servers[role].process.pid, number)

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
        """A request whose pull is under way and stays so."""
        (self.folder / "decode" / "holding").unlink(missing_ok=True)
        self.switch("decode", "hold")
        name = self.submit(self.offer())
        eventually((self.folder / "decode" / "holding").exists, "a read that is held")
        return name

    def let_go(self) -> None:
        (self.folder / "decode" / "hold").unlink()

    def is_whole(self, role: str) -> bool:
        """Used + free = total, with nothing used: all but the null block are free."""
        status = self.ask(role, do="status")
        assert status["num_blocks"] == NUM_BLOCKS
        return bool(status["free_blocks"] == NUM_BLOCKS - 1)

    def require_whole(self) -> None:
        for role in self.servers:
            eventually(partial(self.is_whole, role), f"all blocks of {role} are free")

    def serves(self, tokens: tuple[int, ...]) -> bool:
        """One request from end to end, pulled whole."""
        answer = self.result(self.submit(self.offer()))
        return bool(answer["tokens"] == list(tokens) and answer["transferred_tokens"] == len(PROMPT) - 1)


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
    """Before, during and after pulls and steps; what was not aborted is right."""
    choose = random.Random(3)
    prompts = [PROMPT[: choose.randint(2, 200)] for _ in range(200)]
    waiting: list[str] = []
    for prompt in prompts:
        waiting.append(cluster.submit(cluster.offer(prompt), prompt))
        while waiting and choose.random() < 0.6:
            cluster.ask("decode", do="cancel", request_id=waiting.pop(choose.randrange(len(waiting))))
    for name in waiting:
        cluster.ask("decode", do="cancel", request_id=name)
    cluster.require_whole()
    assert cluster.serves(tokens)


@pytest.mark.parametrize(("role", "lost"), [("decode", "Claim"), ("prefill", "ClaimReply")])
def test_bytes_that_arrived_without_a_proof_give_no_token(
    cluster: Cluster, tokens: tuple[int, ...], role: str, lost: str
) -> None:
    """Claims or their answers are lost: the reads end well, nobody says that the blocks were still the request's."""
    drop = cluster.switch(role, "drop", lost)
    require_no_token(cluster.result(cluster.submit(cluster.offer())), "not complete")
    drop.unlink()
    cluster.require_whole()
    assert cluster.serves(tokens)


def test_a_lost_release_costs_the_producer_no_more_than_the_lease(cluster: Cluster, tokens: tuple[int, ...]) -> None:
    """The request is served; the producer's blocks come back when the lease is over."""
    drop = cluster.switch("decode", "drop", "Release")
    assert cluster.serves(tokens)
    assert cluster.ask("prefill", do="status")["leases"] == 1
    drop.unlink()
    cluster.require_whole()


def test_a_side_channel_that_stops_answering_fails_its_own_request_only(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """It takes connections and says nothing; others are served meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hand_off = cluster.offer()
        lost = cluster.submit({**hand_off, "remote_port": silent.getsockname()[1]})
        assert cluster.serves(tokens)
        require_no_token(cluster.result(lost), "no reply")
    cluster.require_whole()


def test_a_producer_that_freezes_mid_pull_gives_no_token_and_serves_again_when_it_thaws(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """Its memory can still be read; nobody answers for it."""
    name = cluster.held_pull()
    cluster.signal("prefill", signal.SIGSTOP)
    try:
        cluster.let_go()
        require_no_token(cluster.result(name))
    finally:
        cluster.signal("prefill", signal.SIGCONT)
    cluster.require_whole()
    assert cluster.serves(tokens)


def test_a_producer_killed_mid_pull_leaves_a_consumer_that_serves_its_successor(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """The successor has the port and another engine id; hand-offs of the old one are refused by both names."""
    stale = cluster.offer()
    name = cluster.held_pull()
    cluster.kill("prefill")
    cluster.let_go()
    require_no_token(cluster.result(name))
    eventually(lambda: cluster.is_whole("decode"), "all blocks of decode are free")
    cluster.start()
    assert cluster.serves(tokens)
    successor = cluster.servers["prefill"].facts["engine_id"]
    refused = cluster.result(cluster.submit({**stale, "remote_port": cluster.prefill_port}))
    require_no_token(refused, stale["remote_engine_id"], successor)
    cluster.require_whole()


def test_a_consumer_killed_mid_pull_leaves_a_producer_that_serves_its_successor(
    cluster: Cluster, tokens: tuple[int, ...]
) -> None:
    """The dead reader's lease runs out."""
    cluster.held_pull()
    cluster.kill("decode")
    eventually(lambda: cluster.is_whole("prefill"), "all blocks of prefill are free")
    cluster.start()
    assert cluster.serves(tokens)
    cluster.require_whole()


@pytest.mark.slow
def test_a_read_that_is_stuck_in_the_network_is_let_go_of(tmp_path: Path, tokens: tuple[int, ...]) -> None:
    """Over TCP a frozen producer's bytes cannot be read at all: the blocks come back all the same."""
    cluster = Cluster(tmp_path, env={"UCX_TLS": "tcp,self"})
    try:
        cluster.start()
        assert cluster.serves(tokens)
        name = cluster.held_pull()
        cluster.signal("prefill", signal.SIGSTOP)
        cluster.let_go()
        require_no_token(cluster.result(name))
        eventually(lambda: cluster.is_whole("decode"), "all blocks of decode are free")
        cluster.signal("prefill", signal.SIGCONT)
        cluster.require_whole()
        assert cluster.serves(tokens)
    finally:
        cluster.stop()


def test_a_server_that_cannot_start_says_why() -> None:
    """One line, its own."""
    server = StartedServer("decode-server", ["--checkpoint", str(MODEL), "--num-blocks", "1"])
    try:
        with pytest.raises(PeerLostError, match=r"gk decode-server did not start: gk: error: .*num_blocks"):
            server.endpoint()
    finally:
        server.stop()
