"""The vLLM command lines of a disaggregated deployment, as data: nothing is run here.

Importing this does not import vLLM.
"""

from __future__ import annotations

import json
import shlex
import sys
from enum import Enum
from pathlib import Path

from attrs import frozen

from gk_core.errors import RequestError

__all__ = ["Connector", "ServerKind", "ServerSettings", "server_arguments", "server_environment", "shell_line"]


class ServerKind(Enum):
    """Which server of a deployment."""

    PREFILL = "prefill"
    DECODE = "decode"
    SINGLE = "single"
    """One engine for both, without a connector: what the others are compared with."""


class Connector(Enum):
    """Who moves KV."""

    GK = "gk"
    STOCK = "stock"
    """vLLM's own NixlConnector over vLLM's own attention."""


@frozen(kw_only=True)
class ServerSettings:
    """One server.

    Attributes:
        kind, connector: see there.
        model: checkpoint folder or hub id.
        host, port: of the HTTP server.
        side_channel_host, side_channel_port: of the handshake side channel; the host is what peers are told.
        gk_decode: giga-kernel decode on a decode server; False: the native per-layer model.
        gk_attention: group buffers; False: vLLM's own attention and cache layout, under gk's connector.
        dtype, kv_cache_dtype, block_size, max_model_len, max_num_seqs, max_num_batched_tokens: vLLM's.
        packed_k: pair-packed K; needs kv_cache_dtype fp8.
        missing_kv: gk_missing_kv of a giga-kernel engine.
        on_failed_pull: vLLM's kv_load_failure_policy: recompute or fail.
        prefix_caching: vLLM's prefix cache.
        nixl_polling: of the stock connector on a CPU: whether NIXL polls on a thread of its own, a busy core.
        lease_seconds: how long a prefill server keeps KV for a reader.
        cpu_cache_gib, cpu_cores: vLLM's settings for a CPU; None leaves its own defaults.
        extra: arguments passed on as they are.
    """

    kind: ServerKind
    model: str
    connector: Connector = Connector.GK
    host: str = "127.0.0.1"
    port: int = 8000
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 5600
    gk_decode: bool = True
    gk_attention: bool = True
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    packed_k: bool = False
    block_size: int = 128
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    missing_kv: str = "replay"
    on_failed_pull: str = "recompute"
    prefix_caching: bool = True
    nixl_polling: bool = True
    lease_seconds: int = 30
    cpu_cache_gib: int | None = None
    cpu_cores: str | None = None
    extra: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        for name in ("port", "side_channel_port"):
            if not 0 < getattr(self, name) < 65_536:
                raise RequestError(f"{name} must be 1..65535, got {getattr(self, name)}")
        if self.packed_k and not self.kv_cache_dtype.startswith("fp8"):
            raise RequestError(f"packed K needs an FP8 KV cache, got {self.kv_cache_dtype}")
        if not self.gk_attention and (self.packed_k or (self.gk_decode and self.kind is ServerKind.DECODE)):
            raise RequestError("the giga kernel and packed K need gk's cache layout; use native decode without it")


def server_arguments(settings: ServerSettings) -> list[str]:
    """Program and arguments.

    >>> args = server_arguments(ServerSettings(kind=ServerKind.PREFILL, model="m"))
    >>> args[1:5], "--scheduler-cls" in args
    (['-m', 'vllm.entrypoints.openai.api_server', '--model', 'm'], False)
    """
    s = settings
    args = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", s.model]
    args += ["--host", s.host, "--port", str(s.port), "--dtype", s.dtype, "--block-size", str(s.block_size)]
    args += ["--enforce-eager", "--no-disable-hybrid-kv-cache-manager"]
    args += ["--enable-prefix-caching" if s.prefix_caching else "--no-enable-prefix-caching"]
    if s.kv_cache_dtype != "auto":
        args += ["--kv-cache-dtype", s.kv_cache_dtype]
    for flag, value in (
        ("--max-model-len", s.max_model_len),
        ("--max-num-seqs", s.max_num_seqs),
        ("--max-num-batched-tokens", s.max_num_batched_tokens),
    ):
        if value is not None:
            args += [flag, str(value)]
    if s.kind is not ServerKind.SINGLE:
        args += ["--kv-transfer-config", json.dumps(_transfer_config(s))]
    neuron = _neuron_config(s)
    if neuron:
        args += ["--additional-config", json.dumps({"neuron_config": neuron})]
    if s.kind is ServerKind.DECODE and s.connector is Connector.GK:
        args += ["--scheduler-cls", "gk_adapters.vllm.scheduler.GkScheduler"]
    return [*args, *s.extra]


def _transfer_config(s: ServerSettings) -> dict[str, object]:
    quiet = s.connector is Connector.STOCK and not s.nixl_polling
    name = "GkNixlConnector" if s.connector is Connector.GK else "QuietNixlConnector" if quiet else "NixlConnector"
    return {
        "kv_connector": name,
        **({"kv_connector_module_path": "gk_adapters.vllm.quiet_stock"} if quiet else {}),
        "kv_role": "kv_producer" if s.kind is ServerKind.PREFILL else "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": s.on_failed_pull,
        "kv_connector_extra_config": {"kv_lease_duration": s.lease_seconds},
    }


def _neuron_config(s: ServerSettings) -> dict[str, object]:
    if s.connector is Connector.STOCK:
        return {}
    if not s.gk_attention:
        return {"gk_attention": False}
    config: dict[str, object] = {"gk_attention": True}
    if s.packed_k:
        config["fp8_packed_kv"] = True
    if s.kind is ServerKind.DECODE and s.gk_decode:
        config |= {"gk_decode": True, "gk_missing_kv": s.missing_kv}
    return config


def server_environment(settings: ServerSettings) -> dict[str, str]:
    """Environment variables beside the caller's own."""
    env: dict[str, str] = {}
    if settings.kind is not ServerKind.SINGLE:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.side_channel_host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(settings.side_channel_port)
    if settings.cpu_cache_gib is not None:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_cache_gib)
    if settings.cpu_cores is not None:
        env["VLLM_CPU_OMP_THREADS_BIND"] = settings.cpu_cores
    if Path(settings.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env


def shell_line(settings: ServerSettings) -> str:
    """The command as a line for a shell."""
    env = [f"{name}={shlex.quote(value)}" for name, value in server_environment(settings).items()]
    return " ".join([*env, *map(shlex.quote, server_arguments(settings))])
