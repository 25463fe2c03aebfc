"""What all DMA instructions check and count: sides, modes, reach, bytes and descriptors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.errors import ReachError, UsageError, refuse
from gk_kernels.simulator.isa.check import PSUM, SBUF, core_of, tensor
from gk_kernels.simulator.isa.constants import dge_mode, engine
from gk_kernels.simulator.tensor import NkiTensor, Shape

LIMIT = 1 << 32
_unknown, _swdge, _hwdge = dge_mode.unknown, dge_mode.swdge, dge_mode.hwdge
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


def check_side(rule: str, label: str, view: Any) -> NkiTensor:
    found = tensor(rule, label, view)
    if found.buffer is PSUM:
        refuse(f"{rule}: {label} buffer", "psum", "SBUF or HBM; DMA reaches no PSUM")
    if found._unchecked:
        found.check_bounds()
    return found


def check_vector(rule: str, view: NkiTensor, other: NkiTensor, mode: Any) -> None:
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


def count_dma(core: Core, rule: str, dst: NkiTensor, src: NkiTensor, elements: int, *others: NkiTensor) -> None:
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


def member(rule: str, label: str, kind: Any, value: Any) -> Any:
    """`value` as a member of an enum of nisa; the plain number of one is taken with a warning."""
    if type(value) is kind:
        return value
    if not isinstance(value, int) or value not in [m.value for m in kind]:
        refuse(f"{rule}: {label}", repr(value), f"a member of nisa.{kind.__name__}", UsageError)
    core_of(rule).warn(f"{rule}: {label}={value} as a plain number; NKI 0.3 and later want nisa.{kind.__name__}")
    return kind(value)


def check_queue(rule: str, mode: Any, queue: Any) -> None:
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
