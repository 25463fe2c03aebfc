"""Composition root: a prefill node and a decode node on the CPU, over whatever carries bytes and metadata.

A node owns its model's weights, its group buffers, its pool and its ends of transport and side channel; it decides
nothing. Two nodes in one process talk over the fakes (`local_wirings`), two processes over NIXL and ZeroMQ
(`nixl_wiring`).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import evolve, field, frozen

from gk_adapters.block_pool import BlockOrder, HybridBlockPool
from gk_adapters.peer_directory import DirectorySettings, HandshakeServer, NoticeMailbox, PeerDirectory
from gk_adapters.torch_decode import TorchDecodeKernel
from gk_adapters.torch_kv import allocate_group_buffers, per_buffer_kv
from gk_adapters.torch_model import TorchModel, torch_contract
from gk_adapters.torch_prefill import TorchPrefillModel
from gk_adapters.torch_sampling import TorchCallBuilder, TorchSampler
from gk_core.decode_engine import DecodeEngine
from gk_core.decode_request import DecodeSettings
from gk_core.decode_step import ControlShape
from gk_core.disaggregation import Role
from gk_core.handshake import PeerHello
from gk_core.integrity import BlockBytes
from gk_core.kernel_contract import KernelContract
from gk_core.kv_layout import KByteOrder, KVLayout, layout_for
from gk_core.kv_spec import KVDtype, honest_specs, plan_kv_cache
from gk_core.model_geometry import require_gk_geometry
from gk_core.peer_layout import PeerLayout, describe_rank
from gk_core.ports import (
    CallBuilder,
    Clock,
    DecodeKernel,
    Endpoint,
    KVTransport,
    Metrics,
    NoticePort,
    SideChannel,
    SideChannelServer,
)
from gk_core.prefill_engine import PrefillEngine, PrefillSettings
from gk_core.region import KVRegion, regions_of_buffers

__all__ = [
    "CacheSettings",
    "DecodeNode",
    "Link",
    "MonotonicClock",
    "PrefillNode",
    "Wiring",
    "cache_layout",
    "kernel_factory",
    "kernel_label",
    "local_wirings",
    "new_engine_id",
    "nixl_wiring",
    "torch_kernel",
]


class MonotonicClock(Clock):
    """The machine's monotonic clock."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()


class Link(KVTransport, NoticePort, Protocol):
    """A transport that carries notices too, as NIXL agents and the fakes do."""


@frozen(kw_only=True)
class Wiring:
    """How one node reaches the other.

    Attributes:
        link: (name, regions, buffers) -> transport; the buffers are what the regions lie in.
        channel: the asking end of the side channel.
        server: the listening end; needed by producers only.
        advertised_host: host that hand-offs name, where it differs from the address that is bound.
    """

    link: Callable[[str, tuple[KVRegion, ...], tuple[torch.Tensor, ...]], Link]
    channel: SideChannel
    server: SideChannelServer | None = None
    advertised_host: str = ""


@frozen(kw_only=True)
class CacheSettings:
    """The cache of one node.

    Attributes:
        num_blocks: blocks of every buffer, the null block included.
        block_size: tokens per block.
        dtype: element type.
        packed: pair-packed K; FP8 only.
        max_model_len: tokens.
        num_rows: rows of a decode step.
        order: which free block ids come first.
    """

    num_blocks: int
    block_size: int = 128
    dtype: KVDtype = KVDtype.BF16
    packed: bool = False
    max_model_len: int = 4096
    num_rows: int = 8
    order: BlockOrder = field(default=BlockOrder.CONTIGUOUS)


def new_engine_id(role: Role) -> str:
    """An id that no other start of an engine has."""
    return f"{role.value}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def cache_layout(model: TorchModel, settings: CacheSettings) -> KVLayout:
    """Layout of a node's cache: honest specs, planned and checked.

    Raises:
        UnsupportedError: layers that do not alternate, or packed K without FP8.
    """
    geometry = model.config.geometry
    require_gk_geometry(geometry)
    specs = honest_specs(geometry, tp_size=1, block_size=settings.block_size, dtype=settings.dtype)
    plan_kv_cache(specs, num_blocks=settings.num_blocks)
    order = KByteOrder.PAIR_PACKED if settings.packed else KByteOrder.TOKEN_MAJOR
    return layout_for(specs, num_blocks=settings.num_blocks, k_byte_order=order)


class BufferBytes(BlockBytes):
    """The bytes of a node's registered blocks, for checksums."""

    def __init__(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._halves = [half for buffer in buffers for half in buffer.view(torch.uint8)]

    def block_bytes(self, *, region: int, block: int) -> memoryview:
        """See `BlockBytes.block_bytes`."""
        return memoryview(self._halves[region][block].reshape(-1).numpy())


class _Node:
    """What both kinds of node have."""

    def __init__(
        self,
        *,
        role: Role,
        model: TorchModel,
        cache: CacheSettings,
        wiring: Wiring,
        engine_id: str,
        metrics: Metrics,
        scratch_blocks: int = 0,
    ) -> None:
        self.engine_id = engine_id
        self.model = model
        self.layout = cache_layout(model, cache)
        # What lies in memory: the engine's blocks, then the kernel's scratch, which pool and peers never hear of.
        self.memory = evolve(self.layout, num_blocks=self.layout.num_blocks + scratch_blocks)
        self.buffers = allocate_group_buffers(self.memory)
        self.clock = MonotonicClock()
        self.metrics = metrics
        self.pool = HybridBlockPool(
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            sliding_window=model.config.geometry.sliding_window,
            order=cache.order,
        )
        self.peer_layout: PeerLayout = describe_rank(
            model.config.geometry,
            self.layout,
            engine_id=engine_id,
            role=role,
            tp_size=1,
            tp_rank=0,
            k_scale=model.scales.k,
            v_scale=model.scales.v,
            weights_id=model.weights_id,
        )
        bases = [self.buffers[layer // 2].data_ptr() for layer in range(self.layout.num_layers)]
        self.regions = tuple(
            evolve(region, num_blocks=self.layout.num_blocks) for region in regions_of_buffers(self.memory, bases)
        )
        self.link = wiring.link(f"{engine_id}/0", self.regions, self.buffers)
        metadata = self.link.register(regions=self.regions)
        self.hello = PeerHello(layout=self.peer_layout, agent_metadata=metadata, regions=self.regions)
        self.mailbox = NoticeMailbox(port=self.link, metrics=metrics)

    def bytes_if(self, wanted: bool) -> BlockBytes | None:
        """Block bytes where checksums are wanted."""
        return BufferBytes(self.buffers) if wanted else None


class PrefillNode(_Node):
    """A producer: native per-layer prefill, leases, hand-offs.

    Raises:
        LayoutError: the wiring has no listening end.
    """

    def __init__(
        self,
        *,
        model: TorchModel,
        cache: CacheSettings,
        wiring: Wiring,
        metrics: Metrics,
        settings: PrefillSettings | None = None,
        engine_id: str | None = None,
        checksums: bool = False,
    ) -> None:
        super().__init__(
            role=Role.PREFILL,
            model=model,
            cache=cache,
            wiring=wiring,
            engine_id=engine_id or new_engine_id(Role.PREFILL),
            metrics=metrics,
        )
        assert wiring.server is not None, "a producer's wiring has a server"
        self._server = wiring.server
        self.handshakes = HandshakeServer(hellos={0: self.hello}, transports={0: self.link})
        bound = self._server.serve(handler=self.handshakes.handle)
        self.endpoint = Endpoint(host=wiring.advertised_host or bound.host, port=bound.port)
        self.engine = PrefillEngine(
            layout=self.peer_layout,
            endpoint=self.endpoint,
            pool=self.pool,
            model=TorchPrefillModel(model=model, layout=self.layout, buffers=self.buffers),
            mailbox=self.mailbox,
            clock=self.clock,
            settings=settings or PrefillSettings(max_model_len=cache.max_model_len),
            metrics=metrics,
            block_bytes=self.bytes_if(checksums),
        )

    def close(self) -> None:
        """Withdraw what is on offer and let go of everything; harmless twice."""
        self.engine.cancel_all(reason="the producer stops")
        self._server.close()
        self.link.close()


KernelFactory = Callable[[KernelContract, TorchModel], DecodeKernel[torch.Tensor]]
"""Makes the decode kernel that a node runs; the torch kernel by default."""


@runtime_checkable
class ScratchKernelFactory(Protocol):
    """A factory of kernels that want blocks of their own behind the engine's, in every half of every buffer."""

    def scratch_blocks(self, shape: ControlShape) -> int:
        """How many."""
        ...

    def __call__(
        self, contract: KernelContract, model: TorchModel, scratch_blocks: int = 0
    ) -> DecodeKernel[torch.Tensor]:
        """A kernel for caches whose last blocks, counted by the contract's layout, are its scratch."""
        ...


def torch_kernel(contract: KernelContract, model: TorchModel) -> DecodeKernel[torch.Tensor]:
    """The PyTorch kernel."""
    return TorchDecodeKernel(contract=contract, geometry=model.config.geometry)


def kernel_factory(name: str, checkpoint: Path) -> KernelFactory:
    """The kernel of that name: "torch"; "nki" (a Neuron device where there is one, elsewhere our simulator), or one of
    the two by force, "nki-simulator" and "nki-device".
    """
    if name == "torch":
        return torch_kernel
    from gk_adapters.neuron.where import Where
    from gk_adapters.nki_kernel import NkiKernelFactory

    where = {"nki": Where.AUTO, "nki-simulator": Where.SIMULATOR, "nki-device": Where.DEVICE}[name]
    return NkiKernelFactory(checkpoint=checkpoint, where=where)


def kernel_label(name: str, checkpoint: Path) -> str:
    """What runs the kernel of that name on this machine, for people: "torch", "nki on the simulator", ...

    Raises:
        MissingDependencyError, UnsupportedError: nothing here runs it.
    """
    return str(getattr(kernel_factory(name, checkpoint), "label", name))


class DecodeNode(_Node):
    """A consumer: pulls, then one kernel call per step for all layers."""

    def __init__(
        self,
        *,
        model: TorchModel,
        cache: CacheSettings,
        wiring: Wiring,
        metrics: Metrics,
        settings: DecodeSettings | None = None,
        directory: DirectorySettings | None = None,
        engine_id: str | None = None,
        checksums: bool = False,
        kernel: KernelFactory = torch_kernel,
        builder: CallBuilder[torch.Tensor] | None = None,
    ) -> None:
        self.shape = ControlShape(
            num_rows=cache.num_rows,
            block_size=cache.block_size,
            sliding_window=model.config.geometry.sliding_window,
            max_model_len=cache.max_model_len,
        )
        scratch = kernel.scratch_blocks(self.shape) if isinstance(kernel, ScratchKernelFactory) else 0
        super().__init__(
            role=Role.DECODE,
            model=model,
            cache=cache,
            wiring=wiring,
            engine_id=engine_id or new_engine_id(Role.DECODE),
            metrics=metrics,
            scratch_blocks=scratch,
        )
        self._channel = wiring.channel
        self.peers = PeerDirectory(
            hello=self.hello,
            channel=wiring.channel,
            transport=self.link,
            clock=self.clock,
            settings=directory,
        )
        contract = torch_contract(model, layout=self.memory, shape=self.shape)
        self.engine: DecodeEngine[torch.Tensor] = DecodeEngine(
            layout=self.peer_layout,
            shape=self.shape,
            pool=self.pool,
            transport=self.link,
            mailbox=self.mailbox,
            peers=self.peers,
            kernel=kernel(contract, model, scratch)
            if isinstance(kernel, ScratchKernelFactory)
            else kernel(contract, model),
            builder=builder or TorchCallBuilder(model=model, kv=per_buffer_kv(self.buffers, self.memory)),
            sampler=TorchSampler(model=model),
            clock=self.clock,
            settings=settings,
            metrics=metrics,
            block_bytes=self.bytes_if(checksums),
        )

    def close(self) -> None:
        """Let go of everything; harmless twice."""
        self.peers.close()
        self._channel.close()
        self.link.close()


def local_wirings() -> tuple[Wiring, Wiring]:
    """(prefill, decode) wirings inside one process: the fakes move the real bytes of the torch buffers."""
    from gk_adapters.fakes import (
        FakeFabric,
        FakeMemory,
        FakeSideChannel,
        FakeSideChannelServer,
        FakeSwitchboard,
        FakeTransport,
    )

    fabric, board = FakeFabric(), FakeSwitchboard()

    def link(name: str, regions: tuple[KVRegion, ...], buffers: Sequence[torch.Tensor]) -> Link:
        memories = tuple(
            FakeMemory.at(address=b.data_ptr(), size_bytes=b.numel() * b.element_size(), owner=b) for b in buffers
        )
        return FakeTransport(fabric, name=name, memories=memories)

    def wiring(server: SideChannelServer | None) -> Wiring:
        return Wiring(link=link, channel=FakeSideChannel(board), server=server)

    return wiring(FakeSideChannelServer(board)), wiring(None)


def nixl_wiring(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    listen: bool,
    key: bytes | None = None,
    allowed: tuple[Endpoint, ...] = (),
    advertised_host: str = "",
    backend: str = "UCX",
    progress_thread: bool = False,
) -> Wiring:
    """One process's ends of NIXL and ZeroMQ.

    Args:
        host, port: where the side channel binds; 0 takes a free port.
        listen: whether this node is a producer.
        key, allowed, advertised_host: see `ZmqSideChannel` and `Wiring`.
        backend, progress_thread: see `NixlTransport`.
    """
    from gk_adapters.nixl_transport import NixlTransport
    from gk_adapters.zmq_side_channel import ZmqSideChannel, ZmqSideChannelServer

    def link(name: str, regions: tuple[KVRegion, ...], buffers: Any) -> Link:
        return NixlTransport(agent_name=name, backend=backend, progress_thread=progress_thread)

    return Wiring(
        link=link,
        channel=ZmqSideChannel(key=key, allowed=allowed),
        server=ZmqSideChannelServer(host=host, port=port, key=key) if listen else None,
        advertised_host=advertised_host,
    )
