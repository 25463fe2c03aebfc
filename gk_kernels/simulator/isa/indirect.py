"""Rows of a dynamic view: which are legal, gathering and scattering them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import BoundsError, refuse
from gk_kernels.simulator.isa.check import put_raw
from gk_kernels.simulator.isa.constants import dge_mode, oob_mode
from gk_kernels.simulator.isa.dma_checks import check_vector
from gk_kernels.simulator.tensor import NkiTensor

_error = oob_mode.error
_unknown = dge_mode.unknown


def legal_rows(view: NkiTensor, base: Any, unit: int, kind: Any) -> tuple[Array, int]:
    """All legal rows of a vector-indirect view as one strided array, and how many there are."""
    indirect = view.indirect_index
    assert indirect is not None
    size = view.dtype.itemsize
    inner = sum((n - 1) * s for n, s in zip(view.shape[1:], view.strides[1:], strict=True))
    total = view.storage.nbytes // size
    step = max(1, indirect.multiplier)
    rows = min(indirect.bound, (total - view.offset - inner - 1) // step + 1)
    array: Array = np.ndarray(
        (max(rows, 0), *view.shape[1:]),
        kind,
        base,
        view.offset * unit,
        [step * unit, *[s * unit for s in view.strides[1:]]],
    )
    return array, rows


def _indices(core: Core, rule: str, view: NkiTensor, rows: int, mode: oob_mode) -> tuple[Array, Array | None]:
    """Row numbers, and which of them are in range (None: all)."""
    indirect = view.indirect_index
    assert indirect is not None
    index = indirect.index.read().reshape(-1).astype(np.int64)
    valid = (index >= 0) & (index < rows)
    if valid.all():
        return index, None
    if mode is _error:
        at = int(np.flatnonzero(~valid)[0])
        refuse(
            f"{rule}: dynamic index out of bounds",
            f"index {int(index[at])} in row {at}",
            f"0 to {rows - 1} (oob_mode.error)",
            BoundsError,
        )
    skipped = int(np.count_nonzero(~valid))
    core.counters.skipped_rows += skipped
    if skipped < len(valid):
        core.warn(
            f"{rule}: {skipped} of {len(valid)} indices are skipped; mixing valid and skipped rows in one indirect DMA "
            "is reported to hang devices"
        )
    return index, valid


def cast(values: Array, src: NkiTensor, dst: NkiTensor) -> Array:
    if src.dtype == dst.dtype:
        return values
    return dst.dtype.from_f32(src.dtype.to_f32(values))


def gather(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, mode: oob_mode) -> None:
    table, rows = legal_rows(src, src.storage.data, src.dtype.itemsize, src.dtype.np)
    index, valid = _indices(core, rule, src, rows, mode)
    if src.storage.unwritten is not None:
        marks, _ = legal_rows(src, src.storage.unwritten, src.dtype.itemsize, f"u{src.dtype.itemsize}")
        picked = marks[index if valid is None else index[valid]]
        if picked.any():
            src.report_poison(picked)
    if valid is None:
        put_raw(dst, cast(table[index], src, dst).reshape(dst.shape))
        return
    if not valid.any():
        return
    if dst.shape[0] != len(index):
        refuse(f"{rule}: skipped rows", f"dst {dst.shape}", f"{len(index)} rows in dst, one per index")
    out = dst.write_target()
    out[valid] = cast(table[index[valid]], src, dst).reshape((-1, *dst.shape[1:]))
    if dst.storage.unwritten is not None:
        dst.marks()[valid] = 0
        dst.storage.settle()


def scatter(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, mode: oob_mode, add: bool = False) -> None:
    if dst.storage.frozen:
        dst.storage.thaw()
    table, rows = legal_rows(dst, dst.storage.data, dst.dtype.itemsize, dst.dtype.np)
    index, valid = _indices(core, rule, dst, rows, mode)
    values = cast(src.read(), src, dst).reshape((len(index), *dst.shape[1:]))
    if valid is not None:
        index, values = index[valid], values[valid]
    if len(set(index.tolist())) != len(index):
        core.warn(f"{rule}: two rows of one scatter write the same destination; which one stays is not defined")
    if add:
        total = dst.dtype.to_f32(table[index]) + src.dtype.to_f32(values)
        values = dst.dtype.from_f32(total)
    table[index] = values
    if dst.storage.unwritten is not None:
        marks, _ = legal_rows(dst, dst.storage.unwritten, dst.dtype.itemsize, f"u{dst.dtype.itemsize}")
        marks[index] = 0
        dst.storage.settle()


def in_range(core: Core, view: NkiTensor, mode: oob_mode) -> bool:
    """Whether a scalar-indirect view is in range; with oob_mode.skip a view that is not is skipped whole."""
    if mode is _error or view.indirect_index is None:
        return True
    try:
        view._start()
    except BoundsError:
        core.counters.skipped_rows += view.shape[0]
        return False
    return True


def gather_f32(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, mode: oob_mode) -> Array:
    check_vector(rule, src, dst, _unknown)
    table, rows = legal_rows(src, src.storage.data, src.dtype.itemsize, src.dtype.np)
    index, valid = _indices(core, rule, src, rows, mode)
    safe = index if valid is None else np.where(valid, index, 0)
    if src.storage.unwritten is not None:
        marks, _ = legal_rows(src, src.storage.unwritten, src.dtype.itemsize, f"u{src.dtype.itemsize}")
        if marks[safe].any():
            src.report_poison(marks[safe])
    values = src.dtype.to_f32(table[safe])
    if valid is not None:
        values = values.copy()
        values[~valid] = 0
    return values.reshape(dst.shape)
