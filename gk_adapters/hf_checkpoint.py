"""A GPT-OSS checkpoint directory in Hugging Face form: config, shards, and lazy reads by tensor name.

Opening reads JSON and headers only, and compares every name, shape and dtype with what the config promises, so that a
broken checkpoint is refused before anything is allocated. Only safetensors files are ever opened; pickles never.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gk_adapters.hf_config import HFConfig, read_hf_config, read_json
from gk_adapters.mxfp4 import decode_mxfp4, require_scales
from gk_adapters.safetensors_file import SafetensorsFile
from gk_core.checkpoint_tensors import FLOAT_DTYPES, CheckpointTensor, checkpoint_tensors
from gk_core.errors import CheckpointError, LayoutError
from gk_core.kernel_contract import KVScales
from gk_core.model_geometry import ModelGeometry
from gk_core.ports import WeightInfo, WeightSource
from gk_core.weight_layouts import ExpertFormat

__all__ = ["HFCheckpoint", "layer_prefix", "read_kv_scales", "weights_id_of"]

_KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

Index = int | slice


def layer_prefix(layer_id: int) -> str:
    """Name prefix of a decoder layer's tensors."""
    return f"model.layers.{layer_id}."


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
    try:
        required = checkpoint_tensors(config.geometry, config.expert_format)
    except LayoutError as error:
        raise CheckpointError(f"config.json does not describe a checkpoint: {error}") from error
    _check_expert_format(infos, config.expert_format)
    known = required | _optional_tensors(config.geometry)
    missing = [name for name in required if name not in infos]
    if missing:
        raise CheckpointError(f"checkpoint lacks {_named(missing)}, which its config.json asks for")
    unknown = [name for name in infos if name not in known]
    if unknown:
        raise CheckpointError(f"checkpoint holds {_named(unknown)}, which a model of its config.json does not have")
    for name, info in infos.items():
        wanted = known[name]
        if info.shape != wanted.shape and not (info.shape == () and name.endswith(_KV_SCALES)):
            raise CheckpointError(f"{name} must have shape {list(wanted.shape)}, got {list(info.shape)}")
        if info.dtype not in wanted.dtypes:
            raise CheckpointError(f"{name} must be {' or '.join(wanted.dtypes)}, got {info.dtype}")


def _optional_tensors(geometry: ModelGeometry) -> dict[str, CheckpointTensor]:
    """KV scales, of shape [1] or [], and a head saved beside the embedding that it is tied to."""
    shapes: dict[str, tuple[int, ...]] = {
        layer_prefix(i) + scale: (1,) for i in range(geometry.num_layers) for scale in _KV_SCALES
    }
    shapes["lm_head.weight"] = (geometry.vocab_size, geometry.hidden_size)
    return {name: CheckpointTensor(name=name, shape=shape, dtypes=FLOAT_DTYPES) for name, shape in shapes.items()}


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
    k, v = (_one_scale(checkpoint, suffix) for suffix in _KV_SCALES)
    try:
        return KVScales(k=k, v=v)
    except LayoutError as error:
        raise CheckpointError(f"{checkpoint.directory}: {error}") from error


def weights_id_of(checkpoint: HFCheckpoint) -> str:
    """A name for a checkpoint's weights, the same wherever it lies and in either form, MXFP4 or BF16.

    A hash over the vectors, the first row of each matrix and a corner of each expert's matrices, so that opening 120B
    reads some 37,000 pages and not the file; KV scales, which peers compare by themselves, do not enter. Checkpoints
    that differ in other places only have one name.
    """
    digest = hashlib.sha256()
    for name, info in sorted(checkpoint.tensors().items()):
        if len(info.shape) in (1, 2) and not name.endswith(_KV_SCALES):
            digest.update(name.encode())
            digest.update(checkpoint.read_slice(name=name, index=() if len(info.shape) == 1 else 0).tobytes())
    for layer_id in range(checkpoint.config.geometry.num_layers):
        for matrix in ("gate_up_proj", "down_proj"):
            digest.update(_expert_corners(checkpoint, f"{layer_prefix(layer_id)}mlp.experts.{matrix}").tobytes())
    return digest.hexdigest()[:32]


def _expert_corners(checkpoint: HFCheckpoint, name: str) -> NDArray[np.float32]:
    """[E, 4 inputs, 8 outputs] of every expert; float32, in which either form has the same numbers."""
    corner = (slice(None), slice(0, 4), slice(0, 8))
    floats: NDArray[np.float32]
    if checkpoint.config.expert_format is not ExpertFormat.MXFP4:
        floats = checkpoint.read_slice(name=name, index=corner).astype(np.float32)
    else:
        block = (slice(None), slice(0, 8), slice(0, 1))
        blocks, scales = (checkpoint.read_slice(name=f"{name}_{part}", index=block) for part in ("blocks", "scales"))
        floats = decode_mxfp4(blocks, scales, f"{name}_scales").swapaxes(1, 2)[corner]
    floats = floats + np.float32(0)  # no negative zeros
    return floats


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
