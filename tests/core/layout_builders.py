"""Small values for the tests of layouts, tables and steps; every dimension differs from every other."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from gk_core.block_table import BlockId, BlockTable
from gk_core.kv_layout import KByteOrder, KVLayout
from gk_core.kv_spec import KVCacheGroup, KVDtype, LayerKVSpec, honest_specs
from gk_core.model_geometry import GPT_OSS_20B, GPT_OSS_120B, AttentionKind, ModelGeometry, YarnRope, alternating_kinds

__all__ = [
    "SpecTensor",
    "make_full_group",
    "make_geometry",
    "make_layout",
    "make_table",
    "make_target_layout",
    "make_target_specs",
]


@frozen
class SpecTensor:
    """What the core needs of a tensor."""

    shape: tuple[int, ...]
    dtype: object


def make_geometry(num_layers: int = 5) -> ModelGeometry:
    """A tiny model whose sizes are pairwise different."""
    return ModelGeometry(
        num_layers=num_layers, hidden_size=48, intermediate_size=80, num_q_heads=14, num_kv_heads=7, head_size=10,
        num_experts=11, experts_per_token=3, sliding_window=19, vocab_size=101, max_position=640,
        rope=YarnRope(theta=150_000.0, factor=32.0, original_max_position=4096),
        attention_kinds=alternating_kinds(num_layers),
    )  # fmt: skip


def make_layout(
    *,
    num_layers: int = 5,
    num_blocks: int = 7,
    num_kv_heads: int = 3,
    block_size: int = 4,
    head_size: int = 2,
    dtype: KVDtype = KVDtype.BF16,
    k_byte_order: KByteOrder = KByteOrder.TOKEN_MAJOR,
) -> KVLayout:
    """5 layers in 3 buffers, 7 blocks, 3 heads, 4 tokens, 2 dims, 2 bytes."""
    return KVLayout(
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_size=head_size,
        dtype=dtype,
        k_byte_order=k_byte_order,
    )


def make_target_layout(num_blocks: int = 36_175, k_byte_order: KByteOrder = KByteOrder.PAIR_PACKED) -> KVLayout:
    """GPT-OSS-120B at TP8, block 128, packed FP8."""
    return make_layout(
        num_layers=36,
        num_blocks=num_blocks,
        num_kv_heads=1,
        block_size=128,
        head_size=64,
        dtype=KVDtype.FP8_E4M3FN,
        k_byte_order=k_byte_order,
    )


def make_target_specs(*, small: bool = False) -> tuple[LayerKVSpec, ...]:
    """Honest specs of GPT-OSS-120B (or 20B) at TP8, block 128, FP8."""
    geometry = GPT_OSS_20B if small else GPT_OSS_120B
    return honest_specs(geometry, tp_size=8, block_size=128, dtype=KVDtype.FP8_E4M3FN)


def make_full_group(num_layers: int) -> KVCacheGroup:
    """All layers in one full-attention group, as without the hybrid manager."""
    return KVCacheGroup(
        kind=AttentionKind.FULL, layer_ids=tuple(range(num_layers)), block_size=128, sliding_window=None
    )


def make_table(ids: Sequence[int], block_size: int) -> BlockTable:
    """A block table from plain integers."""
    return BlockTable(block_ids=tuple(BlockId(i) for i in ids), block_size=block_size)
