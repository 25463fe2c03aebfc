"""A GPT-OSS checkpoint directory in Hugging Face form: config, shards, and lazy reads by tensor name.

Opening reads JSON and headers only, and compares every name, shape and dtype with what the config promises, so that a
broken checkpoint is refused before anything is allocated. Only safetensors files are ever opened; pickles never.

Dims: L layers, H hidden, E experts, I intermediate, q / kv heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gk_adapters.hf_config import ExpertFormat, HFConfig, read_hf_config, read_json
from gk_adapters.mxfp4 import require_scales
from gk_adapters.safetensors_file import SafetensorsFile
from gk_core.errors import CheckpointError, LayoutError
from gk_core.kernel_contract import KVScales
from gk_core.ports import WeightInfo, WeightSource

__all__ = ["HFCheckpoint", "TensorRule", "expected_tensors", "layer_prefix", "read_kv_scales"]

FLOATS = ("bfloat16", "float16", "float32")
_BYTES = ("uint8",)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

Index = int | slice


@frozen(kw_only=True)
class TensorRule:
    """What the config promises of one tensor: shape, permitted dtypes, and whether it may be absent."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False


def layer_prefix(layer_id: int) -> str:
    """Name prefix of a decoder layer's tensors."""
    return f"model.layers.{layer_id}."


def expected_tensors(config: HFConfig) -> dict[str, TensorRule]:
    """Every tensor that a checkpoint with this config has, by name.

    Source: openai/gpt-oss-120b and -20b, model.safetensors.index.json; BF16 names as transformers saves them.
    """
    g = config.geometry
    q, kv = g.num_q_heads * g.head_size, g.num_kv_heads * g.head_size
    attention = {
        "q_proj.weight": (q, g.hidden_size), "q_proj.bias": (q,),
        "k_proj.weight": (kv, g.hidden_size), "k_proj.bias": (kv,),
        "v_proj.weight": (kv, g.hidden_size), "v_proj.bias": (kv,),
        "o_proj.weight": (g.hidden_size, q), "o_proj.bias": (g.hidden_size,),
        "sinks": (g.num_q_heads,),
    }  # fmt: skip
    layer = {
        "input_layernorm.weight": TensorRule(shape=(g.hidden_size,)),
        "post_attention_layernorm.weight": TensorRule(shape=(g.hidden_size,)),
        **{f"self_attn.{name}": TensorRule(shape=shape) for name, shape in attention.items()},
        "mlp.router.weight": TensorRule(shape=(g.num_experts, g.hidden_size)),
        "mlp.router.bias": TensorRule(shape=(g.num_experts,)),
        **{f"mlp.experts.{name}": rule for name, rule in _expert_rules(config).items()},
    }
    model = {
        "model.embed_tokens.weight": TensorRule(shape=(g.vocab_size, g.hidden_size)),
        "model.norm.weight": TensorRule(shape=(g.hidden_size,)),
        "lm_head.weight": TensorRule(shape=(g.vocab_size, g.hidden_size), optional=g.tie_embeddings),
    }
    return model | {layer_prefix(i) + name: rule for i in range(g.num_layers) for name, rule in layer.items()}


def _expert_rules(config: HFConfig) -> dict[str, TensorRule]:
    g = config.geometry
    e, h, i = g.num_experts, g.hidden_size, g.intermediate_size
    biases = {"gate_up_proj_bias": TensorRule(shape=(e, 2 * i)), "down_proj_bias": TensorRule(shape=(e, h))}
    if config.expert_format is ExpertFormat.BF16:
        return biases | {
            "gate_up_proj": TensorRule(shape=(e, h, 2 * i)), "down_proj": TensorRule(shape=(e, i, h)),
        }  # fmt: skip
    for name, size in (("hidden_size", h), ("intermediate_size", i)):
        if size % 32:
            raise CheckpointError(f"config.json: {name} must be a multiple of 32 for MXFP4 experts, got {size}")
    return biases | {
        "gate_up_proj_blocks": TensorRule(shape=(e, 2 * i, h // 32, 16), dtypes=_BYTES),
        "gate_up_proj_scales": TensorRule(shape=(e, 2 * i, h // 32), dtypes=_BYTES),
        "down_proj_blocks": TensorRule(shape=(e, h, i // 32, 16), dtypes=_BYTES),
        "down_proj_scales": TensorRule(shape=(e, h, i // 32), dtypes=_BYTES),
    }


class HFCheckpoint(WeightSource[NDArray[Any]]):
    """An open checkpoint.

    Attributes:
        directory: where it lies.
        config: what its JSON files say.

    Raises:
        CheckpointError: a file or tensor is missing, unknown, damaged, or not what the config promises.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory; give a checkpoint folder in Hugging Face form")
        self.config = read_hf_config(directory)
        self._home = _open_shards(directory)
        self._infos = {name: file.infos[name] for name, file in self._home.items()}
        _check_tensors(self._infos, self.config)

    def tensors(self) -> Mapping[str, WeightInfo]:
        """Every tensor of the checkpoint."""
        return self._infos

    def read(self, *, name: str) -> NDArray[Any]:
        """One whole tensor: a read-only view of the file.

        Raises:
            CheckpointError: no such tensor, or MXFP4 scales that are NaN.
        """
        return self.read_slice(name=name, index=())

    def read_slice(self, *, name: str, index: Index | tuple[Index, ...]) -> NDArray[Any]:
        """Part of a tensor by basic indexing: a read-only view, so only its own pages are loaded.

        Raises:
            CheckpointError: no such tensor, an index outside it, or MXFP4 scales that are NaN.
        """
        file = self._home.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory} has no tensor {name}")
        try:
            view: NDArray[Any] = file.view(name)[index]
        except IndexError as error:
            raise CheckpointError(f"{name} has shape {list(self._infos[name].shape)}: {error}") from None
        if name.endswith("_scales"):
            require_scales(view, name)
        return view

    def shard_of(self, name: str) -> str:
        """File that holds a tensor; readers that go shard by shard sort by it.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self._home:
            raise CheckpointError(f"{self.directory} has no tensor {name}")
        return self._home[name].path.name


def _open_shards(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> its file."""
    if (directory / _INDEX).is_file():
        return _open_index(directory)
    if (directory / _SINGLE).is_file():
        file = SafetensorsFile(directory / _SINGLE)
        return dict.fromkeys(file.infos, file)
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory} has only pickle files ({', '.join(pickles[:3])}), which are never loaded because loading "
            "runs their code; convert the checkpoint to safetensors"
        )
    raise CheckpointError(f"{directory} has neither {_INDEX} nor {_SINGLE}")


def _open_index(directory: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_INDEX}: weight_map must be an object of tensor names to files")
    files: dict[str, SafetensorsFile] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or PurePath(file_name).name != file_name:
            raise CheckpointError(f"{_INDEX}: tensor {name} must name a file of this folder, got {file_name!r}")
        if not file_name.endswith(".safetensors"):
            raise CheckpointError(
                f"{_INDEX}: tensor {name} lies in {file_name}, which is not safetensors and is never loaded"
            )
        if file_name not in files:
            files[file_name] = SafetensorsFile(directory / file_name)
        if name not in files[file_name].infos:
            raise CheckpointError(f"{_INDEX} puts tensor {name} in {file_name}, which does not hold it")
    for file_name, file in files.items():
        for name in file.infos:
            if weight_map.get(name) != file_name:
                raise CheckpointError(
                    f"{file_name} holds tensor {name}, which {_INDEX} puts in {weight_map.get(name, 'no file')}"
                )
    return {name: files[file_name] for name, file_name in weight_map.items()}


def _check_tensors(infos: Mapping[str, WeightInfo], config: HFConfig) -> None:
    rules = expected_tensors(config)
    _check_expert_format(infos, config.expert_format)
    scales = {
        f"{layer_prefix(i)}self_attn.{k}_scale": TensorRule(shape=(1,), optional=True)
        for i in range(config.geometry.num_layers)
        for k in "kv"
    }
    missing = [name for name, rule in rules.items() if name not in infos and not rule.optional]
    if missing:
        raise CheckpointError(f"checkpoint lacks {_named(missing)}, which its config.json asks for")
    unknown = [name for name in infos if name not in rules and name not in scales]
    if unknown:
        raise CheckpointError(f"checkpoint holds {_named(unknown)}, which a model of its config.json does not have")
    for name, info in infos.items():
        rule = rules.get(name) or scales[name]
        scalar = name in scales and info.shape == ()
        if info.shape != rule.shape and not scalar:
            raise CheckpointError(f"{name} must have shape {list(rule.shape)}, got {list(info.shape)}")
        if info.dtype not in rule.dtypes:
            raise CheckpointError(f"{name} must be {' or '.join(rule.dtypes)}, got {info.dtype}")


def _check_expert_format(infos: Mapping[str, WeightInfo], expert_format: ExpertFormat) -> None:
    """Say that config and tensors contradict each other, rather than that a name is missing."""
    wrong = ("_proj",) if expert_format is ExpertFormat.MXFP4 else ("_proj_blocks", "_proj_scales")
    for name in infos:
        if ".mlp.experts." in name and name.endswith(wrong):
            says = "mxfp4" if expert_format is ExpertFormat.MXFP4 else "no quantisation"
            raise CheckpointError(
                f"config.json: quantization_config says {says}, but the checkpoint holds {name} "
                f"({infos[name].dtype}); the config and the tensors must agree"
            )


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"tensor {', '.join(ordered[:3])}{more}"


def read_kv_scales(checkpoint: HFCheckpoint) -> KVScales:
    """FP8 KV scales: stored = x / scale. 1.0 where the checkpoint has none; one value for all layers.

    Raises:
        CheckpointError: layers differ, some have a scale and some not, or a scale is not a positive finite number.
    """
    found = {kind: _one_scale(checkpoint, f"self_attn.{kind}_scale") for kind in "kv"}
    try:
        return KVScales(k=found["k"], v=found["v"])
    except LayoutError as error:
        raise CheckpointError(f"{checkpoint.directory}: {error}") from error


def _one_scale(checkpoint: HFCheckpoint, suffix: str) -> float:
    names = [layer_prefix(i) + suffix for i in range(checkpoint.config.geometry.num_layers)]
    present = [name for name in names if name in checkpoint.tensors()]
    if not present:
        return 1.0
    if len(present) < len(names):
        lacking = next(name for name in names if name not in present)
        raise CheckpointError(f"checkpoint has {present[0]} but not {lacking}; give every layer a scale, or none")
    values = {name: float(checkpoint.read(name=name).astype(np.float32).reshape(())) for name in present}
    first = values[present[0]]
    for name, value in values.items():
        if value != first and not (np.isnan(value) and np.isnan(first)):
            raise CheckpointError(
                f"the kernel takes one KV scale for all layers: {present[0]} is {first}, {name} is {value}; "
                "requantise with one scale, or use a BF16 KV cache"
            )
    return first
