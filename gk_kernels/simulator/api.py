"""Run a kernel: `simulate(kernel, *args)`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from gk_kernels.simulator import context as cx
from gk_kernels.simulator.allocate import wrap_array
from gk_kernels.simulator.context import Core, Options
from gk_kernels.simulator.counters import Counters, merge
from gk_kernels.simulator.dtypes import Array, DType, as_dtype, from_numpy
from gk_kernels.simulator.errors import SimulationError, UsageError, function_site
from gk_kernels.simulator.memory import MemoryRegion, Peak, check_capacity
from gk_kernels.simulator.program import Kernel, _tag, run
from gk_kernels.simulator.targets import Target, as_target
from gk_kernels.simulator.tensor import NkiTensor

_one_run_at_a_time = threading.RLock()


@dataclass(frozen=True)
class HbmInput:
    """A kernel input that a plain array cannot express: a packed or unusual dtype, or a shape without data.

    Attributes:
        array: the bytes, an array whose element size is that of `dtype`; None for a trace.
        dtype: an nl dtype name such as "float4_e2m1fn_x4"; by default that of the array.
        shape: needed without an array.
        name: shown in messages.
    """

    array: Array | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    name: str = ""


@dataclass(frozen=True)
class SimulationResult:
    """What a run gave.

    Attributes:
        outputs: per rank, what the kernel returned, tensors as NumPy arrays (HbmInput shapes in a trace).
        counters: per rank, over its cores.
        peaks: per rank, (SBUF, PSUM), of the core that used more.
        warnings: legal but suspicious things, with their lines.
        target: the device.
    """

    outputs: list[Any]
    counters: list[Counters]
    peaks: list[tuple[Peak, Peak]]
    warnings: list[str]
    target: Target
    core_counters: list[list[Counters]] = field(default_factory=list)

    @property
    def output(self) -> Any:
        """What rank 0 returned."""
        return self.outputs[0]

    @property
    def total(self) -> Counters:
        """Counters over all ranks."""
        return merge(self.counters)


@dataclass
class _Prepared:
    """A caller's array, ready to become an HBM tensor of one rank."""

    data: Array | None
    kind: DType
    shape: tuple[int, ...]
    frozen: bool
    name: str


def _prepare(value: Any, name: str, trace: bool, shared_by_ranks: bool) -> Any:
    """Turn arrays into _Prepared, refuse what a kernel cannot take, leave the rest."""
    if isinstance(value, HbmInput):
        if value.array is None:
            if value.shape is None or value.dtype is None:
                raise UsageError(f"input {name}", "an HbmInput without array", "shape and dtype")
            if not trace:
                raise UsageError(f"input {name}", "a shape without data", "trace=True, or an array")
            return _Prepared(None, as_dtype(value.dtype), tuple(value.shape), False, value.name or name)
        prepared = _prepare_array(value.array, name, trace, shared_by_ranks, value.dtype)
        prepared.name = value.name or name
        return prepared
    if isinstance(value, np.ndarray):
        return _prepare_array(value, name, trace, shared_by_ranks, None)
    if isinstance(value, list):
        raise UsageError(f"kernel argument {name}", "a list", "a tuple (lists are not kernel arguments)")
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        raise UsageError(f"kernel argument {name}", repr(value), "an nki.language dtype")
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is tuple:
        return tuple(_prepare(v, f"{name}[{i}]", trace, shared_by_ranks) for i, v in enumerate(value))
    if isinstance(value, dict):
        return {k: _prepare(v, f"{name}[{k!r}]", trace, shared_by_ranks) for k, v in value.items()}
    return value


def _prepare_array(array: Array, name: str, trace: bool, shared: bool, dtype: str | None) -> _Prepared:
    kind = from_numpy(array.dtype) if dtype is None else as_dtype(dtype)
    if kind.itemsize != array.dtype.itemsize:
        raise UsageError(f"input {name}", f"{array.dtype} as {kind}", f"elements of {kind.itemsize} bytes")
    if array.ndim == 0 or array.size == 0:
        raise UsageError(f"input {name}", f"shape {array.shape}", "at least one dimension, no empty ones")
    if trace:
        return _Prepared(None, kind, array.shape, False, name)
    dense = np.ascontiguousarray(array)
    frozen = shared or not array.flags.writeable
    return _Prepared(dense.reshape(-1).view(np.uint8), kind, array.shape, frozen, name)


def _materialise(value: Any, core: Core, made: dict[int, NkiTensor]) -> Any:
    if isinstance(value, _Prepared):
        found = made.get(id(value))
        if found is None:
            found = made[id(value)] = wrap_array(
                core, value.data, value.kind, frozen=value.frozen, name=value.name, shape=value.shape
            )
        return found
    if type(value) is tuple:
        return tuple(_materialise(v, core, made) for v in value)
    if isinstance(value, dict):
        return {k: _materialise(v, core, made) for k, v in value.items()}
    return value


def _check_output(value: Any, inputs: dict[int, NkiTensor], function: Callable[..., Any]) -> None:
    if isinstance(value, NkiTensor):
        given = any(value.storage is t.storage for t in inputs.values())
        if value.buffer is not MemoryRegion.shared_hbm and not given:
            raise UsageError("kernel output buffer", f"{value!r}", "nl.shared_hbm", function_site(function))
    elif isinstance(value, (tuple, list)):
        for item in value:
            _check_output(item, inputs, function)


def _collect(value: Any, trace: bool) -> Any:
    if isinstance(value, NkiTensor):
        if trace:
            return HbmInput(dtype=str(value.dtype), shape=value.shape, name=value.name)
        return np.array(value.read())
    if isinstance(value, (tuple, list)):
        return tuple(_collect(v, trace) for v in value)
    if isinstance(value, dict):
        return {k: _collect(v, trace) for k, v in value.items()}
    return value


def simulate(
    kernel: Callable[..., Any],
    *args: Any,
    ranks: int = 1,
    lnc: int | None = None,
    target: str | Target = "trn3",
    rank_args: Sequence[Sequence[Any]] | None = None,
    trace: bool = False,
    poison: str = "error",
    domain: str = "error",
    capacity: str = "error",
    reach_unit: str = "bytes",
    hbm_tensor_limit_bytes: int | None = 1 << 32,
    sections: Sequence[str] = (),
    **kwargs: Any,
) -> SimulationResult:
    """Run an NKI kernel on simulated cores.

    Arrays become HBM tensors over the caller's bytes: a kernel that writes an input changes the caller's array, except
    where several ranks share the argument or the array is read-only or not contiguous (the rank then gets a copy).

    Args:
        kernel: an nki.jit kernel (`kernel[2]` sets lnc) or a plain function.
        args: inputs of every rank: arrays, HbmInput, numbers, strings, nl values, tuples, None.
        ranks: simulated ranks.
        lnc: physical cores per rank, 1 or 2; default that of `kernel[lnc]`, else 1.
        target: "trn2", "trn3", or a Target.
        rank_args: one argument tuple per rank, instead of `args`.
        trace: check and count only, without data; HbmInput(shape=, dtype=) then costs no memory.
        poison: "error", or "nan": never-written bytes read as NaN or -1 and are noted.
        domain: "error" or "warn" for activation inputs outside the documented range.
        capacity: "error" or "warn" for SBUF and PSUM peaks.
        reach_unit: "bytes" or "elements", the unit that is held against 2^32.
        hbm_tensor_limit_bytes: size from which one HBM tensor is refused; None to allow any.
        sections: kernel function names to count by; default: each function that issues instructions.
        kwargs: keyword inputs of the kernel, the same on every rank.

    Raises:
        SimulationError: a rule was broken; the message names it, and the kernel's line.
    """
    function, size = (kernel.function, kernel.lnc) if isinstance(kernel, Kernel) else (kernel, 1)
    size = size if lnc is None else lnc
    _check_options(ranks, size, poison, domain, capacity, reach_unit, args, rank_args)
    options = Options(
        as_target(target), trace, poison, domain, capacity, reach_unit, hbm_tensor_limit_bytes, frozenset(sections)
    )
    with _one_run_at_a_time:
        try:
            return _simulate(function, args, kwargs, ranks, size, rank_args, options)
        except UsageError as error:
            error.site = error.site or function_site(function)
            raise


def _check_options(
    ranks: int, lnc: int, poison: str, domain: str, capacity: str, reach_unit: str, args: Any, rank_args: Any
) -> None:
    for what, value, allowed in (
        ("lnc", lnc, (1, 2)),
        ("poison", poison, ("error", "nan")),
        ("domain", domain, ("error", "warn")),
        ("capacity", capacity, ("error", "warn")),
        ("reach_unit", reach_unit, ("bytes", "elements")),
    ):
        if value not in allowed:
            raise UsageError(f"simulate: {what}", repr(value), " or ".join(map(repr, allowed)))
    if ranks < 1:
        raise UsageError("simulate: ranks", ranks, "at least 1")
    if rank_args is not None and (args or len(rank_args) != ranks):
        raise UsageError(
            "simulate: rank_args",
            f"{len(rank_args)} tuples and {len(args)} common arguments",
            f"{ranks} tuples and no common arguments",
        )


def _simulate(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    ranks: int,
    lnc: int,
    rank_args: Sequence[Sequence[Any]] | None,
    options: Options,
) -> SimulationResult:
    if cx.core is not None:
        raise UsageError("simulate", "a call from inside a kernel", "one simulation at a time")
    common = ranks > 1 and rank_args is None
    prepared_kwargs = {k: _prepare(v, k, options.trace, ranks > 1) for k, v in kwargs.items()}
    shared_args = [_prepare(v, f"{i}", options.trace, common) for i, v in enumerate(args)]
    warnings: list[str] = []
    cores: list[Core] = []
    calls: dict[Core, tuple[list[Any], dict[str, Any], dict[int, NkiTensor]]] = {}
    for rank in range(ranks):
        given = shared_args
        if rank_args is not None:
            given = [_prepare(v, f"{i}", options.trace, False) for i, v in enumerate(rank_args[rank])]
        made: dict[int, NkiTensor] = {}
        shared: dict[object, NkiTensor] = {}
        mine = [
            Core(options, rank=rank, ranks=ranks, core_id=core_id, lnc=lnc, shared=shared, warnings=warnings)
            for core_id in range(lnc)
        ]
        positional = [_materialise(v, mine[0], made) for v in given]
        named = {k: _materialise(v, mine[0], made) for k, v in prepared_kwargs.items()}
        cores += mine
        for core in mine:
            calls[core] = (positional, named, made)

    def body(core: Core) -> Any:
        positional, named, made = calls[core]
        value = function(*positional, **named)
        _check_output(value, made, function)
        return value

    values = run(cores, body)
    return _finish(function, cores, values, ranks, lnc, options, warnings)


def _finish(
    function: Callable[..., Any],
    cores: list[Core],
    values: list[Any],
    ranks: int,
    lnc: int,
    options: Options,
    warnings: list[str],
) -> SimulationResult:
    outputs, counters, peaks, per_core = [], [], [], []
    for rank in range(ranks):
        mine = cores[rank * lnc : (rank + 1) * lnc]
        before = cx.activate(mine[0])
        try:
            measured = [check_capacity(core) for core in mine]
            outputs.append(_collect(values[rank * lnc], options.trace))
        except SimulationError as error:
            _tag(error, mine[0])
            error.site = error.site or function_site(function)
            raise
        finally:
            cx.activate(before)
        peaks.append(
            (
                max((m[0] for m in measured), key=lambda p: p.bytes_per_partition),
                max((m[1] for m in measured), key=lambda p: p.bytes_per_partition),
            )
        )
        per_core.append([core.counters for core in mine])
        counters.append(merge(core.counters for core in mine))
    return SimulationResult(outputs, counters, peaks, warnings, options.target, per_core)


def input_bytes(*values: Any) -> int:
    """Bytes of all arrays among (nested) kernel arguments: what an ideal kernel reads once."""
    total = 0
    for value in values:
        if isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, HbmInput):
            shape = value.shape if value.array is None else value.array.shape
            size = as_dtype(value.dtype).itemsize if value.dtype is not None else 0
            if value.array is not None:
                size = value.array.dtype.itemsize
            total += prod(shape or ()) * size
        elif isinstance(value, (tuple, list)):
            total += input_bytes(*value)
    return total
