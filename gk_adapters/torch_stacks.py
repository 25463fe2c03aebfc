"""Stacked weights in the plain layout of the torch kernel, built directly from a checkpoint.

`weight_stacks` builds the same from index rules, for any layout; this is the short, independent way, and the one that
the rules are tested against.

Dims: L layers, H hidden, I intermediate, E experts, X experts of this rank, q / k query and KV heads of this rank,
d head size.

The plain layout pads and shuffles nothing. Each stack is allocated once and filled layer by layer through NumPy views
of memory-mapped shards, so peak memory is the stacks plus one layer's slices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gk_adapters.hf_checkpoint import HFCheckpoint, layer_prefix
from gk_adapters.hf_config import HFConfig
from gk_adapters.torch_dtypes import array_of, torch_dtype
from gk_core.decode_mesh import DecodeMesh
from gk_core.kernel_contract import TensorSpec
from gk_core.model_geometry import ModelGeometry
from gk_core.weight_layouts import ExpertFormat

__all__ = ["build_plain_stacks"]

Array = NDArray[Any]


def _plain_specs(
    geometry: ModelGeometry, mesh: DecodeMesh, rank: int, *, expert_format: ExpertFormat, model_dtype: str
) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of every plain stack of one rank, written down apart from the core's own table.

    Raises:
        LayoutError: heads do not divide over the mesh, or the rank is outside it.
        UnsupportedError: fewer experts than ranks.
    """
    layers, hidden, inter = geometry.num_layers, geometry.hidden_size, geometry.intermediate_size
    q = len(mesh.q_heads(rank, geometry.num_q_heads))
    k = len(mesh.kv_heads(rank, geometry.num_kv_heads))
    x = len(mesh.experts(rank, geometry.num_experts))
    qkv = (q + 2 * k) * geometry.head_size
    model, raw = (model_dtype,), ("uint8",)
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "input_layernorm_weight": ((hidden,), model),
        "W_qkv": ((hidden, qkv), model),
        "bias_qkv": ((qkv,), model),
        "W_out": ((q * geometry.head_size, hidden), model),
        "bias_out": ((hidden,), model),
        "sink": ((q,), ("float32",)),
        "post_attn_layernorm_weight": ((hidden,), model),
        "router_weights": ((hidden, geometry.num_experts), model),
        "router_bias": ((geometry.num_experts,), model),
        "expert_gate_up_bias": ((x, 2, inter), model),
        "expert_down_bias": ((x, hidden), model),
    }
    if expert_format is ExpertFormat.BF16:
        shapes["expert_gate_up_weights"] = ((x, 2, hidden, inter), model)
        shapes["expert_down_weights"] = ((x, inter, hidden), model)
    else:
        shapes["expert_gate_up_weights"] = ((x, 2, inter, hidden // 2), raw)
        shapes["expert_gate_up_weights_scale"] = ((x, 2, inter, hidden // 32), raw)
        shapes["expert_down_weights"] = ((x, hidden, inter // 2), raw)
        shapes["expert_down_weights_scale"] = ((x, hidden, inter // 32), raw)
    return tuple(
        TensorSpec(name=name, shape=(layers, *shape), dtypes=dtypes) for name, (shape, dtypes) in shapes.items()
    )


def build_plain_stacks(
    checkpoint: HFCheckpoint, mesh: DecodeMesh, rank: int, *, model_dtype: str | None = None
) -> dict[str, torch.Tensor]:
    """This rank's stacks by name, shapes and dtypes as the core's plain layout has them.

    Args:
        model_dtype: dtype of everything but sinks and MXFP4 bytes; the checkpoint's own when None.

    Raises:
        CheckpointError: a tensor cannot be read, or MXFP4 scales hold NaN.
        LayoutError, UnsupportedError: heads or experts do not divide over the mesh.
    """
    config = checkpoint.config
    specs = _plain_specs(
        config.geometry,
        mesh,
        rank,
        expert_format=config.expert_format,
        model_dtype=model_dtype or config.model_dtype,
    )
    stacks = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtypes[0])) for spec in specs}
    arrays = {name: array_of(stack) for name, stack in stacks.items()}
    for layer_id in range(config.geometry.num_layers):
        out = {name: array[layer_id] for name, array in arrays.items()}
        source = _LayerSource(checkpoint, layer_id)
        _fill_attention(source, out, config, mesh, rank)
        _fill_router(source, out)
        _fill_experts(source, out, config, mesh, rank)
    return stacks


class _LayerSource:
    def __init__(self, checkpoint: HFCheckpoint, layer_id: int) -> None:
        self._checkpoint = checkpoint
        self._prefix = layer_prefix(layer_id)

    def __call__(self, name: str, part: slice = slice(None)) -> Array:
        return self._checkpoint.read_slice(name=self._prefix + name, index=part)


def _fill_attention(source: _LayerSource, out: dict[str, Array], config: HFConfig, mesh: DecodeMesh, rank: int) -> None:
    g = config.geometry
    d = g.head_size
    q_heads, kv_heads = mesh.q_heads(rank, g.num_q_heads), mesh.kv_heads(rank, g.num_kv_heads)
    column = 0
    for projection, heads in (("q_proj", q_heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        rows = slice(heads.start * d, heads.stop * d)
        width = len(heads) * d
        out["W_qkv"][:, column : column + width] = source(f"self_attn.{projection}.weight", rows).T
        out["bias_qkv"][column : column + width] = source(f"self_attn.{projection}.bias", rows)
        column += width
    out["W_out"][...] = source("self_attn.o_proj.weight")[:, q_heads.start * d : q_heads.stop * d].T
    # Every TP rank adds its partial sum, so each brings an equal share of the bias.
    out["bias_out"][...] = source("self_attn.o_proj.bias").astype(np.float32) / mesh.tp_size
    out["sink"][...] = source("self_attn.sinks", slice(q_heads.start, q_heads.stop))
    out["input_layernorm_weight"][...] = source("input_layernorm.weight")
    out["post_attn_layernorm_weight"][...] = source("post_attention_layernorm.weight")


def _fill_router(source: _LayerSource, out: dict[str, Array]) -> None:
    out["router_weights"][...] = source("mlp.router.weight").T
    out["router_bias"][...] = source("mlp.router.bias")


def _fill_experts(source: _LayerSource, out: dict[str, Array], config: HFConfig, mesh: DecodeMesh, rank: int) -> None:
    """Gate and up are interleaved in the checkpoint: even rows (or columns) gate, odd ones up."""
    experts = mesh.experts(rank, config.geometry.num_experts)
    mine = slice(experts.start, experts.stop)
    bias = source("mlp.experts.gate_up_proj_bias", mine).astype(np.float32)
    out["expert_gate_up_bias"][:, 0] = bias[:, 0::2]
    out["expert_gate_up_bias"][:, 1] = bias[:, 1::2] + 1.0  # the activation's (up + 1), see `torch_moe`
    out["expert_down_bias"][...] = source("mlp.experts.down_proj_bias", mine)
    if config.expert_format is ExpertFormat.BF16:
        gate_up = source("mlp.experts.gate_up_proj", mine)
        out["expert_gate_up_weights"][:, 0] = gate_up[:, :, 0::2]
        out["expert_gate_up_weights"][:, 1] = gate_up[:, :, 1::2]
        out["expert_down_weights"][...] = source("mlp.experts.down_proj", mine)
        return
    for kind, suffix in (("blocks", ""), ("scales", "_scale")):
        gate_up = source(f"mlp.experts.gate_up_proj_{kind}", mine)
        down = source(f"mlp.experts.down_proj_{kind}", mine)
        for part in (0, 1):
            stack = out[f"expert_gate_up_weights{suffix}"][:, part]
            stack[...] = gate_up[:, part::2].reshape(stack.shape)
        down_stack = out[f"expert_down_weights{suffix}"]
        down_stack[...] = down.reshape(down_stack.shape)
