"""Kernels that hand the library's sub-kernels their SBUF operands; imported with nki in place."""

# mypy: disable-error-code="import-not-found,untyped-decorator"

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
from nkilib_src.nkilib.core.attention.attention_tkg import attention_tkg
from nkilib_src.nkilib.core.mlp.mlp_tkg.down_projection_mx_shard_H import down_projection_mx_shard_H
from nkilib_src.nkilib.core.mlp.mlp_tkg.gate_up_projection_mx_shard_H import gate_up_projection_mx_tp_shard_H
from nkilib_src.nkilib.core.mlp.mlp_tkg.projection_mx_constants import ProjConfig
from nkilib_src.nkilib.core.moe.moe_tkg.gate_up_projection_mx import gate_up_projection_mx_shard_I
from nkilib_src.nkilib.core.utils.allocator import SbufManager
from nkilib_src.nkilib.core.utils.logging import Logger
from nkilib_src.nkilib.core.utils.tensor_view import TensorView


@nki.jit
def run_attention(
    q: Any,
    k_active: Any,
    v_active: Any,
    k_prior: Any,
    v_prior: Any,
    mask: Any,
    rope_pos_ids: Any = None,
    start_pos_ids: Any = None,
    sink: Any = None,
    active_blocks_table: Any = None,
    cfg: Any = None,
) -> Any:
    """attention_tkg with q, k in SBUF ([d, tokens]) and the result in HBM [B, H, d, s_active]."""
    sbm = SbufManager(0, nl.tile_size.total_available_sbuf_size - 16 * 1024, Logger("attention"))
    sbm.open_scope()
    out = nl.ndarray((cfg.bs, cfg.q_head, cfg.d_head, cfg.s_active), q.dtype, buffer=nl.shared_hbm)
    q_sb = sbm.alloc_stack(q.shape, dtype=q.dtype, buffer=nl.sbuf)
    k_sb = sbm.alloc_stack(k_active.shape, dtype=k_active.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=q_sb, src=q)
    nisa.dma_copy(dst=k_sb, src=k_active)
    attention_tkg(
        q_sb,
        k_sb,
        v_active,
        k_prior,
        v_prior,
        mask,
        out,
        cfg,
        sbm,
        None,
        rope_pos_ids,
        start_pos_ids,
        sink,
        active_blocks_table,
        None,
    )
    sbm.close_scope()
    return out


def _load_scales(dst: Any, src: Any, first: int, size: int) -> None:
    """Four scale rows at the start of each 32-partition quadrant."""
    for quadrant in range(4):
        nisa.dma_copy(
            dst=dst[32 * quadrant : 32 * quadrant + 4, :, :],
            src=src[4 * quadrant : 4 * quadrant + 4, first : first + size, :],
        )


@nki.jit
def run_gate_up(
    hidden: Any, hidden_scale: Any, weight: Any, weight_scale: Any, bias: Any, outer: int, inner: int, tokens: int
) -> Any:
    """gate_up_projection_mx_tp_shard_H; hidden [128, outer/512, tokens] e5m2 x4, weight [.., .., inner] fp4 x4."""
    cores, core = nl.num_programs(0), nl.program_id(0)
    cfg = ProjConfig(outer, inner, tokens, cores, core)
    tiles = outer // 512 // cores
    hidden_x4 = hidden.view(nl.float8_e5m2_x4)
    hidden_sb = nl.ndarray((128, tiles, tokens), dtype=nl.float8_e5m2_x4, buffer=nl.sbuf)
    nisa.dma_copy(dst=hidden_sb, src=hidden_x4[:, core * tiles : (core + 1) * tiles, :])
    scale_sb = nl.ndarray((128, tiles, tokens), dtype=nl.uint8, buffer=nl.sbuf)
    _load_scales(scale_sb, hidden_scale, core * tiles, tiles)
    bias_sb = nl.ndarray((128, bias.shape[1], 4), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=bias_sb, value=0.0)
    nisa.dma_copy(dst=bias_sb[: bias.shape[0], :, :], src=bias)
    result = gate_up_projection_mx_tp_shard_H(
        hidden_qtz_sb=TensorView(hidden_sb),
        hidden_scale_sb=TensorView(scale_sb),
        weight_qtz=TensorView(weight.view(nl.float4_e2m1fn_x4)),
        weight_scale=TensorView(weight_scale),
        bias_sb=TensorView(bias_sb),
        cfg=cfg,
    )
    rows = bias.shape[0]
    out = nl.ndarray((rows, *result.shape[1:]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    if core == 0:
        nisa.dma_copy(dst=out, src=result[:rows, :, :, :])
    return out


@nki.jit
def run_down(
    inter: Any, weight: Any, weight_scale: Any, bias: Any, outer: int, inner: int, tokens: int, shuffle: bool
) -> Any:
    """down_projection_mx_shard_H; inter [128, ceil(inner/512), tokens, 4], weight [<=128, ., outer] fp4 x4."""
    cores, core = nl.num_programs(0), nl.program_id(0)
    cfg = ProjConfig(outer, inner, tokens, cores, core, use_stream_shuffle_broadcast=shuffle)
    width = outer // cores
    inter_sb = nl.ndarray(inter.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=inter_sb, src=inter)
    bias_sb = nl.ndarray((1, width), dtype=bias.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=bias_sb, src=bias[:, core * width : (core + 1) * width])
    result = down_projection_mx_shard_H(
        inter_sb=inter_sb,
        weight=weight.view(nl.float4_e2m1fn_x4),
        weight_scale=weight_scale,
        bias_sb=bias_sb,
        cfg=cfg,
    )
    out = nl.ndarray((tokens, outer), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    if core == 0:
        nisa.dma_copy(dst=out, src=result[:tokens, 0, :])
    return out


def _load_x4(src: Any, dtype: Any) -> Any:
    """A [128, tiles, columns] operand in SBUF."""
    tile = nl.ndarray(src.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src.view(dtype))
    return tile


def _load_scale(src: Any) -> Any:
    """A [16, tiles, columns] scale in SBUF, spread over the quadrants."""
    tile = nl.ndarray((128, *src.shape[1:]), dtype=nl.uint8, buffer=nl.sbuf)
    _load_scales(tile, src, 0, src.shape[1])
    return tile


def _load(src: Any) -> Any:
    tile = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src)
    return tile


@nki.jit
def run_moe_gate_up(
    hidden: Any,
    hidden_scale: Any,
    gate: Any,
    gate_scale: Any,
    up: Any,
    up_scale: Any,
    gate_bias: Any,
    up_bias: Any,
    limit: float,
) -> Any:
    """gate_up_projection_mx_shard_I of one expert; operands [128, H/512, ..] x4, biases [128, I/512, 4]."""
    out, out_scale = gate_up_projection_mx_shard_I(
        _load_x4(hidden, nl.float8_e4m3fn_x4),
        _load_scale(hidden_scale),
        _load_x4(gate, nl.float4_e2m1fn_x4),
        _load_x4(up, nl.float4_e2m1fn_x4),
        _load_scale(gate_scale),
        _load_scale(up_scale),
        _load(gate_bias),
        _load(up_bias),
        gate_clamp_upper_limit=limit,
        up_clamp_upper_limit=limit,
        up_clamp_lower_limit=-limit,
    )
    result = nl.ndarray(out.shape, dtype=out.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=out)
    scale = nl.ndarray((16, *out_scale.shape[1:]), dtype=nl.uint8, buffer=nl.shared_hbm)
    for quadrant in range(4):
        nisa.dma_copy(
            dst=scale[4 * quadrant : 4 * quadrant + 4, :, :],
            src=out_scale[32 * quadrant : 32 * quadrant + 4, :, :],
        )
    return result, scale
