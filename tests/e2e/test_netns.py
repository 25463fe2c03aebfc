"""Two machines, as far as one kernel can play them: two network namespaces joined by one virtual cable.

A prefill server lives in one, a decode server in the other. The cable is the only way between them, for the side
channel and for NIXL (UCX over TCP). Needs Linux, root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gk_adapters.cli.servers import StartedServer
from gk_core.errors import PeerLostError
from tools.recall_prompts import make_prompt

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(900)]
pytest.importorskip("nixl")

MODEL = Path(__file__).parents[2] / "models" / "tiny-recall"
LENGTHS = (1, 129, 255, 600)
PREFILL_HOST, DECODE_HOST, CONTROL, HANDSHAKE = "10.250.0.1", "10.250.0.2", "7001", "7002"
ENV = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "gk0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
GK = (sys.executable, "-c", "from gk_adapters.cli.main import run; run()")
FLAGS = ["--checkpoint", str(MODEL), "--num-blocks", "64", "--max-model-len", "700", "--num-rows", "4"]


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Machine:
    """A namespace with one address on the cable."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.enter = ("ip", "netns", "exec", name)

    def server(self, command: str, *flags: str) -> StartedServer:
        """On this machine's address."""
        flags = (*FLAGS, "--host", self.host, "--port", CONTROL, *flags)
        return StartedServer(command, list(flags), program=(*self.enter, *GK), env=ENV)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.enter, *GK, *arguments], capture_output=True, text=True, timeout=300, env={**os.environ, **ENV}
        )

    def received_bytes(self) -> int:
        """That came over the cable so far."""
        (link,) = json.loads(ip("-n", self.name, "-s", "-j", "link", "show", "dev", "gk0"))
        return int(link["stats64"]["rx"]["bytes"])


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    assert shutil.which("ip"), "iproute2 is not installed: apt-get install iproute2"
    names = [f"gk-{os.getpid()}-{role}" for role in ("p", "d")]
    try:
        ip("netns", "add", names[0])
    except OSError as error:
        pytest.skip(f"network namespaces cannot be made here (root is needed): {error}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "gk0", "netns", names[0], "type", "veth", "peer", "name", "gk0", "netns", names[1])
        for name, host in zip(names, (PREFILL_HOST, DECODE_HOST), strict=True):
            ip("-n", name, "address", "add", f"{host}/30", "dev", "gk0")
            for device in ("lo", "gk0"):
                ip("-n", name, "link", "set", device, "up")
        yield Machine(names[0], PREFILL_HOST), Machine(names[1], DECODE_HOST)
    finally:
        for name in ip("netns", "list").split():
            if name in names:
                ip("netns", "delete", name)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of two secrets."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("right", "wrong"):
        (folder / name).write_text(f"the {name} secret of a test\n")
    return {name: str(folder / name) for name in ("right", "wrong")}


@pytest.fixture(scope="module")
def servers(machines: tuple[Machine, Machine], keys: dict[str, str]) -> Iterator[tuple[StartedServer, StartedServer]]:
    started: list[StartedServer] = []
    try:
        key = ("--key-file", keys["right"])
        started.append(machines[0].server("prefill-server", "--handshake-port", HANDSHAKE, *key))
        started.append(machines[1].server("decode-server", "--peer", f"{PREFILL_HOST}:{HANDSHAKE}", *key))
        for server in started:
            server.endpoint()
        yield started[0], started[1]
    finally:
        for server in started:
            server.stop()


def decode(machine: Machine, key: str | None, *flags: str) -> subprocess.CompletedProcess[str]:
    """`gk decode` on a machine, over the servers on both."""
    prompts: list[str] = []
    for length in LENGTHS:
        ids = make_prompt(seed=length, length_tokens=length, distance=min(200, length)).token_ids
        prompts += ["--prompt-ids", ",".join(map(str, ids))]
    return machine.run(
        "decode", "--checkpoint", str(MODEL), "--max-new-tokens", "6", "--ignore-eos", "--json", *prompts,
        "--prefill", f"{PREFILL_HOST}:{CONTROL}", "--decode", f"{DECODE_HOST}:{CONTROL}",
        *(["--key-file", key] if key else []), *flags,
    )  # fmt: skip


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_two_machines_give_hugging_faces_tokens_and_kv_goes_over_the_cable(
    machines: tuple[Machine, Machine], servers: tuple[StartedServer, StartedServer], keys: dict[str, str]
) -> None:
    """Shared key and allow-list; from either machine; every byte of KV is seen on the decode side's device."""
    before = machines[1].received_bytes()
    answer = answer_of(decode(machines[1], keys["right"], "--compare-hf"))
    assert answer["identical_to_hf"] is True
    assert answer["transport"] == "nixl"
    assert [o["transferred_tokens"] for o in answer["outputs"]] == [n - 1 for n in LENGTHS]
    moved = machines[1].received_bytes() - before
    assert moved > kv_bytes(), (moved, kv_bytes())
    again = answer_of(decode(machines[0], keys["right"]))
    assert [o["token_ids"] for o in again["outputs"]] == [o["token_ids"] for o in answer["outputs"]]


def kv_bytes() -> int:
    """Bytes of K and V of all transferred tokens in the full layers."""
    from gk_adapters.hf_config import read_hf_config

    geometry = read_hf_config(MODEL).geometry
    of_token = 2 * geometry.num_layers // 2 * geometry.num_kv_heads * geometry.head_size * 2
    return sum(n - 1 for n in LENGTHS) * of_token


@pytest.mark.parametrize("key", ["wrong", None])
def test_a_client_without_the_key_gets_nothing_and_the_next_one_is_served(
    machines: tuple[Machine, Machine],
    servers: tuple[StartedServer, StartedServer],
    keys: dict[str, str],
    key: str | None,
) -> None:
    """Another key: no reply at all, and one line that says so. No key: refused before anything is sent."""
    done = decode(machines[1], keys[key] if key else None)
    assert (done.returncode, done.stdout) == (2, "")
    wanted = f"no reply from {PREFILL_HOST}:{CONTROL}" if key else f"{PREFILL_HOST} is not loopback"
    assert done.stderr.startswith(f"gk: error: {wanted}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    answer = answer_of(decode(machines[1], keys["right"]))
    assert all(len(o["token_ids"]) == 6 for o in answer["outputs"])


@pytest.mark.parametrize("command", ["prefill-server", "decode-server"])
def test_a_server_on_the_network_does_not_start_without_a_key(machines: tuple[Machine, Machine], command: str) -> None:
    """One line with the address and the reason."""
    server = machines[0].server(command)
    try:
        with pytest.raises(
            PeerLostError, match=rf"{command} did not start: gk: error: binding {PREFILL_HOST}.*shared key"
        ):
            server.endpoint()
    finally:
        server.stop()


def test_a_decode_server_asks_nobody_who_is_not_on_its_list(
    machines: tuple[Machine, Machine], servers: tuple[StartedServer, StartedServer], keys: dict[str, str]
) -> None:
    """The same key and a genuine hand-off: without --peer it fails by the address, and no KV moves."""
    stranger = StartedServer(
        "decode-server",
        [*FLAGS, "--host", DECODE_HOST, "--port", "7003", "--key-file", keys["right"]],
        program=(*machines[1].enter, *GK),
        env=ENV,
    )
    try:
        stranger.endpoint()
        done = machines[1].run(
            "decode", "--checkpoint", str(MODEL), "--max-new-tokens", "6", "--prompt-ids", "5,6,7,8", "--json",
            "--prefill", f"{PREFILL_HOST}:{CONTROL}", "--decode", f"{DECODE_HOST}:7003", "--key-file", keys["right"],
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{PREFILL_HOST}:{HANDSHAKE} is not on the side channel's allow-list" in done.stderr
    finally:
        stranger.stop()
