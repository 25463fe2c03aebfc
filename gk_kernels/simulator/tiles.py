"""nki.language on tiles: small wrappers that allocate a result and issue one or a few instructions."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from gk_kernels.simulator import context as cx
from gk_kernels.simulator import isa
from gk_kernels.simulator.allocate import _site, ndarray
from gk_kernels.simulator.dtypes import (
    as_dtype,
    float32,
    from_numpy,
    uint8,
)
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.memory import Life, MemoryRegion, Storage
from gk_kernels.simulator.ops import OPS, Op
from gk_kernels.simulator.tensor import NkiTensor

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm


def zeros(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def full(shape: Sequence[int], fill_value: float, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A tensor of one value; HBM is filled from an SBUF tile."""
    result = ndarray(shape, dtype, buffer, name)
    if not result.on_chip:
        flat = result.reshape((result.size,))
        chunk = ndarray((1, builtins.min(result.size, 4096)), dtype)
        isa.memset(chunk, fill_value)
        for start in builtins.range(0, result.size, 4096):
            count = builtins.min(4096, result.size - start)
            isa.dma_copy(flat[start : start + count], chunk[:, :count])
        return result
    isa.memset(result, fill_value)
    return result


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """Zeros in the shape of x."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """An undefined tensor in the shape of x."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """A shared_hbm tensor with the contents of a NumPy array or a .npy file."""
    core = cx.current("nl.shared_constant")
    array = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    kind = from_numpy(array.dtype)
    data = None if core.trace else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    life = Life(shared_hbm, "", _site(), 1, array.nbytes)
    storage = Storage(shared_hbm, array.nbytes, array.nbytes, life, data, written=True, frozen=True)
    return NkiTensor(array.shape, kind, storage, shared_hbm)


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """An n x n identity matrix in SBUF; one per size and dtype is kept."""
    core = cx.current("nl.shared_identity_matrix")
    kind = as_dtype(dtype)
    key = f"identity {n} {kind}"
    if dst is None:
        found = core.registers.get(key)
        if found is not None:
            return found  # type: ignore[no-any-return]
        dst = core.registers[key] = ndarray((n, n), kind, sbuf)
    core.retire("shared_identity_matrix", "dma", 0, n, dst)
    if not core.trace:
        dst.write_target()[...] = np.eye(n, dtype=np.float32).astype(kind.np)
        dst.wrote()
    return dst


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor."""
    shape = src.shape if len(src.shape) > 1 else (1, *src.shape)
    result = ndarray(shape, dtype or src.dtype)
    isa.dma_copy(result, src)
    return result


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write an SBUF tile to HBM."""
    isa.dma_copy(dst, value)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with an HBM matrix transposed."""
    result = ndarray((src.shape[1], src.shape[0]), dtype or src.dtype)
    isa.dma_copy(result, src.permute((1, 0)))
    return result


def _result(x: NkiTensor, dtype: Any, shape: tuple[int, ...] | None = None) -> NkiTensor:
    return ndarray(shape or x.shape, dtype or x.dtype)


def _binary_tile(op: Op, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        result = _result(x, dtype)
        isa.tensor_tensor(result, x, y, op)
        return result
    if isinstance(x, NkiTensor):
        result = _result(x, dtype)
        isa.tensor_scalar(result, x, op, y)
        return result
    if not isinstance(y, NkiTensor):
        refuse(f"nl.{op.name}", f"{x!r}, {y!r}", "at least one tile", UsageError)
    result = _result(y, dtype)
    isa.tensor_scalar(result, y, op, x, reverse0=True)
    return result


def _unary_tile(op: Op, x: NkiTensor, dtype: Any = None) -> NkiTensor:
    result = _result(x, dtype)
    if op.act is not None:
        isa.activation(result, op, x)
    else:
        isa.tensor_scalar(result, x, op, None)
    return result


def _divide(_: Op, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    if not isinstance(y, NkiTensor):
        return _binary_tile(OPS["multiply"], x, 1.0 / y, dtype)
    inverse = ndarray(y.shape, float32)
    isa.reciprocal(inverse, y)
    return _binary_tile(OPS["multiply"], x, inverse, dtype or (x.dtype if isinstance(x, NkiTensor) else y.dtype))


add, multiply, maximum, minimum = OPS["add"], OPS["multiply"], OPS["maximum"], OPS["minimum"]
exp, not_equal, logical_and = OPS["exp"], OPS["not_equal"], OPS["logical_and"]

for _op in OPS.values():
    _op.tile = _unary_tile if _op.alu is None else _binary_tile
OPS["divide"].tile = _divide
OPS["negative"].tile = lambda _, x, dtype=None: _binary_tile(OPS["multiply"], x, -1.0, dtype)
OPS["logical_not"].tile = lambda _, x, dtype=None: _binary_tile(OPS["equal"], x, 0.0, dtype)


def _reduction(name: str, alu_op: Op) -> Any:
    def reduce(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: builtins.bool = False) -> NkiTensor:
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        axes = tuple(a + x.ndim if a < 0 else a for a in axes)
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        if not keepdims:
            shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
        if len(shape) < 2:
            shape = (*shape, 1)
        result = ndarray(shape, dtype or x.dtype)
        isa.tensor_reduce(result, alu_op, x, axes)
        return result

    reduce.__name__ = name
    reduce.alu_op = alu_op  # type: ignore[attr-defined]
    return reduce


sum = _reduction("sum", add)
max = _reduction("max", maximum)
min = _reduction("min", minimum)
prod = _reduction("prod", multiply)
_all = _reduction("all", logical_and)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """Whether every element along free axes is not 0."""
    result: NkiTensor = _all(x, axis, dtype)
    return result


all.alu_op = logical_and  # type: ignore[attr-defined]


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: builtins.bool = False) -> NkiTensor:
    """Average over free axes."""
    total = sum(x, axis, float32, keepdims)
    result = ndarray(total.shape, dtype or x.dtype)
    isa.tensor_scalar(result, total, multiply, total.size / x.size)
    return result


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A 2-D tile with partitions and free axis swapped."""
    middle = ndarray((x.shape[1], x.shape[0]), x.dtype, psum)
    isa.nc_transpose(middle, x)
    result = ndarray(middle.shape, dtype or x.dtype)
    isa.tensor_copy(result, middle)
    return result


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: builtins.bool = False) -> NkiTensor:
    """x @ y (x already transposed if `transpose_x`), in PSUM."""
    left = x if transpose_x else transpose(x)
    result = ndarray((left.shape[1], y.shape[1]), float32, psum)
    isa.nc_matmul(result, left, y)
    return result


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Softmax over the last free axis of a 2-D tile."""
    top = ndarray((x.shape[0], 1), float32)
    isa.tensor_reduce(top, maximum, x, axis, negate=True)
    total = ndarray((x.shape[0], 1), float32)
    exps = ndarray(x.shape, float32)
    isa.activation(exps, exp, x, bias=top, reduce_op=add, reduce_res=total, reduce_cmd=isa.reduce_cmd.reset_reduce)
    isa.reciprocal(total, total)
    result = ndarray(x.shape, dtype or x.dtype)
    isa.tensor_scalar(result, exps, multiply, total)
    return result


def where(condition: NkiTensor, x: NkiTensor, y: NkiTensor, dtype: Any = None) -> NkiTensor:
    """x where condition is not 0, else y."""
    result = ndarray(x.shape, dtype or x.dtype)
    isa.tensor_copy(result, y)
    keep = ndarray(x.shape, uint8)
    isa.tensor_scalar(keep, condition, not_equal, 0.0)
    chosen = ndarray(x.shape, result.dtype)
    isa.tensor_copy(chosen, x)
    isa.tensor_copy_predicated(result, chosen, keep)
    return result


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """A view with a new axis of size 1."""
    return x.expand_dim(axis if axis >= 0 else axis + x.ndim + 1)


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """A new tile with size-1 free axes repeated."""
    view = x
    for dim, size in enumerate(shape):
        if view.shape[dim] != size:
            view = view.broadcast(dim, size)
    result = ndarray(tuple(shape), dtype or x.dtype)
    isa.tensor_copy(result, view)
    return result
