"""NumPy definitions of what the library's kernels compute, written from their documented shapes.

Dims: B batch, S tokens, H hidden, D head size, N heads, C context, T tokens, E experts.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def wide(x: Array) -> Array:
    """float32, the precision in which the engines compute."""
    return np.asarray(x, dtype=np.float32)


def rope(x: Array, cos: Array, sin: Array, contiguous: bool) -> Array:
    """`x` [D, B, N, S] rotated by `cos`, `sin` [D/2, B, S]; pairs are halves or even and odd rows."""
    half = len(x) // 2
    c, s = wide(cos)[:, :, None, :], wide(sin)[:, :, None, :]
    first, second = (x[:half], x[half:]) if contiguous else (x[0::2], x[1::2])
    first, second = wide(first), wide(second)
    out = np.empty(x.shape, np.float32)
    low, high = first * c - second * s, second * c + first * s
    if contiguous:
        out[:half], out[half:] = low, high
    else:
        out[0::2], out[1::2] = low, high
    return out


def rope_rows(x: Array, cos: Array, sin: Array, backward: bool) -> Array:
    """`x` [B, N, S, D] by `cos`, `sin` [B or 1, S, D]; backward is the transposed rotation."""
    c, s = wide(cos)[:, None], wide(sin)[:, None]
    x = wide(x)
    half = x.shape[-1] // 2
    if backward:
        scaled = x * s
        turned = np.concatenate([scaled[..., half:], -scaled[..., :half]], axis=-1)
        return np.asarray(x * c + turned)
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return np.asarray(x * c + turned * s)


def rmsnorm_tiles(x: Array, gamma: Array, cores: int, actual: int | None, turned: bool) -> Array:
    """RMSNorm of `x` [B, S, H] laid out as [128, B*S, H/128]: h = core, partition, column (or turned)."""
    hidden = x.shape[-1]
    rows = wide(x).reshape(-1, hidden)
    mean = (rows**2).sum(axis=1, keepdims=True) / (actual or hidden)
    normed = rows / np.sqrt(mean + 1e-6) * wide(gamma)
    if turned:
        return np.asarray(normed.reshape(len(rows), hidden // 128, 128).transpose(2, 0, 1))
    tiles = normed.reshape(len(rows), cores, 128, hidden // 128 // cores)
    return np.asarray(tiles.transpose(2, 0, 1, 3).reshape(128, len(rows), hidden // 128))


def output_projection(attention: Array, weight: Array, bias: Array | None) -> Array:
    """`attention` [D, B, N, S] times `weight` [N * D, H] to [B * S, H]."""
    d, b, n, s = attention.shape
    rows = wide(attention).transpose(1, 3, 2, 0).reshape(b * s, n * d)
    out = rows @ wide(weight)
    return np.asarray(out if bias is None else out + wide(bias))


def transposed_output(out: Array, cores: int) -> Array:
    """`out` [T, H] as [128, cores, H / 128 / cores, T], h = core, partition, column."""
    tokens, hidden = out.shape
    return np.asarray(out.T.reshape(cores, 128, hidden // 128 // cores, tokens).transpose(1, 0, 2, 3))


def top_k(logits: Array, k: int) -> Array:
    """Indices of the k largest of each row, first occurrence first."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :k]


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def scatter_topk(logits: Array, k: int, normalised_after: bool) -> Array:
    """Affinities [T, E], zero but for each row's top k: softmax of those, or of all renormalised."""
    index = top_k(logits, k)
    picked = np.take_along_axis(logits if normalised_after else softmax(logits), index, axis=1)
    values = softmax(picked) if normalised_after else picked / picked.sum(axis=1, keepdims=True)
    out = np.zeros_like(logits)
    np.put_along_axis(out, index, values, axis=1)
    return out


def depthwise_conv(image: Array, kernel: Array, pad: int, stride: int) -> Array:
    """`image` [B, C, 1, W] with `kernel` [C, 1, 1, S], each channel on its own."""
    padded = np.pad(wide(image), ((0, 0), (0, 0), (0, 0), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[3], axis=3)
    return np.asarray((windows[:, :, :, ::stride] * wide(kernel)[None, :, 0, :, None, :]).sum(axis=-1))


def decode_mask(lengths: Array, starts: Array | None, context: int, active: int, heads: int) -> Array:
    """Which context slots each new token may see; bool [B, N, active, C].

    Slots below `lengths` [B, active] are filled, from `starts` where a window is given (a start past
    the length wraps around); the last `active` slots are the new tokens themselves, in causal order.
    """
    slots = np.arange(context)
    ends = np.asarray(lengths)[:, :, None]
    seen = np.broadcast_to(slots < ends, (*np.asarray(lengths).shape, context)).copy()
    if starts is not None:
        begin = np.asarray(starts)[:, :, None]
        seen = np.where(begin <= ends, seen & (slots >= begin), seen | (slots >= begin))
    seen[:, :, context - active :] = np.tri(active, dtype=bool)
    return np.repeat(seen[:, None], heads, axis=1)


def decode_attention(q: Array, k: Array, v: Array, mask: Array, sink: Array | None) -> Array:
    """Attention of `q` [B, N, S, D] over `k`, `v` [B, C, D] to [B, N, S, D]; the sink only adds to the sum."""
    scores = np.einsum("bnsd,bcd->bnsc", wide(q), wide(k))
    scores = np.where(mask, scores, -np.inf)
    if sink is not None:
        extra = np.broadcast_to(wide(sink).reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        scores = np.concatenate([scores, extra], axis=-1)
    share = softmax(scores)[..., : k.shape[1]]
    return np.asarray(np.einsum("bnsc,bcd->bnsd", share, wide(v)))


def unpack_fp4(packed: Array) -> Array:
    """[P, F] uint16 to [P, F, 4] values, lane 0 in the low bits."""
    nibbles = packed[..., None] >> (4 * np.arange(4, dtype=np.uint16)) & np.uint16(15)
    return np.asarray(np.where(nibbles & 8, -1, 1).astype(np.float32) * FP4_VALUES[nibbles & 7])


def unpack_fp8(packed: Array, dtype: Any) -> Array:
    """[P, F] uint32 to [P, F, 4] values, lane 0 in the low byte."""
    lanes = np.ascontiguousarray(packed).view(np.uint8).reshape(*packed.shape, 4)
    return np.asarray(lanes.view(dtype).astype(np.float32))


def mx_values(lanes: Array, scale: Array) -> Array:
    """Values of `lanes` [P, F, 4] under `scale` [P/8, F] uint8 as a matrix [4 * P, F] to contract."""
    factor = np.repeat(2.0 ** (scale.astype(np.float32) - 127), 8, axis=0)
    scaled = lanes * factor[:, :, None]
    return np.asarray(scaled.transpose(0, 2, 1).reshape(-1, lanes.shape[1]))


def quantise_mx(lanes: Array) -> Array:
    """`lanes` [P, F, 4] after MXFP8 (e4m3fn) and back, groups of 8 partitions x 4, doubled scale."""
    p, f, _ = lanes.shape
    groups = wide(lanes).reshape(p // 8, 8, f, 4)
    peak = np.abs(groups).max(axis=(1, 3), keepdims=True)
    exponent = np.floor(np.log2(np.where(peak > 0, peak, 1))) - 7
    scale = np.where(peak > 0, 2.0**exponent, 2.0**-127)
    rounded = (groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return np.asarray(rounded.reshape(p, f, 4))
