"""Experts in each form: float weights, MXFP4 weights, and MXFP4 weights with activations quantised to MXFP8.

Dims: N tokens, Hp / Ip padded hidden and intermediate, t contraction tiles of 512 (partition p, lane l: feature
512 t + 4 p + l).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def swiglu(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    """Gate clamped from above only, up on both sides with its + 1 already in it.

    >>> g, u = np.array([10.0, -10.0, 7.0, 1.0]), np.array([11.0, 1.0, -9.0, 2.0])
    >>> swiglu(g, u, 1.702, 7.0).round(4).tolist()
    [55.9996, -0.0, -41.9997, 1.6916]
    """
    gate = np.minimum(gate, limit)
    with np.errstate(over="ignore"):
        result: Array = gate / (1 + np.exp(-alpha * gate)) * np.clip(up, 1 - limit, 1 + limit)
    return result


def dequantise(weight: Array, scale: Array) -> Array:
    """MXFP4 [128, t, n] uint16 with scale [16, t, n] as [512 t, n] float32, features in the model's order.

    >>> word, scale = np.full((128, 1, 1), 0x4321, np.uint16), np.full((16, 1, 1), 128, np.uint8)
    >>> dequantise(word, scale)[:5, 0].tolist()  # lowest nibble first, scale 2
    [1.0, 2.0, 3.0, 4.0, 1.0]
    """
    lanes = np.stack([FP4[weight >> shift & 15] for shift in (0, 4, 8, 12)], axis=1)  # [128, 4, t, n]
    factors = np.ldexp(np.float32(1), np.repeat(scale.astype(np.int32), 8, axis=0) - 127)  # [128, t, n]
    values = (lanes * factors[:, None]).transpose(2, 0, 1, 3)  # [t, 128, 4, n]
    return np.ascontiguousarray(values).reshape(-1, weight.shape[2])


def quantise_mx(x: Array, terms: int) -> Array:
    """x [N, K], features in the model's order, through so many MXFP8 terms and back; 0 terms leave it as it is.

    Two terms are the upper and the lower four of a bfloat16's eight significant bits; each is quantised alone.

    >>> x = np.array([[1.2421875, 0.0625, 3.0] + [0.0] * 29])  # 1.0011111 in binary
    >>> [quantise_mx(x, terms)[0, 0].item() for terms in (0, 1, 2)]
    [1.2421875, 1.25, 1.2421875]
    """
    if terms == 0:
        return x
    if terms == 1:
        return quantise_term(x)
    narrow = x.astype(ml_dtypes.bfloat16)
    upper = (narrow.view(np.uint16) & 0xFFF0).view(ml_dtypes.bfloat16).astype(np.float32)
    return quantise_term(upper) + quantise_term(narrow.astype(np.float32) - upper)


def quantise_term(x: Array) -> Array:
    """x [N, K] through MXFP8 and back: groups of 32, e4m3fn.

    The scale's exponent is floor(log2 of the largest magnitude) - 7.

    >>> quantise_term(np.array([[1.0, 0.0625, 300.0] + [0.0] * 29])).tolist()[0][:3]
    [1.0, 0.0625, 288.0]
    """
    groups = x.astype(np.float32).reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - 7, -127)
    scaled = np.ldexp(groups, -exponent).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    result: Array = np.ldexp(scaled, exponent).reshape(x.shape)
    return result


def hidden_in_order(stored: Array) -> Array:
    """Columns [N, Hp] from the stored order (lane-major) to the model's: 512 t + 4 p + l from l Hp / 4 + 128 t + p."""
    n, width = stored.shape
    result: Array = stored.reshape(n, 4, width // 4).transpose(0, 2, 1).reshape(n, width)
    return result


def experts_mxfp4(
    normed: Array, affinity: Array, gate_up: Array, gate_up_scale: Array, gate_up_bias: Array, down: Array,
    down_scale: Array, down_bias: Array, *, alpha: float, limit: float, mx_terms: int,
) -> Array:  # fmt: skip
    """Sum over experts of affinity * expert(normed), columns in the stored order, from one layer's NKI stacks.

    normed: [N, Hp] in the stored order; affinity: [N, X]; stacks: see `gk_core.stacked_weights`, without the layer
        axis.
    mx_terms: MXFP8 terms that activations go through, as in the kernel's MX path; 0: none.
    """
    x = hidden_in_order(normed.astype(np.float32))
    x = quantise_mx(x, mx_terms)
    out = np.zeros(normed.shape, np.float32)
    for e in range(len(gate_up)):
        # Stored columns 512 T + 128 w + p are features 512 T + 4 p + w.
        parts = [x @ dequantise(gate_up[e][:, g], gate_up_scale[e][:, g]) for g in (0, 1)]
        ordered = [p.reshape(len(x), -1, 4, 128).swapaxes(2, 3).reshape(len(x), -1) for p in parts]
        biases = gate_up_bias[e].astype(np.float32).transpose(1, 2, 0, 3).reshape(2, -1)
        act = swiglu(ordered[0] + biases[0], ordered[1] + biases[1], alpha, limit)
        # What is quantised is bfloat16 on chip, whatever the terms.
        act = quantise_mx(act.astype(ml_dtypes.bfloat16), mx_terms) if mx_terms else act
        y = act @ dequantise(down[e], down_scale[e]) + down_bias[e].astype(np.float32)
        out += affinity[:, e : e + 1] * y
    return out
