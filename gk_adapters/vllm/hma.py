"""KVCachePlanner over vLLM's own hybrid KV-cache manager (HMA).

Honest per-layer specs go in, vLLM decides groups, shared tensors and the number of blocks, and the result is checked
before anybody builds on it: vLLM pairs layers by the order in which it meets them, so a pair is never assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from gk_adapters.vllm.versions import require_vllm
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_spec import KVCacheGroup, KVCachePlan, KVDtype, LayerKVSpec, SharedBuffer, require_gk_plan
from gk_core.model_geometry import AttentionKind
from gk_core.ports import KVCachePlanner

__all__ = ["HmaPlanner", "layer_id_of", "layer_name", "plan_of_config", "planning_config", "vllm_specs"]

_TORCH_NAMES = {
    KVDtype.FP32: "float32",
    KVDtype.BF16: "bfloat16",
    KVDtype.FP16: "float16",
    KVDtype.FP8_E4M3FN: "float8_e4m3fn",
    # torch has no e4m3 with a maximum of 240; the planner needs the element's size alone.
    KVDtype.FP8_E4M3: "uint8",
}


def layer_name(layer_id: int) -> str:
    """Name of a layer's attention in vLLM's GPT-OSS."""
    return f"model.layers.{layer_id}.attn.attn"


def layer_id_of(name: str) -> int:
    """Layer of a vLLM attention name.

    >>> layer_id_of("model.layers.21.self_attn.attn")
    21

    Raises:
        UnsupportedError: the name has no `layers.N` part.
    """
    match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    if match is None:
        raise UnsupportedError(f"cannot tell the layer of {name!r}: its name has no 'layers.N' part")
    return int(match.group(1))


def vllm_specs(specs: Sequence[LayerKVSpec], *, name_of_layer: Callable[[int], str] = layer_name) -> dict[str, Any]:
    """Honest specs as vLLM's, by layer name, in the order given: vLLM pairs by that order.

    Raises:
        MissingDependencyError, UnsupportedError: see `require_vllm`.
    """
    require_vllm()
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from gk_adapters.vllm.seams_cache import with_kv_halves

    result: dict[str, Any] = {}
    for spec in specs:
        shape: dict[str, Any] = {
            "block_size": spec.block_size,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "dtype": getattr(torch, _TORCH_NAMES[spec.dtype]),
        }
        result[name_of_layer(spec.layer_id)] = with_kv_halves(
            FullAttentionSpec(**shape)
            if spec.sliding_window is None
            else SlidingWindowSpec(**shape, sliding_window=spec.sliding_window)
        )
    return result


def plan_of_config(config: Any) -> KVCachePlan:
    """A vLLM KVCacheConfig as a plan, refused unless the giga kernel can read it.

    Raises:
        UnsupportedError: other than two groups with pairs [2j, 2j+1], specs of another kind, padded or packed pages.
    """
    from gk_adapters.vllm.seams_cache import shared_tensors

    groups = tuple(
        KVCacheGroup(
            kind=_kind_of(group.kv_cache_spec),
            layer_ids=tuple(sorted(map(layer_id_of, group.layer_names))),
            block_size=group.kv_cache_spec.block_size,
            sliding_window=(
                group.kv_cache_spec.sliding_window if _kind_of(group.kv_cache_spec) is AttentionKind.SLIDING else None
            ),
        )
        for group in config.kv_cache_groups
    )
    pages = {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}
    tensors = shared_tensors(config)
    buffers = tuple(
        SharedBuffer(buffer_index=j, layer_ids=tuple(map(layer_id_of, tensor.shared_by)))
        for j, tensor in enumerate(tensors)
    )
    if len(pages) != 1:
        raise UnsupportedError(f"all groups must have pages of one size, got {sorted(pages)} bytes")
    page_bytes = pages.pop()
    for tensor in tensors:
        if tensor.num_bytes != config.num_blocks * page_bytes or not tensor.apart:
            raise UnsupportedError(
                f"the tensor of {list(tensor.shared_by)} has {tensor.num_bytes} bytes, must have {config.num_blocks} "
                f"blocks of {page_bytes} with K and V apart; vLLM's packed cross-layer layout is not what the giga "
                "kernel reads"
            )
    plan = KVCachePlan(groups=groups, buffers=buffers, num_blocks=config.num_blocks, half_block_bytes=page_bytes // 2)
    require_gk_plan(plan, num_layers=sum(len(g.layer_ids) for g in groups))
    return plan


def planning_config(*, max_model_len: int, max_num_batched_tokens: int, hybrid: bool = True) -> Any:
    """A VllmConfig that is enough to plan a cache without loading a model.

    Raises:
        MissingDependencyError, UnsupportedError: see `require_vllm`.
        LayoutError: settings that vLLM refuses.
    """
    require_vllm()
    from vllm.config import SchedulerConfig, VllmConfig

    try:
        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_model_len=max_model_len,
                is_encoder_decoder=False,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=min(max_num_batched_tokens, 128),
                disable_hybrid_kv_cache_manager=not hybrid,
            )
        )
    except ValueError as error:
        raise LayoutError(f"vLLM refuses these settings: {error}") from error
    # Planning reads two numbers of the model's config; building a real one needs a checkpoint folder.
    model: Any = SimpleNamespace(max_model_len=max_model_len, original_max_model_len=max_model_len)
    config.model_config = model
    return config


class HmaPlanner(KVCachePlanner):
    """Plans with real vLLM.

    Args:
        vllm_config: an engine's own, or one of `planning_config`.
        name_of_layer: attention names as the engine's model has them.
    """

    def __init__(self, vllm_config: Any, *, name_of_layer: Callable[[int], str] = layer_name) -> None:
        require_vllm()
        self.vllm_config = vllm_config
        self._name_of_layer = name_of_layer

    def kv_cache_config(self, *, specs: Sequence[LayerKVSpec], memory_bytes: int) -> Any:
        """vLLM's KVCacheConfig for one worker, unchecked.

        Raises:
            LayoutError: the memory does not hold one longest request.
        """
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        from gk_adapters.vllm.seams_cache import planning_view

        layers = vllm_specs(specs, name_of_layer=self._name_of_layer)
        try:
            return get_kv_cache_configs(planning_view(self.vllm_config), [layers], [memory_bytes])[0]
        except ValueError as error:
            raise LayoutError(f"vLLM refuses {memory_bytes} bytes for {len(specs)} layers: {error}") from error

    def plan(self, *, specs: tuple[LayerKVSpec, ...], memory_bytes: int) -> KVCachePlan:
        """See `KVCachePlanner.plan`."""
        if not specs:
            raise LayoutError("a KV cache needs at least one layer spec, got none")
        plan = plan_of_config(self.kv_cache_config(specs=specs, memory_bytes=memory_bytes))
        if plan.half_block_bytes != specs[0].half_block_bytes:
            raise UnsupportedError(
                f"vLLM gives half a block {plan.half_block_bytes} bytes, the specs need {specs[0].half_block_bytes}"
            )
        return plan


def _kind_of(spec: Any) -> AttentionKind:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    if type(spec) is SlidingWindowSpec:
        return AttentionKind.SLIDING
    if type(spec) is FullAttentionSpec:
        return AttentionKind.FULL
    raise UnsupportedError(
        f"a group of {type(spec).__name__} is neither sliding nor full attention; serve this model with vLLM's own "
        "attention"
    )
