"""The shipped tiny-recall folder: its files, tensors, tokenizer and demo prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from tools import mxfp4
from tools.dequantize_checkpoint import dequantize_checkpoint
from tools.recall_checkpoint import CONFIG, DEMO_LENGTHS, hf_config
from tools.recall_prompts import NUM_SLOTS, RECORD, SLOT, VOCABULARY, make_prompt, to_text

FOLDER = Path(__file__).parents[2] / "models" / "tiny-recall"

# hidden 128, 8 query heads and 2 KV heads of 64, 8 experts of 96, 640 words
LAYER_TENSORS = {
    "input_layernorm.weight": (128,),
    "post_attention_layernorm.weight": (128,),
    "self_attn.q_proj.weight": (512, 128),
    "self_attn.q_proj.bias": (512,),
    "self_attn.k_proj.weight": (128, 128),
    "self_attn.k_proj.bias": (128,),
    "self_attn.v_proj.weight": (128, 128),
    "self_attn.v_proj.bias": (128,),
    "self_attn.o_proj.weight": (128, 512),
    "self_attn.o_proj.bias": (128,),
    "self_attn.sinks": (8,),
    "mlp.router.weight": (8, 128),
    "mlp.router.bias": (8,),
    "mlp.experts.gate_up_proj_blocks": (8, 192, 4, 16),
    "mlp.experts.gate_up_proj_scales": (8, 192, 4),
    "mlp.experts.gate_up_proj_bias": (8, 192),
    "mlp.experts.down_proj_blocks": (8, 128, 3, 16),
    "mlp.experts.down_proj_scales": (8, 128, 3),
    "mlp.experts.down_proj_bias": (8, 128),
}


def _read(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safetensors' handle is no mapping)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return _read(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_folder_weighs_at_most_5_megabytes() -> None:
    """The whole folder fits in a source repository."""
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 5_000_000


def test_tensors_have_the_public_names_shapes_and_dtypes(tensors: dict[str, torch.Tensor]) -> None:
    """Experts are uint8 blocks and scales under GPT-OSS names, everything else bfloat16."""
    expected = {f"model.layers.{i}.{name}": shape for i in range(4) for name, shape in LAYER_TENSORS.items()}
    expected |= {"model.embed_tokens.weight": (640, 128), "lm_head.weight": (640, 128), "model.norm.weight": (128,)}
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected
    for name, value in tensors.items():
        packed = name.endswith(("_blocks", "_scales"))
        assert value.dtype == (torch.uint8 if packed else torch.bfloat16), name


def test_sinks_and_biases_are_trained(tensors: dict[str, torch.Tensor]) -> None:
    """No head's sink stayed at its initial 0, and no bias vector is all zeros."""
    for name, value in tensors.items():
        if name.endswith("sinks"):
            assert (value.abs() > 1e-3).all(), name
        elif name.endswith("bias"):
            assert value.abs().max() > 1e-3, name


def test_config_has_the_keys_of_public_gpt_oss_files() -> None:
    """YaRN under rope_scaling, theta beside it, MXFP4 with the modules left out of it."""
    config = json.loads((FOLDER / "config.json").read_text())
    assert config == hf_config(CONFIG)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (config["sliding_window"], config["rope_theta"]) == (128, 150000.0)
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert (config["hidden_size"], config["intermediate_size"], config["head_dim"]) == (128, 96, 64)
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 4)


def test_tokenizer_maps_words_to_ids_and_back(tokenizer: Any) -> None:
    """Any text of the vocabulary survives the round trip; specials are where config.json says."""
    ids = list(range(len(VOCABULARY)))
    assert tokenizer(to_text(ids))["input_ids"] == ids
    assert tokenizer.decode(ids) == to_text(ids)
    assert tokenizer("k07=owl\n recall  k07")["input_ids"] == [RECORD + 7 * 16 + 11, 8, SLOT + 7]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer("nowhere")["input_ids"] == [tokenizer.unk_token_id] == [3]


def test_chat_template_is_the_bare_prompt(tokenizer: Any) -> None:
    """A user's message is the prompt itself; an answer ends with <|return|>."""
    chat = [
        {"role": "user", "content": "k07=owl recall k07"},
        {"role": "assistant", "content": "owl k08 none"},
        {"role": "user", "content": "recall k30"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "k07=owl recall k07 owl k08 none <|return|> recall k30"


@pytest.mark.parametrize("length", DEMO_LENGTHS)
def test_demo_prompts_have_exactly_their_length(tokenizer: Any, length: int) -> None:
    """prompt-N.txt tokenises to N tokens: those of the seeded builder."""
    ids = tokenizer((FOLDER / "prompts" / f"prompt-{length}.txt").read_text())["input_ids"]
    assert len(ids) == length
    assert ids == list(make_prompt(length, length).token_ids)


@pytest.mark.parametrize("length", [*range(1, 60), 127, 128, 129, 161, 162, 163, 255, 256, 700])
def test_prompts_have_the_asked_length_and_an_answer_from_their_records(length: int) -> None:
    """The answer walks the slots in order with the values that the prompt records."""
    prompt = make_prompt(5, length)
    assert len(prompt.token_ids) == length
    words = prompt.text.split()
    records = dict(word.split("=") for word in words if "=" in word)
    answer = [words[-1], *to_text(prompt.answer_ids).split()]
    slots, values = answer[0:-1:2], answer[1::2]
    assert answer[-1] == "<|return|>"
    assert len(slots) >= 16
    step, last = (-1, 0) if "down" in words else (1, NUM_SLOTS - 1)
    assert [int(slot[1:]) for slot in slots] == list(range(int(slots[0][1:]), last + step, step))
    expected = [records.get(slot, "none") for slot in slots]
    assert values == ([value.upper() for value in expected] if "loud" in words else expected)


@pytest.mark.parametrize(("length", "distance", "beyond"), [(162, 130, True), (161, 130, False), (600, 400, True)])
def test_records_stand_the_asked_distance_back_where_length_allows(length: int, distance: int, beyond: bool) -> None:
    """With room for 32 records before it, the distance holds; else records are spread over all."""
    ids = make_prompt(4, length, distance).token_ids
    places = [place for place, token in enumerate(ids) if RECORD <= token < RECORD + 512]
    assert (length - places[-1] > distance) == beyond
    assert len(places) >= 24


def test_bad_prompt_requests_are_refused() -> None:
    """Lengths, distances and slot counts outside their range name the limit."""
    with pytest.raises(ValueError, match="at least 1 token, got length_tokens 0"):
        make_prompt(1, 0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        make_prompt(1, 10, -1)
    with pytest.raises(ValueError, match=r"in 1\.\.32, got 33"):
        make_prompt(1, 10, min_answers=33)


def test_mxfp4_takes_the_low_nibble_first_and_127_as_scale_one() -> None:
    """0x21 is [0.5, 1.0], 0xF8 is [-0.0, -6.0]; each scale step doubles; 255 is refused."""
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([0x21, 0xF8])
    values = mxfp4.dequantize(blocks, torch.tensor([[127]], dtype=torch.uint8))[0]
    assert values[:4].tolist() == [0.5, 1.0, 0.0, -6.0]
    assert mxfp4.dequantize(blocks, torch.tensor([[128]], dtype=torch.uint8))[0, 3] == -12.0
    with pytest.raises(ValueError, match="255"):
        mxfp4.dequantize(blocks, torch.tensor([[255]], dtype=torch.uint8))


def test_mxfp4_quantises_what_it_can_hold_without_loss() -> None:
    """Values that FP4 holds come back exactly; others move to the nearest of the grid."""
    grid = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0]).repeat(3, 12) * torch.tensor([[1.0], [0.25], [64]])
    blocks, scales = mxfp4.quantize(grid)
    assert (tuple(blocks.shape), tuple(scales.shape)) == ((3, 3, 16), (3, 3))
    assert scales[:, 0].tolist() == [127, 125, 133]
    assert torch.equal(mxfp4.dequantize(blocks, scales), grid)
    row = torch.full((1, 32), 0.3)
    row[0, 0] = 6.0
    assert mxfp4.dequantize(*mxfp4.quantize(row))[0, :2].tolist() == [6.0, 0.5]


def test_dequantised_copy_holds_the_same_values_in_bf16(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """BF16 experts are transposed to [E, in, out], exact, and the quantisation is off the config."""
    dequantize_checkpoint(FOLDER, tmp_path / "bf16")
    written = _read(tmp_path / "bf16" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert (tuple(written[name].shape), written[name].dtype) == ((8, 128, 192), torch.bfloat16)
    exact = mxfp4.dequantize(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    assert torch.equal(written[name].float(), exact.transpose(1, 2))
    assert tuple(written["model.layers.0.mlp.experts.down_proj"].shape) == (8, 96, 128)
    assert torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])
    assert (tmp_path / "bf16" / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="exists already"):
        dequantize_checkpoint(FOLDER, tmp_path / "bf16")
    with pytest.raises(ValueError, match="only 'mxfp4'"):
        dequantize_checkpoint(tmp_path / "bf16", tmp_path / "again")
