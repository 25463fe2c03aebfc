"""The layer arithmetic that prefill and decode share: norm, rotary embedding, projections, attention with sinks.

Dims: T tokens, H hidden, K in-features, N out-features, d head size, b batch of attention, g query heads (or queries)
per KV head, S keys.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

from gk_core.errors import UnsupportedError
from gk_core.model_geometry import YarnRope

__all__ = [
    "Matrix",
    "PackedMatrix",
    "add_product",
    "apply_rope",
    "attend",
    "project",
    "rms_norm",
    "rope_factors",
    "rope_tables",
]

MASKED = -1e30
"""Added to the score of a key that must not be read: its weight is exactly 0, and no inf - inf can arise."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32, back in x's dtype."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_tables(
    rope: YarnRope, head_size: int, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [d / 2, T, 1] of positions [T], times the YaRN concentration.

    Angles are float32 products of float32 frequencies, as the reference models have them.
    """
    angles = (_float32_frequencies(rope, head_size)[:, None] * positions.to(torch.float32)[None, :])[..., None]
    return (angles.cos() * rope.concentration).to(dtype), (angles.sin() * rope.concentration).to(dtype)


@lru_cache(maxsize=16)
def _float32_frequencies(rope: YarnRope, head_size: int) -> torch.Tensor:
    """`YarnRope.inverse_frequencies` evaluated in float32 throughout.

    Every published implementation rounds here, and at position 700 the roundings of the exact values differ from theirs
    by more than all other arithmetic of a layer. Models are served as they were trained: rounded.
    """
    half = head_size // 2
    periods = rope.theta ** (torch.arange(half, dtype=torch.float32) * 2 / head_size)
    plain = 1.0 / periods
    if rope.factor == 1.0:
        return plain
    low, high = rope.ramp_ends(head_size)
    width = high - low if high > low else 0.001
    keep = 1.0 - ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1.0 - keep) + plain * keep


def rope_factors(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables [d / 2, T, 1] as two factors [T, 1, 2, d / 2] for `apply_rope`."""
    c, s = cos[:, :, 0].t()[:, None, None, :], sin[:, :, 0].t()[:, None, None, :]
    return torch.cat((c, c), dim=2), torch.cat((-s, s), dim=2)


def apply_rope(x: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Half-split rotation of x [T, heads, d]: first * cos - second * sin, second * cos + first * sin."""
    same, crossed = factors
    halves = x.view(*x.shape[:-1], 2, -1)
    return torch.addcmul(halves * same, halves.flip(2), crossed).flatten(-2)


class PackedMatrix:
    """A bfloat16 matrix [K, N] in oneDNN's own order: a copy that multiplies faster, most of all for 2 rows and more.

    Raises:
        UnsupportedError: another dtype, or a torch without oneDNN.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        if weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            raise UnsupportedError(
                f"prepacked matrices need bfloat16 and a torch with oneDNN, got {weight.dtype}; leave prepack off"
            )
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous())

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] @ the matrix + bias [N]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


Matrix = torch.Tensor | PackedMatrix


def project(x: torch.Tensor, weight: Matrix, bias: torch.Tensor) -> torch.Tensor:
    """x [T, K] @ weight [K, N] + bias [N]. One token with weights that lie [N, K] in memory goes as matrix-vector."""
    if isinstance(weight, PackedMatrix):
        return weight(x, bias)
    if x.shape[0] == 1 and weight.stride(0) == 1:
        return torch.addmv(bias, weight.t(), x[0]).unsqueeze(0)
    return torch.addmm(bias, x, weight)


def add_product(target: torch.Tensor, x: torch.Tensor, weight: Matrix) -> None:
    """target [T, N] += x [T, K] @ weight [K, N], in the same ways."""
    if isinstance(weight, PackedMatrix):
        target.add_(weight(x, None))
    elif x.shape[0] == 1 and weight.stride(0) == 1:
        target[0].addmv_(weight.t(), x[0])
    else:
        target.addmm_(x, weight)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor,
    sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """softmax over keys and one sink, sink dropped, times v: [b, heads, queries, d].

    The sink is a raw logit per query head: it is not scaled and has no value. With lse the log-sum-exp of the scores,
    leaving room for it in the denominator multiplies the output by sigmoid(lse - sink).

    Args:
        q: [b, heads, queries, d].
        k, v: [b, heads, S, d].
        mask: added to the scores, broadcastable to [b, heads, queries, S], q's dtype.
        sink: float32, broadcastable to [b, heads, queries, 1].

    Doctest: q.k = 8 with d = 64 scores 1; a sink of 1 leaves the key half the weight.
    >>> one = torch.ones(1, 1, 1, 64)
    >>> o = attend(one / 8, one, one, mask=torch.zeros(1, 1, 1, 1), sink=torch.tensor(1.0), softmax_scale=64**-0.5)
    >>> round(o[0, 0, 0, 0].item(), 6)
    0.5
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=softmax_scale
    )
    weighted: torch.Tensor = out * torch.sigmoid(lse.unsqueeze(-1) - sink).to(out.dtype)
    return weighted
