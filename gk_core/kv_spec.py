"""KV specs: what each layer asks of the cache, how layers form groups, and which layers share a buffer.

A spec is honest and per layer: a sliding layer reports its window, a full layer reports full attention. That is what
keeps vLLM's hybrid KV-cache manager (HMA) on, with two groups of equal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from attrs import frozen

from gk_core.errors import LayoutError, UnsupportedError
from gk_core.model_geometry import (
    AttentionKind,
    ModelGeometry,
    layers_of_buffer,
)

__all__ = [
    "KVCacheGroup",
    "KVCachePlan",
    "KVDtype",
    "LayerKVSpec",
    "SharedBuffer",
    "honest_specs",
    "kv_heads_per_rank",
    "plan_kv_cache",
    "require_gk_plan",
]


class KVDtype(Enum):
    """Element type of the KV cache: name, bytes per element, largest finite value (FP8 dialects differ)."""

    FP32 = ("float32", 4, 3.4028234663852886e38)
    BF16 = ("bfloat16", 2, 3.3895313892515355e38)
    FP16 = ("float16", 2, 65504.0)
    FP8_E4M3FN = ("float8_e4m3fn", 1, 448.0)
    FP8_E4M3 = ("float8_e4m3", 1, 240.0)

    @property
    def dtype_name(self) -> str:
        """Name as NumPy extensions, torch and NKI spell it."""
        return self.value[0]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.value[1]

    @property
    def max_finite(self) -> float:
        """Writers clamp to plus and minus this; 448 for OCP e4m3fn (trn3), 240 for IEEE-like e4m3 (trn2)."""
        return self.value[2]

    @property
    def is_fp8(self) -> bool:
        """One byte per element."""
        return self.itemsize == 1


@frozen(kw_only=True)
class LayerKVSpec:
    """One layer's honest KV-cache spec.

    Attributes:
        layer_id: from 0.
        kind: sliding or full attention.
        block_size: tokens per block.
        num_kv_heads: heads on this rank.
        head_size: elements per head.
        dtype: element type.
        sliding_window: tokens; None exactly for full attention.
    """

    layer_id: int
    kind: AttentionKind
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: KVDtype
    sliding_window: int | None

    def __attrs_post_init__(self) -> None:
        if self.layer_id < 0:
            raise LayoutError(f"layer_id must be >= 0, got {self.layer_id}")
        for name in ("block_size", "num_kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be >= 1, got {getattr(self, name)}")
        if (self.sliding_window is None) is (self.kind is AttentionKind.SLIDING):
            raise LayoutError(
                f"layer {self.layer_id} is {self.kind.value} with sliding_window "
                f"{self.sliding_window}: a sliding layer names its window, a full layer has none"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise LayoutError(f"sliding_window must be >= 1 token, got {self.sliding_window}")

    @property
    def half_block_bytes(self) -> int:
        """Bytes of one block of K, or of V, of this layer: kv * block * d * itemsize."""
        return self.num_kv_heads * self.block_size * self.head_size * self.dtype.itemsize


@frozen(kw_only=True)
class KVCacheGroup:
    """Layers that share one block table per request.

    Attributes:
        kind: attention kind of all its layers.
        layer_ids: ascending.
        block_size: tokens per block.
        sliding_window: tokens, None for full attention.
    """

    kind: AttentionKind
    layer_ids: tuple[int, ...]
    block_size: int
    sliding_window: int | None

    def __attrs_post_init__(self) -> None:
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise LayoutError(f"a group's layers must be ascending and distinct, got {self.layer_ids}")


@frozen(kw_only=True)
class SharedBuffer:
    """One allocation and the layers whose KV it holds, in the order the planner gave them."""

    buffer_index: int
    layer_ids: tuple[int, ...]


@frozen(kw_only=True)
class KVCachePlan:
    """What a KV-cache planner decided: groups, shared buffers and one block count for all.

    Attributes:
        groups: sliding group first, then full.
        buffers: shared allocations.
        num_blocks: blocks of every buffer, the null block included.
        half_block_bytes: bytes of one block of K, or of V, of one layer.
    """

    groups: tuple[KVCacheGroup, ...]
    buffers: tuple[SharedBuffer, ...]
    num_blocks: int
    half_block_bytes: int

    @property
    def bytes_per_block_all_buffers(self) -> int:
        """Bytes that one block id costs over all buffers, K and V.

        For GPT-OSS-120B at TP8, block 128, FP8: 18 * 2 * 8192 = 294912.
        """
        return len(self.buffers) * 2 * self.half_block_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block_all_buffers


def kv_heads_per_rank(num_kv_heads: int, tp_size: int) -> int:
    """KV heads held by one TP rank; beyond one rank per head, heads are replicated.

    >>> [kv_heads_per_rank(8, tp) for tp in (1, 4, 8, 16)]
    [8, 2, 1, 1]

    Raises:
        LayoutError: heads and ranks do not divide evenly either way.
    """
    if tp_size < 1:
        raise LayoutError(f"tp_size must be >= 1, got {tp_size}")
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise LayoutError(
            f"{num_kv_heads} KV heads over tp_size {tp_size} is not a whole number of heads or of replicas; "
            f"use a tp_size that divides {num_kv_heads} or is a multiple of it"
        )
    return max(1, num_kv_heads // tp_size)


def honest_specs(geometry: ModelGeometry, *, tp_size: int, block_size: int, dtype: KVDtype) -> tuple[LayerKVSpec, ...]:
    """One spec per layer, in layer order, for one TP rank."""
    heads = kv_heads_per_rank(geometry.num_kv_heads, tp_size)
    return tuple(
        LayerKVSpec(
            layer_id=layer_id,
            kind=kind,
            block_size=block_size,
            num_kv_heads=heads,
            head_size=geometry.head_size,
            dtype=dtype,
            sliding_window=geometry.sliding_window if kind is AttentionKind.SLIDING else None,
        )
        for layer_id, kind in enumerate(geometry.attention_kinds)
    )


def plan_kv_cache(specs: Sequence[LayerKVSpec], *, num_blocks: int) -> KVCachePlan:
    """Group layers by attention kind and pair them into shared buffers, as vLLM's HMA does for GPT-OSS.

    Raises:
        LayoutError: no specs, duplicate layers, or fewer than two blocks (block 0 is the null block).
        UnsupportedError: specs that differ in more than window, or kinds that do not alternate.
    """
    if not specs:
        raise LayoutError("a KV cache needs at least one layer spec, got none")
    if num_blocks < 2:
        raise LayoutError(
            f"num_blocks must be >= 2 because block 0 is the null block, got {num_blocks}; give the cache more memory"
        )
    ordered = sorted(specs, key=lambda s: s.layer_id)
    if [s.layer_id for s in ordered] != list(range(len(ordered))):
        raise LayoutError(f"layer ids must be 0..{len(ordered) - 1} once each, got {[s.layer_id for s in ordered]}")
    shapes = {(s.block_size, s.num_kv_heads, s.head_size, s.dtype) for s in ordered}
    windows = {s.sliding_window for s in ordered if s.sliding_window is not None}
    if len(shapes) > 1 or len(windows) > 1:
        raise UnsupportedError(
            f"all layers must share one block shape and one window, got shapes {sorted(map(str, shapes))} "
            f"and windows {sorted(windows)}; use the native per-layer engine"
        )
    groups = tuple(
        KVCacheGroup(
            kind=kind,
            layer_ids=tuple(s.layer_id for s in ordered if s.kind is kind),
            block_size=ordered[0].block_size,
            sliding_window=next(iter(windows)) if kind is AttentionKind.SLIDING else None,
        )
        for kind in (AttentionKind.SLIDING, AttentionKind.FULL)
        if any(s.kind is kind for s in ordered)
    )
    buffers = tuple(
        SharedBuffer(buffer_index=j, layer_ids=layers_of_buffer(j, len(ordered)))
        for j in range((len(ordered) + 1) // 2)
    )
    plan = KVCachePlan(
        groups=groups,
        buffers=buffers,
        num_blocks=num_blocks,
        half_block_bytes=ordered[0].half_block_bytes,
    )
    require_gk_plan(plan, num_layers=len(ordered))
    return plan


def require_gk_plan(plan: KVCachePlan, *, num_layers: int) -> None:
    """Refuse a plan whose buffers are not shared by layers [2j, 2j+1] with even sliding and odd full.

    A planner that got its layers in lexicographic order pairs layers.2 with layers.21; nothing else would notice.

    Raises:
        UnsupportedError: wrong number of groups or buffers, or a wrong pair, naming it.
    """
    kinds: dict[int, AttentionKind] = {i: g.kind for g in plan.groups for i in g.layer_ids}
    wanted_groups = min(2, num_layers)
    if len(plan.groups) != wanted_groups:
        raise UnsupportedError(
            f"the giga kernel needs {wanted_groups} KV cache groups (sliding, full), got {len(plan.groups)}; "
            "keep the hybrid KV-cache manager on"
        )
    if len(plan.buffers) != (num_layers + 1) // 2:
        raise UnsupportedError(
            f"{num_layers} layers need {(num_layers + 1) // 2} shared buffers, got {len(plan.buffers)}; "
            "keep the hybrid KV-cache manager on"
        )
    for buffer in plan.buffers:
        wanted = layers_of_buffer(buffer.buffer_index, num_layers)
        if buffer.layer_ids != wanted:
            raise UnsupportedError(
                f"buffer {buffer.buffer_index} must be shared by layers {list(wanted)}, got "
                f"{list(buffer.layer_ids)}; hand the specs to the planner in layer order"
            )
    for layer_id in range(num_layers):
        wanted_kind = AttentionKind.SLIDING if layer_id % 2 == 0 else AttentionKind.FULL
        if kinds.get(layer_id) is not wanted_kind:
            got = kinds[layer_id].value if layer_id in kinds else "in no group"
            raise UnsupportedError(
                f"layer {layer_id} must be {wanted_kind.value}, got {got}; the giga kernel bakes this parity in"
            )
