"""One layer's attention of a decode step: write the new K and V, gather what each row reads, attend, project.

Dims: a active rows, H hidden, q / h query and KV heads of this rank, d head size, S keys of a row.
"""

from __future__ import annotations

import torch

from gk_adapters.torch_decode_plan import KindPlan
from gk_adapters.torch_kv import BoundHalf, KVCodec
from gk_adapters.torch_layers import LayerWeights
from gk_adapters.torch_math import apply_rope, attend, project
from gk_core.kernel_contract import KVScales

__all__ = ["attention_block"]


def attention_block(
    x: torch.Tensor,
    weights: LayerWeights,
    plan: KindPlan,
    factors: tuple[torch.Tensor, torch.Tensor],
    kv: tuple[BoundHalf, BoundHalf],
    codec: KVCodec,
    scales: KVScales,
    *,
    clean: bool,
) -> torch.Tensor:
    """Output projection [a, H] of normed active rows x [a, H]; on one rank of several, this rank's partial sum.

    Args:
        clean: zero gathered slots that hold no key of the row before they are multiplied.
    """
    rows, heads, d = x.shape[0], codec.layout.num_kv_heads, codec.layout.head_size
    qkv = project(x, weights.qkv, weights.qkv_bias).view(rows, -1, d)
    rotated = apply_rope(qkv[:, :-heads], factors)
    q, k_new, v_new = rotated[:, :-heads], rotated[:, -heads:], qkv[:, -heads:]
    k = _keys(codec, kv[0], codec.encode(k_new, scales.k), plan, clean=clean)
    v = _keys(codec, kv[1], codec.encode(v_new, scales.v), plan, clean=clean)
    out = attend(q.view(rows, heads, -1, d), k, v, mask=plan.mask, sink=weights.sink, softmax_scale=scales.k * d**-0.5)
    if scales.v != 1.0:
        out = out * scales.v
    return project(out.reshape(rows, -1), weights.out, weights.out_bias)


def _keys(codec: KVCodec, half: BoundHalf, new: torch.Tensor, plan: KindPlan, *, clean: bool) -> torch.Tensor:
    """Write this step's K (or V) [a, h, d], then read what each row attends to: [a, h, S, d]."""
    if len(plan.places):
        codec.write(half, plan.places, new if plan.written is None else new[plan.written])
    rows, heads, d = new.shape
    read = codec.gather(half, plan.head_blocks, plan.num_blocks).view(rows, heads, -1, d)
    if clean:
        read = read.masked_fill(~plan.valid, 0.0)
    if plan.own is not None:
        read[plan.own.rows, :, plan.own.positions] = codec.decode(new[plan.own.rows])
    return read
