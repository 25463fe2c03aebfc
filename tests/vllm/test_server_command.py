"""The command lines that `gk serve` prints and runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner

from gk_adapters.cli.serve import serve
from gk_adapters.vllm.server_command import (
    Connector,
    ServerKind,
    ServerSettings,
    server_arguments,
    server_environment,
    shell_line,
)
from gk_core.errors import RequestError

pytestmark = pytest.mark.vllm


def flags(settings: ServerSettings) -> dict[str, Any]:
    """Values by flag, JSON decoded."""
    args = server_arguments(settings)[3:]
    found: dict[str, Any] = {}
    for i, arg in enumerate(args):
        if arg.startswith("--"):
            value = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else True
            found[arg] = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    return found


def test_a_prefill_server_is_a_producer_of_the_native_model() -> None:
    """No giga kernel, no scheduler class, HMA on."""
    found = flags(ServerSettings(kind=ServerKind.PREFILL, model="m", port=8100))
    assert found["--kv-transfer-config"]["kv_role"] == "kv_producer"
    assert found["--kv-transfer-config"]["kv_connector"] == "GkNixlConnector"
    assert found["--additional-config"] == {"neuron_config": {"gk_attention": True}}
    assert found["--no-disable-hybrid-kv-cache-manager"] is True
    assert found["--block-size"] == "128"
    assert "--scheduler-cls" not in found


def test_a_decode_server_is_a_consumer_of_the_giga_kernel() -> None:
    """With the scheduler that survives a failed pull."""
    found = flags(ServerSettings(kind=ServerKind.DECODE, model="m", missing_kv="refuse", on_failed_pull="fail"))
    assert found["--kv-transfer-config"]["kv_role"] == "kv_consumer"
    assert found["--kv-transfer-config"]["kv_load_failure_policy"] == "fail"
    assert found["--additional-config"]["neuron_config"] == {
        "gk_attention": True, "gk_decode": True, "gk_missing_kv": "refuse",
    }  # fmt: skip
    assert found["--scheduler-cls"] == "gk_adapters.vllm.scheduler.GkScheduler"


def test_packed_fp8_is_set_on_both_sides() -> None:
    """K order is part of the handshake."""
    for kind in (ServerKind.PREFILL, ServerKind.DECODE):
        found = flags(ServerSettings(kind=kind, model="m", kv_cache_dtype="fp8", packed_k=True))
        assert found["--kv-cache-dtype"] == "fp8"
        assert found["--additional-config"]["neuron_config"]["fp8_packed_kv"] is True
    with pytest.raises(RequestError, match="packed K needs an FP8 KV cache"):
        ServerSettings(kind=ServerKind.PREFILL, model="m", packed_k=True)


def test_the_stock_connector_comes_without_anything_of_ours() -> None:
    """What a user runs today."""
    found = flags(ServerSettings(kind=ServerKind.DECODE, model="m", connector=Connector.STOCK))
    assert found["--kv-transfer-config"]["kv_connector"] == "NixlConnector"
    assert "--additional-config" not in found
    assert "--scheduler-cls" not in found


def test_a_single_engine_has_no_connector(tmp_path: Path) -> None:
    """And no side channel."""
    settings = ServerSettings(kind=ServerKind.SINGLE, model=str(tmp_path), cpu_cache_gib=2, cpu_cores="0-1")
    assert "--kv-transfer-config" not in flags(settings)
    assert server_environment(settings) == {
        "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def test_the_printed_line_is_the_command_that_would_run() -> None:
    """Read back by a shell, it is environment and arguments."""
    settings = ServerSettings(kind=ServerKind.DECODE, model="a model", side_channel_port=5701)
    words = shlex.split(shell_line(settings))
    assert words[:2] == ["VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT=5701"]
    assert words[2:] == server_arguments(settings)


def test_gk_serve_prints_and_passes_on_what_it_does_not_know() -> None:
    """Everything after -- is vLLM's."""
    result = CliRunner().invoke(
        serve, ["decode", "m", "--port", "8201", "--native-decode", "--print-only", "--", "--seed", "3"]
    )
    assert result.exit_code == 0, result.output
    assert "--port 8201" in result.output
    assert "gk_decode" not in result.output
    assert result.output.rstrip().endswith("--seed 3")


@pytest.mark.parametrize("port", [0, 65_536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    """Before anything starts."""
    with pytest.raises(RequestError, match=r"port must be 1\.\.65535"):
        ServerSettings(kind=ServerKind.PREFILL, model="m", port=port)


def test_the_stock_connector_polls_as_vllm_does_unless_told_not_to() -> None:
    """Told not to, it is vLLM's own class but for that."""
    stock = ServerSettings(kind=ServerKind.PREFILL, model="m", connector=Connector.STOCK)
    quiet = flags(evolve(stock, nixl_polling=False))["--kv-transfer-config"]
    assert flags(stock)["--kv-transfer-config"]["kv_connector"] == "NixlConnector"
    assert (quiet["kv_connector"], quiet["kv_connector_module_path"]) == (
        "QuietNixlConnector", "gk_adapters.vllm.quiet_stock",
    )  # fmt: skip
    gk = flags(ServerSettings(kind=ServerKind.PREFILL, model="m", nixl_polling=False))["--kv-transfer-config"]
    assert gk["kv_connector"] == "GkNixlConnector"
