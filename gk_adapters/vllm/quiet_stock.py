"""vLLM's own pull connector, but for its threads: NIXL polls within the engine's steps, the process keeps its cores.

On a CPU the stock connector gives NIXL a thread that polls without a pause, on the one core to which it pins the worker
as well: a transfer then takes seconds, and leases run out on a small machine. What is transferred, when and how is
vLLM's code here too.
"""

from __future__ import annotations

from typing import Any

from gk_adapters.vllm import seams

__all__ = ["QuietNixlConnector"]


class QuietNixlConnector(seams.PullConnector):  # type: ignore[misc]
    """See the module. Named by `kv_connector_module_path`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with seams.without_progress_thread():
            super().__init__(vllm_config, role, kv_cache_config)
