"""Real vLLM engine configs, built as the command line builds them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["decode_config", "engine_config", "transfer_config"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def transfer_config(role: str, *, connector: str = "GkNixlConnector", **more: Any) -> Any:
    """A KV transfer config."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=connector, kv_role=role, kv_buffer_device="cpu", **more)  # type: ignore[arg-type]


def engine_config(checkpoint: Path, **settings: Any) -> Any:
    """The VllmConfig of one engine over a checkpoint."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": 128,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "disable_hybrid_kv_cache_manager": False,
    }
    return EngineArgs(model=str(checkpoint), **{**defaults, **settings}).create_engine_config()


def decode_config(checkpoint: Path, neuron: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A giga-kernel decode engine that can start, but for what is overridden."""
    defaults: dict[str, Any] = {
        "kv_transfer_config": transfer_config("kv_consumer"),
        "scheduler_cls": "gk_adapters.vllm.scheduler.GkScheduler",
        "additional_config": {"neuron_config": {"gk_decode": True, **(neuron or {})}},
    }
    return engine_config(checkpoint, **{**defaults, **settings})
