"""What giga-kernel servers do about KV that they lack: `refuse` ends the request, `pull_again` asks on and on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gk_adapters.vllm.served import Server, free_ports, started_servers
from gk_adapters.vllm.server_command import ServerKind
from gk_core.errors import TransferError
from tests.vllm.deployment import QUIET, Deployment, server_settings
from tests.vllm.test_deployment import make_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.slow]


@pytest.fixture(scope="module")
def refusing_and_asking_again(
    deployment: Deployment, bf16_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Two more decode servers beside the deployment."""
    ports = free_ports(4)
    settings = [
        server_settings(
            bf16_checkpoint, ServerKind.DECODE, (ports[2 * i], ports[2 * i + 1]), missing_kv=policy, on_failed_pull=then
        )
        for i, (policy, then) in enumerate((("refuse", "recompute"), ("pull_again", "fail")))
    ]
    with started_servers(settings, logs=tmp_path_factory.mktemp("policies"), env=QUIET) as (refusing, asking):
        yield refusing, asking


class Gate:
    """A port of the producer's side channel that swallows connections until it is opened."""

    def __init__(self, port: int, behind: int) -> None:
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", port))
        self.given_up = threading.Event()
        """Somebody connected, waited, and went away without an answer."""
        self.is_open = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(taken, self.is_open.is_set()), daemon=True).start()

    def _serve(self, client: socket.socket, passes: bool) -> None:
        with client:
            if not passes:
                while client.recv(65_536):
                    pass
                self.given_up.set()
                return
            with socket.create_connection(("127.0.0.1", self._behind)) as server:
                back = threading.Thread(target=_copy, args=(server, client))
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_refuse_ends_requests_without_kv_and_serves_the_others(
    deployment: Deployment, refusing_and_asking_again: tuple[Server, Server]
) -> None:
    """No hand-off, a hand-off that is used up: an error that counts; one token, or a good hand-off: an answer."""
    server, _ = refusing_and_asking_again
    deployment_of = deployment.beside(server)
    prompt = make_prompt(140, seed=21)
    wanted = deployment.alone(prompt)
    with pytest.raises(TransferError, match="answered 500"):
        deployment_of.decoded(prompt, None)
    assert deployment.metric(server, "gk_requests_refused_total") == 1
    params = deployment.offer(prompt)
    assert deployment_of.decoded(prompt, params) == wanted
    with pytest.raises(TransferError, match="answered 500"):
        deployment_of.decoded(prompt, params, cache_salt="again")
    assert deployment.metric(server, "gk_pulls_failed_total") == 1
    assert deployment.metric(server, "gk_requests_refused_total") == 2
    assert "gk: request" in server.log.read_text()
    assert "gk_missing_kv is refuse" in server.log.read_text()
    # One token is nothing but the last token, which is computed here anyway.
    assert deployment_of.decoded([17], None) == deployment.alone([17])
    assert deployment.metric(server, "gk_recomputed_tokens_total") == 0
    deployment_of.wait_until_idle()


def test_pull_again_waits_for_a_producer_that_does_not_answer_yet(
    deployment: Deployment, refusing_and_asking_again: tuple[Server, Server]
) -> None:
    """The first handshake gets no answer, a later one does: pulled and not computed."""
    _, server = refusing_and_asking_again
    deployment_of = deployment.beside(server)
    prompt = make_prompt(255, seed=22)
    wanted = deployment.alone(prompt)
    port = free_ports(1)[0]
    with contextlib.closing(Gate(port, deployment.prefill.settings.side_channel_port)) as gate:
        params = {**deployment.offer(prompt), "remote_port": port}
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(deployment_of.decoded, prompt, params)
            assert gate.given_up.wait(60)
            gate.is_open.set()
            assert answer.result() == wanted
    assert deployment.metric(server, "gk_pulls_done_total") == 1
    assert deployment.metric(server, "gk_pulls_failed_total") == 0
    assert deployment.metric(server, "gk_recomputed_tokens_total") == 0
    deployment_of.wait_until_idle()


def test_a_producer_that_never_comes_fails_its_request_only(
    deployment: Deployment, refusing_and_asking_again: tuple[Server, Server]
) -> None:
    """Asked until the pull's deadline; with `fail` the request then ends in an error, and the next is served."""
    _, server = refusing_and_asking_again
    deployment_of = deployment.beside(server)
    prompt = make_prompt(90, seed=23)
    failed = deployment.metric(server, "gk_pulls_failed_total")
    nobody = {**deployment.offer(prompt), "remote_engine_id": "nobody", "remote_port": free_ports(1)[0]}
    with pytest.raises(TransferError, match="answered 500"):
        deployment_of.decoded(prompt, nobody)
    assert deployment.metric(server, "gk_pulls_failed_total") == failed + 1
    assert deployment.metric(server, "gk_recomputed_tokens_total") == 0
    assert deployment_of.decoded(prompt, deployment.offer(prompt)) == deployment.alone(prompt)
    deployment_of.wait_until_idle()
