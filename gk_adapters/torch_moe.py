"""Router and experts in torch: only the experts that tokens were routed to are computed.

Dims: T tokens, H hidden, I intermediate, E experts, X experts of this rank, k experts per token, P = T * k (or those
of them that fall on this rank) token-expert pairs.

Source: openai/gpt-oss, gpt_oss/torch/model.py, MLPBlock and swiglu.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from attrs import frozen

from gk_adapters.torch_math import project

__all__ = ["Experts", "dequantise_rows", "experts_forward", "route", "swiglu"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, experts_per_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and weights [T, k] of tokens x [T, H]: top-k logits, then softmax over the winners only."""
    top = torch.topk(project(x, weight, bias), experts_per_token, dim=-1)
    return top.indices, torch.softmax(top.values, dim=-1)


def swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * up of rows [P, gate..., up...], up already 1 larger; overwrites its argument.

    The gate is clamped from above only; up lies in -limit + 1 .. limit + 1.

    >>> rows = torch.tensor([[10.0, 11.0], [-10.0, 1.0], [7.0, -9.0], [1.0, 2.0]])
    >>> [round(v, 4) for v in swiglu(rows, 1.702, 7.0).flatten().tolist()]
    [55.9996, -0.0, -41.9997, 1.6916]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate.clamp_(max=limit)
    up.clamp_(min=1.0 - limit, max=1.0 + limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up)


def dequantise_rows(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 rows [..., K / 2] bytes with scales [..., K / 32] as [..., K] values; low nibble first."""
    table = torch.tensor(_E2M1, dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((table[byte & 15], table[byte >> 4]), dim=-1)
    powers = torch.from_numpy(np.ldexp(1.0, np.arange(256) - 127)).to(dtype)
    values = pairs.index_select(0, blocks.flatten().to(torch.int32)).view(*scales.shape, 32)
    scale = powers.index_select(0, scales.flatten().to(torch.int32)).view(*scales.shape, 1)
    return values.mul_(scale).flatten(-2)


@frozen(kw_only=True)
class Experts:
    """One layer's experts of this rank, as views of the stacks.

    Attributes:
        gate_up: [2, K, I] per expert, float; or MXFP4 bytes [2, I, K / 2].
        gate_up_joined: [K, 2I] per expert where memory allows that view; else None.
        gate_up_scale: [2, I, K / 32] per expert; None for float experts.
        gate_up_bias: [2I] per expert, +1 folded into up.
        down: [I, H] per expert, float; or MXFP4 bytes [H, I / 2].
        down_scale: [H, I / 32] per expert; None for float experts.
        down_bias: [H] per expert.
        first: id of this rank's first expert.
        num_experts: of the whole model.
    """

    gate_up: tuple[torch.Tensor, ...]
    gate_up_joined: tuple[torch.Tensor, ...] | None
    gate_up_scale: tuple[torch.Tensor, ...] | None
    gate_up_bias: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]
    down_scale: tuple[torch.Tensor, ...] | None
    down_bias: tuple[torch.Tensor, ...]
    first: int
    num_experts: int

    @property
    def local(self) -> int:
        """X."""
        return len(self.down)


def experts_forward(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts, *, alpha: float, limit: float
) -> torch.Tensor:
    """Weighted sum [T, H] over each token's experts that live on this rank; the down bias is weighted too."""
    tokens, top_k = ids.shape
    flat = ids.flatten().numpy()
    local = flat - experts.first
    order = np.argsort(flat, kind="stable")
    order = order[(local[order] >= 0) & (local[order] < experts.local)]
    if not len(order):
        return torch.zeros_like(x)
    sorted_ids = local[order]
    bounds = [0, *(np.flatnonzero(np.diff(sorted_ids)) + 1).tolist(), len(order)]
    index = torch.from_numpy(order)
    rows = x.expand(len(order), -1) if tokens == 1 else x.index_select(0, index // top_k)
    segments = [(int(sorted_ids[s]), s, e) for s, e in pairwise(bounds)]

    intermediate = experts.gate_up_bias[0].shape[0] // 2
    gate_up = torch.empty(len(order), 2 * intermediate, dtype=x.dtype)
    for expert, s, e in segments:
        _gate_up(rows[s:e], experts, expert, gate_up[s:e])
    hidden = swiglu(gate_up, alpha, limit)
    out = torch.empty(len(order), x.shape[1], dtype=x.dtype)
    for expert, s, e in segments:
        project(hidden[s:e], _down(experts, expert, x.dtype), experts.down_bias[expert], out=out[s:e])

    if len(order) < tokens * top_k:
        spread = torch.zeros(tokens * top_k, x.shape[1], dtype=x.dtype)
    else:
        spread = torch.empty(tokens * top_k, x.shape[1], dtype=x.dtype)
    spread[index] = out
    return torch.bmm(weights.unsqueeze(1).to(x.dtype), spread.view(tokens, top_k, -1)).squeeze(1)


def _gate_up(x: torch.Tensor, experts: Experts, expert: int, out: torch.Tensor) -> None:
    bias = experts.gate_up_bias[expert]
    if experts.gate_up_scale is not None:
        matrix = dequantise_rows(experts.gate_up[expert], experts.gate_up_scale[expert], x.dtype)
        project(x, matrix.flatten(0, 1).t(), bias, out=out)
    elif experts.gate_up_joined is not None:
        project(x, experts.gate_up_joined[expert], bias, out=out)
    else:
        half = bias.shape[0] // 2
        for part in (0, 1):
            columns = slice(part * half, (part + 1) * half)
            out[:, columns] = project(x, experts.gate_up[expert][part], bias[columns])


def _down(experts: Experts, expert: int, dtype: torch.dtype) -> torch.Tensor:
    if experts.down_scale is None:
        return experts.down[expert]
    return dequantise_rows(experts.down[expert], experts.down_scale[expert], dtype).t()
