"""Per-layer views of plain stacks, or prepacked copies: made once, so that a step copies no weight and slices none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from gk_adapters.torch_math import Matrix, PackedMatrix
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
    qkv: Matrix
    qkv_bias: torch.Tensor
    out: Matrix
    out_bias: torch.Tensor
    sink: torch.Tensor
    router: Matrix
    router_bias: torch.Tensor
    experts: Experts


def views_of_layers(
    stacks: Mapping[str, torch.Tensor], geometry: ModelGeometry, mesh: DecodeMesh, rank: int, *, prepack: bool = False
) -> tuple[LayerWeights, ...]:
    """Views of every layer; a stack whose leading axis is 1 serves all layers.

    Args:
        prepack: hold copies of float matrices in oneDNN's order instead (MXFP4 bytes stay as they are).

    Raises:
        UnsupportedError: prepack with a dtype or a torch that has no such order.
    """
    experts = mesh.experts(rank, geometry.num_experts)
    kv_heads = len(mesh.kv_heads(rank, geometry.num_kv_heads))
    layers = []
    for layer_id in range(geometry.num_layers):
        w = {name: stack[layer_id if stack.shape[0] > 1 else 0] for name, stack in stacks.items()}
        layers.append(
            LayerWeights(
                input_norm=w["input_layernorm_weight"],
                post_norm=w["post_attn_layernorm_weight"],
                qkv=_matrix(w["W_qkv"], prepack),
                qkv_bias=w["bias_qkv"],
                out=_matrix(w["W_out"], prepack),
                out_bias=w["bias_out"],
                sink=w["sink"].view(1, kv_heads, -1, 1),
                router=_matrix(w["router_weights"], prepack),
                router_bias=w["router_bias"],
                experts=_experts(w, experts.start, geometry.num_experts, prepack),
            )
        )
    return tuple(layers)


def _matrix(weight: torch.Tensor, prepack: bool) -> Matrix:
    return PackedMatrix(weight) if prepack else weight


def _experts(w: Mapping[str, torch.Tensor], first: int, num_experts: int, prepack: bool) -> Experts:
    gate_up, down = w["expert_gate_up_weights"], w["expert_down_weights"]
    gate_up_scale, down_scale = w.get("expert_gate_up_weights_scale"), w.get("expert_down_weights_scale")
    return Experts(
        gate_up=_matrices(gate_up if gate_up_scale is not None else _joined(gate_up), prepack),
        gate_up_scale=None if gate_up_scale is None else gate_up_scale.unbind(0),
        gate_up_bias=w["expert_gate_up_bias"].flatten(1),
        down=_matrices(down, prepack),
        down_scale=None if down_scale is None else down_scale.unbind(0),
        down_bias=w["expert_down_bias"],
        first=first,
        num_experts=num_experts,
    )


def _matrices(stack: torch.Tensor, prepack: bool) -> tuple[Matrix, ...]:
    """One per expert; bytes, and gate and up that cannot be joined, stay views."""
    packable = prepack and stack.dim() == 3 and stack.dtype != torch.uint8
    return tuple(_matrix(matrix, packable) for matrix in stack.unbind(0))


def _joined(gate_up: torch.Tensor) -> torch.Tensor:
    """[X, 2, H, I] as [X, H, 2I] where memory is [X, 2, I, H], which copies nothing; else as it is."""
    experts, _, hidden, inter = gate_up.shape
    if gate_up.stride() != (2 * hidden * inter, hidden * inter, 1, hidden):
        return gate_up
    return gate_up.transpose(2, 3).view(experts, 2 * inter, hidden).transpose(1, 2)
