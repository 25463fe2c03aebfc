"""MXFP4 as GPT-OSS checkpoints store it: 32 values along the input axis share a power of two.

Dims: O output features, G blocks of 32 input features.
Byte b of a block holds elements 2b (low nibble) and 2b+1 (high nibble); value = table[nibble] *
2**(scale - 127). Source: Open Compute Project, Microscaling Formats v1.0, FP4 (E2M1) with E8M0.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLE = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks uint8 [..., O, G, 16] and scales uint8 [..., O, G] of float `weight` [..., O, 32 G].

    Of the two exponents that can suit a block's largest value, the one with the lower squared
    error is taken.

    Raises:
        ValueError: the last axis is not a multiple of 32.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"the last axis must be a multiple of {BLOCK}, got {weight.shape[-1]}")
    grouped = weight.float().reshape(*weight.shape[:-1], -1, BLOCK)
    largest = grouped.abs().amax(-1, keepdim=True)
    low = torch.log2(largest.clamp_min(2.0**-100)).floor() - 2
    nibbles, error = _round(grouped, low)
    nibbles_high, error_high = _round(grouped, low + 1)
    high = error_high < error
    nibbles = torch.where(high, nibbles_high, nibbles)
    exponent = torch.where(high, low + 1, low).squeeze(-1)
    blocks = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return blocks, (exponent + 127).clamp(0, 254).to(torch.uint8)


def _round(grouped: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    scaled = torch.ldexp(grouped, -exponent)
    magnitude = torch.bucketize(scaled.abs(), _MIDPOINTS)
    nibbles = (magnitude + 8 * (scaled < 0)).to(torch.uint8)
    error = torch.ldexp(_TABLE[nibbles.long()], exponent) - grouped
    return nibbles, error.square().sum(-1, keepdim=True)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., O, 32 G] of `blocks` and `scales`; exact in bfloat16 and in float32.

    Raises:
        ValueError: shapes that do not belong together, or a scale of 255 (not a number).
    """
    if blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"blocks must be [..., O, G, {BLOCK // 2}] and scales [..., O, G], "
            f"got {tuple(blocks.shape)} and {tuple(scales.shape)}"
        )
    if (scales == 255).any():
        raise ValueError("an MXFP4 scale of 255 stands for NaN; got one, the file is damaged")
    nibbles = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    values = _TABLE[nibbles.long()]
    exponent = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(values, exponent).flatten(-2).to(dtype)


def fake_quantize(weight: Tensor) -> Tensor:
    """`weight` rounded to what `quantize` would store; its gradient passes through unchanged."""
    with torch.no_grad():
        rounded = dequantize(*quantize(weight))
    return weight + (rounded - weight).detach()
