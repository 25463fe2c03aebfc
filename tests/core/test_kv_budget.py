"""Memory to blocks to tokens; the literals are what vLLM 0.28 prints for the same settings."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.errors import LayoutError
from gk_core.kv_budget import (
    budget,
    full_blocks_per_request,
    num_blocks_for_memory,
    sliding_blocks_per_request,
)
from gk_core.kv_spec import KVCachePlan, SharedBuffer, plan_kv_cache

from .layout_builders import make_full_group, make_target_specs

PLAN = plan_kv_cache(make_target_specs(), num_blocks=36_175)
FLAT = KVCachePlan(
    groups=(make_full_group(36),),
    buffers=tuple(SharedBuffer(buffer_index=i, layer_ids=(i,)) for i in range(36)),
    num_blocks=18_087,
    half_block_bytes=8192,
)


def test_the_target_memory_holds_36175_blocks() -> None:
    """10,668,441,600 bytes of 294,912-byte blocks, 9.936 GiB, and not one byte less."""
    assert num_blocks_for_memory(36_175 * 294_912, 294_912) == 36_175
    assert num_blocks_for_memory(36_175 * 294_912 - 1, 294_912) == 36_174
    assert round(36_175 * 294_912 / 2**30, 3) == 9.936


@pytest.mark.parametrize(
    ("max_len", "batched", "full", "sliding", "tokens"),
    [
        (10_240, 8192, 80, 66, 2_537_205),
        (10_240, 2048, 80, 18, 3_779_918),
        (10_240, 10_240, 80, 81, 2_300_819),
        (10_240, 16_384, 80, 81, 2_300_819),
        (131_072, 8192, 1024, 66, 4_350_027),
        (10_240, 64, 80, 3, 4_463_036),
        (10_240, 128, 80, 3, 4_463_036),
        (10_240, 256, 80, 4, 4_409_904),
    ],
)
def test_token_capacity_depends_on_length_and_batch(
    max_len: int, batched: int, full: int, sliding: int, tokens: int
) -> None:
    """One number of tokens without both settings means nothing."""
    b = budget(PLAN, max_model_len=max_len, max_num_batched_tokens=batched)
    assert (b.full_blocks, b.sliding_blocks, b.blocks_per_request) == (full, sliding, full + sliding)
    assert b.token_capacity == tokens
    assert (b.max_model_len, b.max_num_batched_tokens) == (max_len, batched)


def test_the_target_serves_247_77_requests() -> None:
    """36175 / 146, exactly."""
    b = budget(PLAN, max_model_len=10_240, max_num_batched_tokens=8192)
    assert b.max_requests == Fraction(36_175, 146)
    assert round(float(b.max_requests), 2) == 247.77
    assert (b.num_blocks, b.kv_bytes) == (36_175, 10_668_441_600)


def test_long_context_serves_33_19_requests() -> None:
    """36175 / 1090."""
    assert round(float(budget(PLAN, max_model_len=131_072, max_num_batched_tokens=8192).max_requests), 2) == 33.19


def test_blocks_divided_by_groups_is_not_the_capacity() -> None:
    """The naive rule gives 2,315,136 tokens."""
    naive = 36_175 // 2 * 128
    assert naive == 2_315_136
    assert budget(PLAN, max_model_len=10_240, max_num_batched_tokens=8192).token_capacity != naive


def test_without_the_hybrid_manager_the_cache_has_half_the_blocks() -> None:
    """36 buffers of their own: 589,824 bytes per block, 18,087 blocks, every layer keeps every token."""
    assert FLAT.bytes_per_block_all_buffers == 589_824
    assert num_blocks_for_memory(10_668_441_600, FLAT.bytes_per_block_all_buffers) == 18_087
    b = budget(FLAT, max_model_len=10_240, max_num_batched_tokens=8192)
    assert (b.full_blocks, b.sliding_blocks, b.token_capacity) == (80, 0, 2_315_136)


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (127, 1), (128, 1), (129, 2), (10_240, 80), (131_072, 1024)])
def test_a_full_group_rounds_up_to_whole_blocks(length: int, blocks: int) -> None:
    """ceil(length / 128)."""
    assert full_blocks_per_request(length, 128) == blocks


@pytest.mark.parametrize(
    ("length", "batched", "window", "block", "blocks"),
    [
        (10_240, 8192, 128, 128, 66),
        (10_240, 1, 128, 128, 2),
        (10_240, 2, 128, 128, 3),
        (10_240, 8192, 128, 16, 521),
        (100, 8192, 128, 128, 2),
        (6, 4, 4, 4, 3),
    ],
)
def test_a_sliding_group_holds_window_and_batch_and_one_block(
    length: int, batched: int, window: int, block: int, blocks: int
) -> None:
    """ceil(min(W - 1 + batch, length) / n) + 1."""
    assert sliding_blocks_per_request(length, batched, window, block) == blocks


@given(
    length=st.integers(1, 3000),
    batched=st.integers(1, 3000),
    window=st.integers(1, 300),
    block=st.sampled_from([16, 32, 64, 128]),
)
@settings(deadline=None)
def test_a_sliding_group_never_needs_more_than_its_budget(length: int, batched: int, window: int, block: int) -> None:
    """Blocks touched by any batch and the window before it stay within the budget, at every start of a batch."""
    limit = sliding_blocks_per_request(length, batched, window, block)
    for start in {0, 1, window - 1, window, length // 2, max(length - batched, 0)}:
        end = min(start + batched, length)
        if start < end:
            first = max(start - window + 1, 0) // block
            assert math.ceil(end / block) - first <= limit


@pytest.mark.parametrize(("memory", "blocks"), [(2 * 294_912 - 1, 1), (294_911, 0), (0, 0), (-1, 0)])
def test_memory_for_fewer_than_two_blocks_is_refused(memory: int, blocks: int) -> None:
    """The null block needs a companion."""
    with pytest.raises(LayoutError, match=rf"^{memory} bytes hold {blocks} blocks of 294912 bytes, need at least 2"):
        num_blocks_for_memory(memory, 294_912)


def test_blocks_of_no_bytes_are_refused() -> None:
    """A block costs something."""
    with pytest.raises(LayoutError, match="bytes per block must be >= 1, got 0"):
        num_blocks_for_memory(100, 0)


def test_a_cache_that_holds_not_one_request_is_refused() -> None:
    """146 blocks are needed; 146 pass, 145 do not."""
    enough = plan_kv_cache(make_target_specs(), num_blocks=146)
    assert budget(enough, max_model_len=10_240, max_num_batched_tokens=8192).max_requests == 1
    short = plan_kv_cache(make_target_specs(), num_blocks=145)
    with pytest.raises(LayoutError, match="one request of 10240 tokens needs 146 blocks, the cache has 145"):
        budget(short, max_model_len=10_240, max_num_batched_tokens=8192)


@pytest.mark.parametrize(
    ("length", "batched", "message"),
    [(0, 8, "max_model_len must be >= 1 token, got 0"), (8, 0, "max_num_batched_tokens must be >= 1 token, got 0")],
)
def test_settings_below_one_token_are_refused(length: int, batched: int, message: str) -> None:
    """Both settings are counts of tokens."""
    with pytest.raises(LayoutError, match=message):
        budget(PLAN, max_model_len=length, max_num_batched_tokens=batched)
