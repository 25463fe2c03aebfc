"""config.json in every public variant: understood, or refused by key; never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gk_adapters.hf_config import HFConfig, parse_hf_config, read_hf_config
from gk_core.errors import CheckpointError, UnsupportedError
from gk_core.model_geometry import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    AttentionKind,
    YarnRope,
    alternating_kinds,
    require_gk_geometry,
)
from gk_core.weight_layouts import ExpertFormat

YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip
PUBLIC: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "num_local_experts": 128, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05, "rope_scaling": YARN, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def _parse(**changes: object) -> HFConfig:
    """The public 120B config with some keys changed; ... removes a key."""
    return parse_hf_config({k: v for k, v in (PUBLIC | changes).items() if v is not ...})


def _refused(message: str, **changes: object) -> None:
    with pytest.raises(CheckpointError, match=message):
        _parse(**changes)


def test_the_public_config_is_the_geometry_of_120b() -> None:
    """Every number of the published file."""
    config = _parse()
    assert config.geometry == GPT_OSS_120B
    assert config.expert_format is ExpertFormat.MXFP4
    assert config.model_dtype == "bfloat16"
    assert config.eos_token_ids == (200002,)


def test_the_20b_config_differs_in_layers_and_experts_only() -> None:
    """24 layers, 32 experts."""
    changes = {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": ...}
    assert _parse(**changes).geometry == GPT_OSS_20B


ROPES: dict[str, dict[str, Any]] = {
    "a_scaling_with_theta_outside": {},
    "b_parameters_with_theta_inside": {
        "rope_scaling": ..., "rope_theta": ..., "rope_parameters": YARN | {"rope_theta": 150000.0},
    },
    "c_both_equal": {"rope_parameters": YARN | {"rope_theta": 150000.0}},
    "d_type_for_rope_type": {"rope_scaling": {**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"}},
    "parameters_with_theta_outside": {"rope_scaling": None, "rope_parameters": YARN},
    "both_names_of_the_type": {"rope_scaling": YARN | {"type": "yarn"}},
    "betas_left_out": {"rope_scaling": {k: v for k, v in YARN.items() if not k.startswith("beta")}},
    "original_length_outside": {
        "rope_scaling": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
    },
    "attention_factor_spelt_out": {"rope_scaling": YARN | {"attention_factor": 1.3465735902799727}},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_every_spelling_of_yarn_is_the_same_rotary_embedding(name: str) -> None:
    """Theta, factor, original length, betas, untruncated ramp."""
    assert _parse(**ROPES[name]).geometry.rope == YarnRope(theta=150000.0, factor=32.0, original_max_position=4096)


def test_the_rope_of_the_public_config_has_the_known_ramp_and_concentration() -> None:
    """Ramp ends 8.0928 and 17.3980, attention factor 1.346574."""
    rope = _parse().geometry.rope
    low, high = rope.ramp_ends(64)
    assert (round(low, 4), round(high, 4), round(rope.concentration, 6)) == (8.0928, 17.398, 1.346574)


def test_a_yarn_block_without_truncate_rounds_its_ramp() -> None:
    """As the library that wrote such files reads them: 8 and 18."""
    rope = _parse(rope_scaling={k: v for k, v in YARN.items() if k != "truncate"}).geometry.rope
    assert rope.ramp_ends(64) == (8, 18)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": YARN | {"rope_theta": 10000.0}}, "rope theta twice and they differ.*10000.0.*150000.0"),
        ({"rope_parameters": YARN | {"factor": 16.0}}, "the rotary embedding twice and they differ"),
        ({"rope_scaling": {"rope_type": "default"}}, 'rope_scaling: rope_type must be "yarn" .*, got "default"'),
        ({"rope_scaling": ..., "rope_parameters": {"rope_theta": 150000.0, "type": "default"}}, "type must be .yarn."),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_type twice and they differ"),
        ({"rope_scaling": ...}, "rope_scaling or rope_parameters must describe YaRN"),
        ({"rope_scaling": None, "rope_parameters": {}}, "got neither"),
        ({"rope_theta": ...}, "rope_theta must be a number"),
        ({"rope_theta": "150000"}, 'rope_theta must be a finite number, got "150000"'),
        ({"rope_scaling": {k: v for k, v in YARN.items() if k != "factor"}}, "factor must be a number, got nothing"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "rope factor must be >= 1, got 0.5"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "mscale must be absent"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor must be absent or"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 8192}}, "context before extension twice"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 32.0}, "initial_context_length": ...},
            "original_max_position_embeddings must be a whole number of tokens",
        ),
        (
            {"rope_scaling": ..., "rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}},
            "one rotary embedding for all layers",
        ),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ],
)  # fmt: skip
def test_a_rope_that_is_not_gpt_oss_yarn_is_refused(changes: dict[str, Any], message: str) -> None:
    """Plain RoPE would pass a short smoke test and fail past 128 tokens."""
    _refused(message, **changes)


@pytest.mark.parametrize("head_dim", [..., None])
def test_head_size_is_64_when_the_config_does_not_say(head_dim: object) -> None:
    """Never 2880 / 64 = 45."""
    assert _parse(head_dim=head_dim).geometry.head_size == 64


@pytest.mark.parametrize("layer_types", [..., None, ["sliding_attention", "full_attention"] * 18])
def test_layers_alternate_from_sliding_when_the_config_says_so_or_nothing(layer_types: object) -> None:
    """Even sliding, odd full."""
    assert _parse(layer_types=layer_types).geometry.attention_kinds == alternating_kinds(36)


def test_inverted_layer_types_are_kept_and_refused_by_the_giga_kernel() -> None:
    """A native engine may serve them; the kernel bakes the parity in."""
    geometry = _parse(layer_types=["full_attention", "sliding_attention"] * 18).geometry
    assert geometry.attention_kinds[0] is AttentionKind.FULL
    with pytest.raises(UnsupportedError, match="layer 0 is full_attention, must be sliding_attention"):
        require_gk_geometry(geometry)


def test_a_slice_of_one_layer_is_fine() -> None:
    """One sliding layer."""
    geometry = _parse(num_hidden_layers=1, layer_types=["sliding_attention"]).geometry
    assert geometry.attention_kinds == (AttentionKind.SLIDING,)
    require_gk_geometry(geometry)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 35}, "num_hidden_layers = 36 entries, got 35"),
        ({"layer_types": ["chunked_attention"] * 36}, "layer_types must be a list of sliding_attention or full_att"),
        ({"layer_types": "sliding_attention"}, "layer_types must be a list"),
        ({"model_type": "llama"}, 'model_type must be "gpt_oss", got "llama"'),
        ({"model_type": ...}, "model_type must be .gpt_oss., got nothing"),
        ({"hidden_act": "gelu"}, "hidden_act must be .silu."),
        ({"attention_bias": False}, "attention_bias must be true, got false"),
        ({"hidden_size": ...}, "hidden_size must be a whole number, got nothing"),
        ({"hidden_size": 2880.0}, "hidden_size must be a whole number, got 2880.0"),
        ({"hidden_size": True}, "hidden_size must be a whole number, got true"),
        ({"num_hidden_layers": 0, "layer_types": ...}, "num_layers must be >= 1, got 0"),
        ({"num_hidden_layers": -3, "layer_types": ...}, "num_layers must be >= 1, got -3"),
        ({"num_key_value_heads": 7}, "num_q_heads must be a multiple of num_kv_heads"),
        ({"sliding_window": None}, "sliding_window must be a whole number"),
        ({"num_experts": 64}, "num_experts must be equal to num_local_experts 128, got 64"),
        ({"experts_per_token": 2}, "experts_per_token must be equal to num_experts_per_tok 4, got 2"),
        ({"num_local_experts": ...}, "num_local_experts must be a whole number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"dtype": "float64"}, "dtype must be bfloat16 or float16 or float32"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype twice and they differ"),
    ],
)  # fmt: skip
def test_a_key_that_is_missing_or_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    """Key, got, wanted."""
    _refused(message, **changes)


def test_experts_and_dtype_may_come_under_their_other_names() -> None:
    """num_experts, experts_per_token, torch_dtype."""
    config = _parse(
        num_local_experts=..., num_experts=128, num_experts_per_tok=..., experts_per_token=4, torch_dtype="float16"
    )
    assert config.geometry == GPT_OSS_120B
    assert config.model_dtype == "float16"


@pytest.mark.parametrize("quantization", [..., None, {}])
def test_no_quantisation_means_float_experts(quantization: object) -> None:
    """Missing, null, or emptied by an override."""
    config = _parse(quantization_config=quantization)
    assert config.expert_format is ExpertFormat.BF16
    assert config.unconverted_modules == ()


def test_modules_to_not_convert_may_lack_the_model_prefix() -> None:
    """With, without, or no list at all: the same experts."""
    prefixed = _parse()
    bare = _parse(
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["lm_head", "embed_tokens", "layers.*.mlp.router", "layers.*.self_attn"],
        }
    )
    assert bare == prefixed
    assert prefixed.unconverted_modules == ("embed_tokens", "layers.*.mlp.router", "layers.*.self_attn", "lm_head")
    assert _parse(quantization_config={"quant_method": "mxfp4"}).expert_format is ExpertFormat.MXFP4


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "quark", "weight": {}}, 'quant_method must be "mxfp4".*got "quark"'),
        ({"quant_method": "compressed-tensors"}, 'got "compressed-tensors"'),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 'got "modelopt"'),
        ({"quant_method": None, "bits": 4}, "got null"),
        ({"modules_to_not_convert": []}, "quant_method must be .*got nothing"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "must be a list of module names"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.experts"]}, "without the experts"),
        ("mxfp4", "quantization_config must be an object"),
    ],
)
def test_other_quantisations_are_refused_by_name(quantization: object, message: str) -> None:
    """The method is named, with what to do instead."""
    _refused(message, quantization_config=quantization)


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        (200002, None, (200002,)),
        ([200002, 200012, 200002], None, (200002, 200012)),
        (None, None, ()),
        (200002, {"eos_token_id": [200002, 199999, 200012]}, (200002, 199999, 200012)),
        (200002, {"do_sample": True}, (200002,)),
        (200002, {"eos_token_id": 5}, (5,)),
    ],
)
def test_end_tokens_come_from_a_number_or_a_list_and_generation_config_wins(
    config: object, generation: dict[str, object] | None, wanted: tuple[int, ...]
) -> None:
    """Duplicates are dropped, order is kept."""
    assert parse_hf_config(PUBLIC | {"eos_token_id": config}, generation).eos_token_ids == wanted


@pytest.mark.parametrize("eos", [201088, -1, "</s>", [3, None], True])
def test_end_tokens_outside_the_vocabulary_are_refused(eos: object) -> None:
    """201088 is one past the last id."""
    _refused("eos_token_id must be a token id", eos_token_id=eos)


def test_files_are_read_from_the_checkpoint_folder(tmp_path: Path) -> None:
    """config.json alone, then with generation_config.json."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC))
    assert read_hf_config(tmp_path).eos_token_ids == (200002,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_hf_config(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not readable JSON"), ("[]", "must hold a JSON object, got list"), ("[" * 100_000, "not readable JSON")],
)
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Broken, a list, and nested without end."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_hf_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    """The file is named."""
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_hf_config(tmp_path)
