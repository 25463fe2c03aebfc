"""Honest specs, groups and shared buffers."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_spec import (
    KVCacheGroup,
    KVCachePlan,
    KVDtype,
    SharedBuffer,
    honest_specs,
    kv_heads_per_rank,
    plan_kv_cache,
    require_gk_plan,
)
from gk_core.model_geometry import GPT_OSS_120B, AttentionKind

from .layout_builders import make_geometry, make_target_specs

EVEN, ODD = tuple(range(0, 36, 2)), tuple(range(1, 36, 2))


@pytest.mark.parametrize(
    ("dtype", "name", "itemsize", "largest", "fp8"),
    [
        (KVDtype.FP32, "float32", 4, 3.4028234663852886e38, False),
        (KVDtype.BF16, "bfloat16", 2, 3.3895313892515355e38, False),
        (KVDtype.FP16, "float16", 2, 65504.0, False),
        (KVDtype.FP8_E4M3FN, "float8_e4m3fn", 1, 448.0, True),
        (KVDtype.FP8_E4M3, "float8_e4m3", 1, 240.0, True),
    ],
)
def test_dtypes_know_their_size_and_largest_value(
    dtype: KVDtype, name: str, itemsize: int, largest: float, fp8: bool
) -> None:
    """The two FP8 dialects are two dtypes."""
    assert (dtype.dtype_name, dtype.itemsize, dtype.max_finite, dtype.is_fp8) == (name, itemsize, largest, fp8)


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)])
def test_kv_heads_are_split_until_one_is_left_and_then_replicated(tp: int, heads: int) -> None:
    """8 KV heads over TP."""
    assert kv_heads_per_rank(8, tp) == heads


@pytest.mark.parametrize("tp", [3, 6, 12, 0, -8])
def test_kv_heads_that_do_not_divide_are_refused(tp: int) -> None:
    """Neither whole heads nor whole replicas."""
    with pytest.raises(LayoutError, match=f"tp_size.*{tp}"):
        kv_heads_per_rank(8, tp)


def test_specs_are_honest_per_layer_and_in_layer_order() -> None:
    """Sliding layers report their window, full layers report none."""
    specs = make_target_specs()
    assert [s.layer_id for s in specs] == list(range(36))
    assert [s.sliding_window for s in specs[:4]] == [128, None, 128, None]
    assert [s.kind for s in specs[34:]] == [AttentionKind.SLIDING, AttentionKind.FULL]
    assert {(s.block_size, s.num_kv_heads, s.head_size, s.dtype) for s in specs} == {(128, 1, 64, KVDtype.FP8_E4M3FN)}


@pytest.mark.parametrize(
    ("tp", "dtype", "half_block"),
    [
        (8, KVDtype.FP8_E4M3FN, 8192),
        (4, KVDtype.FP8_E4M3FN, 16_384),
        (1, KVDtype.FP8_E4M3FN, 65_536),
        (16, KVDtype.FP8_E4M3FN, 8192),
        (8, KVDtype.BF16, 16_384),
        (8, KVDtype.FP32, 32_768),
    ],
)
def test_half_a_block_is_heads_times_tokens_times_dims_times_bytes(tp: int, dtype: KVDtype, half_block: int) -> None:
    """8192 bytes for one head of 128 tokens of 64 one-byte elements."""
    assert honest_specs(GPT_OSS_120B, tp_size=tp, block_size=128, dtype=dtype)[0].half_block_bytes == half_block


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_id": -1}, "layer_id must be >= 0, got -1"),
        ({"block_size": 0}, "block_size must be >= 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be >= 1, got 0"),
        ({"head_size": -2}, "head_size must be >= 1, got -2"),
        ({"sliding_window": None}, "layer 0 is sliding_attention with sliding_window None"),
        ({"kind": AttentionKind.FULL}, "layer 0 is full_attention with sliding_window 128"),
        ({"sliding_window": 0}, "sliding_window must be >= 1 token, got 0"),
    ],
)
def test_a_dishonest_spec_is_refused(change: dict[str, Any], message: str) -> None:
    """A window and a kind that contradict each other, or a size below one."""
    with pytest.raises(LayoutError, match=message):
        attrs.evolve(make_target_specs()[0], **change)


def test_the_120b_plan_has_two_groups_and_eighteen_buffers_of_pairs() -> None:
    """Sliding 0, 2 .. 34; full 1, 3 .. 35; buffer j is shared by [2j, 2j+1]."""
    plan = plan_kv_cache(make_target_specs(), num_blocks=36_175)
    assert [(g.kind, g.layer_ids, g.block_size, g.sliding_window) for g in plan.groups] == [
        (AttentionKind.SLIDING, EVEN, 128, 128),
        (AttentionKind.FULL, ODD, 128, None),
    ]
    assert [b.layer_ids for b in plan.buffers] == [(2 * j, 2 * j + 1) for j in range(18)]
    assert [b.buffer_index for b in plan.buffers] == list(range(18))
    assert plan.half_block_bytes == 8192
    assert plan.bytes_per_block_all_buffers == 294_912
    assert plan.kv_bytes == 10_668_441_600
    assert round(plan.kv_bytes / 2**30, 4) == 9.9358


def test_the_20b_plan_has_twelve_buffers() -> None:
    """24 layers."""
    plan = plan_kv_cache(make_target_specs(small=True), num_blocks=5)
    assert len(plan.buffers) == 12
    assert plan.bytes_per_block_all_buffers == 196_608


def test_planning_does_not_depend_on_the_order_of_the_specs() -> None:
    """Pairs come from layer ids, not from the order of a dict."""
    specs = list(make_target_specs())
    random.Random(3).shuffle(specs)
    assert plan_kv_cache(specs, num_blocks=9) == plan_kv_cache(make_target_specs(), num_blocks=9)


def test_a_one_layer_slice_is_one_sliding_group() -> None:
    """One layer, one buffer, one group."""
    plan = plan_kv_cache(make_target_specs()[:1], num_blocks=2)
    assert [g.kind for g in plan.groups] == [AttentionKind.SLIDING]
    assert plan.buffers == (SharedBuffer(buffer_index=0, layer_ids=(0,)),)


@given(num_layers=st.integers(1, 40))
@settings(deadline=None)
def test_every_layer_is_in_one_group_and_one_buffer(num_layers: int) -> None:
    """Groups and buffers are two partitions of the layers."""
    specs = honest_specs(make_geometry(num_layers), tp_size=7, block_size=16, dtype=KVDtype.BF16)
    plan = plan_kv_cache(specs, num_blocks=3)
    layers = list(range(num_layers))
    assert sorted(i for g in plan.groups for i in g.layer_ids) == layers
    assert [i for b in plan.buffers for i in b.layer_ids] == layers


def test_fewer_than_two_blocks_are_refused() -> None:
    """Block 0 is the null block."""
    assert plan_kv_cache(make_target_specs(), num_blocks=2).num_blocks == 2
    with pytest.raises(LayoutError, match="num_blocks must be >= 2 because block 0 is the null block, got 1"):
        plan_kv_cache(make_target_specs(), num_blocks=1)


def test_no_specs_and_gaps_and_doubles_are_refused() -> None:
    """Layer ids are 0..L-1, once each."""
    specs = make_target_specs()
    with pytest.raises(LayoutError, match="at least one layer spec"):
        plan_kv_cache((), num_blocks=2)
    with pytest.raises(LayoutError, match=r"0\.\.2 once each, got \[0, 1, 1\]"):
        plan_kv_cache((*specs[:2], specs[1]), num_blocks=2)
    with pytest.raises(LayoutError, match=r"0\.\.1 once each, got \[0, 2\]"):
        plan_kv_cache((specs[0], specs[2]), num_blocks=2)


@pytest.mark.parametrize("change", [{"block_size": 64}, {"num_kv_heads": 2}, {"head_size": 32}])
def test_layers_of_different_block_shape_are_refused(change: dict[str, Any]) -> None:
    """One block id has to mean the same bytes in every layer."""
    specs = list(make_target_specs())
    specs[3] = attrs.evolve(specs[3], **change)
    with pytest.raises(UnsupportedError, match="all layers must share one block shape and one window"):
        plan_kv_cache(specs, num_blocks=2)


def test_two_windows_are_refused() -> None:
    """The kernel has one trimmed table for all sliding layers."""
    specs = list(make_target_specs())
    specs[2] = attrs.evolve(specs[2], sliding_window=64)
    with pytest.raises(UnsupportedError, match=r"windows \[64, 128\]"):
        plan_kv_cache(specs, num_blocks=2)


def test_inverted_parity_is_refused_by_the_plan_too() -> None:
    """Layer 0 full, layer 1 sliding."""
    specs = make_target_specs()
    swapped = (attrs.evolve(specs[1], layer_id=0), attrs.evolve(specs[0], layer_id=1))
    with pytest.raises(UnsupportedError, match="layer 0 must be sliding_attention, got full_attention"):
        plan_kv_cache(swapped, num_blocks=2)


def test_lexicographic_pairs_are_refused_by_name() -> None:
    """A planner that saw layers.10 before layers.2 shares the wrong buffers; nothing else would notice."""
    plan = plan_kv_cache(make_target_specs(), num_blocks=9)
    order = sorted(range(36), key=str)
    sliding, full = ([i for i in order if i % 2 == p] for p in (0, 1))
    pairs = list(zip(sliding, full, strict=True))
    assert pairs[:3] == [(0, 1), (10, 11), (12, 13)]
    assert (2, 21) in pairs
    wrong = attrs.evolve(plan, buffers=tuple(SharedBuffer(buffer_index=j, layer_ids=p) for j, p in enumerate(pairs)))
    with pytest.raises(UnsupportedError, match=r"buffer 1 must be shared by layers \[2, 3\], got \[10, 11\]"):
        require_gk_plan(wrong, num_layers=36)


def test_pairs_with_the_full_layer_first_are_refused() -> None:
    """[1, 0] is not [0, 1]."""
    plan = plan_kv_cache(make_target_specs(), num_blocks=9)
    buffers = (SharedBuffer(buffer_index=0, layer_ids=(1, 0)), *plan.buffers[1:])
    with pytest.raises(UnsupportedError, match=r"buffer 0 must be shared by layers \[0, 1\], got \[1, 0\]"):
        require_gk_plan(attrs.evolve(plan, buffers=buffers), num_layers=36)


def test_a_plan_without_the_hybrid_manager_is_refused() -> None:
    """One group and 36 buffers: half the blocks, and nothing that the kernel reads."""
    flat = KVCachePlan(
        groups=(
            KVCacheGroup(kind=AttentionKind.FULL, layer_ids=tuple(range(36)), block_size=128, sliding_window=None),
        ),
        buffers=tuple(SharedBuffer(buffer_index=i, layer_ids=(i,)) for i in range(36)),
        num_blocks=18_087,
        half_block_bytes=8192,
    )
    with pytest.raises(UnsupportedError, match=r"needs 2 KV cache groups .* got 1; keep the hybrid"):
        require_gk_plan(flat, num_layers=36)


def test_a_plan_with_too_few_buffers_is_refused() -> None:
    """18 buffers for 36 layers."""
    plan = plan_kv_cache(make_target_specs(), num_blocks=9)
    with pytest.raises(UnsupportedError, match="36 layers need 18 shared buffers, got 17"):
        require_gk_plan(attrs.evolve(plan, buffers=plan.buffers[:-1]), num_layers=36)


def test_a_layer_in_no_group_is_refused() -> None:
    """Groups cover every layer."""
    plan = plan_kv_cache(make_target_specs(), num_blocks=9)
    sliding, full = plan.groups
    groups = (sliding, attrs.evolve(full, layer_ids=full.layer_ids[:-1]))
    with pytest.raises(UnsupportedError, match="layer 35 must be full_attention, got in no group"):
        require_gk_plan(attrs.evolve(plan, groups=groups), num_layers=36)


@pytest.mark.parametrize("layers", [(), (2, 0), (1, 1)])
def test_a_group_lists_its_layers_ascending_once_each(layers: tuple[int, ...]) -> None:
    """Empty, unsorted and doubled layer lists."""
    with pytest.raises(LayoutError, match="ascending and distinct"):
        KVCacheGroup(kind=AttentionKind.FULL, layer_ids=layers, block_size=16, sliding_window=None)
