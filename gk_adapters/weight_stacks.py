"""Builds one rank's stacked weights from a checkpoint: only the slices that the rank needs, straight into the stacks.

Peak memory is the stacks plus what `memory_bytes` allows for source pages in flight; nothing is held twice. Sources are
memory-mapped; their pages are given back after each part, so that they do not pile up in the process.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gk_adapters.weight_gather import (
    CHUNK_BYTES,
    PartPlan,
    ReadSlice,
    as_integers,
    fill_part,
    numpy_dtype,
    plan_part,
    source_slices,
)
from gk_core.errors import CheckpointError
from gk_core.ports import WeightInfo
from gk_core.weight_parts import StackedWeightSpec, WeightPart

__all__ = [
    "MEMORY_BYTES",
    "BuildProgress",
    "SliceSource",
    "StackPlan",
    "Unit",
    "build_stacks",
    "drain",
    "num_threads",
    "plan_stacks",
    "run_units",
    "units_of",
]

Array = NDArray[Any]
MEMORY_BYTES = 128 << 20
"""Default bound on source pages (and, in the cache, layer buffers) in flight."""


class SliceSource(Protocol):
    """A checkpoint that reads parts of tensors lazily; `HFCheckpoint` is one."""

    def tensors(self) -> Mapping[str, WeightInfo]:
        """Every tensor of the checkpoint."""
        ...

    def read_slice(self, *, name: str, index: tuple[slice, ...]) -> Array:
        """A read-only view of part of a tensor."""
        ...


@frozen(kw_only=True)
class BuildProgress:
    """How far a build is."""

    bytes_done: int
    bytes_total: int


Progress = Callable[[BuildProgress], None]


@frozen(kw_only=True, eq=False)
class Unit:
    """What is filled in one go: one layer of every stack, or one weight that no layer owns.

    Attributes:
        layer: layer id, or None.
        specs: stacks to fill.
    """

    layer: int | None
    specs: tuple[StackedWeightSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the unit fills."""
        return sum(spec.layer_bytes for spec in self.specs)


@frozen(kw_only=True, eq=False)
class StackPlan:
    """Specs checked against a checkpoint, ready to be filled.

    Attributes:
        source: the checkpoint.
        specs: what to build.
        parts: plans of each spec's parts, by name.
        units: in the order in which they are filled.
    """

    source: SliceSource
    specs: tuple[StackedWeightSpec, ...]
    parts: Mapping[str, tuple[PartPlan, ...]]
    units: tuple[Unit, ...]

    @property
    def source_bytes(self) -> int:
        """Source pages that one unit maps at a time, at most."""
        return max(plan.mapped_bytes for plans in self.parts.values() for plan in plans)

    def fill(self, unit: Unit, stack_of: Callable[[StackedWeightSpec], Array]) -> None:
        """Fill one unit's share of its stacks, which hold zeros or an earlier layer of the same stack.

        Raises:
            CheckpointError: a value that must not occur or cannot be held, naming the tensor.
        """
        self._prefetch(unit)
        for spec in unit.specs:
            for plan in self.parts[spec.name]:
                with self._reader() as read:
                    fill_part(plan, read, unit.layer, stack_of(spec))

    def copy(self, unit: Unit, share_of: Callable[[StackedWeightSpec], Array]) -> None:
        """Read what `fill` reads and write as many bytes, in source order: the work without the reordering.

        Args:
            share_of: flat bytes of one layer of a stack.
        """
        self._prefetch(unit)
        for spec in unit.specs:
            share, at = share_of(spec), 0
            for plan in self.parts[spec.name]:
                with self._reader() as read:
                    for _, _, view in source_slices(plan, unit.layer, read):
                        fits = min(view.nbytes, len(share) - at)
                        target = share[at : at + fits].view(as_integers(view).dtype)
                        if fits == view.nbytes:
                            target.reshape(view.shape)[...] = as_integers(view)
                        else:
                            target[...] = as_integers(view).reshape(-1)[: len(target)]
                        at += fits
            share[at:] = 0

    def _prefetch(self, unit: Unit) -> None:
        """Have the kernel read the unit's slices in file order, rather than in the order in which tiles touch them."""
        for spec in unit.specs:
            for plan in self.parts[spec.name]:
                first = plan.axes[0]
                whole = (slice(first.low, min(first.high, first.low + plan.chunk)),)
                _advise(
                    self.source.read_slice(name=plan.part.tensor_of_layer(unit.layer), index=whole), "MADV_WILLNEED"
                )

    @contextmanager
    def _reader(self) -> Iterator[ReadSlice]:
        """Reads of the source whose pages are given back at the end."""
        views: list[Array] = []

        def read(name: str, index: tuple[slice, ...]) -> Array:
            views.append(self.source.read_slice(name=name, index=index))
            return views[-1]

        yield read
        for view in views:
            _advise(view, "MADV_DONTNEED")


def plan_stacks(
    source: SliceSource, specs: Sequence[StackedWeightSpec], *, chunk_bytes: int = CHUNK_BYTES
) -> StackPlan:
    """Check every tensor that the specs read, then plan. Nothing is allocated.

    Args:
        chunk_bytes: bound on the source slice that one read takes, where the tensor can be cut.

    Raises:
        CheckpointError: tensors are missing or have the wrong shape or dtype; names the first few.
    """
    infos = source.tensors()
    wrong: list[str] = []
    parts: dict[str, tuple[PartPlan, ...]] = {}
    for spec in specs:
        for part in spec.parts:
            names = [part.tensor_of_layer(layer) for layer in spec.layers]
            found = [_what_is_wrong(name, infos.get(name), part) for name in names]
            wrong += [text for text in found if text]
        if not wrong:
            parts[spec.name] = tuple(plan_part(spec, p, _widest(infos, spec, p), chunk_bytes) for p in spec.parts)
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError("; ".join(wrong[:3]) + more)
    return StackPlan(source=source, specs=tuple(specs), parts=parts, units=units_of(specs))


def units_of(specs: Sequence[StackedWeightSpec]) -> tuple[Unit, ...]:
    """Weights outside the layers one by one, then layer after layer."""
    layered = tuple(spec for spec in specs if spec.num_layers is not None)
    layers = range(max((spec.num_layers or 0 for spec in layered), default=0))
    return (
        *(Unit(layer=None, specs=(spec,)) for spec in specs if spec.num_layers is None),
        *(Unit(layer=layer, specs=layered) for layer in layers),
    )


def _what_is_wrong(name: str, info: WeightInfo | None, part: WeightPart) -> str | None:
    if info is None:
        return f"{name} is missing"
    if info.shape != part.source_shape:
        return f"{name} must have shape {list(part.source_shape)}, got {list(info.shape)}"
    if info.dtype not in part.source_dtypes:
        return f"{name} must be {' or '.join(part.source_dtypes)}, got {info.dtype}"
    return None


def _widest(infos: Mapping[str, WeightInfo], spec: StackedWeightSpec, part: WeightPart) -> str:
    """Layers may differ in dtype; what is in flight is bounded for the widest."""
    return max((infos[part.tensor_of_layer(layer)].dtype for layer in spec.layers), key=_width)


def _width(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize


def build_stacks(
    source: SliceSource,
    specs: Sequence[StackedWeightSpec],
    *,
    threads: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
) -> dict[str, Array]:
    """This rank's stacks by name, in host memory.

    Args:
        threads: layers filled at once; default: one per core, as far as `memory_bytes` allows.
        memory_bytes: bound on source pages in flight.
        progress: called after each layer, in the calling thread.

    Raises:
        CheckpointError: a tensor is not what the specs read; before anything is allocated where names, shapes and
            dtypes say so, at the layer where a value does.
    """
    plan = plan_stacks(source, specs)
    stacks = {spec.name: np.zeros(spec.shape, numpy_dtype(spec.dtype)) for spec in specs}

    def fill(unit: Unit) -> None:
        def stack_of(spec: StackedWeightSpec) -> Array:
            stack = stacks[spec.name]
            return stack if unit.layer is None else stack[unit.layer]

        plan.fill(unit, stack_of)

    run_units(plan.units, fill, num_threads(threads, memory_bytes, plan.source_bytes), progress)
    return stacks


def num_threads(threads: int | None, memory_bytes: int, bytes_per_thread: int) -> int:
    """Threads that cores and the memory bound allow; at least one."""
    return max(1, min(threads or os.cpu_count() or 1, memory_bytes // bytes_per_thread))


def run_units(
    units: Sequence[Unit],
    work: Callable[[Unit], None],
    threads: int,
    progress: Progress | None,
    bytes_done: int = 0,
    bytes_total: int | None = None,
) -> None:
    """Work through units on threads; the first error stops those not begun and is raised.

    Args:
        bytes_done, bytes_total: what was done before, and what there is in all, when these units are not all.
    """
    total = sum(unit.num_bytes for unit in units) if bytes_total is None else bytes_total
    failed = threading.Event()

    def guarded(unit: Unit) -> None:
        if failed.is_set():
            return
        try:
            work(unit)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="gk-weights") as pool:
        pending: dict[Future[None], Unit] = {pool.submit(guarded, unit): unit for unit in units}
        try:
            while pending:
                done, _ = wait(pending, timeout=0.2 if progress else None, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    bytes_done += pending.pop(future).num_bytes
                if progress and done:
                    progress(BuildProgress(bytes_done=bytes_done, bytes_total=total))
        finally:
            failed.set()  # also when the caller was interrupted


def drain(stacks: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """Hand out each stack alone and forget it, so that a device copy never needs two on the host."""
    while stacks:
        name = next(iter(stacks))
        yield name, stacks.pop(name)


def _advise(view: Array, advice: str) -> None:
    """Advise the kernel on the pages of a memory-mapped view, where the platform can.

    MADV_DONTNEED gives them back to the page cache: the next read maps them again.
    """
    base: object = view
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, advice) or not view.size:
        return
    low, high = np.lib.array_utils.byte_bounds(view)
    start = low - np.frombuffer(base, np.uint8).ctypes.data
    aligned = start - start % mmap.PAGESIZE
    base.madvise(getattr(mmap, advice), aligned, high - low + start - aligned)
