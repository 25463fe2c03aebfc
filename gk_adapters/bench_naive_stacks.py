"""Stacked weights the way they are made without a plan: load and reorder each layer, keep it, torch.stack at the end.

The peer of `bench_stacking`. It reads through safetensors' own slices and makes the same bytes, so that it can be
compared by value too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gk_core.weight_layouts import PADDING
from gk_core.weight_parts import SourceView, StackedWeightSpec, WeightPart

__all__ = ["naive_stacks"]

_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8,
    "uint16": torch.int16,
}  # fmt: skip
"""uint16 words as int16: torch indexes few unsigned types."""


def naive_stacks(directory: Path, specs: Sequence[StackedWeightSpec]) -> dict[str, torch.Tensor]:
    """Stacks of layered specs, by name."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files: dict[str, Any] = {name: safe_open(directory / name, framework="pt") for name in set(weight_map.values())}
    layers: dict[str, list[torch.Tensor]] = {spec.name: [] for spec in specs}
    for layer in range(max(spec.num_layers or 0 for spec in specs)):
        for spec in specs:
            tensor = torch.zeros(spec.layer_shape, dtype=_DTYPES[spec.dtype])
            for part in spec.parts:
                name = part.tensor_of_layer(layer)
                box = tuple(slice(s, s + n) for s, n in zip(part.starts, part.extents, strict=True))
                tensor[box] = _gather(part, files[weight_map[name]].get_slice(name)).to(tensor.dtype)
            layers[spec.name].append(tensor)
    return {name: torch.stack(tensors) for name, tensors in layers.items()}


@cache
def _index_tensors(indices: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.tensor(indices)
    return tensor, (tensor == PADDING).nonzero().flatten()


def _gather(part: WeightPart, stored: Any) -> torch.Tensor:
    real = [i for i in part.axes[0].indices if i != PADDING]
    low, high = min(real), max(real) + 1
    values: torch.Tensor = stored[low:high]
    if part.view is not SourceView.STORED:
        values = values.flatten(-2)
        if part.view is SourceView.FP4_X4:
            values = values.view(torch.int16)
    if not part.rule.keeps_values:
        values = values.float() / part.rule.divide_by + part.rule.add
    shape: list[int] = []
    stack_axes: list[int] = []
    for i, axis in enumerate(part.axes):
        if isinstance(axis.indices, range):
            values = values.narrow(i, axis.indices.start - (low if i == 0 else 0), len(axis.indices))
        else:
            indices, padding = _index_tensors(axis.indices)
            values = values.index_select(i, (indices - (low if i == 0 else 0)).clamp(min=0))
            if len(padding):
                values.index_fill_(i, padding, 0)
        shape += axis.shape
        stack_axes += axis.stack_axes
    values = values.reshape(shape).permute([stack_axes.index(a) for a in sorted(stack_axes)])
    return values.reshape(part.extents)
