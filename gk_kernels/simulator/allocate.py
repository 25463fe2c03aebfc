"""Allocation: nl.ndarray, the tensors that two cores share, explicit addresses, and kernel inputs."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gk_kernels.simulator import context as cx
from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import (
    DType,
    as_dtype,
)
from gk_kernels.simulator.errors import CapacityError, Site, UsageError, kernel_frame, refuse
from gk_kernels.simulator.memory import Life, MemoryRegion, Storage
from gk_kernels.simulator.targets import PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS
from gk_kernels.simulator.tensor import NkiTensor, check_start

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm


def _site() -> Site | None:
    frame = kernel_frame(2)
    return None if frame is None else (frame.f_code, frame.f_lineno)


def _check_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (int, np.integer)):
        shape = (shape,)
    result = []
    for size in shape:
        if isinstance(size, float) or int(size) < 1:
            refuse("ndarray: shape", tuple(shape), "positive integers", UsageError)
        result.append(int(size))
    if not result:
        refuse("ndarray: shape", tuple(shape), "at least one dimension", UsageError)
    return tuple(result)


def ndarray(
    shape: Sequence[int],
    dtype: Any,
    buffer: MemoryRegion = sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """Allocate a tensor; its contents are undefined until written.

    Raises:
        UsageError: not an nl dtype or buffer, a bad shape, or a name that is taken.
        ConstraintError: more than 128 partitions, or an HBM tensor at or above the size limit.
        CapacityError: larger than a whole partition.
    """
    core = cx.current("nl.ndarray")
    kind = as_dtype(dtype)
    size = _check_shape(shape)
    if not isinstance(buffer, MemoryRegion):
        refuse("ndarray: buffer", repr(buffer), "nl.sbuf, psum, hbm, private_hbm or shared_hbm", UsageError)
    site = _site()
    if buffer is shared_hbm and core.lnc == 2:
        return _shared(core, size, kind, name, site)
    return _allocate(core, size, kind, buffer, name, address, site)


def _shared(core: Core, shape: tuple[int, ...], kind: DType, name: str, site: Site | None) -> NkiTensor:
    """The one shared_hbm tensor that both cores of a rank allocate, matched by name or by line and turn."""
    if name:
        key: object = name
        if name in core.names:
            _taken(name, core)
        core.names[name] = ""
    else:
        turn = core.site_counts.get(site, 0)
        core.site_counts[site] = turn + 1
        key = (site, turn)
    found = core.shared.get(key)
    if found is None:
        found = core.shared[key] = _allocate(core, shape, kind, shared_hbm, name and f"{name}", None, site, shared=True)
    elif found.shape != shape or found.dtype != kind:
        refuse(
            "ndarray: shared_hbm on two cores",
            f"{kind} {shape} and {found.dtype} {found.shape}",
            "the same shape and dtype on both cores",
            UsageError,
        )
    return found


def _taken(name: str, core: Core) -> None:
    refuse(
        "ndarray: name", f"{name!r} is taken by {core.names[name]}", "a name of its own for every tensor", UsageError
    )


def _allocate(
    core: Core,
    shape: tuple[int, ...],
    kind: DType,
    buffer: MemoryRegion,
    name: str,
    address: tuple[int, int] | None,
    site: Site | None,
    *,
    shared: builtins.bool = False,
) -> NkiTensor:
    if name and not shared:
        if name in core.names:
            _taken(name, core)
        core.names[name] = f"{buffer.value} {shape}"
    nbytes = math.prod(shape) * kind.itemsize
    if buffer is sbuf or buffer is psum:
        if len(shape) < 2:
            refuse("ndarray: on-chip dimensions", shape, "2 or more, the partition first", UsageError)
        if shape[0] > PARTITIONS:
            refuse("ndarray: partitions", shape[0], PARTITIONS)
        row_bytes = nbytes // shape[0]
        whole = core.target.sbuf_bytes if buffer is sbuf else PSUM_BANK_BYTES * PSUM_BANKS
        if row_bytes > whole:
            refuse(f"ndarray: {buffer.value} bytes per partition", row_bytes, whole, CapacityError)
        life = Life(buffer, name, site, shape[0], row_bytes)
        if address is not None:
            _place(life, address, whole)
        core.lives.append(life)
    else:
        row_bytes = nbytes
        limit = core.options.hbm_tensor_limit_bytes
        if limit is not None and nbytes >= limit:
            refuse("HBM tensor size", f"{nbytes} bytes ({kind} {shape})", f"below {limit} bytes")
        if address is not None:
            refuse("ndarray: address", address, "none for HBM tensors", UsageError)
        life = Life(buffer, name, site, 1, nbytes)
    data = None
    if not core.trace:
        data = np.empty(nbytes, np.uint8)
        if core.options.poison != "error":
            data.fill(0xFF)
    storage = Storage(buffer, nbytes, row_bytes, life, data, written=False)
    return NkiTensor(shape, kind, storage, buffer, name)


def _place(life: Life, address: tuple[int, int], whole: int) -> None:
    partition, free = int(address[0]), int(address[1])
    align = 4 if life.buffer is psum else 1
    if free % align or free < 0 or free + life.row_bytes > whole:
        refuse(
            "ndarray: address",
            address,
            f"a free offset that is a multiple of {align} and ends by byte {whole}",
            CapacityError,
        )
    check_start(life.partitions, partition)
    life.partition_start, life.free_start = partition, free


def wrap_array(
    core: Core, array: Any, kind: DType, *, frozen: builtins.bool, name: str, shape: tuple[int, ...]
) -> NkiTensor:
    """An HBM input over a caller's bytes (`array` None: shape only, for a trace)."""
    nbytes = math.prod(shape) * kind.itemsize
    limit = core.options.hbm_tensor_limit_bytes
    if limit is not None and nbytes >= limit:
        raise_size(nbytes, kind, shape, limit)
    buffer = shared_hbm if core.lnc == 2 else private_hbm
    life = Life(buffer, name, None, 1, nbytes)
    storage = Storage(buffer, nbytes, nbytes, life, array, written=True, frozen=frozen)
    return NkiTensor(shape, kind, storage, buffer, name)


def raise_size(nbytes: int, kind: DType, shape: tuple[int, ...], limit: int) -> None:
    """Refuse an input that is too large for one HBM tensor."""
    refuse("HBM tensor size", f"{nbytes} bytes ({kind} {shape})", f"below {limit} bytes")
