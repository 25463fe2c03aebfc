"""DMA transposes, direct and gathered."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.errors import BoundsError, refuse
from gk_kernels.simulator.isa.check import DONE, SBUF, core_of, put_raw, tensor
from gk_kernels.simulator.isa.constants import NkiInstruction, dge_mode, oob_mode
from gk_kernels.simulator.isa.dma_checks import check_priority, check_reach, check_side, count_dma, member
from gk_kernels.simulator.isa.indirect import in_range, legal_rows
from gk_kernels.simulator.tensor import NkiTensor

_Dge, _Oob = dge_mode, oob_mode
_error, _skip = oob_mode.error, oob_mode.skip
_unknown, _swdge, _hwdge = dge_mode.unknown, dge_mode.swdge, dge_mode.hwdge


_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = _unknown,
    oob_mode: oob_mode = _error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src with axes (1,0), (2,1,0) or (3,1,2,0); an indirect src is gathered first."""
    rule = "dma_transpose"
    core = core_of(rule)
    check_side(rule, "dst", dst)
    check_side(rule, "src", src)
    dge_mode, oob_mode = member(rule, "dge_mode", _Dge, dge_mode), member(rule, "oob_mode", _Oob, oob_mode)
    check_priority(core, rule, priority)
    ndim = len(src.shape)
    order = _AXES.get(ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        refuse(f"{rule}: axes", f"{axes} of a {ndim}-dimensional src", "(1, 0), (2, 1, 0) or (3, 1, 2, 0)")
    if dst.buffer is not SBUF:
        refuse(f"{rule}: dst buffer", dst.buffer.value, "sbuf")
    if dst.dtype != src.dtype:
        refuse(f"{rule}: dtypes", f"{src.dtype} to {dst.dtype}", "equal dtypes")
    shape = tuple(src.shape[axis] for axis in order)
    if prod(dst.shape) != prod(shape) or dst.shape[0] != shape[0]:
        refuse(f"{rule}: dst shape", dst.shape, shape)
    indirect = src.indirect_index
    if indirect is not None and indirect.kind == "vector":
        _check_indirect_transpose(rule, src, dge_mode)
    elif oob_mode is _skip and indirect is None:
        refuse(f"{rule}: oob_mode", "skip", "error unless src is indirect")
    elif dge_mode not in (_unknown, _hwdge):
        refuse(f"{rule}: dge_mode", dge_mode.name, "unknown or hwdge")
    elif dge_mode is _hwdge:
        _check_hwdge_transpose(rule, src)
    check_reach(core, rule, src)
    elements = prod(shape)
    count_dma(core, rule, dst, src, elements)
    if core.trace:
        return DONE
    if indirect is None or indirect.kind == "scalar":
        if in_range(core, src, oob_mode):
            put_raw(dst, np.ascontiguousarray(src.read().transpose(order)))
        return DONE
    _gather_transpose(core, rule, dst, src, order, oob_mode)
    return DONE


def _check_hwdge_transpose(rule: str, src: NkiTensor) -> None:
    """src.shape[-1] <= 128 holds already: it becomes the destination's partitions."""
    first = src.shape[0]
    if len(src.shape) == 2:
        if first != 16:
            refuse(f"{rule} with hwdge: src.shape[0]", first, 16)
    elif first not in (1, 2, 4, 8, 16) or first * src.shape[-2] % 16:
        refuse(
            f"{rule} with hwdge: src.shape", src.shape, "shape[0] in 1, 2, 4, 8, 16 and shape[0]*shape[-2] % 16 == 0"
        )
    if src.dtype.itemsize != 2:
        refuse(f"{rule} with hwdge: src dtype", src.dtype, "2 bytes")


def _check_indirect_transpose(rule: str, src: NkiTensor, mode: Any) -> None:
    indirect = src.indirect_index
    assert indirect is not None
    index = tensor(rule, "vector_offset", indirect.index)
    rows = src.shape[0]
    if mode not in (_unknown, _swdge):
        refuse(f"{rule}: dge_mode of an indirect transpose", mode.name, "unknown or swdge")
    if src.dtype.itemsize != 2:
        refuse(f"{rule}: src dtype of an indirect transpose", src.dtype, "2 bytes")
    if len(src.shape) == 4 and 1 not in src.shape[1:3]:
        refuse(f"{rule}: src shape of an indirect transpose", src.shape, "shape[1] or shape[2] is 1")
    if index.buffer is not SBUF or index.dtype != "uint32" or len(index.shape) != 2:
        refuse(f"{rule}: indices", f"{index.dtype} {index.shape} in {index.buffer.value}", "2-D uint32 in SBUF")
    if rows % 16 or index.size < rows:
        refuse(f"{rule}: gathered rows", rows, f"a multiple of 16, at most the {index.size} indices")
    height, width = index.shape
    if not 16 <= height <= 128 or height % 16 or (width > 1 and height != 128):
        refuse(
            f"{rule}: indices shape", index.shape, "shape[0] a multiple of 16 up to 128, exactly 128 if shape[1] > 1"
        )


def _gather_transpose(
    core: Core, rule: str, dst: NkiTensor, src: NkiTensor, order: tuple[int, ...], mode: oob_mode
) -> None:
    indirect = src.indirect_index
    assert indirect is not None
    table, rows = legal_rows(src, src.storage.data, src.dtype.itemsize, src.dtype.np)
    index = np.ascontiguousarray(indirect.index.read().T).reshape(-1)[: src.shape[0]].astype(np.int64)
    valid = (index >= 0) & (index < rows)
    if not valid.all() and mode is _error:
        at = int(np.flatnonzero(~valid)[0])
        refuse(
            f"{rule}: dynamic index out of bounds",
            f"index {int(index[at])} in row {at}",
            f"0 to {rows - 1} (oob_mode.error)",
            BoundsError,
        )
    if src.storage.unwritten is not None:
        marks, _ = legal_rows(src, src.storage.unwritten, src.dtype.itemsize, f"u{src.dtype.itemsize}")
        if marks[index[valid]].any():
            src.report_poison(marks[index[valid]])
    values = table[index[valid]].transpose(order)
    if valid.all():
        put_raw(dst, np.ascontiguousarray(values))
        return
    core.counters.skipped_rows += int(np.count_nonzero(~valid))
    if dst.shape[-1] != len(index):
        refuse(f"{rule}: skipped rows", f"dst {dst.shape}", f"{len(index)} columns in dst, one per index")
    dst.write_target()[..., valid] = values.reshape((*dst.shape[:-1], -1))
    if dst.storage.unwritten is not None:
        dst.marks()[..., valid] = 0
        dst.storage.settle()
