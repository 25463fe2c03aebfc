"""Checkpoints of real size, made up: real names, shapes, shard files and index, contents a pure function of a seed.

Files are sparse: only the slices that the given specs read are written, the rest are holes that read as zeros. So one
rank's build of a 65 GB checkpoint runs at full size in about a gigabyte of disk.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gk_adapters.weight_gather import numpy_dtype
from gk_core.checkpoint_tensors import checkpoint_tensors
from gk_core.model_geometry import ModelGeometry
from gk_core.weight_layouts import PADDING, ExpertFormat
from gk_core.weight_parts import SourceView, StackedWeightSpec

__all__ = ["config_json", "made_up_values", "write_checkpoint"]

Array = NDArray[Any]
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
_RUN_BYTES = 16 << 20


def made_up_values(name: str, dtype: str, start: int, count: int, seed: int = 0) -> Array:
    """Elements start .. start + count - 1 of a tensor, flat. Finite, at most about 2 in size; scales near 2 ** -4.

    Element i is byte or word i of a counter hash (splitmix64) of the tensor's name and the seed.
    """
    width = numpy_dtype(dtype).itemsize
    per_word = 8 // width
    first, last = start // per_word, -(-(start + count) // per_word)
    with np.errstate(over="ignore"):
        z = np.arange(first, last, dtype=np.uint64) + np.uint64(zlib.crc32(f"{seed} {name}".encode()) << 32)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    raw: Array = z.view(f"<u{width}")[start - first * per_word :][:count]
    if dtype == "uint8":
        scales: Array = raw % np.uint8(8) + np.uint8(119)
        return scales if name.endswith("_scales") else raw
    keep, base = {
        "bfloat16": (0x83FF, 0x3C00), "float16": (0x8FFF, 0x3000), "float32": (0x81FFFFFF, 0x3E000000),
    }[dtype]  # fmt: skip
    words: Array = (raw & raw.dtype.type(keep)) | raw.dtype.type(base)
    return words.view(numpy_dtype(dtype))


def config_json(geometry: ModelGeometry, expert_format: ExpertFormat) -> dict[str, object]:
    """config.json of a model in Hugging Face form."""
    g = geometry
    config: dict[str, object] = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
        "num_hidden_layers": g.num_layers, "hidden_size": g.hidden_size, "intermediate_size": g.intermediate_size,
        "num_attention_heads": g.num_q_heads, "num_key_value_heads": g.num_kv_heads, "head_dim": g.head_size,
        "num_local_experts": g.num_experts, "num_experts_per_tok": g.experts_per_token,
        "sliding_window": g.sliding_window, "vocab_size": g.vocab_size, "max_position_embeddings": g.max_position,
        "rms_norm_eps": g.rms_norm_eps, "swiglu_limit": g.swiglu_limit, "tie_word_embeddings": g.tie_embeddings,
        "hidden_act": "silu", "attention_bias": True, "rope_theta": g.rope.theta,
        "layer_types": [kind.value for kind in g.attention_kinds],
        "rope_scaling": {
            "rope_type": "yarn", "factor": g.rope.factor, "beta_fast": g.rope.beta_fast,
            "beta_slow": g.rope.beta_slow, "truncate": g.rope.truncate,
            "original_max_position_embeddings": g.rope.original_max_position,
        },
    }  # fmt: skip
    if expert_format is ExpertFormat.MXFP4:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return config


def write_checkpoint(
    directory: Path,
    geometry: ModelGeometry,
    expert_format: ExpertFormat,
    *,
    specs: Iterable[StackedWeightSpec] | None = None,
    num_shards: int = 15,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> dict[str, tuple[Path, int]]:
    """Write config, index and shards; return each tensor's file and the byte at which its data starts.

    Args:
        specs: whose slices hold made-up values, the rest being holes; None fills everything.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(geometry, expert_format), indent=1))
    tensors = {
        t.name: (t.shape, "uint8" if t.dtypes == ("uint8",) else dtype)
        for t in checkpoint_tensors(geometry, expert_format).values()
    }
    places: dict[str, tuple[Path, int]] = {}
    weight_map: dict[str, str] = {}
    for i, names in enumerate(_deal(tensors, num_shards)):
        path = directory / f"model-{i:05d}-of-{num_shards - 1:05d}.safetensors"
        places.update(_write_shard(path, {name: tensors[name] for name in names}))
        weight_map |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": sum(_size(*t) for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if specs is None:
        ranges = {name: [(0, math.prod(shape))] for name, (shape, _) in tensors.items()}
    else:
        ranges = _needed(specs, {name: shape for name, (shape, _) in tensors.items()})
    for name, runs in ranges.items():
        _fill(places[name], name, tensors[name][1], runs, seed)
    return places


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * numpy_dtype(dtype).itemsize


def _deal(tensors: Mapping[str, tuple[tuple[int, ...], str]], num_shards: int) -> list[list[str]]:
    """Names in order, cut where a shard has its share of the bytes."""
    share = sum(_size(*t) for t in tensors.values()) / num_shards
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    at = 0
    for name, tensor in tensors.items():
        shards[min(int(at / share), num_shards - 1)].append(name)
        at += _size(*tensor)
    return shards


def _write_shard(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[Path, int]]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, {}
    for name, (shape, dtype) in tensors.items():
        end = at + _size(shape, dtype)
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        starts[name], at = at, end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + at)
    return {name: (path, 8 + len(encoded) + start) for name, start in starts.items()}


def _needed(
    specs: Iterable[StackedWeightSpec], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[tuple[int, int]]]:
    """Flat element runs that the specs read, by tensor."""
    runs: dict[str, set[tuple[int, int]]] = {}
    for spec in specs:
        for part in spec.parts:
            bounds = []
            for axis in part.axes:
                real = [i for i in axis.indices if i != PADDING]
                bounds.append((min(real), max(real) + 1) if real else (0, 0))
            if part.view is not SourceView.STORED:
                bounds[-1:] = [(0, n) for n in part.source_shape[-2:]]
            for layer in spec.layers:
                runs.setdefault(part.tensor_of_layer(layer), set()).update(_runs(bounds, part.source_shape))
    return {name: sorted(found) for name, found in runs.items() if name in shapes}


def _runs(bounds: list[tuple[int, int]], shape: tuple[int, ...]) -> set[tuple[int, int]]:
    """A box as runs of consecutive elements."""
    split = len(shape)
    while split > 1 and bounds[split - 1] == (0, shape[split - 1]):
        split -= 1
    inner = math.prod(shape[split:])
    low, high = bounds[split - 1]
    base = np.zeros(1, np.int64)
    for (start, stop), size in zip(bounds[: split - 1], shape, strict=False):
        base = (base[:, None] * size + np.arange(start, stop)).ravel()
    starts = (base * shape[split - 1] + low) * inner
    return {(int(s), (high - low) * inner) for s in starts if high > low}


def _fill(place: tuple[Path, int], name: str, dtype: str, runs: list[tuple[int, int]], seed: int) -> None:
    path, data_start = place
    width = numpy_dtype(dtype).itemsize
    step = _RUN_BYTES // width
    fd = os.open(path, os.O_WRONLY)
    try:
        for start, count in runs:
            for at in range(start, start + count, step):
                values = made_up_values(name, dtype, at, min(step, start + count - at), seed)
                os.pwrite(fd, values.tobytes(), data_start + at * width)
    finally:
        os.close(fd)
