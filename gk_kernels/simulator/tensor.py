"""NkiTensor: a view of on-device memory, and how instructions read and write through it.

Strategy: the NumPy view is built on first use and kept, and so is what the compute engines need to know (`tile`). A
read checks the storage's marks of never-written bytes as long as there are any. A dynamic index is looked up when an
instruction runs. View operations are in views.py and indexing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gk_kernels.simulator import context as cx
from gk_kernels.simulator.dtypes import Array, DType, as_dtype
from gk_kernels.simulator.errors import BoundsError, PoisonError, format_site, refuse
from gk_kernels.simulator.indexing import IndexedView
from gk_kernels.simulator.memory import MemoryRegion, Storage
from gk_kernels.simulator.registers import DynamicSlice, Indirect, NKIObject, VirtualRegister
from gk_kernels.simulator.views import MAX_DIMS, Shape, StridedView, row_major

MAX_STRIDE = 2**15 - 1
MAX_COUNT = 2**16 - 1
PSUM_ALIGN = 4


class Tile(NamedTuple):
    """What compute engines need to know of an on-chip view."""

    partitions: int
    free: int
    start: int


def check_start(partitions: int, start: int) -> None:
    """The start-partition rule of the compute engines."""
    step = 32 if partitions <= 32 else 64 if partitions <= 64 else 128
    if start % step or start + partitions > 128:
        refuse(
            "start partition of a compute access",
            f"{partitions} partitions from partition {start}",
            "0 above 64 partitions; 0 or 64 for 33 to 64; 0, 32, 64 or 96 up to 32",
        )


def _check_encoding(shape: Shape, strides: Shape) -> None:
    """Counts fit uint16 and strides int16, after contiguous dimensions are merged and long ones split."""
    merged: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    for count, stride in merged:
        if stride > MAX_STRIDE:
            refuse("access pattern stride", f"{stride} elements", f"int16, at most {MAX_STRIDE}")
        longest = MAX_STRIDE // max(1, stride)
        if count > MAX_COUNT and all(count % inner for inner in range(longest, count // MAX_COUNT, -1)):
            refuse("access pattern count", count, f"uint16, at most {MAX_COUNT} (or a product of two that fit)")


class NkiTensor(IndexedView):
    """A view of on-device memory.

    Attributes:
        shape, strides, offset: in elements of `dtype`.
        dtype: an nl dtype.
        buffer: a MemoryRegion.
        name: the name it was allocated under.
    """

    __slots__ = ("_array", "_marks", "_tile", "_version")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: object,
        storage: Storage,
        buffer: MemoryRegion = MemoryRegion.sbuf,
        name: str = "",
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = as_dtype(dtype)
        self.storage, self.buffer, self.name = storage, buffer, name
        self.strides = row_major(self.shape)
        self.offset = 0
        self.indirect_index = None
        self._array: Array | None = None
        self._marks: Array | None = None
        self._tile: Tile | None = None
        self._version = 0
        self._unchecked = False

    def _view(
        self,
        shape: Shape,
        strides: Shape,
        offset: int,
        dtype: DType | None = None,
        indirect: Indirect | None = None,
    ) -> NkiTensor:
        view = object.__new__(NkiTensor)
        view.shape, view.strides, view.offset = shape, strides, offset
        view.dtype = dtype or self.dtype
        view.storage, view.buffer, view.name = self.storage, self.buffer, self.name
        view.indirect_index = indirect
        view._array = view._marks = view._tile = None
        view._version = 0
        view._unchecked = self._unchecked
        return view

    def __repr__(self) -> str:
        return f"NkiTensor({self.name or 'unnamed'}, {self.shape}, {self.dtype!r}, {self.buffer!r})"

    def _start(self) -> int:
        """First element, dynamic scalar index included."""
        indirect = self.indirect_index
        if indirect is None:
            return self.offset
        if indirect.kind == "vector":
            refuse("an indirect view by vector_offset", "a compute instruction", "DMA instructions only")
        index = index_value(indirect.index)
        if not 0 <= index < indirect.bound:
            refuse("dynamic index out of bounds", index, f"0 to {indirect.bound - 1}", BoundsError)
        start = self.offset + index * indirect.multiplier
        last = start + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if last >= self.storage.nbytes // self.dtype.itemsize:
            refuse(
                "dynamic access out of bounds",
                f"index {index} reaches element {last}",
                f"{self.storage.nbytes // self.dtype.itemsize} elements",
                BoundsError,
            )
        return start

    def numpy_view(self) -> Array:
        """The live NumPy view, without a poison check."""
        array = self._array
        storage = self.storage
        if array is None or self._version != storage.version:
            size = self.dtype.itemsize
            array = np.ndarray(
                self.shape, self.dtype.np, storage.data, self._start() * size, [s * size for s in self.strides]
            )
            if self.indirect_index is None:
                self._array, self._version = array, storage.version
                self._marks = None
        return array

    def marks(self) -> Array:
        """The unwritten marks under this view, `itemsize` of them per element (only while there are any)."""
        marks = self._marks
        if marks is None or marks.base is not self.storage.unwritten:
            size = self.dtype.itemsize
            marks = np.ndarray(
                self.shape, f"u{size}", self.storage.unwritten, self._start() * size, [s * size for s in self.strides]
            )
            if self.indirect_index is None:
                self._marks = marks
        return marks

    def read(self) -> Array:
        """The NumPy view for reading.

        Raises:
            PoisonError: part of it was never written.
        """
        storage = self.storage
        if storage.unwritten is not None:
            marks = self.marks()
            if marks.any():
                self.report_poison(marks)
            elif marks.nbytes == storage.nbytes:
                storage.unwritten = None
        return self.numpy_view()

    def report_poison(self, marks: Array) -> None:
        """Refuse, or note, a read of never-written bytes."""
        count = int(np.count_nonzero(marks))
        first = tuple(int(i) for i in np.argwhere(marks)[0])
        life = self.storage.life
        core = cx.current()
        core.refuse_or_warn(
            core.options.poison if core.options.poison == "error" else "warn",
            "read of never-written bytes",
            f"{count} of {self.size} elements of {life.name or 'a tensor'} {self.shape}, the first at {first}",
            f"write before read; allocated at {format_site(life.site)}",
            PoisonError,
        )

    def write_target(self) -> Array:
        """The NumPy view for writing; the caller reports with `wrote`."""
        if self.storage.frozen:
            self.storage.thaw()
        return self.numpy_view()

    def wrote(self) -> None:
        """Everything under this view has been written."""
        storage = self.storage
        if storage.unwritten is not None:
            marks = self.marks()
            marks[...] = 0
            storage.pending += marks.nbytes
            if storage.pending >= storage.nbytes:
                storage.settle()
        if storage.matmul is not None:
            self.mark_matmul(2)

    def matmul_state(self) -> tuple[int, int]:
        """Smallest and largest accumulation mark under a PSUM view."""
        state = self.storage.matmul
        if state is None:
            return 0, 0
        if isinstance(state, int):
            return state, state
        marks = self._matmul_view(state)
        return int(marks.min()), int(marks.max())

    def mark_matmul(self, mark: int) -> None:
        """Set the accumulation mark of everything under a PSUM view."""
        storage = self.storage
        state = storage.matmul
        if isinstance(state, int) and state == mark:
            return
        if self.size * self.dtype.itemsize == storage.nbytes:
            storage.matmul = mark
            return
        if not isinstance(state, np.ndarray):
            state = storage.matmul = np.full(storage.nbytes, state or 0, np.uint8)
        self._matmul_view(state)[...] = mark

    def _matmul_view(self, marks: Array) -> Array:
        size = self.dtype.itemsize
        view: Array = np.ndarray(
            (*self.shape, size), np.uint8, marks, self.offset * size, [*(s * size for s in self.strides), 1]
        )
        return view

    def tile(self, check: bool = True) -> Tile:
        """Partitions, elements per partition, and start partition; checked once per view.

        `check=False` leaves out the start-partition rule (MX scales have their own).

        Raises:
            UsageError: not on chip.
            ConstraintError: more than 128 partitions, too many dimensions, a stride or count out of range.
        """
        tile = self._tile
        if tile is not None:
            return tile
        if not self.storage.on_chip:
            refuse("compute engines read and write on-chip memory", self.buffer.value, "SBUF or PSUM (dma_copy first)")
        if self._unchecked:
            self.check_bounds()
        shape, strides = self.shape, self.strides
        if len(shape) > MAX_DIMS:
            refuse("access pattern dimensions", len(shape), f"at most {MAX_DIMS}, the partition included")
        free = 1
        for count, stride in zip(shape[1:], strides[1:], strict=True):
            free *= count
            if count > MAX_COUNT or (count > 1 and stride > MAX_STRIDE):
                _check_encoding(shape[1:], strides[1:])
        start = self.storage.partition_start + self.offset // (self.storage.row_bytes // self.dtype.itemsize)
        if self.buffer is MemoryRegion.psum:
            first = self.offset % (self.storage.row_bytes // self.dtype.itemsize) * self.dtype.itemsize
            if first % PSUM_ALIGN:
                refuse("start of a PSUM access", f"byte {first}", f"a multiple of {PSUM_ALIGN} bytes")
        if check:
            check_start(shape[0], start)
        tile = Tile(shape[0], free, start)
        if check:
            self._tile = tile
        return tile


def index_value(index: Any) -> int:
    """The value of a scalar index; 0 while tracing, when no data exists."""
    if isinstance(index, VirtualRegister):
        return index.read()
    if cx.current().trace:
        return 0
    return int(index.read().flat[0])


__all__ = ["DynamicSlice", "Indirect", "NKIObject", "NkiTensor", "Shape", "StridedView", "Tile", "VirtualRegister"]
