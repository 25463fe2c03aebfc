"""Small random GPT-OSS checkpoints, made and saved by transformers, and rewritten as MXFP4 or in shards.

The sizes are pairwise different and hidden != intermediate, so a missing transpose or a swapped axis shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from gk_adapters.mxfp4 import decode_mxfp4, encode_mxfp4

__all__ = ["make_hf_checkpoint", "make_hf_config", "make_hf_model", "rewrite_json", "to_mxfp4", "to_shards"]

ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
    "rope_theta": 150000.0,
}


def make_hf_config(**changes: Any) -> GptOssConfig:
    """A small config: 4 layers, hidden 96, intermediate 64, 6 query and 2 KV heads of 32, 5 experts, window 128."""
    values: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 4,
        "vocab_size": 199,
        "sliding_window": 128,
        "max_position_embeddings": 1024,
        "rope_parameters": dict(ROPE),
        "initializer_range": 0.15,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return GptOssConfig(**(values | changes))


def make_hf_model(config: GptOssConfig, *, seed: int = 1) -> Any:
    """A random model in float32 whose norms, biases and sinks are random too, so that dropping one shows."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model: Any = GptOssForCausalLM(config)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
    return model


def make_hf_checkpoint(directory: Path, *, seed: int = 1, mxfp4: bool = False, **changes: object) -> Any:
    """Save a random model under `directory`; return the transformers model that holds exactly the saved weights."""
    model = make_hf_model(make_hf_config(**changes), seed=seed)
    if mxfp4:
        _round_experts(model)
    model.save_pretrained(directory)
    if mxfp4:
        to_mxfp4(directory)
    return model


def _round_experts(model: Any) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            experts = layer.mlp.experts
            for parameter in (experts.gate_up_proj, experts.down_proj):
                blocks, scales = encode_mxfp4(parameter.transpose(1, 2).contiguous().numpy())
                parameter.copy_(torch.from_numpy(decode_mxfp4(blocks, scales)).transpose(1, 2))


def to_mxfp4(directory: Path) -> None:
    """Rewrite a single-file checkpoint's experts as MXFP4 blocks and scales, as the public checkpoints have them."""
    tensors = load_file(directory / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = encode_mxfp4(tensors.pop(name).float().transpose(1, 2).contiguous().numpy())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    rewrite_json(
        directory / "config.json",
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    )


def to_shards(directory: Path, num_shards: int = 3) -> None:
    """Split a single-file checkpoint into shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file_name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::num_shards]}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewrite_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None removes a key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
