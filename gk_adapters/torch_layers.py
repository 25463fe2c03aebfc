"""Per-layer views of plain stacks: made once, so that a step copies no weight and slices none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from gk_adapters.torch_moe import Experts
from gk_core.decode_mesh import DecodeMesh
from gk_core.model_geometry import ModelGeometry

__all__ = ["LayerWeights", "views_of_layers"]


@frozen(kw_only=True, eq=False)
class LayerWeights:
    """One layer's weights: shapes of `WeightLayout.PLAIN` without the leading axis.

    Attributes:
        sink: float32 [1, h, g, 1], one raw logit per query head.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    sink: torch.Tensor
    router: torch.Tensor
    router_bias: torch.Tensor
    experts: Experts


def views_of_layers(
    stacks: Mapping[str, torch.Tensor], geometry: ModelGeometry, mesh: DecodeMesh, rank: int
) -> tuple[LayerWeights, ...]:
    """Views of every layer; a stack whose leading axis is 1 serves all layers."""
    experts = mesh.experts(rank, geometry.num_experts)
    kv_heads = len(mesh.kv_heads(rank, geometry.num_kv_heads))
    layers = []
    for layer_id in range(geometry.num_layers):
        w = {name: stack[layer_id if stack.shape[0] > 1 else 0] for name, stack in stacks.items()}
        layers.append(
            LayerWeights(
                input_norm=w["input_layernorm_weight"],
                post_norm=w["post_attn_layernorm_weight"],
                qkv=w["W_qkv"],
                qkv_bias=w["bias_qkv"],
                out=w["W_out"],
                out_bias=w["bias_out"],
                sink=w["sink"].view(1, kv_heads, -1, 1),
                router=w["router_weights"],
                router_bias=w["router_bias"],
                experts=_experts(w, experts.start, geometry.num_experts),
            )
        )
    return tuple(layers)


def _experts(w: Mapping[str, torch.Tensor], first: int, num_experts: int) -> Experts:
    gate_up = w["expert_gate_up_weights"]
    gate_up_scale, down_scale = w.get("expert_gate_up_weights_scale"), w.get("expert_down_weights_scale")
    return Experts(
        gate_up=(gate_up if gate_up_scale is not None else _joined(gate_up)).unbind(0),
        gate_up_scale=None if gate_up_scale is None else gate_up_scale.unbind(0),
        gate_up_bias=w["expert_gate_up_bias"].flatten(1),
        down=w["expert_down_weights"].unbind(0),
        down_scale=None if down_scale is None else down_scale.unbind(0),
        down_bias=w["expert_down_bias"],
        first=first,
        num_experts=num_experts,
    )


def _joined(gate_up: torch.Tensor) -> torch.Tensor:
    """[X, 2, H, I] as [X, H, 2I] where memory is [X, 2, I, H], which copies nothing; else as it is."""
    experts, _, hidden, inter = gate_up.shape
    if gate_up.stride() != (2 * hidden * inter, hidden * inter, 1, hidden):
        return gate_up
    return gate_up.transpose(2, 3).view(experts, 2 * inter, hidden).transpose(1, 2)
