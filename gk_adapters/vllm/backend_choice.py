"""Which attention backend an engine gets: gk's where its settings ask for gk, vLLM's own everywhere else.

vLLM's CPU platform has one overridable entry for its backend and resolves it by name when the first attention layer is
built. The name `CpuBackend` of this module is that entry; it is decided at that moment, from the engine's own config,
so an installed plugin changes nothing for engines that do not use it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["choose_cpu_backend"]


def choose_cpu_backend() -> Any:
    """The backend class for the engine that is being built in this process."""
    from vllm.config import get_current_vllm_config_or_none

    from gk_adapters.vllm.settings import engine_uses_gk

    config: Any = get_current_vllm_config_or_none()
    if config is not None and engine_uses_gk(config):
        from gk_adapters.vllm.attention import GkAttentionBackend

        return GkAttentionBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend


def __getattr__(name: str) -> Any:
    if name == "CpuBackend":
        return choose_cpu_backend()
    raise AttributeError(name)
