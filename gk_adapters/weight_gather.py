"""Executes parts of stacked weights with NumPy: a gather from a checkpoint tensor into one box of one layer's stack.

Strategy. Everything about a part that no layer changes is worked out once (`PartPlan`): which slice of the source a
rank needs, which index vectors are plain strides, and how the source's axes lie in the stack. Executing a plan then
moves bytes only:

- values are moved as unsigned integers of their own width, so bfloat16 costs what uint16 costs;
- a vector that is a stride over each of its stack axes (heads, experts, interleaved rows) becomes a strided view;
- where the source's last axis is not the stack's last one the gather is a transposition: it runs in tiles of 64
  source columns, so that each cache line is read once;
- what no layer writes stays as it was: stacks start as zeros, and padding columns are never touched. Padding rows of a
  gathered tile are written as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gk_core.errors import CheckpointError
from gk_core.weight_layouts import PADDING
from gk_core.weight_parts import SourceAxis, SourceView, StackedWeightSpec, WeightPart

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
_TILE_COLUMNS = 64
CHUNK_BYTES = 32 << 20
"""Default bound on the source slice that one read takes, where the tensor can be cut."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a spec's dtype name."""
    return _DTYPES[name]


def as_integers(array: Array) -> Array:
    """The same bytes as unsigned integers of the same width."""
    integers: Array = array.view(_UNSIGNED[array.dtype.itemsize])
    return integers


@frozen(kw_only=True)
class _AxisPlan:
    """One source axis.

    Attributes:
        low, high: the rank needs source indices low..high-1; both 0 when all is padding.
        strided: extents over the stack axes that hold real elements, when the vector is a stride over each of them.
        strides: those strides, in source elements, relative to `low`.
        indices: source index minus `low` per place, padding pointing anywhere.
        padding: places that are padding.
    """

    stack_axes: tuple[int, ...]
    shape: tuple[int, ...]
    low: int
    high: int
    strided: tuple[int, ...] | None
    strides: tuple[int, ...]
    indices: Ints
    padding: Ints


@frozen(kw_only=True, eq=False)
class _Tile:
    """Source columns low..high-1 (those at `pick` of them, if not all) go to the stack places `where`."""

    low: int
    high: int
    pick: Ints | None
    where: tuple[Any, ...]


@frozen(kw_only=True, eq=False)
class PartPlan:
    """A part, ready to be executed for any layer.

    Attributes:
        part: what it says.
        dtype: the stack's dtype.
        axes: one per viewed source axis.
        perm: stack axes in source order, unfed ones first.
        tiles: of source columns, when the source's last axis goes elsewhere than to the stack's last axis.
        chunk: places of the first source axis that one read takes.
        mapped_bytes: source bytes that one read touches at most.
    """

    part: WeightPart
    dtype: np.dtype[Any]
    axes: tuple[_AxisPlan, ...]
    perm: tuple[int, ...]
    tiles: tuple[_Tile, ...] | None
    chunk: int
    mapped_bytes: int


def plan_part(spec: StackedWeightSpec, part: WeightPart, source_dtype: str, chunk_bytes: int = CHUNK_BYTES) -> PartPlan:
    """Work out what no layer changes."""
    axes = tuple(_plan_axis(axis) for axis in part.axes)
    fed = [a for axis in axes for a in axis.stack_axes]
    unfed = [a for a in range(len(part.starts)) if a not in fed]
    last = len(part.starts) - 1
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
        tiles=_tiles(axes[-1]) if len(axes) > 1 and last in fed and last not in axes[-1].stack_axes else None,
        chunk=max(1, chunk),
        mapped_bytes=max(1, chunk) * stored,
    )


def _plan_axis(axis: SourceAxis) -> _AxisPlan:
    indices = np.asarray(axis.indices, np.int64)
    real = np.flatnonzero(indices != PADDING)
    low, high = (int(indices[real].min()), int(indices[real].max()) + 1) if len(real) else (0, 0)
    relative = np.where(indices == PADDING, 0, indices - low)
    strided, strides = _as_strides(indices.reshape(axis.shape), low)
    return _AxisPlan(
        stack_axes=axis.stack_axes,
        shape=axis.shape,
        low=low,
        high=high,
        strided=strided,
        strides=strides,
        indices=relative,
        padding=np.flatnonzero(indices == PADDING),
    )


def _as_strides(indices: Ints, low: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Extents and strides, when the real places are a box at the origin and each step along an axis is constant."""
    real = indices != PADDING
    if not real.flat[0] or indices.flat[0] != low:
        return None, ()
    extents, strides = [], []
    for axis in range(indices.ndim):
        line = np.moveaxis(indices, axis, 0)[(slice(None),) + (0,) * (indices.ndim - 1)]
        count = int((line != PADDING).sum())
        extents.append(count)
        strides.append(int(line[1] - line[0]) if count > 1 else 0)
    grid = low + sum(
        (s * np.arange(n)).reshape([-1 if i == a else 1 for i in range(indices.ndim)])
        for a, (n, s) in enumerate(zip(extents, strides, strict=True))
    )
    box = tuple(slice(n) for n in extents)
    if int(real.sum()) != math.prod(extents) or not real[box].all() or not np.array_equal(indices[box], grid):
        return None, ()
    return tuple(extents), tuple(strides)


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
            axes = (_chunk_axis(first, start, stop), *plan.axes[1:])
        turned = place.transpose(plan.perm)
        turned = turned[(0,) * (turned.ndim - sum(len(a.stack_axes) for a in axes))]
        if plan.tiles is None:
            _straight(axes, values, turned)
        else:
            _transposed(axes, plan.tiles, values, turned)


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


def _chunk_axis(axis: _AxisPlan, start: int, stop: int) -> _AxisPlan:
    n = stop - start
    return _AxisPlan(
        stack_axes=axis.stack_axes, shape=(n,), low=start, high=stop, strided=(n,), strides=(1,),
        indices=np.arange(n), padding=np.empty(0, np.int64),
    )  # fmt: skip


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


def _straight(axes: tuple[_AxisPlan, ...], values: Array, turned: Array) -> None:
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


def _taken(values: Array, i: int, axis: _AxisPlan) -> Array:
    """Axis i of `values` by index, zeros where the vector has padding."""
    taken = np.take(values, axis.indices, axis=i, mode="clip")
    if len(axis.padding):
        taken[(slice(None),) * i + (axis.padding,)] = 0
    return taken


def _transposed(axes: tuple[_AxisPlan, ...], tiles: tuple[_Tile, ...], values: Array, turned: Array) -> None:
    """Tile by tile of source columns, each tile's rows taken while it is in cache."""
    *rows, columns = axes
    n = turned.ndim - len(columns.shape)
    turned = turned.transpose(*range(n, turned.ndim), *range(n))
    row_shape = [extent for axis in rows for extent in axis.shape]
    by_index = [(i, axis) for i, axis in enumerate(rows) if axis.strided != axis.shape or axis.strides != (1,)]
    columns_first = (len(rows), *range(len(rows)))
    for tile in tiles:
        block = np.ascontiguousarray(values[..., tile.low : tile.high])
        for i, axis in by_index:
            block = _taken(block, i, axis)
        if tile.pick is not None:
            block = block[..., tile.pick]
        block = block.transpose(columns_first)
        turned[tile.where] = block.reshape(len(block), *row_shape)


def _tiles(columns: _AxisPlan) -> tuple[_Tile, ...]:
    """Real places by ascending source index, cut into tiles."""
    real = np.setdiff1d(np.arange(len(columns.indices)), columns.padding)
    order = real[np.argsort(columns.indices[real], kind="stable")]
    tiles = []
    for start in range(0, len(order), _TILE_COLUMNS):
        places = order[start : start + _TILE_COLUMNS]
        sources = columns.indices[places]
        low, high = int(sources[0]), int(sources[-1]) + 1
        where: tuple[Any, ...] = np.unravel_index(places, columns.shape)
        if len(where) == 1 and (np.diff(places) == 1).all():
            where = (slice(int(places[0]), int(places[-1]) + 1),)
        pick = None if np.array_equal(sources, np.arange(low, high)) else sources - low
        tiles.append(_Tile(low=low, high=high, pick=pick, where=where))
    return tuple(tiles)
