"""Worker half of gk's connector over group buffers: a K and a V region each, real NIXL, the core's leases and pulls.

Layers 2j and 2j+1 have one buffer and give one pair of regions; a native prefill engine and a giga-kernel decode engine
register the same. vLLM calls `start_load_kv` and `get_finished` once per step, requests or not, and that is what polls.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping

import torch

from gk_adapters.hf_checkpoint import HFCheckpoint, weights_id_of
from gk_adapters.nixl_transport import NixlTransport
from gk_adapters.nodes import MonotonicClock
from gk_adapters.peer_codec import encode_hello
from gk_adapters.peer_directory import HandshakeServer, NoticeMailbox, PeerDirectory
from gk_adapters.vllm.connector_settings import ConnectorSettings
from gk_adapters.vllm.engine_facts import EngineFacts
from gk_adapters.vllm.handshake_channel import HandshakeChannel
from gk_adapters.vllm.hma import layer_name
from gk_adapters.vllm.introductions import IntroducingTransport, take_notices
from gk_adapters.vllm.notice_thread import NoticeThread
from gk_adapters.vllm.settings import MissingKVPolicy
from gk_adapters.vllm.stats import CollectedMetrics, GkConnectorStats
from gk_adapters.vllm.transfer_orders import TransferOrders
from gk_adapters.vllm.worker_leases import WorkerLeases
from gk_adapters.vllm.worker_pulls import WorkerPulls
from gk_core.disaggregation import Role
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.handshake import PeerHello
from gk_core.kv_layout import KVLayout
from gk_core.model_geometry import buffer_of_layer
from gk_core.notices import Claim, PeerNotice, Release
from gk_core.peer_layout import describe_rank
from gk_core.ports import PeerKey
from gk_core.region import KVRegion, regions_of_buffers

__all__ = ["GkWorkerHalf", "group_regions"]

_log = logging.getLogger("vllm.gk")
_EAGER_ATTEMPTS = 5


class GkWorkerHalf:
    """One rank.

    Args:
        facts: of the engine.
        settings: of the connector.
        engine_id: of this start of the engine.
        tp_rank: of this worker.
        scales: KV scales (k, v) of the attention layers.
    """

    def __init__(
        self,
        *,
        facts: EngineFacts,
        settings: ConnectorSettings,
        engine_id: str,
        tp_rank: int,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.facts, self._settings, self._scales = facts, settings, scales
        self._key = PeerKey(engine_id=engine_id, rank=tp_rank)
        self._metrics = CollectedMetrics()
        self._missing: set[int] = set()
        self.failed_requests: set[str] = set()
        """Requests of the last `get_finished` whose pull was not good."""
        self._ends: _Ends | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> bytes:
        """Register the group buffers and say what a peer needs to know of them.

        Raises:
            LayoutError, UnsupportedError: caches that are not group buffers of this engine's layers.
            TransferError: NIXL refused.
        """
        layout, regions = group_regions(self.facts, kv_caches)
        self._ends = _Ends(self.facts, self._settings, self._key, self._scales, layout, regions, self._metrics)
        _log.info(
            "gk: registered %d regions of %d blocks, %d bytes each: K and V of %d group buffers",
            len(regions), layout.num_blocks, layout.block_bytes, layout.num_buffers,
        )  # fmt: skip
        return self._ends.hello

    def start(self, orders: TransferOrders) -> None:
        """Take a step's orders."""
        ends = self._open()
        with ends.lock:
            for lease in orders.leases:
                ends.leases.grant(lease)
        for offered in orders.waiting:
            ends.pulls.wait(offered)
        for pull in orders.pulls:
            ends.pulls.start(pull)
        for offered in orders.declined:
            ends.pulls.decline(offered)
        for request_id in orders.aborted:
            ends.pulls.abort(request_id)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Poll; requests whose blocks nobody reads any more, and requests whose pull is over, good or not."""
        ends = self._open()
        for notice in ends.take_notices():
            if isinstance(notice, Claim | Release):
                with ends.lock:
                    ends.leases.answer(notice)
            else:
                ends.pulls.notice(notice)
        received, self.failed_requests = set(), set()
        for result in ends.pulls.poll():
            received.add(result.request_id)
            if result.reason:
                self._missing |= result.missing_ids
                self.failed_requests.add(result.request_id)
                _log.warning("gk: the KV of request %s was not pulled: %s", result.request_id, result.reason)
        with ends.lock:
            return ends.leases.take_ended(), received

    def take_missing_ids(self) -> set[int]:
        """Blocks that pulls since the last call left without contents."""
        missing, self._missing = self._missing, set()
        return missing

    def take_stats(self) -> GkConnectorStats | None:
        """Counts since the last call."""
        return self._metrics.take()

    @property
    def num_leases(self) -> int:
        """Requests whose blocks wait for a reader."""
        return self._open().leases.num_leases

    def shutdown(self) -> None:
        """Let go of everything; harmless twice."""
        if self._ends is not None:
            self._ends.close()
            self._ends = None

    def _open(self) -> _Ends:
        if self._ends is None:
            raise LayoutError("register_kv_caches must come first")
        return self._ends


class _Ends:
    """Everything that needs a registered cache."""

    def __init__(
        self,
        facts: EngineFacts,
        settings: ConnectorSettings,
        key: PeerKey,
        scales: tuple[float, float],
        layout: KVLayout,
        regions: tuple[KVRegion, ...],
        metrics: CollectedMetrics,
    ) -> None:
        clock = MonotonicClock()
        role = facts.role
        assert role is not None, "the facade refuses an engine that is both"
        described = describe_rank(
            facts.geometry,
            layout,
            engine_id=key.engine_id,
            role=role,
            tp_size=facts.tp_size,
            tp_rank=key.rank,
            dcp_size=facts.dcp_size,
            k_scale=scales[0],
            v_scale=scales[1],
            weights_id=settings.weights_id or weights_id_of(HFCheckpoint(facts.directory)),
        )
        # A new name per start: peers may still know the last one's.
        self.link = NixlTransport(
            agent_name=f"{key.engine_id}/{key.rank}/{uuid.uuid4().hex[:8]}",
            backend=settings.backend,
            progress_thread=settings.progress_thread,
        )
        metadata = self.link.register(regions=regions)
        hello = PeerHello(layout=described, agent_metadata=metadata, regions=regions)
        self.hello = encode_hello(hello)
        mailbox = NoticeMailbox(port=self.link, metrics=metrics)
        self.handshakes = HandshakeServer(hellos={key.rank: hello}, transports={key.rank: self.link})
        self.leases = WorkerLeases(
            key=key, mailbox=mailbox, clock=clock, metrics=metrics, max_lifetime_seconds=settings.max_lease_seconds
        )
        introducing = IntroducingTransport(transport=self.link, notices=self.link)
        introducing.hello = self.hello
        self.peers = PeerDirectory(
            hello=hello,
            channel=HandshakeChannel(allowed=settings.allowed_producers),
            transport=introducing,
            clock=clock,
            # All ranks of a vLLM engine are asked at one address.
            where=lambda endpoint, rank: endpoint,
        )
        self.lock = threading.RLock()
        self._metrics = metrics
        self._thread: NoticeThread | None = None
        if role is Role.PREFILL:
            self._thread = NoticeThread(
                take=self._take,
                answer=self.leases.answer,
                is_busy=lambda: self.leases.num_leases > 0,
                lock=self.lock,
            )
        eager = facts.settings.missing_kv is MissingKVPolicy.PULL_AGAIN
        self.pulls = WorkerPulls(
            layout=described,
            transport=self.link,
            mailbox=mailbox,
            peers=self.peers,
            clock=clock,
            metrics=metrics,
            settings=settings.pull_settings(max_attempts=_EAGER_ATTEMPTS if eager else 2),
            keep_asking=eager,
        )

    def take_notices(self) -> tuple[PeerNotice, ...]:
        """Notices that the caller has to deal with."""
        return self._take() if self._thread is None else self._thread.take_others()

    def _take(self) -> tuple[PeerNotice, ...]:
        return take_notices(port=self.link, handshakes=self.handshakes, metrics=self._metrics)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self.peers.close()
        self.link.close()


def group_regions(facts: EngineFacts, kv_caches: Mapping[str, torch.Tensor]) -> tuple[KVLayout, tuple[KVRegion, ...]]:
    """Layout and regions of bound caches {layer name: [2, num_blocks, kv, block, d]}.

    Raises:
        LayoutError: a layer is missing, a shape is not a group buffer's, or paired layers do not share one.
        UnsupportedError: memory that is not the host's.
    """
    geometry, itemsize = facts.geometry, facts.kv_dtype.itemsize
    names = [layer_name(i) for i in range(geometry.num_layers)]
    missing = [n for n in names if n not in kv_caches]
    if missing:
        raise LayoutError(f"no KV cache for {missing}")
    tensors = [kv_caches[n] for n in names]
    shape = tuple(tensors[0].shape)
    layout = facts.layout(num_blocks=shape[1] if len(shape) > 1 else 1)
    wanted = layout.buffer_shape
    for name, tensor in zip(names, tensors, strict=True):
        if tuple(tensor.shape) != wanted or tensor.element_size() != itemsize or not tensor.is_contiguous():
            raise LayoutError(
                f"the cache of {name} must be a contiguous group buffer {list(wanted)} of {itemsize}-byte "
                f"elements, got {list(tensor.shape)} of {tensor.element_size()}"
            )
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"gk's connector registers host memory here, got a cache on {tensor.device}")
    bases = [tensors[i].data_ptr() for i in range(geometry.num_layers)]
    for i in range(geometry.num_layers):
        if bases[i] != bases[2 * buffer_of_layer(i)]:
            raise LayoutError(f"layer {i} does not share group buffer {buffer_of_layer(i)} with its pair")
    return layout, regions_of_buffers(layout, bases)
