"""A 120B rank's share of one layer at full size, with made-up weights: for the kernel and for its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from gk_adapters.nki_kernel import giga_kernel
from gk_adapters.torch_giga import giga_weight_names, scratch_slots, to_stored_order
from gk_core.decode_mesh import DecodeMesh
from gk_core.model_geometry import GPT_OSS_120B, alternating_kinds
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import PADDING, ExpertFormat, WeightLayout, hidden_order
from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.reference.layer import decode_layer
from gk_kernels.simulator import SimulationResult, simulate

__all__ = ["LayerCase", "make_layer_case", "reference_hidden", "simulate_layer"]

Array = NDArray[Any]
MESH = DecodeMesh(tp_size=8, dp_size=16, ep_size=128)
BLOCK, NUM_BLOCKS = 128, 24
SCRATCH = (NUM_BLOCKS - 1) * BLOCK
"""The last block is scratch, and this its first slot."""


@frozen(kw_only=True, eq=False)
class LayerCase:
    """Inputs of one layer. The rank stands alone: its partial sums are not added to others'."""

    x: Array
    stacks: Mapping[str, Array]
    k: Array
    v: Array
    table: Array
    positions: Array
    starts: Array
    slots: Array
    writes: Array
    cos: Array
    sin: Array
    config: DecodeConfig


def _weight(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    if dtype == "uint16":
        values: Array = rng.integers(0, 65536, shape, dtype=np.uint16)
        return values
    if dtype == "uint8":
        return rng.integers(118, 122, shape, dtype=np.uint8)
    values = rng.standard_normal(shape, dtype=np.float32)
    values = values + 1 if "layernorm" in name else values * 0.3 if "bias" in name or name == "sink" else values * 0.02
    return values.astype(getattr(ml_dtypes, dtype, dtype))


def make_layer_case(*, dtype: str, kv_dtype: Any, packed: bool, mx_terms: int, rows: int = 8) -> LayerCase:
    """Layer 0 (sliding) of rank 0: 8 query heads, 1 KV head, one expert, MXFP4, hidden 2880 padded to 3072."""
    rng = np.random.default_rng(11)
    g = evolve(GPT_OSS_120B, num_layers=1, attention_kinds=alternating_kinds(1))
    specs = build_stacked_weight_specs(g, MESH, 0, WeightLayout.NKI, ExpertFormat.MXFP4, dtype)
    stacks = {s.name: _weight(rng, s.name, s.shape, s.dtype) for s in specs}
    pad = np.flatnonzero(np.array(hidden_order(g.hidden_size)) == PADDING)
    for name in ("input_layernorm_weight", "bias_out", "post_attn_layernorm_weight", "expert_down_bias", "W_out",
                 "expert_down_weights"):  # fmt: skip
        stacks[name][..., pad] = 0
    # So that expert 0, the only one here, wins now and then.
    stacks["router_bias"][..., 0] = 1.0
    positions = np.array([[5], [127], [128], [129], [200], [255], [131], [130]][:rows], np.float32)
    starts = np.maximum(positions - 127, 0)
    blocks = rng.permutation(NUM_BLOCKS - 2)[: 2 * rows] + 1
    table = blocks.reshape(rows, 2).astype(np.int32)
    update = (
        table[np.arange(rows), (positions[:, 0] // BLOCK).astype(int)] * BLOCK + positions[:, 0].astype(int) % BLOCK
    )
    update[-1] = -1
    slots, writes = scratch_slots(update[:, None].astype(np.int64), BLOCK, SCRATCH)
    k, v = (rng.standard_normal((NUM_BLOCKS, 1, BLOCK, g.head_size), np.float32).astype(kv_dtype) for _ in range(2))
    angles = rng.uniform(0, 6, (g.head_size // 2, rows, 1)).astype(np.float32)
    float_type = getattr(ml_dtypes, dtype, dtype)
    return LayerCase(
        x=to_stored_order(rng.standard_normal((rows, g.hidden_size), np.float32).astype(float_type), g.hidden_size),
        stacks=stacks,
        k=np.ascontiguousarray(k.reshape(NUM_BLOCKS, 1, BLOCK // 2, 2, -1).swapaxes(3, 4)) if packed else k,
        v=v, table=table, positions=positions, starts=starts, slots=slots, writes=writes,
        cos=np.cos(angles).astype(float_type), sin=np.sin(angles).astype(float_type),
        config=DecodeConfig(
            num_layers=1, hidden_size=g.hidden_size, num_q_heads=8, num_kv_heads=1, head_size=g.head_size,
            experts_per_token=4, swiglu_alpha=g.swiglu_alpha, swiglu_limit=g.swiglu_limit,
            rms_norm_eps=g.rms_norm_eps, k_scale=2.0, v_scale=0.5, tp_groups=((0,),), ep_groups=((0,),),
            mx_matmul=mx_terms > 0, mx_terms=mx_terms, scratch_slot=SCRATCH,
        ),
    )  # fmt: skip


def simulate_layer(case: LayerCase, *, target: str) -> SimulationResult:
    """The kernel on the case; it writes the case's K and V."""
    full = np.zeros((len(case.x), 1), np.int32)  # no full layer is run
    return simulate(
        giga_kernel(), case.x, *(case.stacks[name] for name in giga_weight_names()), (case.k,), (case.v,), full,
        case.table, case.positions, case.positions, case.starts, case.slots, case.slots, case.writes, case.writes,
        case.cos, case.sin, np.zeros((1, 1), np.int32), case.config, target=target,
    )  # fmt: skip


def reference_hidden(case: LayerCase, *, mx_terms: int) -> Array:
    """The reference on a case that the kernel has not run on; it writes the case's K and V."""
    return decode_layer(
        case.x.astype(np.float32), {name: stack[0] for name, stack in case.stacks.items()}, case.k, case.v, case.table,
        case.positions[:, 0].astype(int).tolist(), case.starts[:, 0].astype(int).tolist(), case.slots[:, 0],
        case.writes[:, 0], case.cos[:, :, 0].T.astype(np.float32), case.sin[:, :, 0].T.astype(np.float32),
        config=case.config, mx_terms=mx_terms,
    )  # fmt: skip
