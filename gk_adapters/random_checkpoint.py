"""A small GPT-OSS checkpoint of random numbers, for runs that need a model and no particular one.

Its attention is broad, so that a lost block of KV shows in the log-probabilities; biases, sinks, norms are random too.
"""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
from attrs import evolve

from gk_adapters.bench_checkpoint import write_checkpoint
from gk_core.checkpoint_tensors import checkpoint_tensors
from gk_core.model_geometry import GPT_OSS_20B, ModelGeometry, alternating_kinds
from gk_core.weight_layouts import ExpertFormat

__all__ = ["SMALL", "write_random_checkpoint"]

SMALL: ModelGeometry = evolve(
    GPT_OSS_20B,
    num_layers=4,
    hidden_size=128,
    intermediate_size=96,
    num_q_heads=8,
    num_kv_heads=2,
    num_experts=8,
    vocab_size=640,
    attention_kinds=alternating_kinds(4),
)
"""Four layers of 64-wide heads and a window of 128; two megabytes in BF16."""


def write_random_checkpoint(directory: Path, geometry: ModelGeometry = SMALL, *, seed: int = 0) -> None:
    """Write config and BF16 weights in Hugging Face form; the same for the same seed. No tokenizer."""
    places = write_checkpoint(directory, geometry, ExpertFormat.BF16, specs=(), num_shards=1)
    shapes = {t.name: t.shape for t in checkpoint_tensors(geometry, ExpertFormat.BF16).values()}
    rng = np.random.default_rng(seed)
    for name, (path, start) in sorted(places.items()):
        values = rng.standard_normal(math.prod(shapes[name]), dtype=np.float32) * _spread(name)
        if name.endswith("norm.weight"):
            values += 1
        with path.open("r+b") as file:
            file.seek(start)
            file.write(values.astype(ml_dtypes.bfloat16).tobytes())


def _spread(name: str) -> float:
    if name.endswith("norm.weight"):
        return 0.1
    if name.endswith("bias"):
        return 0.3
    return 1.0 if name.endswith("sinks") else 0.15
