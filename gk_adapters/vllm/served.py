"""vLLM servers as child processes: started, waited for, asked over HTTP, and ended by pid."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gk_adapters.vllm.server_command import ServerSettings, server_arguments, server_environment
from gk_core.errors import PeerLostError, TransferError, TransferTimeoutError

__all__ = ["Server", "free_ports", "post_json", "started_servers"]

_START_SECONDS = 600.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.25
_PORTS = range(20_000, 32_000)
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now.

    Taken from below the ports that outgoing connections get: vLLM binds its side channel half a minute after it was
    told the port, and must still find it free.
    """
    ports = random.SystemRandom().sample(_PORTS, len(_PORTS))
    free: list[int] = []
    for port in ports:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            return free
    raise TransferError(f"{count} free ports are needed on 127.0.0.1 between {_PORTS[0]} and {_PORTS[-1]}")


def post_json(url: str, body: Mapping[str, Any], *, timeout_seconds: float = 300.0) -> dict[str, Any]:
    """One JSON request, one JSON answer.

    Raises:
        PeerLostError: nobody there.
        TransferTimeoutError: no answer in time.
        TransferError: an answer that is an error or not a JSON object; with what it says.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with _opener.open(request, timeout=timeout_seconds) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise TransferError(f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}") from None
    except TimeoutError:
        raise TransferTimeoutError(f"{url} did not answer within {timeout_seconds:g} s") from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        raise PeerLostError(f"{url} cannot be reached: {error}") from None
    except ValueError as error:
        raise TransferError(f"{url} did not answer with JSON: {error}") from None
    if not isinstance(answer, dict):
        raise TransferError(f"{url} must answer with a JSON object, got {type(answer).__name__}")
    return answer


class Server:
    """One running server.

    Args:
        settings: what to run.
        log: file that takes everything it writes.
        env: environment variables beside the process's own and the settings'.
    """

    def __init__(self, settings: ServerSettings, *, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.settings = settings
        self.log = log
        self.url = f"http://{settings.host}:{settings.port}"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                server_arguments(settings),
                env={**os.environ, **server_environment(settings), **(env or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_up(self, *, timeout_seconds: float = _START_SECONDS) -> None:
        """Return once it answers /health.

        Raises:
            PeerLostError: it ended first; with the last error of its log.
            TransferTimeoutError: it took too long.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise PeerLostError(f"the {self.settings.kind.value} server did not start: {self._last_error()}")
            if time.monotonic() > deadline:
                raise TransferTimeoutError(
                    f"the {self.settings.kind.value} server was not up within {timeout_seconds:g} s; see {self.log}"
                )
            time.sleep(_POLL_SECONDS)

    def is_healthy(self) -> bool:
        """Whether it answers now."""
        try:
            with _opener.open(self.url + "/health", timeout=2) as response:
                return bool(response.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def text(self, path: str) -> str:
        """What a GET answers."""
        with _opener.open(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def stop(self, *, kill: bool = False) -> None:
        """End it and its own children, politely unless `kill`; harmless twice."""
        if self.process.poll() is None and not kill:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_SECONDS)
        # Its children are in its process group, which we made; some outlive a parent that is killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _last_error(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        told = [line for line in lines if "Error" in line]
        return (told or lines or ["it wrote nothing"])[-1].strip()[-500:]


@contextlib.contextmanager
def started_servers(
    settings: Sequence[ServerSettings], *, logs: Path, env: Mapping[str, str] | None = None
) -> Iterator[list[Server]]:
    """Servers that are up, for as long as the block runs; they start side by side.

    Raises:
        PeerLostError, TransferTimeoutError: one did not come up.
    """
    servers: list[Server] = []
    try:
        for one in settings:
            servers.append(Server(one, log=logs / f"{one.kind.value}-{one.port}.log", env=env))
        for server in servers:
            server.wait_until_up()
        yield servers
    finally:
        for server in servers:
            server.stop()
