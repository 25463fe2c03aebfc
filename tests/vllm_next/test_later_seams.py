"""vLLM 0.32: what of the earlier era's seams is missing, what stands in its place, and what gk refuses there."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from gk_adapters.vllm import versions
from gk_adapters.vllm.engine_facts import engine_facts
from gk_adapters.vllm.hma import HmaPlanner, layer_name, plan_of_config, planning_config
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.model_geometry import GPT_OSS_20B
from tests.vllm.engine_configs import decode_config, engine_config, transfer_config
from tests.vllm.test_connector_scheduler import make_manager, make_request

pytestmark = pytest.mark.vllm

GEOMETRY = attrs.evolve(
    GPT_OSS_20B, num_layers=6, num_q_heads=6, num_kv_heads=3, head_size=8,
    attention_kinds=GPT_OSS_20B.attention_kinds[:6],
)  # fmt: skip
SPECS = honest_specs(GEOMETRY, tp_size=1, block_size=16, dtype=KVDtype.FP32)
HALF_BLOCK = 3 * 16 * 8 * 4
NUM_BLOCKS = 11


def planned(num_blocks: int = NUM_BLOCKS, *, layout: str | None = None) -> Any:
    """vLLM's cache config of six layers."""
    config = planning_config(max_model_len=16, max_num_batched_tokens=16)
    config.cache_config.kv_cache_layout = layout
    return HmaPlanner(config).kv_cache_config(specs=SPECS, memory_bytes=num_blocks * 3 * 2 * HALF_BLOCK)


def allocated(config: Any, layout: str) -> dict[str, torch.Tensor]:
    """Caches as vLLM's runner binds them."""
    layouts: Any = importlib.import_module("vllm.v1.kv_cache_layout")
    utils: Any = importlib.import_module("vllm.v1.worker.utils")
    caches: dict[str, torch.Tensor] = utils.allocate_kv_cache(
        config, torch.device("cpu"), layouts.KVCacheLayout[layout], [16, 16]
    )
    return caches


def test_the_installed_vllm_is_the_one_that_is_tested() -> None:
    """And the refusal names it."""
    assert ".".join(map(str, versions.vllm_version())) == "0.32.0" == versions.TESTED[1]


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("vllm.v1.attention.backend", "AttentionBackend", "get_kv_cache_shape"),
        ("vllm.v1.attention.backend", "AttentionBackend", "get_required_kv_cache_layout"),
        ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1", "register_cross_layers_kv_cache"),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker", "NixlBaseConnectorWorker",
            "_register_packed_kv_cache",
        ),
    ],
)  # fmt: skip
def test_the_earlier_eras_seam_is_missing(module: str, owner: str, name: str) -> None:
    """As `seams` and `seams_cache` say."""
    assert not hasattr(getattr(importlib.import_module(module), owner), name)


def test_k_of_all_blocks_lies_before_v_in_each_pairs_region() -> None:
    """Three buffers in one allocation, each 2 * 11 * 1536 bytes; V of block 4, head 2, token 5, dim 7."""
    from gk_adapters.vllm.seams_cache import group_buffer

    caches = allocated(planned(), "LHBNC")
    buffers = [group_buffer(caches[layer_name(i)], num_kv_heads=3, head_size=8) for i in range(6)]
    assert {tuple(b.shape) for b in buffers} == {(2, 11, 3, 16, 8)}
    assert all(b.is_contiguous() for b in buffers)
    base = buffers[0].data_ptr()
    assert [b.data_ptr() - base for b in buffers] == [0, 0, 33_792, 33_792, 67_584, 67_584]
    buffers[3][1, 4, 2, 5, 7] = 9.5
    assert buffers[2][1, 4, 2, 5, 7] == 9.5
    raw = buffers[0].untyped_storage()
    flat = torch.tensor([], dtype=torch.float32).set_(raw)
    assert flat.nonzero().tolist() == [[(33_792 + 16_896 + 4 * 1536) // 4 + 2 * 16 * 8 + 5 * 8 + 7]]


def test_a_cache_in_vllms_own_order_is_refused() -> None:
    """K and V of a block side by side, as VLLM_KV_CACHE_LAYOUT could ask for it."""
    from gk_adapters.vllm.seams_cache import group_buffer

    config = planned(layout="LBHNC")
    with pytest.raises(UnsupportedError, match="with K and V apart"):
        plan_of_config(config)
    cache = allocated(config, "LBHNC")[layer_name(0)]
    with pytest.raises(LayoutError, match=r"all of K before all of V is needed, got \[11, 2, 16, 24\]"):
        group_buffer(cache, num_kv_heads=3, head_size=8)


def test_the_backend_names_its_order_and_its_slots() -> None:
    """Two slots of all heads per token; pages keep their size."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from gk_adapters.vllm.attention import GkAttentionBackend

    backend: Any = GkAttentionBackend
    assert [layout.name for layout in backend.supported_kv_cache_layouts()] == ["LHBNC"]
    plain: Any = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=8, dtype=torch.bfloat16)
    spec = backend.customize_spec(plain)
    assert (spec.num_head_slots, spec.state_content_bytes, spec.page_size_bytes) == (2, 48, 1536)
    assert spec.page_size_bytes == plain.page_size_bytes
    assert backend.customize_spec(spec) == spec


def test_vllms_own_prefill_backoff_is_none_for_gpt_oss(bf16_checkpoint: Path) -> None:
    """So the block at window boundaries is lost there still, and the one-token-short rule is gk's."""
    module: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler")
    config = engine_config(bf16_checkpoint, kv_transfer_config=transfer_config("kv_producer"))
    half = SimpleNamespace(_has_mamba=False, _bounded_replay=False, vllm_config=config)
    assert module.NixlBaseConnectorScheduler._prefill_backoff(half) == 0


def test_failed_loads_by_block_end_the_engine_where_there_are_two_groups() -> None:
    """Why failures are reported by request."""
    scheduler: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    two_groups = SimpleNamespace(kv_cache_config=planned())
    with pytest.raises(RuntimeError, match="multiple KV cache groups"):
        scheduler._handle_invalid_blocks(two_groups, {3}, {})


@pytest.mark.parametrize("recompute", [True, False])
def test_a_failed_pull_concerns_its_own_request_only(recompute: bool) -> None:
    """vLLM rewinds it, or hands it on to be ended in an error."""
    from vllm.v1.request import RequestStatus

    scheduler: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    requests = {name: make_request(list(range(300)), None, request_id=name) for name in ("a", "b")}
    manager = make_manager()
    for request in requests.values():
        manager.allocate_slots(request, 0, num_external_computed_tokens=299, delay_cache_blocks=True)
        request.num_computed_tokens = 299
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    state = SimpleNamespace(
        requests=requests,
        recompute_kv_load_failures=recompute,
        failed_recving_kv_req_ids=set(),
        kv_cache_manager=manager,
    )
    assert scheduler._handle_failed_recving(state, {"a", "gone"}) == (set() if recompute else {"a"})
    assert state.failed_recving_kv_req_ids == ({"a"} if recompute else set())
    assert [r.num_computed_tokens for r in requests.values()] == [0 if recompute else 299, 299]


def test_the_connector_reports_failures_by_request() -> None:
    """A failed pull is over and failed; no block is named."""
    from gk_adapters.vllm.connector import GkNixlConnector

    connector: Any = object.__new__(GkNixlConnector)
    connector._gk_worker = SimpleNamespace(
        get_finished=lambda: ({"sent"}, {"good", "bad"}), failed_requests={"bad"}, take_missing_ids=lambda: {3, 4}
    )
    results = connector.get_transfer_results({"whatever"})
    assert (results.finished_sending, results.finished_recving) == ({"sent"}, {"good", "bad"})
    assert results.failed_recving == {"bad"}
    assert connector.get_block_ids_with_load_errors() == set()


def test_vllms_own_cache_under_gks_connector_is_refused(bf16_checkpoint: Path) -> None:
    """Its failed transfers end in code that takes other arguments than the guarded half overrides."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from gk_adapters.vllm import stock_cache
    from gk_adapters.vllm.connector import GkNixlConnector

    worker: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker")
    theirs = inspect.signature(worker.NixlBaseConnectorWorker._handle_failed_transfer)
    ours = inspect.signature(stock_cache._GuardedWorker._handle_failed_transfer)
    assert len(theirs.parameters) > len(ours.parameters)
    config = decode_config(bf16_checkpoint, additional_config={"neuron_config": {"gk_attention": False}})
    plan = HmaPlanner(config).kv_cache_config(specs=engine_facts(config).specs, memory_bytes=2**28)
    for role in KVConnectorRole:
        with pytest.raises(UnsupportedError, match="runs over gk's cache layout only"):
            GkNixlConnector(config, role, plan)


def test_the_cache_is_asked_for_in_group_buffers(bf16_checkpoint: Path) -> None:
    """vLLM's own connector would ask for the fused order, which gk's backend does not permit."""
    from gk_adapters.vllm.connector import GkNixlConnector

    config = decode_config(bf16_checkpoint)
    assert GkNixlConnector.get_required_kvcache_layout(config) == "LHBNC"
    other = decode_config(bf16_checkpoint, additional_config={"neuron_config": {"gk_attention": False}})
    assert GkNixlConnector.get_required_kvcache_layout(other) == "LBHNC"
