"""Rotary position embedding, half-split: tokens on partitions, the halves on the free dimension."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def rope(x: nl.NkiTensor, cosines: nl.NkiTensor, sines: nl.NkiTensor) -> nl.NkiTensor:
    """Rotate `x` [tokens, heads, 2 * half] by `cosines`, `sines` [tokens, half]; tokens <= 128.

    first' = first * cos - second * sin, second' = second * cos + first * sin. A stride of 0 repeats
    one token's angles over its heads.
    """
    tokens, heads, size = x.shape
    half = size // 2
    out = nl.ndarray((tokens, heads, size), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray((tokens, heads, size), dtype=x.dtype, buffer=nl.sbuf, name="tile")
    nisa.dma_copy(dst=tile, src=x)
    cos = nl.ndarray((tokens, 1, half), dtype=cosines.dtype, buffer=nl.sbuf, name="cos")
    nisa.dma_copy(dst=cos, src=cosines)
    sin = nl.ndarray((tokens, 1, half), dtype=sines.dtype, buffer=nl.sbuf, name="sin")
    nisa.dma_copy(dst=sin, src=sines)
    cos_heads = cos.broadcast(1, heads)
    sin_heads = sin.broadcast(1, heads)
    first = tile[:, :, 0:half]
    second = tile[:, :, half:size]

    result = nl.ndarray((tokens, heads, size), dtype=x.dtype, buffer=nl.sbuf, name="result")
    one = nl.ndarray((tokens, heads, half), dtype=nl.float32, buffer=nl.sbuf, name="one")
    other = nl.ndarray((tokens, heads, half), dtype=nl.float32, buffer=nl.sbuf, name="other")
    nisa.tensor_tensor(dst=one, data1=first, data2=cos_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=other, data1=second, data2=sin_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=result[:, :, 0:half], data1=one, data2=other, op=nl.subtract)
    nisa.tensor_tensor(dst=one, data1=second, data2=cos_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=other, data1=first, data2=sin_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=result[:, :, half:size], data1=one, data2=other, op=nl.add)
    nisa.dma_copy(dst=out, src=result)
    return out
