"""Plain stacks: every element against the checkpoint by coordinates, and against the core's table of sources."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.torch_model import load_torch_model, resident_stacks
from gk_adapters.torch_moe import dequantise_rows
from gk_adapters.torch_stacks import build_plain_stacks
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import UnsupportedError
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import WeightLayout
from tests.hf_models import make_hf_checkpoint

MESHES = {
    "1": DecodeMesh(tp_size=1),
    "tp2": DecodeMesh(tp_size=2, ep_size=2),
    # 5 experts over 3 ranks: 2, 2, 1.
    "dp3": DecodeMesh(tp_size=1, dp_size=3, ep_size=3),
    # 2 KV heads over 4 ranks: each head twice; experts 2, 1, 1, 1.
    "tp4": DecodeMesh(tp_size=4, ep_size=4),
}
H, INTER, D = 96, 64, 32


@pytest.fixture(scope="module", params=["float", "mxfp4"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HFCheckpoint, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    # 12 query heads divide over 4 ranks; hidden 96, intermediate 64.
    make_hf_checkpoint(directory, mxfp4=request.param == "mxfp4", num_attention_heads=12)
    return HFCheckpoint(directory), load_file(directory / "model.safetensors")


def _layer(tensors: Any, layer: int) -> Any:
    return lambda name: tensors[f"model.layers.{layer}.{name}"]


@pytest.mark.parametrize(("mesh_name", "rank"), [("1", 0), ("tp2", 1), ("dp3", 2), ("tp4", 0), ("tp4", 3)])
def test_stacks_hold_the_ranks_own_rows_of_the_checkpoint(
    saved: tuple[HFCheckpoint, Any], mesh_name: str, rank: int
) -> None:
    """Attention columns by head, router transposed, output bias shared out; one layer at a time."""
    checkpoint, tensors = saved
    mesh = MESHES[mesh_name]
    stacks = build_plain_stacks(checkpoint, mesh, rank)
    q, kv = mesh.q_heads(rank, 12), mesh.kv_heads(rank, 2)
    for layer in (0, 3):
        source = _layer(tensors, layer)
        heads = [("q", h) for h in q] + [("k", h) for h in kv] + [("v", h) for h in kv]
        for i, (letter, head) in enumerate(heads):
            rows = source(f"self_attn.{letter}_proj.weight")[head * D : (head + 1) * D]
            assert torch.equal(stacks["W_qkv"][layer, :, i * D : (i + 1) * D], rows.t())
            bias = source(f"self_attn.{letter}_proj.bias")[head * D : (head + 1) * D]
            assert torch.equal(stacks["bias_qkv"][layer, i * D : (i + 1) * D], bias)
        columns = source("self_attn.o_proj.weight")[:, q.start * D : q.stop * D]
        assert torch.equal(stacks["W_out"][layer], columns.t())
        assert torch.allclose(stacks["bias_out"][layer] * mesh.tp_size, source("self_attn.o_proj.bias"))
        assert torch.equal(stacks["sink"][layer], source("self_attn.sinks")[q.start : q.stop])
        assert torch.equal(stacks["router_weights"][layer], source("mlp.router.weight").t())
        assert torch.equal(stacks["router_bias"][layer], source("mlp.router.bias"))
        assert torch.equal(stacks["input_layernorm_weight"][layer], source("input_layernorm.weight"))
        assert torch.equal(stacks["post_attn_layernorm_weight"][layer], source("post_attention_layernorm.weight"))


@pytest.mark.parametrize(("mesh_name", "rank"), [("1", 0), ("tp2", 1), ("dp3", 1), ("tp4", 2)])
def test_expert_stacks_hold_whole_experts_with_gate_and_up_apart(
    saved: tuple[HFCheckpoint, Any], mesh_name: str, rank: int
) -> None:
    """Even columns (or rows) gate, odd ones up; full width whatever the mesh; +1 on the up bias."""
    checkpoint, tensors = saved
    mesh = MESHES[mesh_name]
    stacks = build_plain_stacks(checkpoint, mesh, rank)
    source = _layer(tensors, 2)
    for x, expert in enumerate(mesh.experts(rank, 5)):
        bias = source("mlp.experts.gate_up_proj_bias")[expert]
        assert torch.equal(stacks["expert_gate_up_bias"][2, x, 0], bias[0::2])
        assert torch.equal(stacks["expert_gate_up_bias"][2, x, 1], bias[1::2] + 1)
        assert torch.equal(stacks["expert_down_bias"][2, x], source("mlp.experts.down_proj_bias")[expert])
        gate_up, down = stacks["expert_gate_up_weights"][2, x], stacks["expert_down_weights"][2, x]
        if "expert_down_weights_scale" in stacks:
            assert gate_up.shape == (2, INTER, H // 2)
            assert down.shape == (H, INTER // 2)
            for part in (0, 1):
                rows = source("mlp.experts.gate_up_proj_blocks")[expert, part::2].flatten(1)
                assert torch.equal(gate_up[part], rows)
                scales = source("mlp.experts.gate_up_proj_scales")[expert, part::2]
                assert torch.equal(stacks["expert_gate_up_weights_scale"][2, x, part], scales)
            assert torch.equal(down, source("mlp.experts.down_proj_blocks")[expert].flatten(1))
            assert torch.equal(
                stacks["expert_down_weights_scale"][2, x], source("mlp.experts.down_proj_scales")[expert]
            )
        else:
            assert torch.equal(gate_up[0], source("mlp.experts.gate_up_proj")[expert, :, 0::2])
            assert torch.equal(gate_up[1], source("mlp.experts.gate_up_proj")[expert, :, 1::2])
            assert torch.equal(down, source("mlp.experts.down_proj")[expert])


def test_a_fused_row_splits_in_pairs(tmp_path: Path) -> None:
    """[g0, u0, g1, u1] = [1, 10, 2, 20]: gate [1, 2], up [10, 20]."""
    make_hf_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.gate_up_proj"][3, 7, :4] = torch.tensor([1.0, 10.0, 2.0, 20.0])
    save_file(tensors, tmp_path / "model.safetensors")
    weights = build_plain_stacks(HFCheckpoint(tmp_path), MESHES["1"], 0)["expert_gate_up_weights"]
    assert weights[1, 3, 0, 7, :2].tolist() == [1.0, 2.0]
    assert weights[1, 3, 1, 7, :2].tolist() == [10.0, 20.0]


def test_experts_are_dealt_whole() -> None:
    """Rank 77 of 128 has exactly expert 77; 128 over 3 ranks are 43, 43, 42; more ranks than experts is refused."""
    assert list(DecodeMesh(tp_size=8, dp_size=16, ep_size=128).experts(77, 128)) == [77]
    three = DecodeMesh(tp_size=1, dp_size=3, ep_size=3)
    assert [len(three.experts(r, 128)) for r in range(3)] == [43, 43, 42]


def test_more_ranks_than_experts_are_refused(saved: tuple[HFCheckpoint, Any]) -> None:
    """Rather than an empty slice."""
    with pytest.raises(UnsupportedError, match="leaves ranks without an expert"):
        build_plain_stacks(saved[0], DecodeMesh(tp_size=2, dp_size=3, ep_size=6), 5)


@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mesh_name", "rank"), [("1", 0), ("dp3", 0), ("tp4", 3)])
def test_names_shapes_and_dtypes_are_the_cores(
    saved: tuple[HFCheckpoint, Any], mesh_name: str, rank: int, model_dtype: str
) -> None:
    """The contract's table, written twice and independently."""
    checkpoint, mesh = saved[0], MESHES[mesh_name]
    stacks = build_plain_stacks(checkpoint, mesh, rank, model_dtype=model_dtype)
    config = checkpoint.config
    specs = build_stacked_weight_specs(
        config.geometry, mesh, rank, WeightLayout.PLAIN, config.expert_format, model_dtype
    )
    got = {name: (tuple(s.shape), str(s.dtype).removeprefix("torch.")) for name, s in stacks.items()}
    assert got == {spec.name: (spec.shape, spec.dtype) for spec in specs}


def test_resident_stacks_keep_shapes_and_values(saved: tuple[HFCheckpoint, Any]) -> None:
    """[in, out] shapes over [out, in] memory; MXFP4 bytes become the floats that they stand for."""
    checkpoint, _ = saved
    mesh = MESHES["1"]
    plain = build_plain_stacks(checkpoint, mesh, 0)
    kept = {name: stack.clone() for name, stack in plain.items()}
    resident = resident_stacks(plain, torch.float32)
    assert plain == {}
    specs = build_stacked_weight_specs(
        checkpoint.config.geometry, mesh, 0, WeightLayout.PLAIN, type(checkpoint.config.expert_format).BF16, "float32"
    )
    assert {n: tuple(s.shape) for n, s in resident.items()} == {s.name: s.shape for s in specs}
    for name, stack in resident.items():
        wanted = kept[name]
        if wanted.dtype == torch.uint8:
            wanted = dequantise_rows(wanted, kept[f"{name}_scale"], torch.float32).transpose(-1, -2)
        assert torch.equal(stack, wanted), name
    for name in ("W_qkv", "W_out", "router_weights", "expert_gate_up_weights", "expert_down_weights"):
        assert resident[name].stride(-2) == 1, name


def test_a_square_down_projection_is_not_transposed(tmp_path: Path) -> None:
    """hidden == intermediate hides a missing transpose from shapes; values show it."""
    hf = make_hf_checkpoint(tmp_path, mxfp4=True, hidden_size=64, intermediate_size=64)
    model = load_torch_model(tmp_path)
    experts = hf.model.layers[1].mlp.experts
    picks = random.Random(1)
    for _ in range(50):
        e, i, h = picks.randrange(5), picks.randrange(64), picks.randrange(64)
        assert model.stacks["expert_down_weights"][1, e, i, h] == experts.down_proj[e, i, h]
        assert model.stacks["expert_gate_up_weights"][1, e, 1, h, i] == experts.gate_up_proj[e, h, 2 * i + 1]
