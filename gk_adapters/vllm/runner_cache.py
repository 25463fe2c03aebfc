"""The KV cache of a model runner of one's own: what its `initialize_kv_cache` calls.

vLLM's own runners need nothing of this. Up to 0.28 they allocate one tensor per pair of layers, which gk's backend
shapes as a group buffer; from 0.30 on one memory for all pairs, in which each pair's buffer has its own base. A runner
for a device wants a tensor per buffer: addressed from 0, so that offsets fit 32 bits whatever the size of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gk_adapters.torch_kv import allocate_group_buffers
from gk_adapters.vllm.decode_model import GkDecodeModel
from gk_adapters.vllm.hma import layer_name, plan_of_config
from gk_adapters.vllm.seams_cache import bound_cache
from gk_core.errors import UnsupportedError
from gk_core.model_geometry import buffer_of_layer

__all__ = ["initialize_kv_cache"]


def initialize_kv_cache(
    model: Any,
    kv_cache_config: Any,
    *,
    otherwise: Callable[[Any], dict[str, torch.Tensor]],
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Allocate and bind the cache of a model; gated on the giga-kernel model.

    That model gets one separate zeroed tensor [2, num_blocks, kv, block, d] per shared buffer of vLLM's plan, K half
    then V half; where K is packed, the model holds it as a view of the same bytes. Any other is left to `otherwise`.

    Args:
        model: as vLLM's loader made it.
        kv_cache_config: vLLM's KVCacheConfig.
        otherwise: what the runner does for every other model.
        device: of the memory.

    Returns:
        {attention name: its cache}, the same tensor for layers that share it; what a connector registers.

    Raises:
        UnsupportedError: a plan that the giga kernel cannot read, or one for another model than this.
    """
    if not isinstance(model, GkDecodeModel):
        return otherwise(kv_cache_config)
    plan = plan_of_config(kv_cache_config)
    layout = model.facts.layout(num_blocks=plan.num_blocks)
    if len(plan.buffers) != layout.num_buffers or plan.half_block_bytes != layout.block_bytes:
        raise UnsupportedError(
            f"the plan has {len(plan.buffers)} buffers with half blocks of {plan.half_block_bytes} bytes, the model "
            f"needs {layout.num_buffers} of {layout.block_bytes}"
        )
    buffers = allocate_group_buffers(layout, device=device)
    model.set_kv_cache_buffers(buffers)
    caches = {layer_name(i): bound_cache(buffers[buffer_of_layer(i)]) for i in range(layout.num_layers)}
    for i, keeper in enumerate(model.keepers):
        keeper.kv_cache = caches[layer_name(i)]
    return caches
