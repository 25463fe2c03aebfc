"""View operations of NKI 0.6: shapes, strides and offsets only; no view moves data.

Strides and offset count elements of the view's dtype over the whole storage. On chip the partition stride is the
storage's row length, and the partition dimension stays first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from gk_kernels.simulator.dtypes import DType, as_dtype
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.memory import MemoryRegion, Storage
from gk_kernels.simulator.registers import Indirect, NKIObject

if TYPE_CHECKING:
    from gk_kernels.simulator.tensor import NkiTensor

MAX_DIMS = 5
Shape = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Shape:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


class StridedView(NKIObject):
    """(storage, shape, strides, offset, dtype), and every operation that makes another view of the storage."""

    __slots__ = ("_unchecked", "buffer", "dtype", "indirect_index", "name", "offset", "shape", "storage", "strides")

    shape: Shape
    strides: Shape
    offset: int
    dtype: DType
    buffer: MemoryRegion
    storage: Storage
    name: str
    indirect_index: Indirect | None
    _unchecked: bool

    def _view(
        self,
        shape: Shape,
        strides: Shape,
        offset: int,
        dtype: DType | None = None,
        indirect: Indirect | None = None,
    ) -> NkiTensor:
        raise NotImplementedError

    def _same(self) -> NkiTensor:
        return self._view(self.shape, self.strides, self.offset, None, self.indirect_index)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def on_chip(self) -> bool:
        """Whether it lies in SBUF or PSUM."""
        return self.storage.on_chip

    @property
    def row(self) -> int:
        """Elements per partition of the storage, in this view's dtype."""
        return self.storage.row_bytes // self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Whether the view is dense and row-major (on chip: within a partition)."""
        want = 1
        first = 1 if self.storage.on_chip else 0
        for size, stride in zip(reversed(self.shape[first:]), reversed(self.strides[first:]), strict=True):
            if size != 1 and stride != want:
                return False
            want *= size
        return True

    def get_pattern(self) -> list[list[int]]:
        """The view as `[[stride, count], ...]`."""
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Whether the view carries a dynamic index."""
        return self.indirect_index is not None

    def _refuse_indirect(self, what: str) -> None:
        refuse(
            "an indirect view takes one dynamic index",
            f"a {what} of the indexed dimension",
            "apply it before the dynamic index",
            UsageError,
        )

    def _dim(self, dim: int, rule: str, *, upto: int | None = None) -> int:
        limit = len(self.shape) if upto is None else upto
        if dim < 0:
            dim += limit
        if not 0 <= dim < limit:
            refuse(rule, f"dimension {dim}", f"0 to {limit - 1}", UsageError)
        return dim

    def _keep_first(self, dim: int, rule: str) -> None:
        vector = self.indirect_index is not None and self.indirect_index.kind == "vector"
        if dim == 0 and (self.on_chip or vector):
            refuse(rule, "dimension 0", "the partition dimension stays first and whole", UsageError)

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Dimensions in another order; on chip the first stays first."""
        if sorted(dims) != list(range(self.ndim)):
            refuse("permute", tuple(dims), f"a permutation of 0..{self.ndim - 1}", UsageError)
        if dims[0] != 0:
            self._keep_first(0, "permute")
        indirect = self.indirect_index
        if indirect is not None and indirect.dim >= 0:
            indirect = indirect._replace(dim=list(dims).index(indirect.dim))
        return self._view(tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims), self.offset,
                          None, indirect)  # fmt: skip

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a dimension of size 1."""
        dim = self._dim(dim, "broadcast")
        if self.on_chip:
            self._keep_first(dim, "broadcast")
        if self.shape[dim] != 1:
            refuse("broadcast", f"size {self.shape[dim]}", "a dimension of size 1", UsageError)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        strides = (*self.strides[:dim], 0, *self.strides[dim + 1 :])
        return self._view(shape, strides, self.offset, None, self.indirect_index)

    def expand_dim(self, dim: int) -> NkiTensor:
        """A new dimension of size 1."""
        dim = self._dim(dim, "expand_dim", upto=self.ndim + 1)
        self._keep_first(dim, "expand_dim")
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._with_dims(dim, dim, (1,), (stride,))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove a dimension of size 1."""
        dim = self._dim(dim, "squeeze_dim")
        self._keep_first(dim, "squeeze_dim")
        if self.shape[dim] != 1:
            refuse("squeeze_dim", f"size {self.shape[dim]}", "size 1", UsageError)
        if self.ndim == 1 or (self.on_chip and self.ndim == 2):
            refuse(
                "squeeze_dim", f"a {self.ndim}-dimensional tensor", "2 dimensions remain on chip, 1 in HBM", UsageError
            )
        return self._with_dims(dim, dim + 1, (), ())

    def _with_dims(self, start: int, stop: int, shape: Shape, strides: Shape) -> NkiTensor:
        """Replace dimensions start..stop-1."""
        indirect = self.indirect_index
        if indirect is not None and indirect.dim >= 0:
            if start <= indirect.dim < stop:
                self._refuse_indirect("reshape")
            if indirect.dim >= stop:
                indirect = indirect._replace(dim=indirect.dim + len(shape) - (stop - start))
        return self._view(
            self.shape[:start] + shape + self.shape[stop:],
            self.strides[:start] + strides + self.strides[stop:],
            self.offset,
            None,
            indirect,
        )

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split one dimension; one part may be -1."""
        dim = self._dim(dim, "reshape_dim")
        parts = _infer(shape, self.shape[dim], "reshape_dim")
        if parts == (self.shape[dim],):
            return self._same()
        self._keep_first(dim, "reshape_dim")
        stride = self.strides[dim]
        return self._with_dims(dim, dim + 1, parts, tuple(s * stride for s in row_major(parts)))

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge dimensions start..end (inclusive), which must be contiguous with each other."""
        start_dim, end_dim = self._dim(start_dim, "flatten_dims"), self._dim(end_dim, "flatten_dims")
        if start_dim == end_dim:
            return self._same()
        self._keep_first(start_dim, "flatten_dims")
        size, stride = 1, self.strides[end_dim]
        for i in range(end_dim, start_dim - 1, -1):
            if self.shape[i] == 1:
                continue
            if size == 1:
                stride = self.strides[i]
            elif self.strides[i] != stride * size:
                refuse(
                    "flatten_dims",
                    f"shape {self.shape} with strides {self.strides}",
                    "dimensions contiguous with each other",
                    UsageError,
                )
            size *= self.shape[i]
        return self._with_dims(start_dim, end_dim + 1, (size,), (stride,))

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """The same elements under another shape, if no copy is needed."""
        new = _infer(shape, self.size, "reshape")
        if new == self.shape:
            return self._same()
        vector = self.indirect_index is not None and self.indirect_index.kind == "vector"
        if self.on_chip or vector:
            if not new or new[0] != self.shape[0]:
                refuse("reshape", f"{self.shape} to {new}", "the partition dimension keeps its size", UsageError)
            strides = self._restride(self.shape[1:], self.strides[1:], new[1:])
            full: Shape | None = None if strides is None else (self.strides[0], *strides)
        else:
            full = self._restride(self.shape, self.strides, new)
        if full is None:
            refuse(
                "reshape",
                f"{self.shape} with strides {self.strides} to {new}",
                "a layout that needs no copy",
                UsageError,
            )
        if self.indirect_index is not None and self.indirect_index.dim > 0:
            self._refuse_indirect("reshape")
        if self.on_chip and len(new) < 2:
            new, full = (*new, 1), (*full, 1)
        return self._view(new, full, self.offset, None, self.indirect_index)

    @staticmethod
    def _restride(old: Shape, strides: Shape, new: Shape) -> Shape | None:
        """Strides of `new` over the same elements, or None when a copy would be needed."""
        blocks: list[list[int]] = []  # maximal runs of mutually contiguous dimensions: [size, innermost stride]
        for size, stride in zip(old, strides, strict=True):
            if size == 1:
                continue
            if blocks and blocks[-1][1] == stride * size:
                blocks[-1] = [blocks[-1][0] * size, stride]
            else:
                blocks.append([size, stride])
        result: list[int] = []
        left = 1
        stride = 1
        for size in new:
            if size == 1:
                result.append(stride * left if left > 1 else 1)
                continue
            if left == 1:
                if not blocks:
                    return None
                left, stride = blocks.pop(0)
            if left % size:
                return None
            left //= size
            result.append(stride * left)
        return tuple(result) if left == 1 and not blocks else None

    def rearrange(
        self, src_pattern: tuple[Any, ...], dst_pattern: tuple[Any, ...], fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Split, reorder and merge named dimensions, einops style."""
        sizes = dict(fixed_sizes or {})
        if len(src_pattern) != self.ndim:
            refuse("rearrange", src_pattern, f"{self.ndim} entries", UsageError)
        view = self
        names: list[str] = []
        for entry in src_pattern:
            group = (entry,) if isinstance(entry, str) else tuple(entry)
            dim = len(names)
            if len(group) != 1:
                view = view.reshape_dim(dim, tuple(sizes.get(name, -1) for name in group))
            elif sizes.get(group[0], view.shape[dim]) != view.shape[dim]:
                refuse("rearrange", f"{group[0]} = {sizes[group[0]]}", view.shape[dim], UsageError)
            names += group
        groups = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in dst_pattern]
        flat = [name for group in groups for name in group]
        if sorted(flat) != sorted(names):
            refuse("rearrange", f"{src_pattern} to {dst_pattern}", "the same names on both sides", UsageError)
        view = view.permute(tuple(names.index(name) for name in flat))
        for dim, group in enumerate(groups):
            if not group:
                view = view.expand_dim(dim)
            elif len(group) > 1:
                view = view.flatten_dims(dim, dim + len(group) - 1)
        return view

    def view(self, dtype: object) -> NkiTensor:
        """The same bits as another dtype; the last dimension scales with the size."""
        new = as_dtype(dtype)
        old_size, new_size = self.dtype.itemsize, new.itemsize
        if old_size == new_size:
            return self._view(self.shape, self.strides, self.offset, new, self.indirect_index)
        if self.indirect_index is not None:
            self._refuse_indirect("dtype view")
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            refuse("view(dtype)", f"last stride {self.strides[-1]}", "a contiguous last dimension", UsageError)
        if old_size > new_size:
            ratio = old_size // new_size
            shape = (*self.shape[:-1], self.shape[-1] * ratio)
            strides = (*(s * ratio for s in self.strides[:-1]), 1)
            return self._view(shape, strides, self.offset * ratio, new)
        ratio = new_size // old_size
        scaled = [s for s, n in zip(self.strides[:-1], self.shape[:-1], strict=True) if n > 1]
        if self.shape[-1] % ratio or self.offset % ratio or any(s % ratio for s in scaled):
            refuse(
                "view(dtype)",
                f"shape {self.shape}, strides {self.strides}, offset {self.offset}",
                f"multiples of {ratio} ({new} over {self.dtype})",
                UsageError,
            )
        shape = (*self.shape[:-1], self.shape[-1] // ratio)
        return self._view(shape, (*(s // ratio for s in self.strides[:-1]), 1), self.offset // ratio, new)

    reinterpret_cast = view

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse("assignment to a tensor", "t[...] = x", "nisa.tensor_copy, nisa.dma_copy or nisa.memset", UsageError)

    def _arithmetic(self, *_: Any) -> Any:
        refuse(
            "Python arithmetic on a tensor",
            "an operator",
            "nisa.tensor_tensor, nisa.tensor_scalar, nl.add ...",
            UsageError,
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _arithmetic
    __matmul__ = __neg__ = __pow__ = __iadd__ = __isub__ = __imul__ = __lt__ = __gt__ = __le__ = __ge__ = _arithmetic
    __bool__ = _arithmetic


def _infer(shape: Sequence[int], size: int, rule: str) -> Shape:
    known = prod(n for n in shape if n != -1)
    result = tuple(size // known if n == -1 else int(n) for n in shape) if known else ()
    if sum(n == -1 for n in shape) > 1 or prod(result) != size or min(result, default=0) < 1:
        refuse(rule, tuple(shape), f"{size} elements", UsageError)
    return result
