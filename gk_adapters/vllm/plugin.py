"""vLLM plugin entry point (`vllm.general_plugins`): registers gk's backend, models and connector by name.

Nothing here imports the adapters themselves, and an engine whose settings do not mention gk runs vLLM's own classes.
"""

from __future__ import annotations

import logging

from gk_core.errors import UnsupportedError

__all__ = ["CONNECTOR_NAME", "register"]

CONNECTOR_NAME = "GkNixlConnector"

_ARCHITECTURE = "GptOssForCausalLM"
_log = logging.getLogger("vllm.gk")
_registered = False


def register() -> None:
    """Called by vLLM in every process that it starts; harmless twice."""
    global _registered
    if _registered:
        return
    from gk_adapters.vllm.versions import require_vllm

    try:
        require_vllm()
    except UnsupportedError as error:
        # A plugin that raises is only logged by vLLM; saying it once and leaving vLLM alone is the same, but readable.
        _log.warning("gk: not registered: %s", error)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "gk_adapters.vllm.backend_choice.CpuBackend")
    ModelRegistry.register_model(_ARCHITECTURE, "gk_adapters.vllm.factory:GptOssForCausalLM")
    KVConnectorFactory.register_connector(CONNECTOR_NAME, "gk_adapters.vllm.connector", CONNECTOR_NAME)
    _registered = True
