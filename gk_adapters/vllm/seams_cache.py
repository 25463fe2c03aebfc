"""How vLLM lays a KV cache out and says so: the seams of the HMA adapter, the attention backend and the models.

Two eras (`versions.Era`), one result, group buffers [2, num_blocks, kv, block, d] that layers 2j and 2j+1 share:

- SHAPES, 0.26 to 0.28. A backend names its tensor's shape; vLLM allocates one tensor per pair of layers.
- LAYOUTS, 0.30 to 0.32. A layer is [blocks, head slots, tokens, bytes] in an order that a backend permits, inside one
  allocation for all layers. K and V of all heads are two slots here, and slots lie outside blocks: the K half of a
  layer's region, then its V half. Bytes inside a block's half are the backend's own, so they are [kv, block, d] here.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from attrs import frozen

from gk_adapters.vllm.versions import Era, served_era

__all__ = [
    "BackendLayout",
    "LayoutBackend",
    "ShapeBackend",
    "SharedTensor",
    "bound_cache",
    "group_buffer",
    "planning_view",
    "shared_tensors",
    "with_kv_halves",
]


@frozen(kw_only=True)
class SharedTensor:
    """Memory that layers share.

    Attributes:
        shared_by: attention names, in the order of vLLM's groups.
        num_bytes: for all blocks.
        apart: whether it holds whole pages of these layers and nothing else.
    """

    shared_by: tuple[str, ...]
    num_bytes: int
    apart: bool


class ShapeBackend:
    """What a backend of the SHAPES era says."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[2, num_blocks, kv, block, d]."""
        return 2, num_blocks, num_kv_heads, block_size, head_size

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        """Head-major blocks."""
        return "HND"


class LayoutBackend:
    """What a backend of the LAYOUTS era says."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """K and V as the two head slots of a page, of the same bytes in all."""
        return with_kv_halves(spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """A layer's K slot for all blocks, then its V slot."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LHBNC,)


BackendLayout: Any = LayoutBackend if served_era() is Era.LAYOUTS else ShapeBackend


def with_kv_halves(spec: Any) -> Any:
    """A layer's vLLM spec as gk's backend wants it; pages keep their size."""
    if served_era() is Era.SHAPES or spec.state_content_bytes is not None:
        return spec
    return replace(spec, num_head_slots=2, state_content_bytes=spec.num_kv_heads * spec.head_size * spec.dtype.itemsize)


def planning_view(config: Any) -> Any:
    """An engine config to plan with before an engine has settled the layout; the config itself is not touched."""
    if served_era() is Era.SHAPES or config.cache_config.kv_cache_layout is not None:
        return config
    view = copy.copy(config)
    view.cache_config = copy.copy(config.cache_config)
    view.cache_config.kv_cache_layout = "LHBNC"
    return view


def shared_tensors(config: Any) -> list[SharedTensor]:
    """Who shares what in a vLLM KVCacheConfig, in the order of memory."""
    if served_era() is Era.SHAPES:
        return [
            SharedTensor(
                shared_by=tuple(tensor.shared_by), num_bytes=tensor.size, apart=not getattr(tensor, "block_stride", 0)
            )
            for tensor in config.kv_cache_tensors
        ]
    pages = {
        name: group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups for name in group.layer_names
    }
    found: dict[int, list[tuple[str, bool, int]]] = {}
    for tensor in config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            # Slots outside blocks: the next block's K is half a page on, the next layer a whole region.
            apart = tensor.block_stride * 2 == pages[name] and tensor.layer_stride * len(tensor.layers) == tensor.size
            at = tensor.offset + index * tensor.layer_stride
            found.setdefault(at, []).append((name, apart, tensor.layer_stride))
    return [
        SharedTensor(
            shared_by=tuple(name for name, _, _ in sharing),
            num_bytes=max(size for _, _, size in sharing),
            apart=all(apart for _, apart, _ in sharing),
        )
        for _, sharing in sorted(found.items())
    ]


def group_buffer(cache: torch.Tensor, *, num_kv_heads: int, head_size: int) -> torch.Tensor:
    """A layer's bound cache as the group buffer [2, num_blocks, kv, block, d]; the same memory.

    Raises:
        LayoutError: K and V of a block are not apart.
    """
    if served_era() is Era.SHAPES or cache.numel() == 0:
        return cache
    from gk_core.errors import LayoutError

    content = num_kv_heads * head_size
    halves = cache.transpose(0, 1) if cache.dim() == 4 else cache
    if cache.dim() != 4 or cache.shape[1] != 2 or cache.shape[3] != content or not halves.is_contiguous():
        raise LayoutError(
            f"a cache [blocks, 2, tokens, {content}] with all of K before all of V is needed, got {list(cache.shape)} "
            f"with strides {list(cache.stride())}; leave VLLM_KV_CACHE_LAYOUT unset"
        )
    return halves.view(2, cache.shape[0], num_kv_heads, cache.shape[2], head_size)


def bound_cache(buffer: torch.Tensor) -> torch.Tensor:
    """A group buffer as vLLM binds it to the layers that share it; the inverse of `group_buffer`, the same memory."""
    if served_era() is Era.SHAPES:
        return buffer
    _, blocks, heads, tokens, head_size = buffer.shape
    return buffer.view(2, blocks, tokens, heads * head_size).transpose(0, 1)
