"""Registers, and what the two cores of one LNC 2 rank exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa.check import DONE, SBUF, buffer, core_of, same, tensor
from gk_kernels.simulator.isa.constants import NkiInstruction, dma_engine, engine
from gk_kernels.simulator.memory import MemoryRegion
from gk_kernels.simulator.program import CoreBarrier, SendRecv
from gk_kernels.simulator.tensor import NkiTensor, VirtualRegister, index_value

_GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}


def register_alloc(x: Any = None) -> VirtualRegister:
    """A register, set to x if given."""
    core_of("register_alloc")
    if x is None:
        return VirtualRegister()
    if isinstance(x, NkiTensor):
        register = VirtualRegister()
        register_load(register, x)
        return register
    return VirtualRegister(int(x))


def _register(rule: str, name: str, value: Any) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        refuse(f"{rule}: {name}", repr(value), "a register from register_alloc", UsageError)
    return value


def register_move(dst: VirtualRegister, src: int | VirtualRegister) -> None:
    """dst = a constant or another register."""
    core_of("register_move").retire("register_move", "sync", 0, 1, None)
    _register("register_move", "dst", dst).write(src.read() if isinstance(src, VirtualRegister) else int(src))


def _one_element(rule: str, value: NkiTensor) -> NkiTensor:
    tensor(rule, "the tensor", value)
    if value.buffer is MemoryRegion.psum or value.size != 1:
        refuse(f"{rule}: tensor", f"{value.shape} in {value.buffer.value}", "one element in SBUF or HBM")
    return value


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the single element of src (0 while tracing)."""
    core = core_of("register_load")
    _register("register_load", "dst", dst)
    core.retire("register_load", "sync", 0, 1, None, _one_element("register_load", src))
    if core.trace:
        core.warn("register_load while tracing: there is no data, the register holds 0")
    dst.write(index_value(src))


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """The single element of dst = src."""
    core = core_of("register_store")
    _register("register_store", "src", src)
    core.retire("register_store", "sync", 0, 1, _one_element("register_store", dst))
    if not core.trace:
        dst.write_target()[...] = np.int64(src.read()).astype(dst.dtype.np)
        dst.wrote()


def _need_lnc2(core: Core, rule: str) -> None:
    if core.lnc != 2:
        refuse(
            f"{rule}: logical core size",
            f"lnc {core.lnc}",
            "lnc 2; one physical core has no partner (the compiler reports NCC_IBTN243)",
        )


def core_barrier(
    data: NkiTensor, cores: Any, engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Wait until both cores of the rank arrive. LNC 2 only."""
    rule = "core_barrier"
    core = core_of(rule)
    _need_lnc2(core, rule)
    if tuple(cores) != (0, 1):
        refuse(f"{rule}: cores", tuple(cores), "(0, 1)")
    if tensor(rule, "data", data).buffer is not MemoryRegion.shared_hbm:
        refuse(f"{rule}: data buffer", data.buffer.value, "shared_hbm")
    core.retire(rule, "sync", 0, 1, None, data)
    assert core.rendezvous is not None
    core.rendezvous(CoreBarrier())
    return DONE


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Send src to the partner core's dst and receive its src into dst. LNC 2 only, SBUF."""
    rule = "sendrecv"
    core = core_of(rule)
    _need_lnc2(core, rule)
    buffer(rule, "src", src, SBUF)
    buffer(rule, "dst", dst, SBUF)
    tile = same(rule, dst, src)
    if src.shape != dst.shape:
        refuse(f"{rule}: shapes", f"src {src.shape}, dst {dst.shape}", "equal shapes")
    if src.dtype != dst.dtype:
        refuse(f"{rule}: dtypes", f"src {src.dtype}, dst {dst.dtype}", "equal dtypes")
    for label, value in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if value not in (0, 1):
            refuse(f"{rule}: {label}", value, "0 or 1")
    if dma_engine is _gpsimd_dma:
        limit = _GPSIMD_DMA_BYTES.get(src.dtype.itemsize, 256)
        if tile.free * src.dtype.itemsize > limit:
            refuse(f"{rule}: bytes per partition with gpsimd_dma", tile.free * src.dtype.itemsize, limit)
    stat = core.retire(rule, "dma", 0, tile.free, dst, src)
    stat.bytes += src.size * src.dtype.itemsize
    core.counters.dma_bytes["sbuf>sbuf"] += src.size * src.dtype.itemsize
    values = None if core.trace else src.read().copy()
    assert core.rendezvous is not None
    received = core.rendezvous(
        SendRecv(values, int(send_to_rank), int(recv_from_rank), pipe_id, src.shape, str(src.dtype))
    )
    if not core.trace:
        dst.write_target()[...] = received
        dst.wrote()
    return DONE


_gpsimd_dma = dma_engine.gpsimd_dma
