"""config.json of a GPT-OSS checkpoint in Hugging Face form, in every public variant, to a `ModelGeometry`.

Silence is what hurts here: a missed YaRN block or a wrong head size gives plausible text up to 128 tokens and garbage
after. So every key is either understood, or refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, cast

from attrs import frozen

from gk_core.errors import CheckpointError, LayoutError
from gk_core.model_geometry import AttentionKind, ModelGeometry, YarnRope, alternating_kinds
from gk_core.weight_layouts import ExpertFormat

__all__ = ["HFConfig", "parse_hf_config", "read_hf_config", "read_json"]

_GPT_OSS_HEAD_SIZE = 64
_DTYPES = ("bfloat16", "float16", "float32")
_REQUIRED = object()

V = TypeVar("V")


@frozen(kw_only=True)
class HFConfig:
    """What a checkpoint's JSON files say.

    Attributes:
        geometry: shape of the model.
        expert_format: how the experts are stored.
        model_dtype: dtype that the model computes in: 'bfloat16', 'float16' or 'float32'.
        eos_token_ids: tokens that end an output; generation_config.json wins over config.json.
        unconverted_modules: modules that quantization_config leaves alone, without their 'model.' prefix, sorted.
    """

    geometry: ModelGeometry
    expert_format: ExpertFormat
    model_dtype: str
    eos_token_ids: tuple[int, ...]
    unconverted_modules: tuple[str, ...] = ()


def read_json(path: Path) -> dict[str, object]:
    """One JSON object from a file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_hf_config(directory: Path) -> HFConfig:
    """config.json, and generation_config.json where there is one.

    Raises:
        CheckpointError: a key is missing, contradictory or not understood; names key, got and wanted.
    """
    generation = directory / "generation_config.json"
    return parse_hf_config(
        read_json(directory / "config.json"), read_json(generation) if generation.is_file() else None
    )


def parse_hf_config(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> HFConfig:
    """The same from parsed JSON.

    Raises:
        CheckpointError: see `read_hf_config`.
    """
    keys = _Keys(config, "config.json")
    _require_equal(keys, "model_type", "gpt_oss", required=True)
    _require_equal(keys, "hidden_act", "silu")
    _require_equal(keys, "attention_bias", True)
    num_layers = keys.integer("num_hidden_layers")
    expert_format, unconverted = _quantization(keys)
    try:
        geometry = ModelGeometry(
            num_layers=num_layers,
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_q_heads=keys.integer("num_attention_heads"),
            num_kv_heads=keys.integer("num_key_value_heads"),
            # Not hidden_size / heads: 2880 / 64 = 45 is not GPT-OSS's head size.
            head_size=keys.integer("head_dim", default=_GPT_OSS_HEAD_SIZE),
            num_experts=keys.either("num_local_experts", "num_experts"),
            experts_per_token=keys.either("num_experts_per_tok", "experts_per_token"),
            sliding_window=keys.integer("sliding_window"),
            vocab_size=keys.integer("vocab_size"),
            max_position=keys.integer("max_position_embeddings"),
            rope=_rope(keys),
            attention_kinds=_attention_kinds(keys, num_layers),
            rms_norm_eps=keys.number("rms_norm_eps", default=1e-5),
            swiglu_alpha=keys.number("swiglu_alpha", default=1.702),
            swiglu_limit=keys.number("swiglu_limit", default=7.0),
            tie_embeddings=keys.boolean("tie_word_embeddings", default=False),
        )
    except LayoutError as error:
        raise CheckpointError(f"config.json does not describe a model: {error}") from error
    return HFConfig(
        geometry=geometry,
        expert_format=expert_format,
        model_dtype=_model_dtype(keys),
        eos_token_ids=_eos(keys, generation, geometry.vocab_size),
        unconverted_modules=unconverted,
    )


class _Keys:
    """Typed reads from a JSON object; null counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str) -> object:
        return self.values.get(key)

    def refuse(self, key: str, wanted: str) -> CheckpointError:
        got = json.dumps(self.values[key], default=str) if key in self.values else "nothing"
        return CheckpointError(f"{self.where}: {key} must be {wanted}, got {got}")

    def integer(self, key: str, default: object = _REQUIRED) -> int:
        value = self._value(key, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, "a whole number")
        return value

    def number(self, key: str, default: object = _REQUIRED) -> float:
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refuse(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: object = _REQUIRED) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def table(self, key: str) -> _Keys | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return _Keys(value, f"{self.where}: {key}")

    def either(self, first: str, second: str) -> int:
        """One number under either of two names; both only when equal."""
        found = {key: self.integer(key) for key in (first, second) if self.get(key) is not None}
        if not found:
            raise self.refuse(first, "a whole number")
        if len(set(found.values())) > 1:
            raise self.refuse(second, f"equal to {first} {found[first]}")
        return next(iter(found.values()))

    def _value(self, key: str, default: object, wanted: str) -> object:
        value = self.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.refuse(key, wanted)
        return default


def _require_equal(keys: _Keys, key: str, wanted: object, *, required: bool = False) -> None:
    value = keys.get(key)
    if value is None and not required:
        return
    if value != wanted:
        raise keys.refuse(key, json.dumps(wanted))


def _agreed(name: str, found: Mapping[str, V]) -> V | None:
    """The one value that all places give; None when there is no place."""
    values = list(found.values())
    if any(v != values[0] for v in values):
        places = ", ".join(f"{place} {value}" for place, value in found.items())
        raise CheckpointError(f"config.json gives {name} twice and they differ: {places}; make them equal")
    return values[0] if values else None


def _rope(keys: _Keys) -> YarnRope:
    """YaRN from `rope_scaling`, `rope_parameters` or both; theta from any of three places."""
    tables = [t for t in (keys.table("rope_scaling"), keys.table("rope_parameters")) if t is not None and t.values]
    if not tables:
        raise CheckpointError(
            "config.json: rope_scaling or rope_parameters must describe YaRN for gpt_oss, got neither; plain RoPE "
            "would give wrong answers"
        )
    theta_places = {t.where: t.number("rope_theta") for t in tables if t.get("rope_theta") is not None}
    if keys.get("rope_theta") is not None:
        theta_places["config.json: rope_theta"] = keys.number("rope_theta")
    theta = _agreed("rope theta", theta_places)
    if theta is None:
        raise keys.refuse("rope_theta", "a number, here or in rope_parameters")
    parsed = {t.where: _yarn(t, keys, theta) for t in tables}
    return cast(YarnRope, _agreed("the rotary embedding", parsed))


def _yarn(table: _Keys, keys: _Keys, theta: float) -> YarnRope:
    for key in ("sliding_attention", "full_attention"):
        if isinstance(table.get(key), dict):
            raise table.refuse(key, "absent: gpt_oss has one rotary embedding for all layers")
    kinds = {key: table.get(key) for key in ("rope_type", "type") if table.get(key) is not None}
    if _agreed("rope_type", kinds) != "yarn":
        key = next(iter(kinds), "rope_type")
        raise table.refuse(key, '"yarn" for gpt_oss')
    for key in ("mscale", "mscale_all_dim"):
        if table.get(key) is not None:
            raise table.refuse(key, "absent for gpt_oss")
    if table.number("partial_rotary_factor", default=1.0) != 1.0:
        raise table.refuse("partial_rotary_factor", "1.0 for gpt_oss")
    originals = {
        where: source.integer(key)
        for where, source, key in (
            (f"{table.where}.original_max_position_embeddings", table, "original_max_position_embeddings"),
            ("config.json: initial_context_length", keys, "initial_context_length"),
        )
        if source.get(key) is not None
    }
    original = _agreed("the context before extension", originals)
    if original is None:
        raise table.refuse("original_max_position_embeddings", "a whole number of tokens")
    rope = YarnRope(
        theta=theta,
        factor=table.number("factor"),
        original_max_position=original,
        beta_fast=table.number("beta_fast", default=32.0),
        beta_slow=table.number("beta_slow", default=1.0),
        # A YaRN block without the key means rounded ramp ends, as transformers reads it.
        truncate=table.boolean("truncate", default=True),
    )
    given = table.number("attention_factor", default=rope.concentration)
    if not math.isclose(given, rope.concentration, rel_tol=1e-6):
        raise table.refuse("attention_factor", f"absent or 0.1 ln(factor) + 1 = {rope.concentration:.6f}")
    return rope


def _attention_kinds(keys: _Keys, num_layers: int) -> tuple[AttentionKind, ...]:
    """`layer_types` as given, even when inverted: whether a kernel serves them is the kernel's affair."""
    value = keys.get("layer_types")
    if value is None:
        return alternating_kinds(max(num_layers, 0))
    known = {kind.value: kind for kind in AttentionKind}
    if not isinstance(value, list) or any(not isinstance(v, str) or v not in known for v in value):
        raise keys.refuse("layer_types", f"a list of {' or '.join(known)}")
    if len(value) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types must have num_hidden_layers = {num_layers} entries, got {len(value)}"
        )
    return tuple(known[v] for v in value)


def _quantization(keys: _Keys) -> tuple[ExpertFormat, tuple[str, ...]]:
    table = keys.table("quantization_config")
    if table is None or not table.values:
        return ExpertFormat.BF16, ()
    if table.get("quant_method") != "mxfp4":
        raise table.refuse("quant_method", '"mxfp4"; dequantise the checkpoint to BF16, or use the original MXFP4 one')
    modules = table.get("modules_to_not_convert")
    if modules is None:
        return ExpertFormat.MXFP4, ()
    if not isinstance(modules, list) or any(not isinstance(m, str) for m in modules):
        raise table.refuse("modules_to_not_convert", "a list of module names")
    names = tuple(sorted({cast(str, m).removeprefix("model.") for m in modules}))
    if any("experts" in name for name in names):
        raise table.refuse("modules_to_not_convert", "without the experts, which are what mxfp4 converts")
    return ExpertFormat.MXFP4, names


def _model_dtype(keys: _Keys) -> str:
    found = {key: keys.get(key) for key in ("dtype", "torch_dtype") if keys.get(key) is not None}
    dtype = _agreed("dtype", found)
    if dtype is None:
        return "bfloat16"
    if dtype not in _DTYPES:
        raise keys.refuse(next(iter(found)), " or ".join(_DTYPES))
    return str(dtype)


def _eos(keys: _Keys, generation: Mapping[str, object] | None, vocab_size: int) -> tuple[int, ...]:
    source = keys
    if generation is not None and generation.get("eos_token_id") is not None:
        source = _Keys(generation, "generation_config.json")
    value = source.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise source.refuse("eos_token_id", f"a token id, or a list of them, in 0..{vocab_size - 1}")
    return tuple(dict.fromkeys(cast("list[int]", ids)))
