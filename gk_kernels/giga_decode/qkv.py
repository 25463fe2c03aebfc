"""QKV projection with bias, rotary embedding, and the new K and V as the cache will hold them.

Heads lie on the free axis, so the halves of the rotation are slices, whatever the head size.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.giga_decode.tiles import Constants, cast, linear, turn_rows


class NewTokens(NamedTuple):
    """Queries, and this step's K and V, of every row.

    Attributes:
        queries: [d, q, R] in the model's dtype, times d ** -0.5 and the K scale.
        keys, values: [d, kv, R] in the model's dtype, as they read back from the cache.
        stored_keys, stored_values: [R, kv * d] in the cache's dtype.
    """

    queries: nl.NkiTensor
    keys: nl.NkiTensor
    values: nl.NkiTensor
    stored_keys: nl.NkiTensor
    stored_values: nl.NkiTensor


def load_angles(table: nl.NkiTensor, name: str) -> nl.NkiTensor:
    """A rotary table [d / 2, R, 1] as float32 [R, 1, d / 2]."""
    half = table.shape[0]
    rows = table.shape[1]
    tile = nl.ndarray((rows, 1, half), dtype=nl.float32, buffer=nl.sbuf, name=name)
    nisa.dma_copy(dst=tile, src=table.ap(pattern=[[1, rows], [rows, half]]))
    return tile


def rotate(x: nl.NkiTensor, cos: nl.NkiTensor, sin: nl.NkiTensor, name: str) -> nl.NkiTensor:
    """Half-split rotation of `x` [R, heads, d]: first cos - second sin, second cos + first sin; float32."""
    rows, heads, size = x.shape
    half = size // 2
    first = x[:, :, 0:half]
    second = x[:, :, half:size]
    cos_heads = cos.broadcast(1, heads)
    sin_heads = sin.broadcast(1, heads)
    out = nl.ndarray((rows, heads, size), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_out")
    one = nl.ndarray((rows, heads, half), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_one")
    other = nl.ndarray((rows, heads, half), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_other")
    nisa.tensor_tensor(dst=one, data1=first, data2=cos_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=other, data1=second, data2=sin_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=out[:, :, 0:half], data1=one, data2=other, op=nl.subtract)
    nisa.tensor_tensor(dst=one, data1=second, data2=cos_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=other, data1=first, data2=sin_heads, op=nl.multiply)
    nisa.tensor_tensor(dst=out[:, :, half:size], data1=one, data2=other, op=nl.add)
    return out


def as_stored(x: nl.NkiTensor, scale: float, dtype: nl.DType, name: str) -> nl.NkiTensor:
    """`x` [R, n] float32 as the cache stores it: divided by the scale, clamped to FP8's range, rounded."""
    out = nl.ndarray(x.shape, dtype=dtype, buffer=nl.sbuf, name=f"{name}_stored")
    if dtype == nl.float8_e4m3fn or dtype == nl.float8_e4m3:
        # Past the largest finite value a cast gives NaN (e4m3fn) or infinity (e4m3); the cache saturates.
        limit = 448.0 if dtype == nl.float8_e4m3fn else 240.0
        clamped = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_clamped")
        nisa.tensor_scalar(dst=clamped, data=x, op0=nl.multiply, operand0=1.0 / scale, op1=nl.minimum, operand1=limit)
        nisa.tensor_scalar(dst=out, data=clamped, op0=nl.maximum, operand0=-limit)
    else:
        nisa.tensor_scalar(dst=out, data=x, op0=nl.multiply, operand0=1.0 / scale)
    return out


def make_new_tokens(
    normed: nl.NkiTensor, weight: nl.NkiTensor, bias: nl.NkiTensor, cos: nl.NkiTensor, sin: nl.NkiTensor,
    cache_dtype: nl.DType, config: DecodeConfig, constants: Constants, name: str,
) -> NewTokens:  # fmt: skip
    """Queries, keys and values of `normed` [R, Hp] in the model's dtype.

    weight: [Hp, (q + 2 kv) d]; bias: [1, (q + 2 kv) d]; cos, sin: [R, 1, d / 2] float32.
    """
    rows = normed.shape[0]
    d = config.head_size
    q = config.num_q_heads
    kv = config.num_kv_heads
    turned = turn_rows(normed, 128, f"{name}_x")
    qkv = linear(turned, weight, bias, constants.ones, f"{name}_qkv")
    rotated = rotate(qkv[:, 0 : (q + kv) * d].reshape((rows, q + kv, d)), cos, sin, f"{name}_rope")
    flat = rotated.reshape((rows, (q + kv) * d))

    scaled = nl.ndarray((rows, q * d), dtype=normed.dtype, buffer=nl.sbuf, name=f"{name}_scaled")
    nisa.tensor_scalar(dst=scaled, data=flat[:, 0 : q * d], op0=nl.multiply, operand0=d**-0.5 * config.k_scale)
    keys = as_stored(flat[:, q * d : (q + kv) * d], config.k_scale, cache_dtype, f"{name}_k")
    values = as_stored(qkv[:, (q + kv) * d : (q + 2 * kv) * d], config.v_scale, cache_dtype, f"{name}_v")
    return NewTokens(
        queries=turn_rows(scaled, d, f"{name}_q_turned"),
        keys=turn_rows(cast(keys, normed.dtype, f"{name}_k_back"), d, f"{name}_k_turned"),
        values=turn_rows(cast(values, normed.dtype, f"{name}_v_back"), d, f"{name}_v_turned"),
        stored_keys=keys,
        stored_values=values,
    )
