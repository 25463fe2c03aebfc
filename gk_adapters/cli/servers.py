"""`gk prefill-server` and `gk decode-server`: one node each, on an address that is an input; and starting both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import evolve

from gk_adapters.cli.common import KERNELS, KV_DTYPES, kv_dtype_option
from gk_core.errors import PeerLostError, RequestError
from gk_core.metrics import NullMetrics
from gk_core.ports import Endpoint, Metrics

__all__ = [
    "StartedServer",
    "decode_server",
    "parse_endpoint",
    "prefill_server",
    "read_key",
    "spawned_servers",
    "started_server",
]

F = TypeVar("F", bound=Callable[..., Any])

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0


def parse_endpoint(text: str) -> Endpoint:
    """HOST:PORT; IPv6 hosts in brackets.

    >>> parse_endpoint("127.0.0.1:5557")
    Endpoint(host='127.0.0.1', port=5557)

    Raises:
        RequestError: not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(f"an address is HOST:PORT with a port of 1..65535, got {text!r}")
    return Endpoint(host=host.strip("[]"), port=int(port))


def read_key(path: Path | None) -> bytes | None:
    """The shared key in a file, surrounding white space removed."""
    return None if path is None else path.read_bytes().strip()


def _server_options(command: F) -> F:
    options = [
        click.option("--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True),
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind."),
        click.option("--port", type=click.IntRange(0, 65535), default=0, help="Control port; 0 takes a free one."),
        click.option("--num-blocks", type=int, default=1024, show_default=True, help="Blocks of every buffer."),
        click.option("--block-size", type=int, default=128, show_default=True, help="Tokens per block."),
        kv_dtype_option("bf16"),
        click.option("--max-model-len", type=int, default=8192, show_default=True, help="Tokens."),
        click.option("--num-rows", type=int, default=8, show_default=True, help="Rows of a decode step."),
        click.option("--dtype", type=click.Choice(["float32", "bfloat16", "checkpoint"]), default="float32"),
        click.option("--weights-id", default="", help="Name of the weights, which must be the peer's too, instead of a "
                     "hash over them: for checkpoints that hold the same weights in other float types."),
        click.option("--key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                     help="Shared key; needed on any address but loopback."),
        click.option("--backend", default="UCX", show_default=True, help="NIXL plugin, for example LIBFABRIC."),
        click.option("--progress-thread/--no-progress-thread", default=False, help="NIXL polls on its own thread."),
        click.option("--checksums", is_flag=True, help="Carry and check a checksum per block, half and head."),
        click.option("--metrics-port", type=click.IntRange(0, 65535), default=None,
                     help="Serve Prometheus metrics here; 0 takes a free port."),
        click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address of the metrics page."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command("prefill-server")
@_server_options
@click.option("--handshake-port", type=click.IntRange(0, 65535), default=0, help="0 takes a free one.")
@click.option("--advertise-host", default="", help="Host that hand-offs name, where it is not --host.")
@click.option("--lease-seconds", type=float, default=30.0, show_default=True, help="How long KV waits for a reader.")
def prefill_server(
    handshake_port: int, advertise_host: str, lease_seconds: float, host: str, key_file: Path | None, **options: Any
) -> None:
    """Run a prefill engine; prints its addresses as one JSON line, then serves until it is told to stop."""
    from gk_adapters.nodes import PrefillNode, nixl_wiring
    from gk_adapters.services import PrefillService
    from gk_core.prefill_engine import PrefillSettings

    key = read_key(key_file)
    wiring = nixl_wiring(
        host=host, port=handshake_port, listen=True, key=key, advertised_host=advertise_host,
        backend=options["backend"], progress_thread=options["progress_thread"],
    )  # fmt: skip
    model, cache = _model_and_cache(options)
    metrics = _Page.open(options)
    node = PrefillNode(
        model=model, cache=cache, wiring=wiring, metrics=metrics.metrics, checksums=options["checksums"],
        settings=PrefillSettings(max_model_len=cache.max_model_len, lease_seconds=lease_seconds),
    )  # fmt: skip
    _serve(
        PrefillService(node), host, options["port"], key,
        {"role": "prefill", "engine_id": node.engine_id, "handshake": f"{node.endpoint.host}:{node.endpoint.port}"},
        metrics,
    )  # fmt: skip


@click.command("decode-server")
@_server_options
@click.option("--kernel", type=click.Choice(KERNELS), default="torch", show_default=True)
@click.option("--peer", "peers", multiple=True, metavar="HOST:PORT",
              help="Handshake address of a prefill server that is not on loopback; may be given often.")  # fmt: skip
@click.option("--on-failed-pull", type=click.Choice(["fail", "replay"]), default="fail", show_default=True)
@click.option("--pull-seconds", type=float, default=30.0, show_default=True, help="Deadline of one pull.")
def decode_server(
    kernel: str, peers: tuple[str, ...], on_failed_pull: str, pull_seconds: float, host: str, key_file: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Run a decode engine; prints its address as one JSON line, then serves until it is told to stop."""
    from gk_adapters.nodes import DecodeNode, kernel_factory, nixl_wiring
    from gk_adapters.services import DecodeService
    from gk_core.decode_request import DecodeSettings, FailedPull
    from gk_core.pull import PullSettings

    key = read_key(key_file)
    wiring = nixl_wiring(
        listen=False, key=key, allowed=tuple(parse_endpoint(p) for p in peers),
        backend=options["backend"], progress_thread=options["progress_thread"],
    )  # fmt: skip
    model, cache = _model_and_cache(options)
    metrics = _Page.open(options)
    node = DecodeNode(
        model=model, cache=cache, wiring=wiring, metrics=metrics.metrics, checksums=options["checksums"],
        kernel=kernel_factory(kernel, options["checkpoint"]),
        settings=DecodeSettings(
            on_failed_pull=FailedPull(on_failed_pull), pull=PullSettings(deadline_seconds=pull_seconds)
        ),
    )  # fmt: skip
    _serve(DecodeService(node), host, options["port"], key, {"role": "decode", "engine_id": node.engine_id}, metrics)


class _Page:
    """Where a server counts, and the page that shows it, if one was asked for."""

    def __init__(self, metrics: Metrics, address: str = "", close: Callable[[], None] = lambda: None) -> None:
        self.metrics, self.address, self.close = metrics, address, close

    @classmethod
    def open(cls, options: dict[str, Any]) -> _Page:
        if options["metrics_port"] is None:
            return cls(NullMetrics())
        from gk_adapters.prometheus_metrics import PrometheusMetrics

        metrics = PrometheusMetrics()
        at = metrics.serve(host=options["metrics_host"], port=options["metrics_port"])
        return cls(metrics, f"{at.host}:{at.port}", metrics.close)


def _model_and_cache(options: dict[str, Any]) -> tuple[Any, Any]:
    from gk_adapters.nodes import CacheSettings
    from gk_adapters.torch_model import load_torch_model

    dtype = KV_DTYPES[options["kv_dtype"]]
    cache = CacheSettings(
        num_blocks=options["num_blocks"],
        block_size=options["block_size"],
        dtype=dtype,
        packed=dtype.is_fp8,
        max_model_len=options["max_model_len"],
        num_rows=options["num_rows"],
    )
    named = options["dtype"]
    model = load_torch_model(options["checkpoint"], model_dtype=None if named == "checkpoint" else named)
    return evolve(model, weights_id=options["weights_id"] or model.weights_id), cache


def _serve(service: Any, host: str, port: int, key: bytes | None, facts: dict[str, str], page: _Page) -> None:
    """Answer control requests until SIGTERM or SIGINT, then let go of everything."""
    from gk_adapters.zmq_side_channel import ZmqSideChannelServer

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    control = ZmqSideChannelServer(host=host, port=port, key=key)
    service.start()
    endpoint = control.serve(handler=service.handle)
    if page.address:
        facts = {**facts, "metrics": page.address}
    click.echo(json.dumps({**facts, "control": f"{endpoint.host}:{endpoint.port}", "pid": os.getpid()}))
    sys.stdout.flush()
    while not stop.wait(0.5) and service.failure is None:
        pass
    control.close()
    service.stop()
    service.node.close()
    page.close()
    if service.failure is not None:
        raise service.failure


@contextlib.contextmanager
def spawned_servers(
    flags: list[str], *, prefill_flags: list[str] | None = None, decode_flags: list[str] | None = None
) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Start both servers on loopback, yield their control addresses, and end them by pid.

    Raises:
        PeerLostError: a server ended before it listened; with the last line that it wrote.
    """
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(started_server("prefill-server", [*flags, *(prefill_flags or [])]))
        decode = stack.enter_context(started_server("decode-server", [*flags, *(decode_flags or [])]))
        yield prefill.endpoint(), decode.endpoint()


class StartedServer:
    """A server process; its first line of output says where it listens.

    Args:
        command, flags: what `gk` is called with.
        program: what to call instead of this interpreter's `gk`.
        env: added to our environment.
    """

    def __init__(
        self,
        command: str,
        flags: list[str],
        *,
        program: Sequence[str] = (sys.executable, "-c", "from gk_adapters.cli.main import run; run()"),
        env: dict[str, str] | None = None,
    ) -> None:
        self.command = command
        self.process = subprocess.Popen(
            [*program, command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=self._drain, daemon=True)]
        self._readers[0].start()
        self.facts: dict[str, Any] = {}

    def endpoint(self) -> Endpoint:
        """Its control address; waits until it listens."""
        if not self.facts:
            watchdog = threading.Timer(_START_SECONDS, self.process.kill)
            watchdog.start()
            assert self.process.stdout is not None
            try:
                for line in self.process.stdout:
                    if line.startswith("{"):
                        self.facts = json.loads(line)
                        break
            finally:
                watchdog.cancel()
            if not self.facts:
                self.process.wait()
                self._readers[0].join()
                last = next((line for line in reversed(self._errors) if line.strip()), "it wrote nothing")
                raise PeerLostError(f"gk {self.command} did not start: {last.strip()}")
            # Whatever it prints from now on must not fill the pipe and hold it up.
            self._readers.append(threading.Thread(target=self.process.stdout.read, daemon=True))
            self._readers[-1].start()
        return parse_endpoint(self.facts["control"])

    def stop(self) -> None:
        """End it by pid, politely first."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)
            del self._errors[:-200]


@contextlib.contextmanager
def started_server(command: str, flags: list[str]) -> Iterator[StartedServer]:
    """One server process for as long as the block runs."""
    server = StartedServer(command, flags)
    try:
        yield server
    finally:
        server.stop()
