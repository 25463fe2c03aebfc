"""Everything of vLLM's inside that moves between versions, for the connector and its scheduler; caches: `seams_cache`.

What the eras (`versions.Era`) have:

- SHAPES, 0.26 to 0.28. A worker reports (sent, received) by `get_finished` and failed loads by block id, which vLLM's
  own scheduler does not stand with several KV cache groups: `scheduler.GkScheduler` does. A cache is asked for as HND.
- LAYOUTS, 0.30 to 0.32. A worker reports sent, received and failed requests at once, by `get_transfer_results`; failed
  loads by block id end the engine where there are several groups, so none are reported. A cache is asked for by layout
  name. A producer's `_prefill_backoff()` is 0 for GPT-OSS, so the one-token-short rule is gk's in both eras.
  `compute_nixl_compatibility_hash` takes no flag for cross-layer blocks. What is missing: failed transfers end in other
  code with other arguments than `stock_cache` overrides, so gk's connector is refused over vLLM's own cache layouts.
"""

from __future__ import annotations

import contextlib
import functools
import os
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

from gk_adapters.vllm.versions import Era, served_era
from gk_core.ports import Endpoint

__all__ = [
    "CACHE_LAYOUT",
    "FAILS_BY_REQUEST",
    "GUARDS_VLLMS_CACHE",
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
    "transfer_results",
    "without_progress_thread",
]

PullConnector: Any = NixlPullConnector
PullScheduler: Any = NixlPullConnectorScheduler
PullWorker: Any = NixlPullConnectorWorker
ConnectorMetadata: Any = NixlConnectorMetadata

_LAYOUTS = served_era() is Era.LAYOUTS
CACHE_LAYOUT = "LHBNC" if _LAYOUTS else "HND"
"""What a connector over group buffers asks the cache to be."""
FAILS_BY_REQUEST = _LAYOUTS
"""Whether failed pulls are reported as requests and not as blocks."""
GUARDS_VLLMS_CACHE = not _LAYOUTS
"""Whether gk's connector is served over vLLM's own cache layouts."""


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
    cross_layers = () if _LAYOUTS else (False,)
    return GkHandshakePayload(
        compatibility_hash=compute_nixl_compatibility_hash(vllm_config, "GK_GROUP_BUFFERS", *cross_layers),
        agent_metadata_bytes=b"",
        gk_hello=hello,
    )


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """A step's results in the form of the LAYOUTS era; failed requests are among the received ones too."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    made: Any = base
    return made.KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)


@contextlib.contextmanager
def without_progress_thread() -> Iterator[None]:
    """While a stock worker makes its NIXL agent on a CPU: no thread of NIXL's own, and the process keeps its cores.

    The thread would take a core for itself, the very one to which the worker pins itself. vLLM reads the agent's config
    class from its module and offers no setting.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.platforms import current_platform

    module: Any = base_worker
    stock = module.nixl_agent_config
    if stock is None or current_platform.device_type != "cpu":
        yield
        return
    cores = os.sched_getaffinity(0)
    module.nixl_agent_config = functools.partial(stock, enable_prog_thread=False)
    try:
        yield
    finally:
        module.nixl_agent_config = stock
        os.sched_setaffinity(0, cores)
