"""New tokens into a paged cache."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


def write_tokens(cache: Array, new: Array, slots: Array, writes: Array) -> None:
    """Tokens new [R, kv, d] to their slots, in place; packed K [blocks, kv, block / 2, d, 2] keeps the other lane."""
    block_size = cache.shape[2] * (2 if cache.ndim == 5 else 1)
    for token, slot, write in zip(new, slots, writes, strict=True):
        block, offset = divmod(int(slot), block_size)
        if not write:
            continue
        if cache.ndim == 5:
            cache[block, :, offset // 2, :, offset % 2] = token
        else:
            cache[block, :, offset] = token
