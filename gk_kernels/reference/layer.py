"""One decoder layer of one rank that shares nothing with others, from the kernel's own stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gk_kernels.reference.attention import attend
from gk_kernels.reference.experts import experts_mxfp4
from gk_kernels.reference.gather import gather_row
from gk_kernels.reference.kv_write import write_tokens
from gk_kernels.reference.norms import rms_norm
from gk_kernels.reference.projection import project_out
from gk_kernels.reference.qkv import as_stored, rotate
from gk_kernels.reference.router import route

Array = NDArray[Any]


def decode_layer(
    x: Array, weights: Mapping[str, Array], k: Array, v: Array, table: Array, positions: Sequence[int],
    starts: Sequence[int], slots: Array, writes: Array, cos: Array, sin: Array, *, config: Any, mx_terms: int,
) -> Array:  # fmt: skip
    """Hidden states [R, Hp] after the layer; K and V are written in place.

    x: [R, Hp] float32 in the stored order. weights: one layer of the NKI stacks with MXFP4 experts. table: [R, width];
    positions, starts: in the table's frame. cos, sin: [R, d / 2]. config: the kernel's `DecodeConfig`.
    mx_terms: MXFP8 terms that the experts' activations go through; 0: none.
    """
    w = {name: a if a.dtype.kind in "iu" else a.astype(np.float32) for name, a in weights.items()}
    q, kv, d, g = config.num_q_heads, config.num_kv_heads, config.head_size, config.q_per_kv()
    normed = rms_norm(x, w["input_layernorm_weight"], config.hidden_size, config.rms_norm_eps)
    heads = (normed @ w["W_qkv"] + w["bias_qkv"]).reshape(len(x), -1, d)
    rotated = rotate(heads[:, : q + kv], cos, sin)
    queries = rotated[:, :q] * np.float32(d**-0.5 * config.k_scale)
    new_k = as_stored(rotated[:, q:], config.k_scale, k.dtype)
    new_v = as_stored(heads[:, q + kv :], config.v_scale, v.dtype)
    out = np.empty((len(x), q, d), np.float32)
    for row in range(len(x)):
        for head in range(kv):
            seen = slice(starts[row], positions[row])
            out[row, head * g : (head + 1) * g] = config.v_scale * attend(
                queries[row, head * g : (head + 1) * g],
                gather_row(k, table[row], head)[seen],
                gather_row(v, table[row], head)[seen],
                new_k[row, head].astype(np.float32),
                new_v[row, head].astype(np.float32),
                w["sink"][head * g : (head + 1) * g, 0],
            )
    write_tokens(k, new_k, slots, writes)
    write_tokens(v, new_v, slots, writes)
    x = x + project_out(out, w["W_out"], w["bias_out"])
    normed = rms_norm(x, w["post_attn_layernorm_weight"], config.hidden_size, config.rms_norm_eps)
    affinity = route(normed, w["router_weights"], w["router_bias"], config.experts_per_token)
    experts = len(w["expert_gate_up_weights"])
    moe = experts_mxfp4(
        normed, affinity[:, :experts], w["expert_gate_up_weights"], w["expert_gate_up_weights_scale"],
        w["expert_gate_up_bias"], w["expert_down_weights"], w["expert_down_weights_scale"], w["expert_down_bias"],
        alpha=config.swiglu_alpha, limit=config.swiglu_limit, mx_terms=mx_terms,
    )  # fmt: skip
    result: Array = x + moe
    return result
