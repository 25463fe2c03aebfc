"""Everything of vLLM's inside that moves between versions, in one place.

Served and tested: 0.28. What 0.32 has in place of these seams, read from its source and not run here:

- attention backends no longer give a cache shape: `get_kv_cache_shape` is gone, a backend names permitted orders of one
  fused tensor with `supported_kv_cache_layouts`, so separate K and V halves of a buffer have no seam of that kind;
- `_register_packed_kv_cache` and `register_cross_layers_kv_cache` are gone;
- the runner asks a connector for `get_transfer_results()` (sent, received, failed by request) and no longer for
  `get_finished` and block ids;
- a producer shortens prompts in `on_new_request` by `_prefill_backoff()`, which is 0 for GPT-OSS;
- `compute_nixl_compatibility_hash` takes no `cross_layers_blocks`;
- its scheduler still takes one block table per request where a load failed by block ids.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakePayload,
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from gk_core.ports import Endpoint

__all__ = [
    "ConnectorMetadata",
    "GkHandshakePayload",
    "PullConnector",
    "PullScheduler",
    "PullWorker",
    "handshake_payload",
    "init_facade",
    "is_scheduler_role",
    "side_channel_endpoint",
    "tp_rank",
    "without_progress_thread",
]

PullConnector: Any = NixlPullConnector
PullScheduler: Any = NixlPullConnectorScheduler
PullWorker: Any = NixlPullConnectorWorker
ConnectorMetadata: Any = NixlConnectorMetadata


@dataclass
class GkHandshakePayload(NixlHandshakePayload):
    """vLLM's payload and gk's hello; a stock peer reads the first two fields."""

    gk_hello: bytes = b""


def init_facade(connector: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    """What every NIXL connector sets up, without vLLM's own halves."""
    NixlBaseConnector.__init__(connector, vllm_config, role, kv_cache_config)


def is_scheduler_role(role: Any) -> bool:
    """Whether a connector is being made for the scheduler."""
    return bool(role == KVConnectorRole.SCHEDULER)


def side_channel_endpoint(vllm_config: Any) -> Endpoint:
    """Where this engine answers handshakes."""
    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
    return Endpoint(host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST, port=port)


def tp_rank() -> int:
    """Tensor-parallel rank of this worker."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def handshake_payload(vllm_config: Any, hello: bytes) -> GkHandshakePayload:
    """A worker's payload. Stock peers are refused by the hash: their caches have other regions."""
    return GkHandshakePayload(
        compatibility_hash=compute_nixl_compatibility_hash(vllm_config, "GK_GROUP_BUFFERS", False),
        agent_metadata_bytes=b"",
        gk_hello=hello,
    )


@contextlib.contextmanager
def without_progress_thread() -> Iterator[None]:
    """While a stock worker makes its NIXL agent on a CPU: no thread of NIXL's own, which would take a core for itself.

    vLLM reads the agent's config class from its module and offers no setting.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.platforms import current_platform

    module: Any = base_worker
    stock = module.nixl_agent_config
    if stock is None or current_platform.device_type != "cpu":
        yield
        return
    module.nixl_agent_config = functools.partial(stock, enable_prog_thread=False)
    try:
        yield
    finally:
        module.nixl_agent_config = stock
