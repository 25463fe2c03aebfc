"""Indexing of tensors: integers, slices, dynamic indices, and raw access patterns over the storage."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from gk_kernels.simulator import context as cx
from gk_kernels.simulator.dtypes import as_dtype
from gk_kernels.simulator.errors import BoundsError, UsageError, refuse
from gk_kernels.simulator.memory import MemoryRegion
from gk_kernels.simulator.registers import DynamicSlice, Indirect, VirtualRegister
from gk_kernels.simulator.views import MAX_DIMS, Shape, StridedView

if TYPE_CHECKING:
    from gk_kernels.simulator.tensor import NkiTensor


class IndexedView(StridedView):
    """A view that can be indexed."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> NkiTensor:
        shape, strides = self.shape, self.strides
        if type(key) is not tuple:
            key = (key,)
        rank = len(shape)
        if Ellipsis in key:
            at = key.index(Ellipsis)
            key = key[:at] + (slice(None),) * (rank - len(key) + 1) + key[at + 1 :]
        if len(key) > rank:
            refuse("indexing", f"{len(key)} indices", f"{rank} dimensions", UsageError)
        indirect = self.indirect_index
        offset = self.offset
        new_shape: list[int] = []
        new_strides: list[int] = []
        new_dim = indirect.dim if indirect is not None else -1
        on_chip = self.storage.on_chip
        dim = 0
        for item in key:
            size, stride = shape[dim], strides[dim]
            kind = type(item)
            if kind is slice:
                start, stop, step = item.start, item.stop, item.step
                if start is None:
                    start = 0
                elif start < 0:
                    start += size
                if stop is None:
                    stop = size
                elif stop < 0:
                    stop += size
                if step is None:
                    step = 1
                if not 0 <= start < stop <= size or step < 1:
                    refuse(
                        f"slice of dimension {dim}",
                        f"{start}:{stop}:{step}",
                        f"0 <= start < stop <= {size}, step >= 1",
                        BoundsError,
                    )
                count = (stop - start + step - 1) // step
                if indirect is not None and dim == indirect.dim and (count != size or step != 1):
                    self._refuse_indirect("slice")
                offset += start * stride
                new_shape.append(count)
                new_strides.append(stride * step)
            elif kind is DynamicSlice:
                start, count = item
                if isinstance(start, (VirtualRegister, StridedView)):
                    if indirect is not None:
                        self._refuse_indirect("dynamic slice")
                    indirect = Indirect("scalar", start, stride, size - count + 1, dim)
                    new_dim = len(new_shape)
                    start = 0
                if not 0 <= start < start + count <= size:
                    refuse(f"nl.ds on dimension {dim}", f"{start}:{start + count}", f"inside 0..{size}", BoundsError)
                if self.indirect_index is not None and dim == self.indirect_index.dim:
                    self._refuse_indirect("slice")
                offset += start * stride
                new_shape.append(count)
                new_strides.append(stride)
            else:
                if isinstance(item, (StridedView, VirtualRegister)):
                    return self._getitem_dynamic(key, dim)
                try:
                    index = operator.index(item)
                except TypeError:
                    refuse(
                        "indexing",
                        f"a {kind.__name__}",
                        "int, slice, nl.ds, Ellipsis or a 1-element tensor",
                        UsageError,
                    )
                if index < 0:
                    index += size
                if not 0 <= index < size:
                    refuse(f"index of dimension {dim}", index, f"0 to {size - 1}", BoundsError)
                if indirect is not None and dim == indirect.dim:
                    self._refuse_indirect("index")
                offset += index * stride
                if on_chip and dim == 0:
                    new_shape.append(1)
                    new_strides.append(stride)
                elif indirect is not None and dim < indirect.dim:
                    new_dim -= 1
            dim += 1
        if dim < rank:
            new_shape += shape[dim:]
            new_strides += strides[dim:]
        if (on_chip and len(new_shape) < 2) or not new_shape:
            new_shape.append(1)
            new_strides.append(1)
        if indirect is not None and indirect.dim != new_dim:
            indirect = indirect._replace(dim=new_dim)
        return self._view(tuple(new_shape), tuple(new_strides), offset, None, indirect)

    def _getitem_dynamic(self, key: tuple[Any, ...], dim: int) -> NkiTensor:
        rest = (*key[:dim], slice(None), *key[dim + 1 :])
        if any(isinstance(item, (StridedView, VirtualRegister)) for item in rest):
            self._refuse_indirect("second dynamic index")
        dropped = sum(1 for i, item in enumerate(key[:dim]) if isinstance(item, int) and not (self.on_chip and i == 0))
        return self[rest].select(dim - dropped, key[dim])

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start..end-1 of one dimension, every `step`-th."""
        dim = self._dim(dim, "slice")
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        """One element of a dimension, which is removed; `index` may be a 1-element SBUF tensor or a register."""
        dim = self._dim(dim, "select")
        if not isinstance(index, (StridedView, VirtualRegister)):
            return self[(slice(None),) * dim + (index,)]
        if self.indirect_index is not None:
            self._refuse_indirect("second dynamic index")
        if self.on_chip and dim == 0:
            refuse("dynamic select on chip", "dimension 0", "a free dimension", UsageError)
        indirect = Indirect("scalar", _index_tensor(index), self.strides[dim], self.shape[dim], -1)
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        strides = self.strides[:dim] + self.strides[dim + 1 :]
        if not shape or (self.on_chip and len(shape) < 2):
            shape, strides = (*shape, 1), (*strides, 1)
        return self._view(shape, strides, self.offset, None, indirect)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Partition p sees row `vector_offset[p]` of dimension 0 of an HBM tensor."""
        if dim != 0 or self.on_chip or self.indirect_index is not None:
            refuse(
                "vector_select",
                f"dimension {dim} of a tensor in {self.buffer.value}",
                "dimension 0 of an HBM tensor without another dynamic index",
                UsageError,
            )
        indirect = Indirect("vector", vector_offset, self.strides[0], self.shape[0], 0)
        return self._view((vector_offset.shape[0], *self.shape[1:]), self.strides, self.offset, None, indirect)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: object | None = None,
    ) -> NkiTensor:
        """A raw access pattern over the storage (this view's shape and strides are ignored)."""
        new = self.dtype if dtype is None else as_dtype(dtype)
        shape = tuple(int(count) for _, count in pattern)
        strides = tuple(int(stride) for stride, _ in pattern)
        if not shape or len(shape) > MAX_DIMS or min(shape) < 1:
            refuse("ap pattern", list(map(tuple, pattern)), f"1 to {MAX_DIMS} pairs, counts of at least 1")
        inherited = self.offset * self.dtype.itemsize // new.itemsize
        if offset is None:
            offset = inherited
        elif self.offset:
            cx.current().warn(
                f"ap(offset={offset}) on a view that starts at element {self.offset}: NKI's documents disagree whether "
                "the two add; the storage offset is taken as given here"
            )
        if offset < 0:
            refuse("ap offset", offset, "at least 0", BoundsError)
        row = self.storage.row_bytes // new.itemsize
        if self.on_chip and strides[0] != row and shape[0] > 1:
            refuse("ap partition stride", strides[0], f"{row}, the elements per partition of the storage")
        if self.on_chip:
            strides = (row, *strides[1:])
        indirect: Indirect | None = None
        if scalar_offset is not None and vector_offset is not None:
            refuse("ap", "scalar_offset and vector_offset", "at most one of them", UsageError)
        if scalar_offset is not None or vector_offset is not None:
            if self.indirect_index is not None:
                self._refuse_indirect("second dynamic index")
            dim = self._dim(indirect_dim, "ap indirect_dim")
            multiplier = prod(self.shape[dim + 1 :]) * self.dtype.itemsize // new.itemsize
            if vector_offset is not None:
                if dim != 0 or self.on_chip:
                    refuse(
                        "ap vector_offset",
                        f"indirect_dim {indirect_dim} of a tensor in {self.buffer.value}",
                        "indirect_dim 0 of an HBM tensor",
                    )
                indirect = Indirect("vector", vector_offset, multiplier, self.shape[0], 0)
            else:
                if self.on_chip and dim == 0:
                    refuse("ap scalar_offset on chip", "indirect_dim 0", "a free dimension")
                indirect = Indirect("scalar", _index_tensor(scalar_offset), multiplier, self.shape[dim], -1)
        view = self._view(shape, strides, offset, new, indirect)
        view._unchecked = True
        return view

    def check_bounds(self) -> None:
        """An access pattern stays inside its storage (looked at when an instruction uses it)."""
        self._unchecked = False
        shape, strides, row = self.shape, self.strides, self.row
        first = 1 if self.indirect_index is not None and self.indirect_index.kind == "vector" else 0
        reach = self.offset + sum((n - 1) * abs(s) for n, s in zip(shape[first:], strides[first:], strict=True))
        total = self.storage.nbytes // self.dtype.itemsize
        if reach >= total or (self.on_chip and self._row_overrun(shape, strides, self.offset, row)):
            refuse(
                "ap bounds",
                f"element {reach} (offset {self.offset}, pattern {list(zip(strides, shape, strict=True))})",
                f"{total} elements, {row} per partition" if self.on_chip else f"{total} elements",
                BoundsError,
            )

    @staticmethod
    def _row_overrun(shape: Shape, strides: Shape, offset: int, row: int) -> bool:
        inner = offset % row + sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        return inner >= row

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Tensor indirection of later trn3 silicon: not simulated."""
        refuse("tensor indirection", "indirect()", "not simulated (second trn3 revision only)", UsageError)


def _index_tensor(index: Any) -> Any:
    if isinstance(index, VirtualRegister):
        return index
    if not isinstance(index, StridedView) or index.size != 1 or index.buffer is not MemoryRegion.sbuf:
        refuse("scalar_offset", repr(index), "a 1x1 SBUF tensor or a register", UsageError)
    if index.dtype not in ("int32", "uint32"):
        refuse("scalar_offset dtype", index.dtype, "int32 or uint32")
    return index
