"""KV budget: memory to blocks to tokens, the way vLLM's hybrid KV-cache manager counts.

A single "tokens" number means nothing for a hybrid model: a full layer's group keeps every block of a request, a
sliding layer's group only the window and what one batch of prefill touches. Both settings are inputs, both are shown.
"""

from __future__ import annotations

from fractions import Fraction

from attrs import frozen

from gk_core.errors import LayoutError
from gk_core.kv_spec import KVCachePlan

__all__ = [
    "KVBudget",
    "budget",
    "full_blocks_per_request",
    "num_blocks_for_memory",
    "sliding_blocks_per_request",
]


@frozen(kw_only=True)
class KVBudget:
    """Capacity of one plan at one max_model_len and max_num_batched_tokens.

    Attributes:
        num_blocks: blocks of every buffer, null block included.
        kv_bytes: bytes of the cache.
        max_model_len, max_num_batched_tokens: tokens; the two settings without which the rest means nothing.
        full_blocks: blocks that the full group of one longest request needs.
        sliding_blocks: blocks that its sliding group needs; 0 without such a group.
    """

    num_blocks: int
    kv_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    full_blocks: int
    sliding_blocks: int

    @property
    def blocks_per_request(self) -> int:
        """Blocks of one request of max_model_len tokens."""
        return self.full_blocks + self.sliding_blocks

    @property
    def max_requests(self) -> Fraction:
        """Requests of max_model_len tokens that fit at once, exact."""
        return Fraction(self.num_blocks, self.blocks_per_request)

    @property
    def token_capacity(self) -> int:
        """Tokens: max_requests * max_model_len, rounded down."""
        return int(self.max_requests * self.max_model_len)


def num_blocks_for_memory(memory_bytes: int, bytes_per_block_all_buffers: int) -> int:
    """Whole blocks that a memory budget holds.

    >>> num_blocks_for_memory(10_668_441_600, 18 * 2 * 8192)
    36175

    Raises:
        LayoutError: not even two blocks fit (block 0 is the null block).
    """
    if bytes_per_block_all_buffers < 1:
        raise LayoutError(f"bytes per block must be >= 1, got {bytes_per_block_all_buffers}")
    num_blocks = memory_bytes // bytes_per_block_all_buffers
    if num_blocks < 2:
        raise LayoutError(
            f"{memory_bytes} bytes hold {max(num_blocks, 0)} blocks of {bytes_per_block_all_buffers} bytes, "
            "need at least 2 (block 0 is the null block); give the cache more memory"
        )
    return num_blocks


def full_blocks_per_request(max_model_len: int, block_size: int) -> int:
    """Blocks of a full-attention group: ceil(max_model_len / block_size). 80 for 10240 tokens at 128."""
    return -(-max_model_len // block_size)


def sliding_blocks_per_request(
    max_model_len: int, max_num_batched_tokens: int, sliding_window: int, block_size: int
) -> int:
    """Blocks of a sliding group while one batch of prefill is in flight.

    ceil(min(window - 1 + max_num_batched_tokens, max_model_len) / block_size) + 1; the extra block is for a window
    that starts inside one.

    >>> sliding_blocks_per_request(10240, 8192, 128, 128)
    66

    Source: vllm/v1/kv_cache_interface.py@0.28.0, SlidingWindowSpec.max_memory_usage_bytes.
    """
    tokens = min(sliding_window - 1 + max_num_batched_tokens, max_model_len)
    return -(-tokens // block_size) + 1


def budget(plan: KVCachePlan, *, max_model_len: int, max_num_batched_tokens: int) -> KVBudget:
    """Capacity of a plan.

    Raises:
        LayoutError: a setting is below one token, or not one request fits.
    """
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise LayoutError(f"{name} must be >= 1 token, got {value}")
    full = sliding = 0
    for group in plan.groups:
        if group.sliding_window is None:
            full += full_blocks_per_request(max_model_len, group.block_size)
        else:
            sliding += sliding_blocks_per_request(
                max_model_len, max_num_batched_tokens, group.sliding_window, group.block_size
            )
    if plan.num_blocks < full + sliding:
        raise LayoutError(
            f"one request of {max_model_len} tokens needs {full + sliding} blocks, the cache has "
            f"{plan.num_blocks}; lower max_model_len or give the cache more memory"
        )
    return KVBudget(
        num_blocks=plan.num_blocks,
        kv_bytes=plan.kv_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        full_blocks=full,
        sliding_blocks=sliding,
    )
