"""DMA: copies between HBM and SBUF, gathers, scatters, transposes and adds.

A dynamic view is resolved here, because only DMA has oob_mode. The declared range of a dynamic view, not the indices of
this run, is held against 2^32.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import BoundsError, ReachError, UsageError, refuse
from gk_kernels.simulator.isa.check import DONE, PSUM, SBUF, core_of, put_raw, tensor, writable
from gk_kernels.simulator.isa.constants import NkiInstruction, dge_mode, engine, oob_mode
from gk_kernels.simulator.ops import as_op
from gk_kernels.simulator.tensor import NkiTensor, Shape

LIMIT = 1 << 32
_Dge, _Oob = dge_mode, oob_mode
_error, _skip = oob_mode.error, oob_mode.skip
_unknown, _swdge, _hwdge, _static = dge_mode.unknown, dge_mode.swdge, dge_mode.hwdge, dge_mode.none
_ROUTE = {"sbuf": "sbuf", "private_hbm": "hbm", "shared_hbm": "hbm"}


@lru_cache(maxsize=4096)
def _run_elements(shape: Shape, strides: Shape, on_chip: bool) -> int:
    """Elements of the longest contiguous run; on chip a run ends with its partition."""
    run = 1
    for count, stride in zip(reversed(shape[1 if on_chip else 0 :]), reversed(strides[1 if on_chip else 0 :]),
                             strict=True):  # fmt: skip
        if count == 1:
            continue
        if stride != run:
            break
        run *= count
    return run


def check_reach(core: Core, rule: str, view: NkiTensor) -> None:
    """The declared range of a DMA access stays below 2^32.

    Raises:
        ReachError: it does not, in the unit of the option `reach_unit`.
    """
    if view.storage.on_chip:
        return
    itemsize = view.dtype.itemsize
    if view.storage.nbytes < LIMIT // 2:
        return
    indirect = view.indirect_index
    shape, strides, reach = view.shape, view.strides, view.offset
    if indirect is not None:
        reach += (indirect.bound - 1) * indirect.multiplier
        if indirect.kind == "vector":
            shape, strides = shape[1:], strides[1:]
    reach += sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
    reach = min(reach, view.storage.nbytes // itemsize - 1)
    unit = core.options.reach_unit
    size = (reach + 1) * (itemsize if unit == "bytes" else 1)
    kind = "static" if indirect is None else "dynamic"
    if size > LIMIT:
        refuse(
            f"{rule}: {kind} DMA reach of {view.name or 'an HBM tensor'}",
            f"{size} {unit}",
            f"{LIMIT} {unit}",
            ReachError,
        )
    if size > LIMIT // 2:
        core.warn(f"{rule}: {kind} DMA reach of {view.name or 'an HBM tensor'} is {size} {unit}, above 2^31")


def _check_side(rule: str, label: str, view: Any) -> NkiTensor:
    found = tensor(rule, label, view)
    if found.buffer is PSUM:
        refuse(f"{rule}: {label} buffer", "psum", "SBUF or HBM; DMA reaches no PSUM")
    if found._unchecked:
        found.check_bounds()
    return found


def _check_vector(rule: str, view: NkiTensor, other: NkiTensor, mode: Any) -> None:
    indirect = view.indirect_index
    assert indirect is not None
    index = tensor(rule, "vector_offset", indirect.index)
    if index.buffer is not SBUF:
        refuse(f"{rule}: vector_offset buffer", index.buffer.value, "sbuf")
    if index.dtype not in ("int32", "uint32"):
        refuse(f"{rule}: vector_offset dtype", index.dtype, "int32 or uint32")
    if index.shape[0] != view.shape[0] or index.size != view.shape[0]:
        refuse(f"{rule}: vector_offset shape", index.shape, f"({view.shape[0]}, 1), one index per row")
    if other.buffer is not SBUF:
        refuse(f"{rule}: the other side of an indirect DMA", other.buffer.value, "sbuf")
    if other.indirect_index is not None:
        refuse(f"{rule}: dynamic sides", "both", "one indirect side")
    if mode not in (_unknown, _swdge):
        refuse(f"{rule}: dge_mode of an indirect DMA", mode.name, "unknown or swdge")


def _count(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, elements: int, *others: NkiTensor) -> None:
    extra = [v.indirect_index.index for v in (dst, src) if v.indirect_index is not None]
    stat = core.retire(rule, "dma", 0, elements // max(1, dst.shape[0]), dst, src, *others,
                       *[t for t in extra if type(t) is NkiTensor])  # fmt: skip
    counters = core.counters
    written, read = elements * dst.dtype.itemsize, elements * src.dtype.itemsize
    stat.bytes += written
    source, target = _ROUTE[src.buffer.value], _ROUTE[dst.buffer.value]
    counters.dma_bytes[f"{source}>{target}"] += written
    if source == "hbm":
        counters.hbm_read_bytes += read
    if target == "hbm":
        counters.hbm_write_bytes += written
    run = min(
        _run_elements(dst.shape, dst.strides, dst.storage.on_chip),
        _run_elements(src.shape, src.strides, src.storage.on_chip),
    )
    counters.descriptors[run * dst.dtype.itemsize] += -(-elements // run)


def _rows(view: NkiTensor, base: Any, unit: int, kind: Any) -> tuple[Array, int]:
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


def _cast(values: Array, src: NkiTensor, dst: NkiTensor) -> Array:
    if src.dtype == dst.dtype:
        return values
    return dst.dtype.from_f32(src.dtype.to_f32(values))


def _gather(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, mode: oob_mode) -> None:
    table, rows = _rows(src, src.storage.data, src.dtype.itemsize, src.dtype.np)
    index, valid = _indices(core, rule, src, rows, mode)
    if src.storage.unwritten is not None:
        marks, _ = _rows(src, src.storage.unwritten, src.dtype.itemsize, f"u{src.dtype.itemsize}")
        picked = marks[index if valid is None else index[valid]]
        if picked.any():
            src.report_poison(picked)
    if valid is None:
        put_raw(dst, _cast(table[index], src, dst).reshape(dst.shape))
        return
    if not valid.any():
        return
    if dst.shape[0] != len(index):
        refuse(f"{rule}: skipped rows", f"dst {dst.shape}", f"{len(index)} rows in dst, one per index")
    out = dst.write_target()
    out[valid] = _cast(table[index[valid]], src, dst).reshape((-1, *dst.shape[1:]))
    if dst.storage.unwritten is not None:
        dst.marks()[valid] = 0
        dst.storage.settle()


def _scatter(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, mode: oob_mode, add: bool = False) -> None:
    if dst.storage.frozen:
        dst.storage.thaw()
    table, rows = _rows(dst, dst.storage.data, dst.dtype.itemsize, dst.dtype.np)
    index, valid = _indices(core, rule, dst, rows, mode)
    values = _cast(src.read(), src, dst).reshape((len(index), *dst.shape[1:]))
    if valid is not None:
        index, values = index[valid], values[valid]
    if len(set(index.tolist())) != len(index):
        core.warn(f"{rule}: two rows of one scatter write the same destination; which one stays is not defined")
    if add:
        total = dst.dtype.to_f32(table[index]) + src.dtype.to_f32(values)
        values = dst.dtype.from_f32(total)
    table[index] = values
    if dst.storage.unwritten is not None:
        marks, _ = _rows(dst, dst.storage.unwritten, dst.dtype.itemsize, f"u{dst.dtype.itemsize}")
        marks[index] = 0
        dst.storage.settle()


def _in_range(core: Core, view: NkiTensor, mode: oob_mode) -> bool:
    """Whether a scalar-indirect view is in range; with oob_mode.skip a view that is not is skipped whole."""
    if mode is _error or view.indirect_index is None:
        return True
    try:
        view._start()
    except BoundsError:
        core.counters.skipped_rows += view.shape[0]
        return False
    return True


def member(rule: str, label: str, kind: Any, value: Any) -> Any:
    """`value` as a member of an enum of nisa; the plain number of one is taken with a warning."""
    if type(value) is kind:
        return value
    if not isinstance(value, int) or value not in [m.value for m in kind]:
        refuse(f"{rule}: {label}", repr(value), f"a member of nisa.{kind.__name__}", UsageError)
    core_of(rule).warn(f"{rule}: {label}={value} as a plain number; NKI 0.3 and later want nisa.{kind.__name__}")
    return kind(value)


def _check_queue(rule: str, mode: Any, queue: Any) -> None:
    if not isinstance(queue, engine):
        refuse(f"{rule}: engine", repr(queue), "a member of nisa.engine", UsageError)
    if queue is not engine.unknown and mode is not _hwdge:
        refuse(f"{rule}: engine", queue.name, "only with dge_mode.hwdge")
    if queue not in (engine.unknown, engine.sync, engine.scalar):
        refuse(f"{rule}: engine", queue.name, "sync or scalar")


def check_priority(core: Core, rule: str, priority: Any) -> None:
    """DMA quality of service: 0 to 3, trn3."""
    if priority is None:
        return
    if core.target.generation < 4:
        refuse(f"{rule}: priority", priority, "trn3 or newer")
    if priority not in (0, 1, 2, 3):
        refuse(f"{rule}: priority", priority, "0 to 3")


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = _error,
    dge_mode: dge_mode = _unknown,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src between HBM and SBUF; equal element counts, dtypes convert through fp32."""
    rule = "dma_copy"
    core = core_of(rule)
    _check_side(rule, "dst", dst)
    _check_side(rule, "src", src)
    dge_mode, oob_mode = member(rule, "dge_mode", _Dge, dge_mode), member(rule, "oob_mode", _Oob, oob_mode)
    _check_queue(rule, dge_mode, engine)
    check_priority(core, rule, priority)
    elements = prod(dst.shape)
    if elements != prod(src.shape):
        refuse(f"{rule}: element count", f"src {src.shape}, dst {dst.shape}", "equal element counts")
    if dst.dtype != src.dtype:
        if dst.dtype.kind == "x" or src.dtype.kind == "x":
            refuse(f"{rule}: cast", f"{src.dtype} to {dst.dtype}", "no cast of x4 dtypes")
        if dge_mode is _hwdge:
            refuse(f"{rule}: cast with hwdge", f"{src.dtype} to {dst.dtype}", "equal dtypes")
    to, of = dst.indirect_index, src.indirect_index
    if dge_mode is _static and (to is not None or of is not None):
        refuse(f"{rule}: dge_mode of a dynamic address", "none", "unknown, swdge or hwdge")
    if to is not None and to.kind == "vector":
        _check_vector(rule, dst, src, dge_mode)
    if of is not None and of.kind == "vector":
        _check_vector(rule, src, dst, dge_mode)
    if 0 in dst.strides:
        writable(rule, dst)
    check_reach(core, rule, dst)
    check_reach(core, rule, src)
    _count(core, rule, dst, src, elements)
    if core.trace:
        return DONE
    if to is None and of is None:
        values = src.read()
        if dst.dtype != src.dtype:
            values = _cast(values, src, dst)
        elif dst.storage is src.storage:
            values = values.copy()
        put_raw(dst, values)
    elif of is not None and of.kind == "vector":
        _gather(core, rule, dst, src, oob_mode)
    elif to is not None and to.kind == "vector":
        _scatter(core, rule, dst, src, oob_mode)
    elif _in_range(core, src, oob_mode) and _in_range(core, dst, oob_mode):
        put_raw(dst, _cast(src.read(), src, dst))
    return DONE


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
    _check_side(rule, "dst", dst)
    _check_side(rule, "src", src)
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
    _count(core, rule, dst, src, elements)
    if core.trace:
        return DONE
    if indirect is None or indirect.kind == "scalar":
        if _in_range(core, src, oob_mode):
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
    table, rows = _rows(src, src.storage.data, src.dtype.itemsize, src.dtype.np)
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
        marks, _ = _rows(src, src.storage.unwritten, src.dtype.itemsize, f"u{src.dtype.itemsize}")
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


def dma_compute(
    dst: NkiTensor,
    srcs: Any,
    reduce_op: Any,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = _error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = sum of srcs in the DMA engine, in fp32; with vector_offset a read-modify-write of gathered rows."""
    rule = "dma_compute"
    core = core_of(rule)
    _check_side(rule, "dst", dst)
    oob_mode = member(rule, "oob_mode", _Oob, oob_mode)
    if not isinstance(srcs, (list, tuple)) or not 1 <= len(srcs) <= 16:
        refuse(f"{rule}: srcs", repr(srcs), "a list of 1 to 16 tensors", UsageError)
    for src in srcs:
        _check_side(rule, "src", src)
        if prod(src.shape) != prod(dst.shape):
            refuse(f"{rule}: element count", f"src {src.shape}, dst {dst.shape}", "equal element counts")
    if as_op(reduce_op, rule).name != "add":
        refuse(f"{rule}: reduce_op", repr(reduce_op), "nl.add")
    if scales is not None and any(scale != 1.0 for scale in scales):
        refuse(f"{rule}: scales", scales, "1.0 for every source")
    dynamic = [v for v in (dst, *srcs) if v.indirect_index is not None]
    if dynamic:
        if len(srcs) != 2:
            refuse(f"{rule}: sources of a read-modify-write", len(srcs), 2)
        if not unique_indices:
            refuse(f"{rule}: unique_indices", False, "True with vector_offset")
        if any(v.indirect_index is None or v.indirect_index.kind != "vector" for v in dynamic):
            refuse(f"{rule}: dynamic index", "scalar_offset", "vector_offset")
    for view in (dst, *srcs):
        check_reach(core, rule, view)
    for src in srcs:
        _count(core, rule, dst, src, prod(dst.shape))
    if core.trace:
        return DONE
    if dst.indirect_index is not None:
        plain = [s for s in srcs if s.indirect_index is None]
        if len(plain) != 1:
            refuse(f"{rule}: scatter sources", "no plain source", "the indexed dst and one SBUF tensor")
        _check_vector(rule, dst, plain[0], _unknown)
        _scatter(core, rule, dst, plain[0], oob_mode, add=True)
        return DONE
    total: Array | None = None
    for src in srcs:
        if src.indirect_index is None:
            values = src.dtype.to_f32(src.read()).reshape(dst.shape)
        else:
            values = _gather_f32(core, rule, dst, src, oob_mode)
        total = values if total is None else total + values
    assert total is not None
    put_raw(dst, dst.dtype.from_f32(total))
    return DONE


def _gather_f32(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, mode: oob_mode) -> Array:
    _check_vector(rule, src, dst, _unknown)
    table, rows = _rows(src, src.storage.data, src.dtype.itemsize, src.dtype.np)
    index, valid = _indices(core, rule, src, rows, mode)
    safe = index if valid is None else np.where(valid, index, 0)
    if src.storage.unwritten is not None:
        marks, _ = _rows(src, src.storage.unwritten, src.dtype.itemsize, f"u{src.dtype.itemsize}")
        if marks[safe].any():
            src.report_poison(marks[safe])
    values = src.dtype.to_f32(table[safe])
    if valid is not None:
        values = values.copy()
        values[~valid] = 0
    return values.reshape(dst.shape)
