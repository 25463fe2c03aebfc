"""Everything of vLLM's inside that moves between versions, in one place.

Served and tested: 0.28 (0.24 to 0.28 have the same seams).
"""

from __future__ import annotations

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

from gk_core.ports import Endpoint

__all__ = [
    "ConnectorMetadata",
    "GkHandshakePayload",
    "PullConnector",
    "handshake_payload",
    "init_facade",
    "is_scheduler_role",
    "side_channel_endpoint",
    "tp_rank",
]

PullConnector: Any = NixlPullConnector
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
