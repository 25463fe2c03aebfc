"""Executes parts of stacked weights with NumPy: a gather from a checkpoint tensor into one box of one layer's stack.

Strategy. Everything about a part that no layer changes is worked out once (`PartPlan`): which slice of the source a
rank needs, which index vectors are plain strides, and how the source's axes lie in the stack. Executing a plan then
moves bytes only:

- values are moved as unsigned integers of their own width, so bfloat16 costs what uint16 costs;
- a vector that is a stride over each of its stack axes (heads, experts, interleaved rows) becomes a strided view;
- where the source's last axis is not the stack's last one the gather is a transposition: it runs in blocks of rows
  that stay in cache while their columns are written out;
- what no layer writes stays as it was: stacks start as zeros, and padding columns are never touched. Padding rows of a
  gathered tile are written as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gk_adapters.weight_axes import AxisPlan, Run, chunk_of, plan_axis, runs_of
from gk_core.errors import CheckpointError
from gk_core.weight_parts import SourceView, StackedWeightSpec, WeightPart

__all__ = [
    "CHUNK_BYTES",
    "PartPlan",
    "ReadSlice",
    "as_integers",
    "fill_part",
    "numpy_dtype",
    "plan_part",
    "source_slices",
]

Array = NDArray[Any]
Ints = NDArray[np.int64]
ReadSlice = Callable[[str, tuple[slice, ...]], Array]
"""(tensor name, slice per stored axis) -> read-only view."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
}
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_MIN_ROWS, _MAX_ROWS, _BLOCK_BYTES = 64, 512, 768 << 10
_CACHE_LINE, _ROW_CONFLICT_BYTES = 64, 512
CHUNK_BYTES = 32 << 20
"""Default bound on the source slice that one read takes, where the tensor can be cut."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a spec's dtype name."""
    return _DTYPES[name]


def as_integers(array: Array) -> Array:
    """The same bytes as unsigned integers of the same width."""
    integers: Array = array.view(_UNSIGNED[array.dtype.itemsize])
    return integers


@frozen(kw_only=True, eq=False)
class PartPlan:
    """A part, ready to be executed for any layer.

    Attributes:
        part: what it says.
        dtype: the stack's dtype.
        axes: one per viewed source axis.
        perm: stack axes in source order, unfed ones first.
        runs: of source columns, when the source's last axis goes elsewhere than to the stack's last axis.
        inner: the source axis that goes there then.
        chunk: places of the first source axis that one read takes.
        mapped_bytes: source bytes that one read touches at most.
    """

    part: WeightPart
    dtype: np.dtype[Any]
    axes: tuple[AxisPlan, ...]
    perm: tuple[int, ...]
    runs: tuple[Run, ...] | None
    inner: int
    chunk: int
    mapped_bytes: int


def plan_part(spec: StackedWeightSpec, part: WeightPart, source_dtype: str, chunk_bytes: int = CHUNK_BYTES) -> PartPlan:
    """Work out what no layer changes."""
    axes = tuple(plan_axis(axis) for axis in part.axes)
    fed = [a for axis in axes for a in axis.stack_axes]
    unfed = [a for a in range(len(part.starts)) if a not in fed]
    last = len(part.starts) - 1
    inner = next((i for i, axis in enumerate(axes) if last in axis.stack_axes), len(axes) - 1)
    stored = math.prod(part.source_shape) // part.source_shape[0] * numpy_dtype(source_dtype).itemsize
    first = axes[0]
    rows = first.high - first.low
    can_chunk = first.strided is not None and first.strides == (1,)
    chunk = max(1, min(rows, chunk_bytes // stored)) if can_chunk else rows
    return PartPlan(
        part=part,
        dtype=numpy_dtype(spec.dtype),
        axes=axes,
        perm=(*unfed, *fed),
        runs=None if inner == len(axes) - 1 else runs_of(axes[-1]),
        inner=inner,
        chunk=max(1, chunk),
        mapped_bytes=max(1, chunk) * stored,
    )


def fill_part(plan: PartPlan, read: ReadSlice, layer: int | None, stack: Array) -> None:
    """Fill a part's box of one layer's stack (zeros so far).

    Args:
        stack: [*layer_shape], writable.

    Raises:
        CheckpointError: a refused value, or one that the stack's dtype cannot hold.
    """
    name = plan.part.tensor_of_layer(layer)
    box = as_integers(stack)[tuple(slice(s, s + n) for s, n in zip(plan.part.starts, plan.part.extents, strict=True))]
    if any(axis.low == axis.high for axis in plan.axes):
        return  # all padding, as in a vocabulary shard past the vocabulary
    first = plan.axes[0]
    for start, stop, values in source_slices(plan, layer, read):
        values = as_integers(_converted(plan, name, values))
        place, axes = box, plan.axes
        if stop - start < first.high - first.low:
            place = box[tuple(_chunk_slice(plan, a, start, stop) for a in range(box.ndim))]
            axes = (chunk_of(first, start, stop), *plan.axes[1:])
        turned = place.transpose(plan.perm)
        turned = turned[(0,) * (turned.ndim - sum(len(a.stack_axes) for a in axes))]
        if plan.runs is None:
            _straight(axes, values, turned)
        else:
            _transposed(axes, plan, values, turned)


def source_slices(plan: PartPlan, layer: int | None, read: ReadSlice) -> Iterator[tuple[int, int, Array]]:
    """What a rank needs of a part's source, in reads of at most a chunk: start and stop on its first axis, view."""
    name = plan.part.tensor_of_layer(layer)
    first = plan.axes[0]
    for start in range(first.low, first.high, plan.chunk):
        stop = min(start + plan.chunk, first.high)
        yield start, stop, _read(plan, name, read, start, stop)


def _chunk_slice(plan: PartPlan, stack_axis: int, start: int, stop: int) -> slice:
    first = plan.axes[0]
    if stack_axis != first.stack_axes[0]:
        return slice(None)
    return slice(start - first.low, stop - first.low)


def _read(plan: PartPlan, name: str, read: ReadSlice, start: int, stop: int) -> Array:
    """The needed slice of the viewed source."""
    part = plan.part
    inner = tuple(slice(a.low, a.high) for a in plan.axes[1:])
    if part.view is SourceView.STORED:
        return read(name, (slice(start, stop), *inner))
    stored = read(name, (slice(start, stop), *inner[:-1]))
    joined = stored.reshape(*stored.shape[:-2], -1)
    if part.view is SourceView.FP4_X4:
        joined = joined.view(np.dtype("<u2"))
    return joined[..., inner[-1]]


def _converted(plan: PartPlan, name: str, values: Array) -> Array:
    rule = plan.part.rule
    if rule.refused is not None and (values == rule.refused).any():
        raise CheckpointError(
            f"{name} holds the byte {rule.refused}, which is NaN as a scale; every weight under it would be NaN"
        )
    if rule.keeps_values and values.dtype.itemsize == plan.dtype.itemsize and values.dtype == plan.dtype:
        return values
    wide: Array = values.astype(np.float32)
    if not rule.keeps_values:
        wide = wide / np.float32(rule.divide_by) + np.float32(rule.add)
    with np.errstate(over="ignore"):
        narrow: Array = wide.astype(plan.dtype)
    if plan.dtype == np.float16 and not np.isfinite(narrow).all():
        raise CheckpointError(
            f"{name} holds values that float16 cannot ({float(np.abs(wide).max())} > 65504); build with dtype float32"
        )
    return narrow


def _straight(axes: tuple[AxisPlan, ...], values: Array, turned: Array) -> None:
    """Source order and stack order agree on the last axis: take rows, then one copy."""
    shape: list[int] = []
    strides: list[int] = []
    places: list[slice] = []
    for i, axis in enumerate(axes):
        if axis.strided is None:
            values = _taken(values, i, axis)
    for i, axis in enumerate(axes):
        if axis.strided is None:
            shape += axis.shape
            strides += [values.strides[i] * math.prod(axis.shape[k + 1 :]) for k in range(len(axis.shape))]
            places += [slice(None)] * len(axis.shape)
        else:
            shape += axis.strided
            strides += [values.strides[i] * s for s in axis.strides]
            places += [slice(n) for n in axis.strided]
    turned[tuple(places)] = np.lib.stride_tricks.as_strided(values, shape, strides, writeable=False)


def _taken(values: Array, i: int, axis: AxisPlan) -> Array:
    """Axis i of `values` by index, zeros where the vector has padding."""
    taken = np.take(values, axis.indices, axis=i, mode="clip")
    if len(axis.padding):
        taken[(slice(None),) * i + (axis.padding,)] = 0
    return taken


def _transposed(axes: tuple[AxisPlan, ...], plan: PartPlan, values: Array, turned: Array) -> None:
    """Block by block of the rows that end up along the stack's last axis, run by run of columns."""
    assert plan.runs is not None
    others = [i for i in range(len(axes) - 1) if i != plan.inner]
    places = _places_of_axes(axes)
    turned = turned.transpose([a for i in (len(axes) - 1, *others, plan.inner) for a in places[i]])
    values = values.transpose([*others, plan.inner, len(axes) - 1])
    for i, other in enumerate(others):
        if not axes[other].is_plain:
            values = _taken(values, i, axes[other])
    shape = [extent for i in others for extent in axes[i].shape]
    inner = axes[plan.inner]
    if not inner.is_plain:
        values = _contiguous(values)  # or each take would make a copy of its own
    *outer, length = inner.shape
    size = max(_MIN_ROWS, min(_MAX_ROWS, _BLOCK_BYTES // (values.shape[-1] * values.itemsize)))
    for k, at in enumerate(np.ndindex(*outer)):
        for start in range(0, length, size):
            stop = min(start + size, length)
            rows = _rows(values, inner, k * length + start, k * length + stop)
            place = (..., *at, slice(start, stop))
            target = turned[place]
            for run in plan.runs:
                columns = np.moveaxis(rows[..., run.source], -1, 0)
                target[run.where] = columns.reshape(len(columns), *shape, stop - start)


def _contiguous(values: Array) -> Array:
    """Contiguous rows, with a cache line to spare where their length would send all rows to the same few cache sets."""
    if values.shape[-1] * values.itemsize % _ROW_CONFLICT_BYTES:
        return np.ascontiguousarray(values)
    spare = np.empty((*values.shape[:-1], values.shape[-1] + _CACHE_LINE // values.itemsize), values.dtype)
    spare[..., : values.shape[-1]] = values
    return spare


def _places_of_axes(axes: tuple[AxisPlan, ...]) -> list[range]:
    """Positions of each source axis' stack axes in a box turned to source order."""
    ends = list(accumulate(len(axis.shape) for axis in axes))
    return [range(end - len(axis.shape), end) for end, axis in zip(ends, axes, strict=True)]


def _rows(values: Array, axis: AxisPlan, start: int, stop: int) -> Array:
    """Places start..stop-1 of the second axis from the end, zeros where they are padding."""
    if axis.is_plain:
        return values[..., start:stop, :]
    indices = axis.indices[start:stop]
    rows: Array = np.take(values, indices, axis=-2)
    low, high = np.searchsorted(axis.padding, (start, stop))
    if high > low:
        rows[..., axis.padding[low:high] - start, :] = 0
    return rows
