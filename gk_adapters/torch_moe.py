"""Router and experts in torch: only the experts that tokens were routed to are computed.

Dims: T tokens, H hidden, I intermediate, E experts, X experts of this rank, k experts per token, P token-expert pairs
on this rank (T * k on a single one).

Source: openai/gpt-oss, gpt_oss/torch/model.py, MLPBlock and swiglu.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from attrs import frozen

from gk_adapters.torch_math import Matrix, PackedMatrix, add_product, project

__all__ = ["Experts", "dequantise_rows", "experts_forward", "route", "swiglu"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def route(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor, experts_per_token: int
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


@frozen(kw_only=True, eq=False)
class Experts:
    """One layer's experts of this rank, as views of the stacks, taken apart once and not per step.

    Attributes:
        gate_up: [K, 2I] per expert, perhaps prepacked; or gate and up [2, K, I] where memory allows no such view; or
            MXFP4 bytes [2, I, K / 2].
        gate_up_scale: [2, I, K / 32] per expert; None for float experts.
        gate_up_bias: [X, 2I], +1 folded into up.
        down: [I, H] per expert, float; or MXFP4 bytes [H, I / 2].
        down_scale: [H, I / 32] per expert; None for float experts.
        down_bias: [X, H].
        first: id of this rank's first expert.
        num_experts: of the whole model.
    """

    gate_up: tuple[Matrix, ...]
    gate_up_scale: tuple[torch.Tensor, ...] | None
    gate_up_bias: torch.Tensor
    down: tuple[Matrix, ...]
    down_scale: tuple[torch.Tensor, ...] | None
    down_bias: torch.Tensor
    first: int
    num_experts: int

    def gate_up_of(self, expert: int, dtype: torch.dtype) -> Matrix:
        """[K, 2I] (or [2, K, I]) of one local expert."""
        matrix = self.gate_up[expert]
        if self.gate_up_scale is None or isinstance(matrix, PackedMatrix):
            return matrix
        return dequantise_rows(matrix, self.gate_up_scale[expert], dtype).flatten(0, 1).t()

    def down_of(self, expert: int, dtype: torch.dtype) -> Matrix:
        """[I, H] of one local expert."""
        matrix = self.down[expert]
        if self.down_scale is None or isinstance(matrix, PackedMatrix):
            return matrix
        return dequantise_rows(matrix, self.down_scale[expert], dtype).t()


def experts_forward(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, experts: Experts, *, alpha: float, limit: float
) -> torch.Tensor:
    """Weighted sum [T, H] over each token's experts that live on this rank; the down bias is weighted too."""
    pairs = _local_pairs(ids, experts)
    if pairs is None:
        return torch.zeros_like(x)
    rows = x.expand(pairs.count, -1) if x.shape[0] == 1 else x.index_select(0, pairs.tokens)

    gate_up = experts.gate_up_bias.index_select(0, pairs.experts).to(x.dtype)
    for expert, start, end in pairs.segments:
        _add_gate_up(gate_up[start:end], rows[start:end], experts.gate_up_of(expert, x.dtype))
    hidden = swiglu(gate_up, alpha, limit)
    out = experts.down_bias.index_select(0, pairs.experts).to(x.dtype)
    for expert, start, end in pairs.segments:
        add_product(out[start:end], hidden[start:end], experts.down_of(expert, x.dtype))

    shares = shares.to(x.dtype)
    if x.shape[0] == 1:
        return shares.index_select(1, pairs.order) @ out
    spread = torch.zeros if pairs.count < ids.numel() else torch.empty
    by_token = spread(ids.numel(), x.shape[1], dtype=x.dtype)
    by_token.index_copy_(0, pairs.order, out)
    return torch.bmm(shares.unsqueeze(1), by_token.view(*ids.shape, -1)).squeeze(1)


@frozen(kw_only=True, eq=False)
class _Pairs:
    """Token-expert pairs of this rank, sorted by expert.

    Attributes:
        order: index of each pair among all T * k.
        tokens: its token.
        experts: its expert, counted from this rank's first.
        segments: (local expert, first pair, end).
        count: P.
    """

    order: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor
    segments: list[tuple[int, int, int]]
    count: int


def _local_pairs(ids: torch.Tensor, experts: Experts) -> _Pairs | None:
    flat = ids.flatten().numpy()
    local = flat - experts.first
    order = np.argsort(flat, kind="stable")
    if len(experts.down) < experts.num_experts:
        order = order[(local[order] >= 0) & (local[order] < len(experts.down))]
    if not len(order):
        return None
    sorted_ids = local[order]
    bounds = [0, *(np.flatnonzero(sorted_ids[1:] != sorted_ids[:-1]) + 1).tolist(), len(order)]
    tokens = order // ids.shape[1]
    segments = [(int(sorted_ids[s]), s, e) for s, e in pairwise(bounds)]
    return _Pairs(
        order=torch.from_numpy(order),
        tokens=torch.from_numpy(tokens),
        experts=torch.from_numpy(sorted_ids),
        segments=segments,
        count=len(order),
    )


def _add_gate_up(target: torch.Tensor, x: torch.Tensor, weight: Matrix) -> None:
    if isinstance(weight, PackedMatrix) or weight.dim() == 2:
        add_product(target, x, weight)
        return
    for columns, matrix in zip(target.chunk(2, dim=1), weight, strict=True):
        columns += x @ matrix
