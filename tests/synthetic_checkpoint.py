"""Checkpoints for tests: small ones with every size different, and real 120B names, shapes and shards at full size.

Contents are a pure function of tensor name and seed (`gk_adapters.bench_checkpoint.made_up_values`), so a test can ask
what any element must be without reading a file. Full-size files are sparse: about a gigabyte of disk for one rank.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from attrs import evolve
from numpy.typing import NDArray

from gk_adapters.bench_checkpoint import made_up_values, write_checkpoint
from gk_core.checkpoint_tensors import checkpoint_tensors
from gk_core.decode_mesh import DecodeMesh
from gk_core.model_geometry import GPT_OSS_20B, GPT_OSS_120B, ModelGeometry, alternating_kinds
from gk_core.stacked_weights import build_stacked_weight_specs, build_unstacked_weight_specs
from gk_core.weight_layouts import ExpertFormat, WeightLayout
from gk_core.weight_parts import StackedWeightSpec

__all__ = [
    "RANK_120B_MESH",
    "SMALL",
    "all_specs",
    "rewrite_header",
    "tensor_values",
    "write_120b",
    "write_small",
]

SMALL = evolve(
    GPT_OSS_20B, num_layers=3, hidden_size=544, intermediate_size=96, num_q_heads=6, num_kv_heads=2, head_size=10,
    num_experts=7, experts_per_token=2, vocab_size=101, attention_kinds=alternating_kinds(3),
)  # fmt: skip
"""Hidden is two NKI tiles and a bit of the second, intermediate part of one; no two sizes are equal."""

RANK_120B_MESH = DecodeMesh(tp_size=8, dp_size=16, ep_size=128)


def all_specs(
    geometry: ModelGeometry,
    mesh: DecodeMesh,
    rank: int,
    layout: WeightLayout,
    fmt: ExpertFormat,
    dtype: str = "bfloat16",
) -> tuple[StackedWeightSpec, ...]:
    """Stacked weights and those outside the layers."""
    return (
        *build_stacked_weight_specs(geometry, mesh, rank, layout, fmt, dtype),
        *build_unstacked_weight_specs(geometry, mesh, rank, layout, dtype),
    )


def write_small(
    directory: Path,
    fmt: ExpertFormat,
    geometry: ModelGeometry = SMALL,
    dtype: str = "bfloat16",
    seed: int = 0,
    num_shards: int = 3,
) -> dict[str, tuple[Path, int]]:
    """A whole small checkpoint; each tensor's file and where its data starts."""
    return write_checkpoint(directory, geometry, fmt, dtype=dtype, seed=seed, num_shards=num_shards)


def write_120b(directory: Path, specs: tuple[StackedWeightSpec, ...]) -> dict[str, tuple[Path, int]]:
    """Real 120B names, shapes, 15 shards and index, with contents where `specs` read."""
    return write_checkpoint(directory, GPT_OSS_120B, ExpertFormat.MXFP4, specs=specs)


def tensor_values(
    name: str, fmt: ExpertFormat, geometry: ModelGeometry = SMALL, dtype: str = "bfloat16", seed: int = 0
) -> NDArray[Any]:
    """A whole tensor of a small checkpoint, without its file."""
    tensor = checkpoint_tensors(geometry, fmt)[name]
    stored = "uint8" if tensor.dtypes == ("uint8",) else dtype
    return made_up_values(name, stored, 0, math.prod(tensor.shape), seed).reshape(tensor.shape)


def rewrite_header(path: Path, change: Any) -> None:
    """Apply `change` to a safetensors file's header (same length or shorter once encoded), data untouched."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    assert len(encoded) <= length
    stat = path.stat()
    path.write_bytes(data[:8] + encoded.ljust(length) + data[8 + length :])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
