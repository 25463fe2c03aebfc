"""What a source axis of a stacked weight amounts to for NumPy: a slice to read; strides, indices or runs over it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gk_core.weight_layouts import PADDING
from gk_core.weight_parts import SourceAxis

__all__ = ["AxisPlan", "Run", "chunk_of", "plan_axis", "runs_of"]

Ints = NDArray[np.int64]


@frozen(kw_only=True)
class AxisPlan:
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

    @property
    def is_plain(self) -> bool:
        """Whether every place in turn holds the next source index."""
        return self.shape == self.strided and (self.strides == (1,) or self.shape == (1,))


def plan_axis(axis: SourceAxis) -> AxisPlan:
    """Work out what no layer changes."""
    indices = np.asarray(axis.indices, np.int64)
    real = np.flatnonzero(indices != PADDING)
    low, high = (int(indices[real].min()), int(indices[real].max()) + 1) if len(real) else (0, 0)
    relative = np.where(indices == PADDING, 0, indices - low)
    strided, strides = _as_strides(indices.reshape(axis.shape), low)
    return AxisPlan(
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


def chunk_of(axis: AxisPlan, start: int, stop: int) -> AxisPlan:
    """Source indices start..stop-1 of an axis that steps by one."""
    n = stop - start
    return AxisPlan(
        stack_axes=axis.stack_axes, shape=(n,), low=start, high=stop, strided=(n,), strides=(1,),
        indices=np.arange(n), padding=np.empty(0, np.int64),
    )  # fmt: skip


@frozen(kw_only=True, eq=False)
class Run:
    """Places along one stack axis that hold source indices in even steps.

    Attributes:
        where: an index for each stack axis of the source axis, a slice for the one along which the run goes.
        source: the source indices, relative to the axis' `low`.
    """

    where: tuple[int | slice, ...]
    source: slice


def runs_of(axis: AxisPlan) -> tuple[Run, ...]:
    """All real places as runs, along the stack axis that needs the fewest."""
    indices = axis.indices.copy()
    indices[axis.padding] = PADDING
    grid = indices.reshape(axis.shape)
    return min((_runs_along(grid, k) for k in range(grid.ndim)), key=len)


def _runs_along(grid: Ints, k: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    lines = np.moveaxis(grid, k, -1)
    for rest in np.ndindex(lines.shape[:-1]):
        line = lines[rest].tolist()
        start = 0
        while start < len(line):
            stop = _end_of_run(line, start)
            if line[start] != PADDING:
                where: tuple[Any, ...] = (*rest[:k], slice(start, stop), *rest[k:])
                step = line[start + 1] - line[start] if stop - start > 1 else 1
                runs.append(Run(where=where, source=slice(line[start], line[stop - 1] + 1, step)))
            start = stop
    return tuple(runs)


def _end_of_run(line: list[int], start: int) -> int:
    stop = start + 1
    if line[start] == PADDING or stop == len(line) or line[stop] <= line[start]:
        return stop
    step = line[stop] - line[start]
    while stop < len(line) and line[stop] - line[stop - 1] == step:
        stop += 1
    return stop
