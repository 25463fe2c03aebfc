"""DMA copies between HBM and SBUF, and adds in flight.

A dynamic view is resolved here, because only DMA has oob_mode. The declared range of a dynamic view, not the indices of
this run, is held against 2^32.
"""

from __future__ import annotations

from math import prod
from typing import Any

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa.check import DONE, core_of, put_raw, writable
from gk_kernels.simulator.isa.constants import NkiInstruction, dge_mode, engine, oob_mode
from gk_kernels.simulator.isa.dma_checks import (
    check_priority,
    check_queue,
    check_reach,
    check_side,
    check_vector,
    count_dma,
    member,
)
from gk_kernels.simulator.isa.indirect import cast, gather, gather_f32, in_range, scatter
from gk_kernels.simulator.ops import as_op
from gk_kernels.simulator.tensor import NkiTensor

_Dge, _Oob = dge_mode, oob_mode
_error = oob_mode.error
_unknown, _hwdge, _static = dge_mode.unknown, dge_mode.hwdge, dge_mode.none


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
    check_side(rule, "dst", dst)
    check_side(rule, "src", src)
    dge_mode, oob_mode = member(rule, "dge_mode", _Dge, dge_mode), member(rule, "oob_mode", _Oob, oob_mode)
    check_queue(rule, dge_mode, engine)
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
        check_vector(rule, dst, src, dge_mode)
    if of is not None and of.kind == "vector":
        check_vector(rule, src, dst, dge_mode)
    if 0 in dst.strides:
        writable(rule, dst)
    check_reach(core, rule, dst)
    check_reach(core, rule, src)
    count_dma(core, rule, dst, src, elements)
    if core.trace:
        return DONE
    if to is None and of is None:
        values = src.read()
        if dst.dtype != src.dtype:
            values = cast(values, src, dst)
        elif dst.storage is src.storage:
            values = values.copy()
        put_raw(dst, values)
    elif of is not None and of.kind == "vector":
        gather(core, rule, dst, src, oob_mode)
    elif to is not None and to.kind == "vector":
        scatter(core, rule, dst, src, oob_mode)
    elif in_range(core, src, oob_mode) and in_range(core, dst, oob_mode):
        put_raw(dst, cast(src.read(), src, dst))
    return DONE


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
    check_side(rule, "dst", dst)
    oob_mode = member(rule, "oob_mode", _Oob, oob_mode)
    if not isinstance(srcs, (list, tuple)) or not 1 <= len(srcs) <= 16:
        refuse(f"{rule}: srcs", repr(srcs), "a list of 1 to 16 tensors", UsageError)
    for src in srcs:
        check_side(rule, "src", src)
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
        count_dma(core, rule, dst, src, prod(dst.shape))
    if core.trace:
        return DONE
    if dst.indirect_index is not None:
        plain = [s for s in srcs if s.indirect_index is None]
        if len(plain) != 1:
            refuse(f"{rule}: scatter sources", "no plain source", "the indexed dst and one SBUF tensor")
        check_vector(rule, dst, plain[0], _unknown)
        scatter(core, rule, dst, plain[0], oob_mode, add=True)
        return DONE
    total: Array | None = None
    for src in srcs:
        if src.indirect_index is None:
            values = src.dtype.to_f32(src.read()).reshape(dst.shape)
        else:
            values = gather_f32(core, rule, dst, src, oob_mode)
        total = values if total is None else total + values
    assert total is not None
    put_raw(dst, dst.dtype.from_f32(total))
    return DONE
