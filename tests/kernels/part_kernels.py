"""One small kernel around each part of the giga kernel, so that a part runs alone on plain arrays."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.attention import attend
from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.giga_decode.dequantise import dequantise_columns
from gk_kernels.giga_decode.experts import activate, add_down
from gk_kernels.giga_decode.experts_mx import activate_mx, add_down_mx, contract_mx, hidden_lanes, load_mx, quantise
from gk_kernels.giga_decode.gather import itemsize_of, make_gather, make_gather_plan
from gk_kernels.giga_decode.kv_write import make_write_plan, write_packed_keys, write_tokens
from gk_kernels.giga_decode.norms import rms_norm
from gk_kernels.giga_decode.qkv import NewTokens, as_stored, load_angles, rotate
from gk_kernels.giga_decode.router import route
from gk_kernels.giga_decode.tiles import load, make_constants, turn_rows


def give(tile: nl.NkiTensor) -> nl.NkiTensor:
    """An SBUF tile as the kernel's output."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit  # type: ignore[untyped-decorator]
def norm_kernel(x: nl.NkiTensor, gain: nl.NkiTensor, hidden_size: int, epsilon: float) -> nl.NkiTensor:
    """`norms.rms_norm`."""
    constants = make_constants(nl.float32)
    return give(rms_norm(load(x, nl.float32, "x"), gain, hidden_size, epsilon, constants, "norm"))


@nki.jit  # type: ignore[untyped-decorator]
def rotate_kernel(x: nl.NkiTensor, cos: nl.NkiTensor, sin: nl.NkiTensor) -> nl.NkiTensor:
    """`qkv.rotate`."""
    return give(rotate(load(x, nl.float32, "x"), load_angles(cos, "cos"), load_angles(sin, "sin"), "rope"))


@nki.jit  # type: ignore[untyped-decorator]
def stored_kernel(x: nl.NkiTensor, like: nl.NkiTensor, scale: float) -> nl.NkiTensor:
    """`qkv.as_stored` in the dtype of `like`."""
    return give(as_stored(load(x, nl.float32, "x"), scale, like.dtype, "stored"))


@nki.jit  # type: ignore[untyped-decorator]
def route_kernel(normed: nl.NkiTensor, weight: nl.NkiTensor, bias: nl.NkiTensor, winners: int) -> nl.NkiTensor:
    """`router.route`."""
    return give(route(load(normed, nl.float32, "x"), weight, bias, winners, make_constants(nl.float32), "router"))


@nki.jit  # type: ignore[untyped-decorator]
def dequantise_kernel(weight: nl.NkiTensor, scale: nl.NkiTensor) -> nl.NkiTensor:
    """`dequantise.dequantise_columns` of the first 512 columns."""
    return give(dequantise_columns(weight, scale, 0, nl.float32, make_constants(nl.float32), "w"))


@nki.jit  # type: ignore[untyped-decorator]
def expert_kernel(
    x: nl.NkiTensor, affinity: nl.NkiTensor, gate_up: nl.NkiTensor, gate_up_scale: nl.NkiTensor | None,
    gate_up_bias: nl.NkiTensor, down: nl.NkiTensor, down_scale: nl.NkiTensor | None, down_bias: nl.NkiTensor,
    config: DecodeConfig,
) -> nl.NkiTensor:  # fmt: skip
    """All experts of a rank on `x` [N, Hp], float, widened or MX as the arguments say."""
    constants = make_constants(x.dtype)
    turned = turn_rows(load(x, x.dtype, "x"), 128, "turned")
    shares = [load(affinity, nl.float32, "affinity")]
    total = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf, name="total")
    for e in range(gate_up.shape[0]):
        bias = down_bias[e : e + 1, :]
        if config.mx_matmul and gate_up_scale is not None and down_scale is not None:
            tokens = quantise(hidden_lanes(turned, f"lanes{e}"), config.mx_terms, f"tokens{e}")
            act8 = activate_mx(tokens, gate_up[e], gate_up_scale[e], gate_up_bias[e], config, f"e{e}")
            add_down_mx(act8, down[e], down_scale[e], bias, shares, e, [total], constants, f"d{e}")
        else:
            up_scale = None if gate_up_scale is None else gate_up_scale[e]
            out_scale = None if down_scale is None else down_scale[e]
            act = activate(turned, gate_up[e], up_scale, gate_up_bias[e], config, constants, f"e{e}")
            add_down(act, down[e], out_scale, bias, shares, e, [total], constants, f"d{e}")
    return give(total)


@nki.jit  # type: ignore[untyped-decorator]
def product_mx_kernel(x: nl.NkiTensor, weight: nl.NkiTensor, scale: nl.NkiTensor, terms: int) -> nl.NkiTensor:
    """`experts_mx.contract_mx` of tokens x [n, Hp], quantised to `terms`, with 512 columns of MXFP4 weights."""
    tokens = quantise(hidden_lanes(turn_rows(load(x, x.dtype, "x"), 128, "turned"), "lanes"), terms, "tokens")
    sums = nl.ndarray((x.shape[0], 512), dtype=nl.float32, buffer=nl.psum, name="sums")
    contract_mx(sums, tokens, 0, x.shape[0], [load_mx(weight, scale, 0, "weight")], 0, 512)
    out = nl.ndarray((x.shape[0], 512), dtype=nl.float32, buffer=nl.sbuf, name="product")
    nisa.tensor_copy(dst=out, src=sums)
    return give(out)


@nki.jit  # type: ignore[untyped-decorator]
def pairs_kernel(slots: nl.NkiTensor, writes: nl.NkiTensor, block_size: int, scratch_slot: int) -> nl.NkiTensor:
    """Pair rows [R, 2] of `kv_write.make_write_plan` for one KV head: the even pass, then the odd one."""
    plan = make_write_plan(slots, writes, block_size, 1, True, scratch_slot, "plan")
    assert plan.pairs is not None
    return give(plan.pairs.reshape((slots.shape[0], 2)))


@nki.jit  # type: ignore[untyped-decorator]
def write_kernel(
    k: nl.NkiTensor, v: nl.NkiTensor, new_k: nl.NkiTensor, new_v: nl.NkiTensor, slots: nl.NkiTensor,
    writes: nl.NkiTensor, scratch_slot: int,
) -> nl.NkiTensor:  # fmt: skip
    """`kv_write` of [R, kv * d] tokens; returns the new K."""
    packed = len(k.shape) == 5
    heads = v.shape[1]
    plan = make_write_plan(slots, writes, v.shape[2], heads, packed, scratch_slot, "write")
    tile_k = load(new_k, new_k.dtype, "new_k")
    if plan.pairs is not None:
        write_packed_keys(k, tile_k, plan.pairs, plan.lanes, heads, "k")
    else:
        write_tokens(k, tile_k, plan, heads, "k")
    write_tokens(v, load(new_v, new_v.dtype, "new_v"), plan, heads, "v")
    return give(tile_k)


@nki.jit  # type: ignore[untyped-decorator]
def attend_kernel(
    queries: nl.NkiTensor, keys: nl.NkiTensor, values: nl.NkiTensor, k: nl.NkiTensor, v: nl.NkiTensor,
    sink: nl.NkiTensor, table: nl.NkiTensor, positions: nl.NkiTensor, starts: nl.NkiTensor | None, config: DecodeConfig,
) -> nl.NkiTensor:  # fmt: skip
    """`attention.attend` of queries [d, q, R] with own keys and values [d, kv, R] over a paged cache."""
    rows, width = table.shape
    packed = len(k.shape) == 5
    plan = make_gather_plan(rows, width, v.shape[2], v.shape[3], itemsize_of(v), packed)
    gather = make_gather(table, positions, starts, v.shape[1], plan, "gather")
    new = NewTokens(
        queries=load(queries, queries.dtype, "q"), keys=load(keys, keys.dtype, "k_own"),
        values=load(values, values.dtype, "v_own"), stored_keys=queries, stored_values=queries,
    )  # fmt: skip
    return give(attend(new, k, v, sink, gather, config, make_constants(queries.dtype), "attn"))
