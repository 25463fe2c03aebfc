"""The giga kernel: one call for all layers of one decode step.

Layer i takes weights i, buffer i // 2, and by its parity the sliding (even) or the full (odd) table, positions and
slots. Everything that is the same for all layers of a kind is made before the first one. Nothing lives outside this
call: all state of a trace is made here, so a second trace starts afresh.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.giga_decode.gather import Gather, itemsize_of, make_gather, make_gather_plan
from gk_kernels.giga_decode.kv_write import WritePlan, make_write_plan
from gk_kernels.giga_decode.layer import AttentionWeights, Cache, ExpertWeights, attention_half, expert_half
from gk_kernels.giga_decode.qkv import load_angles
from gk_kernels.giga_decode.tiles import layer_of, load, make_constants


@nki.jit  # type: ignore[untyped-decorator]
def giga_decode(
    x: nl.NkiTensor,
    input_layernorm_weight: nl.NkiTensor,
    w_qkv: nl.NkiTensor,
    bias_qkv: nl.NkiTensor,
    w_out: nl.NkiTensor,
    bias_out: nl.NkiTensor,
    sink: nl.NkiTensor,
    post_attn_layernorm_weight: nl.NkiTensor,
    router_weights: nl.NkiTensor,
    router_bias: nl.NkiTensor,
    expert_gate_up_weights: nl.NkiTensor,
    expert_gate_up_weights_scale: nl.NkiTensor | None,
    expert_gate_up_bias: nl.NkiTensor,
    expert_down_weights: nl.NkiTensor,
    expert_down_weights_scale: nl.NkiTensor | None,
    expert_down_bias: nl.NkiTensor,
    k_buffers: tuple[nl.NkiTensor, ...] | nl.NkiTensor,
    v_buffers: tuple[nl.NkiTensor, ...] | nl.NkiTensor,
    block_table: nl.NkiTensor,
    block_table_swa: nl.NkiTensor,
    positions: nl.NkiTensor,
    positions_swa: nl.NkiTensor,
    swa_start: nl.NkiTensor,
    slots: nl.NkiTensor,
    slots_swa: nl.NkiTensor,
    writes: nl.NkiTensor,
    writes_swa: nl.NkiTensor,
    cos: nl.NkiTensor,
    sin: nl.NkiTensor,
    first_expert: nl.NkiTensor,
    config: DecodeConfig,
) -> nl.NkiTensor:
    """Hidden states [T, Hp] of this rank's rows after all layers, in x's dtype; K and V of all rows are written in
    place.

    Dims: L layers (or 1, shared), g group buffers, F and S table widths.

    x: [T, Hp], this rank's rows of the embedded tokens, hidden in the stored order, padding zero.
    weights: the stacks of the NKI weight layout, leading axis L or 1; scales None for float experts.
    k_buffers, v_buffers: g tensors [num_blocks, kv, block, d], K packed [num_blocks, kv, block / 2, d, 2] or not; or
        one tensor of each with a leading axis g. block_table [R, F], block_table_swa [R, S]: int32; unused entries 0.
    positions, positions_swa, swa_start: [R, 1] float32.
    slots, slots_swa: [R, 1] int32, all inside the cache, scratch slots for rows that write nothing (see `kv_write`).
    writes, writes_swa: [R, 1] uint8, 1 where a row writes.
    cos, sin: [d / 2, R, 1].
    first_expert: [1, 1] int32.
    """
    dtype = x.dtype
    constants = make_constants(dtype)
    rows = block_table.shape[0]
    k_first = k_buffers[0]
    v_first = v_buffers[0]
    packed = len(k_first.shape) == len(v_first.shape) + 1
    num_kv_heads, block_size, head_size = v_first.shape[1], v_first.shape[2], v_first.shape[3]
    itemsize = itemsize_of(v_first)
    plan_swa = make_gather_plan(rows, block_table_swa.shape[1], block_size, head_size, itemsize, packed)
    plan_full = make_gather_plan(rows, block_table.shape[1], block_size, head_size, itemsize, packed)
    gathers: list[Gather] = [
        make_gather(block_table_swa, positions_swa, swa_start, num_kv_heads, plan_swa, "swa"),
        make_gather(block_table, positions, None, num_kv_heads, plan_full, "full"),
    ]
    scratch = config.scratch_slot
    write_plans: list[WritePlan] = [
        make_write_plan(slots_swa, writes_swa, block_size, num_kv_heads, packed, scratch, "write_swa"),
        make_write_plan(slots, writes, block_size, num_kv_heads, packed, scratch, "write_full"),
    ]
    cos_rows = load_angles(cos, "cos")
    sin_rows = load_angles(sin, "sin")
    expert_id = load(first_expert, nl.int32, "first_expert")

    state = load(x, nl.float32, "x")
    for i in range(config.num_layers):
        parity = i % 2
        attention = AttentionWeights(
            norm=layer_of(input_layernorm_weight, i), qkv=layer_of(w_qkv, i), qkv_bias=layer_of(bias_qkv, i),
            out=layer_of(w_out, i), out_bias=layer_of(bias_out, i), sink=layer_of(sink, i),
        )  # fmt: skip
        cache = Cache(k=k_buffers[i // 2], v=v_buffers[i // 2], gather=gathers[parity], write=write_plans[parity])
        state = attention_half(state, attention, cache, cos_rows, sin_rows, dtype, config, constants, f"l{i}a")
        gate_up_scale = None
        down_scale = None
        if expert_gate_up_weights_scale is not None:
            gate_up_scale = layer_of(expert_gate_up_weights_scale, i)
            down_scale = layer_of(expert_down_weights_scale, i)
        experts = ExpertWeights(
            norm=layer_of(post_attn_layernorm_weight, i), router=layer_of(router_weights, i),
            router_bias=layer_of(router_bias, i), gate_up=layer_of(expert_gate_up_weights, i),
            gate_up_scale=gate_up_scale, gate_up_bias=layer_of(expert_gate_up_bias, i),
            down=layer_of(expert_down_weights, i), down_scale=down_scale, down_bias=layer_of(expert_down_bias, i),
        )  # fmt: skip
        state = expert_half(state, experts, expert_id, dtype, config, constants, f"l{i}e")

    result = nl.ndarray(x.shape, dtype=dtype, buffer=nl.sbuf, name="result")
    nisa.tensor_copy(dst=result, src=state)
    out = nl.ndarray(x.shape, dtype=dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=result)
    return out
