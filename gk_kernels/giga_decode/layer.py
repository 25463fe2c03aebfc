"""One decoder layer on this rank's rows: attention half, then expert half, each with its residual.

Between collectives a rank holds only its own T rows. Attention works on all R rows of the replica with this rank's
heads, the experts work on all N rows of the mesh with this rank's experts.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.attention import attend
from gk_kernels.giga_decode.collectives import all_gather_rows, reduce_scatter_fp8, reduce_scatter_rows
from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.giga_decode.experts import activate, add_down
from gk_kernels.giga_decode.experts_mx import activate_mx, add_down_mx, hidden_lanes, quantise
from gk_kernels.giga_decode.gather import Gather
from gk_kernels.giga_decode.kv_write import WritePlan, write_packed_keys, write_tokens
from gk_kernels.giga_decode.norms import rms_norm
from gk_kernels.giga_decode.projection import project_out
from gk_kernels.giga_decode.qkv import make_new_tokens
from gk_kernels.giga_decode.router import route
from gk_kernels.giga_decode.tiles import Constants, cast, turn_tiles


class AttentionWeights(NamedTuple):
    """One layer's attention weights, HBM views without the layer axis; shapes as in the stacks."""

    norm: nl.NkiTensor
    qkv: nl.NkiTensor
    qkv_bias: nl.NkiTensor
    out: nl.NkiTensor
    out_bias: nl.NkiTensor
    sink: nl.NkiTensor


class ExpertWeights(NamedTuple):
    """One layer's router and experts, HBM views without the layer axis; scales are None for float experts."""

    norm: nl.NkiTensor
    router: nl.NkiTensor
    router_bias: nl.NkiTensor
    gate_up: nl.NkiTensor
    gate_up_scale: nl.NkiTensor | None
    gate_up_bias: nl.NkiTensor
    down: nl.NkiTensor
    down_scale: nl.NkiTensor | None
    down_bias: nl.NkiTensor


class Cache(NamedTuple):
    """The buffer of a layer, and one attention kind's control of this step."""

    k: nl.NkiTensor
    v: nl.NkiTensor
    gather: Gather
    write: WritePlan


def attention_half(
    x: nl.NkiTensor, weights: AttentionWeights, cache: Cache, cos: nl.NkiTensor, sin: nl.NkiTensor, dtype: nl.DType,
    config: DecodeConfig, constants: Constants, name: str,
) -> nl.NkiTensor:  # fmt: skip
    """x [T, Hp] float32 plus attention."""
    normed = rms_norm(x, weights.norm, config.hidden_size, config.rms_norm_eps, constants, f"{name}_norm1")
    rows = all_gather_rows(cast(normed, dtype, f"{name}_own"), config.tp_groups, f"{name}_rows")
    new = make_new_tokens(
        rows[0], weights.qkv, weights.qkv_bias, cos, sin, cache.v.dtype, config, constants, f"{name}_qkv"
    )
    heads = attend(new, cache.k, cache.v, weights.sink, cache.gather, config, constants, f"{name}_attn")
    # After the gathers: what is read of a slot that is being written is masked, so the order is free.
    pairs, lanes = cache.write.pairs, cache.write.lanes
    if pairs is not None and lanes is not None:
        write_packed_keys(cache.k, new.stored_keys, pairs, lanes, config.num_kv_heads, f"{name}_k")
    else:
        write_tokens(cache.k, new.stored_keys, cache.write, config.num_kv_heads, f"{name}_k")
    write_tokens(cache.v, new.stored_values, cache.write, config.num_kv_heads, f"{name}_v")
    partial = project_out(heads, weights.out, weights.out_bias, constants, f"{name}_o")
    mine = reduce_scatter_rows([partial], config.tp_groups, dtype, f"{name}_sum1")
    return add_rows(x, mine, f"{name}_x1")


def expert_half(
    x: nl.NkiTensor, weights: ExpertWeights, first_expert: nl.NkiTensor, dtype: nl.DType, config: DecodeConfig,
    constants: Constants, name: str,
) -> nl.NkiTensor:  # fmt: skip
    """x [T, Hp] float32 plus its experts. first_expert: [1, 1] int32 in SBUF, id of this rank's first expert."""
    normed = rms_norm(x, weights.norm, config.hidden_size, config.rms_norm_eps, constants, f"{name}_norm2")
    own = route(normed, weights.router, weights.router_bias, config.experts_per_token, constants, f"{name}_router")
    tokens = all_gather_rows(cast(normed, dtype, f"{name}_own2"), config.ep_groups, f"{name}_tokens")
    everyone = all_gather_rows(own, config.ep_groups, f"{name}_affinity")
    experts = weights.gate_up.shape[0]
    # One expert's sums are rounded once, to what is sent; those of several are added up in float32 first.
    kept = nl.float32
    if experts == 1 and config.ep_size() > 1 and not config.fp8_reduce_scatter:
        kept = dtype
    shares = []
    totals = []
    for i in range(len(tokens)):
        count = tokens[i].shape[0]
        share = nl.ndarray((count, experts), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_share{i}")
        nisa.tensor_copy(dst=share, src=everyone[i][:, nl.ds(first_expert, experts)])
        shares.append(share)
        total = nl.ndarray(tokens[i].shape, dtype=kept, buffer=nl.sbuf, name=f"{name}_total{i}")
        totals.append(total)
    turned = turn_tiles(tokens, 128, f"{name}_turned")
    if config.mx_matmul:
        add_experts_mx(turned, weights, shares, totals, config, constants, name)
    else:
        add_experts(turned, weights, shares, totals, config, constants, name)
    if config.fp8_reduce_scatter:
        mine = reduce_scatter_fp8(totals, config.ep_groups, f"{name}_sum2")
    else:
        mine = reduce_scatter_rows(totals, config.ep_groups, dtype, f"{name}_sum2")
    return add_rows(x, mine, f"{name}_x2")


def add_experts(
    turned: nl.NkiTensor, weights: ExpertWeights, shares: list[nl.NkiTensor], totals: list[nl.NkiTensor],
    config: DecodeConfig, constants: Constants, name: str,
) -> None:  # fmt: skip
    """Every expert of this rank on all tokens `turned` [128, Hp / 128, N], added up in `totals`."""
    for e in range(weights.gate_up.shape[0]):
        up_scale = None if weights.gate_up_scale is None else weights.gate_up_scale[e]
        down_scale = None if weights.down_scale is None else weights.down_scale[e]
        activated = activate(
            turned, weights.gate_up[e], up_scale, weights.gate_up_bias[e], config, constants, f"{name}_e{e}"
        )
        add_down(
            activated, weights.down[e], down_scale, weights.down_bias[e : e + 1, :], shares, e, totals, constants,
            f"{name}_d{e}",
        )  # fmt: skip


def add_experts_mx(
    turned: nl.NkiTensor, weights: ExpertWeights, shares: list[nl.NkiTensor], totals: list[nl.NkiTensor],
    config: DecodeConfig, constants: Constants, name: str,
) -> None:  # fmt: skip
    """The same with MX matmuls: tokens are quantised once for all experts."""
    assert weights.gate_up_scale is not None, "MX matmuls take MXFP4 experts"
    assert weights.down_scale is not None, "MX matmuls take MXFP4 experts"
    tokens = quantise(hidden_lanes(turned, f"{name}_lanes"), config.mx_terms, f"{name}_tokens8")
    for e in range(weights.gate_up.shape[0]):
        activated = activate_mx(
            tokens, weights.gate_up[e], weights.gate_up_scale[e], weights.gate_up_bias[e], config, f"{name}_e{e}"
        )
        add_down_mx(
            activated, weights.down[e], weights.down_scale[e], weights.down_bias[e : e + 1, :], shares, e, totals,
            constants, f"{name}_d{e}",
        )  # fmt: skip


def add_rows(x: nl.NkiTensor, more: nl.NkiTensor, name: str) -> nl.NkiTensor:
    """The residual stream stays float32 on chip from the first layer to the last."""
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf, name=name)
    nisa.tensor_tensor(dst=out, data1=x, data2=more, op=nl.add)
    return out
