"""vLLM's scheduler with a failed pull over two groups, and what the connector refuses to start with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gk_adapters.vllm.engine_facts import engine_facts
from gk_adapters.vllm.hma import layer_name
from gk_core.errors import LayoutError, UnsupportedError
from tests.vllm.engine_configs import decode_config, engine_config, transfer_config
from tests.vllm.test_connector_scheduler import make_manager, make_request

pytestmark = pytest.mark.vllm


def test_a_failed_pull_rewinds_its_own_request_only() -> None:
    """Two requests wait for KV; a block of the first one's full group did not come."""
    from gk_adapters.vllm.scheduler import GkScheduler

    manager = make_manager()
    requests = [make_request(list(range(300)), None, request_id=name) for name in ("a", "b")]
    for request in requests:
        manager.allocate_slots(request, 0, num_external_computed_tokens=299, delay_cache_blocks=True)
        request.num_computed_tokens = 299
    scheduler: Any = SimpleNamespace(kv_cache_manager=manager)
    bad = {manager.get_block_ids("a")[1][2]}
    got = GkScheduler._update_requests_with_invalid_blocks(scheduler, requests, bad, {}, evict_blocks=False)
    assert got == ({"a"}, 299, set())
    assert [r.num_computed_tokens for r in requests] == [0, 299]


def test_vllms_own_code_for_it_does_not_stand_two_groups() -> None:
    """Why the connector insists on the scheduler class: this is what would end the engine."""
    from vllm.v1.core.sched.scheduler import Scheduler

    manager = make_manager()
    request = make_request(list(range(300)), None, request_id="a")
    manager.allocate_slots(request, 0, num_external_computed_tokens=299, delay_cache_blocks=True)
    scheduler: Any = SimpleNamespace(kv_cache_manager=manager, block_size=128)
    with pytest.raises(ValueError, match="too many values to unpack"):
        Scheduler._update_requests_with_invalid_blocks(scheduler, [request], {1}, {}, evict_blocks=False)


def test_running_requests_are_never_touched() -> None:
    """Nothing that runs can hold a block that is being pulled."""
    from gk_adapters.vllm.scheduler import GkScheduler

    manager = make_manager()
    request = make_request(list(range(100)), None, request_id="a")
    manager.allocate_slots(request, 100)
    request.num_computed_tokens = 100
    scheduler: Any = SimpleNamespace(kv_cache_manager=manager)
    every = {b for ids in manager.get_block_ids("a") for b in ids}
    got = GkScheduler._update_requests_with_invalid_blocks(scheduler, [request], every, {}, evict_blocks=True)
    assert got == (set(), 0, set())
    assert request.num_computed_tokens == 100


def planned(config: Any) -> Any:
    """vLLM's own cache plan for an engine."""
    from gk_adapters.vllm.hma import HmaPlanner

    return HmaPlanner(config).kv_cache_config(specs=engine_facts(config).specs, memory_bytes=2**28)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scheduler_cls": None}, "needs --scheduler-cls gk_adapters.vllm.scheduler.GkScheduler, got "),
        ({"kv_transfer_config": "kv_both"}, "on a kv_producer or a kv_consumer, got kv_role kv_both"),
    ],
)
def test_the_connector_refuses_what_it_cannot_do_right(
    bf16_checkpoint: Path, settings: dict[str, Any], said: str
) -> None:
    """Before the server listens."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from gk_adapters.vllm.connector import GkNixlConnector

    if "kv_transfer_config" in settings:
        settings = {"kv_transfer_config": transfer_config(settings["kv_transfer_config"])}
    config = decode_config(bf16_checkpoint, additional_config={}, **settings)
    with pytest.raises(UnsupportedError, match=said):
        GkNixlConnector(config, KVConnectorRole.SCHEDULER, planned(config))


def test_a_producer_runs_under_vllms_own_scheduler(bf16_checkpoint: Path) -> None:
    """It never pulls."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from gk_adapters.vllm.connector import GkNixlConnector

    config = engine_config(bf16_checkpoint, kv_transfer_config=transfer_config("kv_producer"))
    connector = GkNixlConnector(config, KVConnectorRole.SCHEDULER, planned(config))
    assert not connector.has_pending_push_work()
    connector.shutdown()


def make_caches(num_blocks: int = 7) -> dict[str, torch.Tensor]:
    """Two group buffers of the shipped model, as vLLM binds them: paired layers share one."""
    buffers = [torch.zeros(2, num_blocks, 2, 128, 64) for _ in range(2)]
    return {layer_name(i): buffers[i // 2] for i in range(4)}


def test_four_layers_give_two_k_and_two_v_regions(bf16_checkpoint: Path) -> None:
    """Each region begins at its half's base and has blocks of kv * block * d * 4 bytes."""
    from gk_adapters.vllm.connector_worker import group_regions

    caches = make_caches()
    layout, regions = group_regions(engine_facts(engine_config(bf16_checkpoint)), caches)
    assert (layout.num_blocks, layout.block_bytes, len(regions)) == (7, 2 * 128 * 64 * 4, 4)
    first = caches[layer_name(0)]
    assert [r.base_address for r in regions[:2]] == [first[0].data_ptr(), first[1].data_ptr()]
    assert [r.base_address for r in regions[2:]] == [caches[layer_name(3)][h].data_ptr() for h in (0, 1)]


@pytest.mark.parametrize("wrong", ["missing", "shape", "dtype", "unshared"])
def test_caches_that_are_not_group_buffers_are_refused(bf16_checkpoint: Path, wrong: str) -> None:
    """Nothing is registered."""
    from gk_adapters.vllm.connector_worker import group_regions

    caches = make_caches()
    if wrong == "missing":
        del caches[layer_name(2)]
    elif wrong == "shape":
        caches = {name: torch.zeros(7, 2, 128, 128) for name in caches}
    elif wrong == "dtype":
        caches = {name: t.half() for name, t in caches.items()}
    else:
        caches[layer_name(1)] = torch.zeros(2, 7, 2, 128, 64)
    with pytest.raises(LayoutError):
        group_regions(engine_facts(engine_config(bf16_checkpoint)), caches)


def test_the_weights_name_is_the_same_for_both_forms_of_a_checkpoint(bf16_checkpoint: Path) -> None:
    """MXFP4 as shipped and written out as BF16 are one model; another one has another name."""
    from gk_adapters.hf_checkpoint import HFCheckpoint, weights_id_of
    from tests.vllm.conftest import SHIPPED

    assert weights_id_of(HFCheckpoint(SHIPPED)) == weights_id_of(HFCheckpoint(bf16_checkpoint))
    assert len(weights_id_of(HFCheckpoint(SHIPPED))) == 32
