"""A checkpoint as the torch engines hold it: stacks, embedding, head, scales."""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen

from gk_adapters.hf_checkpoint import HFCheckpoint, read_kv_scales, weights_id_of
from gk_adapters.hf_config import HFConfig
from gk_adapters.torch_dtypes import array_of, torch_dtype
from gk_adapters.torch_moe import dequantise_rows
from gk_adapters.torch_stacks import build_plain_stacks
from gk_core.decode_mesh import DecodeMesh
from gk_core.decode_step import ControlShape
from gk_core.kernel_contract import KernelContract, KVScales
from gk_core.kv_layout import KVLayout
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import ExpertFormat, WeightLayout

__all__ = ["TorchModel", "load_torch_model", "resident_stacks", "torch_contract"]

_FOUR_BIT = ("expert_gate_up_weights", "expert_down_weights")
_MATRICES = ("W_qkv", "W_out", "router_weights", *_FOUR_BIT)


@frozen(kw_only=True, eq=False)
class TorchModel:
    """One rank's share of a model in memory.

    Attributes:
        config: of the checkpoint.
        dtype: that the engines compute in.
        expert_format: of `stacks`: BF16 (any float dtype) or MXFP4.
        stacks: plain stacked weights by name.
        embedding: [V, H].
        final_norm: [H].
        lm_head: [V, H]; the embedding itself where the model ties them.
        scales: KV scales.
        mesh, rank: whose share.
        weights_id: name of the weights, which a peer's must equal; see `weights_id_of`.
    """

    config: HFConfig
    dtype: torch.dtype
    expert_format: ExpertFormat
    stacks: dict[str, torch.Tensor]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    lm_head: torch.Tensor
    scales: KVScales
    mesh: DecodeMesh
    rank: int
    weights_id: str = ""


def load_torch_model(
    directory: Path,
    *,
    mesh: DecodeMesh | None = None,
    rank: int = 0,
    model_dtype: str | None = None,
    resident: bool = True,
) -> TorchModel:
    """Read a checkpoint for the torch engines.

    Args:
        model_dtype: dtype to compute in; the checkpoint's own when None.
        resident: hold matrices as `resident_stacks` does: faster steps, four times the memory for MXFP4 experts.

    Raises:
        CheckpointError: see `HFCheckpoint`.
    """
    mesh = mesh or DecodeMesh(tp_size=1)
    checkpoint = HFCheckpoint(directory)
    config = checkpoint.config
    dtype = torch_dtype(model_dtype or config.model_dtype)
    stacks = build_plain_stacks(checkpoint, mesh, rank, model_dtype=model_dtype)
    if resident:
        stacks = resident_stacks(stacks, dtype)
    embedding = _read(checkpoint, "model.embed_tokens.weight", dtype)
    tied = config.geometry.tie_embeddings
    return TorchModel(
        config=config,
        dtype=dtype,
        expert_format=ExpertFormat.BF16 if resident else config.expert_format,
        stacks=stacks,
        embedding=embedding,
        final_norm=_read(checkpoint, "model.norm.weight", dtype),
        lm_head=embedding if tied else _read(checkpoint, "lm_head.weight", dtype),
        scales=read_kv_scales(checkpoint),
        mesh=mesh,
        rank=rank,
        weights_id=weights_id_of(checkpoint),
    )


def resident_stacks(stacks: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The stacks in the form that a CPU multiplies fastest: same names and shapes, MXFP4 experts as floats.

    Matrices keep their contract shape [.., in, out] but lie [.., out, in] in memory, where one output's weights are
    consecutive. Takes the stacks out of the argument one by one, so that peak memory is one stack more.
    """
    out: dict[str, torch.Tensor] = {}
    for name in list(stacks):
        if name.endswith("_scale"):
            continue
        stack = stacks.pop(name)
        if name in _FOUR_BIT and stack.dtype == torch.uint8:
            scale = stacks.pop(f"{name}_scale")
            rows = torch.empty(*stack.shape[:-1], stack.shape[-1] * 2, dtype=dtype)
            for layer in range(stack.shape[0]):
                rows[layer] = dequantise_rows(stack[layer], scale[layer], dtype)
            out[name] = rows.transpose(-1, -2)
        elif name in _MATRICES:
            out[name] = stack.transpose(-1, -2).contiguous().transpose(-1, -2)
        else:
            out[name] = stack
    return out


def torch_contract(model: TorchModel, *, layout: KVLayout, shape: ControlShape) -> KernelContract:
    """The contract of a torch kernel over this model."""
    name = str(model.dtype).rpartition(".")[2]
    geometry = model.config.geometry
    return KernelContract(
        layout=layout,
        shape=shape,
        mesh=model.mesh,
        hidden_size=geometry.hidden_size,
        model_dtypes=(name,),
        weights=tuple(
            spec.tensor_spec
            for spec in build_stacked_weight_specs(
                geometry, model.mesh, model.rank, WeightLayout.PLAIN, model.expert_format, name
            )
        ),
    )


def _read(checkpoint: HFCheckpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    source = checkpoint.read(name=name)
    tensor = torch.empty(source.shape, dtype=dtype)
    array_of(tensor)[...] = source
    return tensor
