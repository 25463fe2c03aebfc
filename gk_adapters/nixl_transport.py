"""KVTransport and NoticePort over a NIXL agent (UCX by default, LIBFABRIC by option).

Strategy: each side's descriptor list is prepared once in NIXL's strided form, one row per region, so neither set-up
time nor memory grows with the number of blocks. A read names descriptors by index, region-major (region * num_blocks +
block), as int32 arrays, both sides ascending so that NIXL can merge neighbours.

Without a progress thread nothing moves unless both sides poll; the engines do. A progress thread polls for you and
costs one core.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, mutable

from gk_core.errors import (
    GkError,
    LayoutError,
    MissingDependencyError,
    PeerLostError,
    TransferError,
    UnsupportedError,
)
from gk_core.ports import KVTransport, Notice, NoticePort, PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.region import KVRegion, strided_run
from gk_core.transfer_plan import HeadSlice, RankRead

__all__ = ["FOREIGN_ERRORS", "NixlTransport", "descriptor_indices"]

FOREIGN_ERRORS: dict[str, type[TransferError]] = {
    "nixlBackendError": TransferError,
    "nixlCancelledError": TransferError,
    "nixlInvalidParamError": TransferError,
    "nixlMismatchError": TransferError,
    "nixlNoTelemetryError": TransferError,
    "nixlNotAllowedError": TransferError,
    "nixlNotFoundError": PeerLostError,
    "nixlNotPostedError": TransferError,
    "nixlNotSupportedError": TransferError,
    "nixlRemoteDisconnectError": PeerLostError,
    "nixlRepostActiveError": TransferError,
    "nixlUnknownError": TransferError,
}
"""Every exception that NIXL's binding raises, and ours for it; a test compares this with the binding's own list."""

_LOCAL = "NIXL_INIT_AGENT"
_MAX_INDEX = 2**31 - 1

Indices = npt.NDArray[np.int32]


def descriptor_indices(ids: npt.NDArray[np.int64], num_regions: int, num_blocks: int) -> Indices:
    """Indices of the same blocks in every region: region * num_blocks + id, region-major.

    >>> descriptor_indices(np.array([5]), 2, 111680)
    array([     5, 111685], dtype=int32)
    """
    bases = np.arange(num_regions, dtype=np.int64)[:, None] * num_blocks
    return (bases + ids).astype(np.int32).ravel()


@mutable(eq=False)
class _Peer:
    """A connected peer: NIXL's name for it, its regions and the descriptor lists prepared so far."""

    agent_metadata: bytes
    name: str
    regions: tuple[KVRegion, ...]
    lists: dict[HeadSlice, Any] = field(factory=dict)


class NixlTransport(KVTransport, NoticePort):
    """Real KV transport. Thread-safe: one lock around the agent.

    Args:
        agent_name: unique per worker and per start of it; engine id and rank make a good one.
        backend: NIXL plugin, "UCX" or "LIBFABRIC".
        memory_type: "DRAM", or "VRAM" for device memory.
        progress_thread: let NIXL poll on a thread of its own (one busy core).
        num_threads: backend worker threads, 0 for its default.

    Raises:
        MissingDependencyError: nixl is not installed.
        UnsupportedError: NIXL has no such backend here.
    """

    def __init__(
        self,
        *,
        agent_name: str,
        backend: str = "UCX",
        memory_type: str = "DRAM",
        progress_thread: bool = False,
        num_threads: int = 0,
    ) -> None:
        api = _nixl_api()
        self._errors = _error_table()
        self._lock = threading.RLock()
        self._memory_type = memory_type
        self._regions: tuple[KVRegion, ...] = ()
        self._registration: Any = None
        self._metadata = b""
        self._local_lists: dict[tuple[int, int], Any] = {}
        self._peers: dict[PeerKey, _Peer] = {}
        self._handles: set[_NixlRead] = set()
        self._closed = False
        self._register_calls = 0
        config = api.nixl_agent_config(enable_prog_thread=progress_thread, num_threads=num_threads, backends=[backend])
        with self._foreign("start agent"):
            self._agent = api.nixl_agent(agent_name, config)
        if backend not in self._agent.backends:
            raise UnsupportedError(
                f"NIXL here has no {backend} backend, it has {sorted(self._agent.plugin_list)}; "
                "install that plugin's libraries or choose another backend"
            )
        self._backend = backend

    @property
    def backend(self) -> str:
        """Name of the NIXL plugin in use."""
        return self._backend

    @property
    def num_register_calls(self) -> int:
        """How often memory was registered with NIXL; stays 1 however many requests are served."""
        return self._register_calls

    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        """See `KVTransport.register`."""
        with self._lock:
            self._require_open()
            if self._registration is not None:
                if regions != self._regions:
                    raise TransferError("other regions are registered already; use a new transport for a new cache")
                return self._metadata
            if not regions:
                raise LayoutError("no regions to register")
            if len(regions) * max(r.num_blocks for r in regions) > _MAX_INDEX:
                raise LayoutError(
                    f"{len(regions)} regions of {regions[0].num_blocks} blocks exceed NIXL's int32 descriptor indices"
                )
            rows = np.array([(r.base_address, r.size_bytes, r.device_id) for r in regions], dtype=np.uint64)
            with self._foreign("register memory"):
                self._registration = self._agent.register_memory(rows, self._memory_type, backends=[self._backend])
                self._register_calls += 1
                self._metadata = self._agent.get_agent_metadata()
            self._regions = regions
            return self._metadata

    def connect(self, *, peer: PeerAgent) -> None:
        """See `KVTransport.connect`."""
        with self._lock:
            self._require_open()
            if not self._regions:
                raise TransferError("register our regions before connecting to a peer")
            if len(peer.regions) != len(self._regions):
                raise LayoutError(f"peer has {len(peer.regions)} regions, we have {len(self._regions)}")
            if len({r.num_blocks for r in peer.regions}) != 1:
                raise LayoutError("a peer's regions must all have the same number of blocks")
            known = self._peers.get(peer.key)
            if known is not None:
                if known.agent_metadata == peer.agent_metadata and known.regions == peer.regions:
                    return
                self._forget(peer.key)
            try:
                with self._foreign("add peer"):
                    name = self._agent.add_remote_agent(peer.agent_metadata)
            except TransferError as error:
                raise PeerLostError(f"peer {peer.key.engine_id}/{peer.key.rank}: metadata refused: {error}") from error
            self._peers[peer.key] = _Peer(
                agent_metadata=peer.agent_metadata,
                name=name.decode() if isinstance(name, bytes) else name,
                regions=peer.regions,
            )

    def disconnect(self, *, peer: PeerKey) -> None:
        """Forget a peer and release what was prepared for it; harmless when unknown."""
        with self._lock:
            if peer in self._peers:
                self._forget(peer)

    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        """See `KVTransport.read`."""
        with self._lock:
            self._require_open()
            remote = self._peers.get(peer)
            if remote is None:
                raise PeerLostError(f"peer {peer.engine_id}/{peer.rank} is not connected")
            if not read.runs:
                return _DONE_READ
            local_ids = np.array(read.local_ids, dtype=np.int64)
            remote_ids = np.array(read.remote_ids, dtype=np.int64)
            _require_ids(local_ids, self._regions[0].num_blocks, "local")
            _require_ids(remote_ids, remote.regions[0].num_blocks, "remote")
            local_list, remote_list = self._prepared(remote, read.head_slice)
            n = len(self._regions)
            with self._foreign("post read"):
                handle = self._agent.make_prepped_xfer(
                    "READ",
                    local_list,
                    descriptor_indices(local_ids, n, self._regions[0].num_blocks),
                    remote_list,
                    descriptor_indices(remote_ids, n, remote.regions[0].num_blocks),
                    backends=[self._backend],
                )
                posted = _NixlRead(self, handle)
                self._handles.add(posted)
                try:
                    posted.state = _STATES[self._agent.transfer(handle)]
                except BaseException:
                    self._handles.discard(posted)
                    raise
            return posted

    def send_notice(self, *, peer: PeerKey, payload: bytes) -> None:
        """See `NoticePort.send_notice`."""
        with self._lock:
            self._require_open()
            remote = self._peers.get(peer)
            if remote is None:
                raise PeerLostError(f"peer {peer.engine_id}/{peer.rank} is not connected")
            with self._foreign("send notice"):
                self._agent.send_notif(remote.name, payload)

    def take_notices(self) -> tuple[Notice, ...]:
        """See `NoticePort.take_notices`."""
        with self._lock:
            self._require_open()
            with self._foreign("take notices"):
                by_sender = self._agent.get_new_notifs()
        return tuple(
            Notice(sender=_text(sender), payload=payload)
            for sender, all_of_it in by_sender.items()
            for payload in all_of_it
        )

    def close(self) -> None:
        """See `KVTransport.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for posted in tuple(self._handles):
                posted.abort()
            for key in tuple(self._peers):
                self._forget(key)
            for prepared in self._local_lists.values():
                prepared.release()
            self._local_lists.clear()
            if self._registration is not None:
                with self._foreign("deregister memory"):
                    self._agent.deregister_memory(self._registration, backends=[self._backend])
                self._registration = None
            del self._agent

    def _prepared(self, remote: _Peer, cut: HeadSlice) -> tuple[Any, Any]:
        ours = (cut.local_offset_bytes, cut.length_bytes)
        with self._foreign("prepare descriptors"):
            if ours not in self._local_lists:
                self._local_lists[ours] = self._agent.prep_xfer_dlist(
                    _LOCAL, _strided_rows(self._regions, *ours), self._memory_type, backends=[self._backend]
                )
            if cut not in remote.lists:
                rows = _strided_rows(remote.regions, cut.remote_offset_bytes, cut.length_bytes)
                remote.lists[cut] = self._agent.prep_xfer_dlist(
                    remote.name, rows, self._memory_type, backends=[self._backend]
                )
        return self._local_lists[ours], remote.lists[cut]

    def _forget(self, key: PeerKey) -> None:
        """Release our descriptor lists first, then NIXL's knowledge of the peer."""
        remote = self._peers.pop(key)
        for prepared in remote.lists.values():
            prepared.release()
        try:
            with self._foreign("remove peer"):
                self._agent.remove_remote_agent(remote.name)
        except TransferError:
            # NIXL forgets a disconnected peer by itself; either way it is gone.
            return

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError("the transport is closed")

    def _foreign(self, doing: str) -> _Translate:
        return _Translate(self._errors, doing)


class _Translate:
    """Context manager that turns NIXL's exceptions into ours."""

    def __init__(self, table: dict[type[BaseException], type[TransferError]], doing: str) -> None:
        self._table = table
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, GkError) or not isinstance(error, Exception):
            return
        ours = self._table.get(type(error), TransferError)
        raise ours(f"NIXL could not {self._doing}: {type(error).__name__}: {error}") from error


_STATES = {"DONE": ReadState.DONE, "PROC": ReadState.PENDING, "ERR": ReadState.FAILED}


class _NixlRead(ReadHandle):
    """A posted read. FAILED is reported only once NIXL has let go of the handle, when no byte can land any more."""

    def __init__(self, transport: NixlTransport, handle: Any) -> None:
        self._transport = transport
        self._handle = handle
        self._failing = False
        self._released = False
        self.state = ReadState.PENDING

    def poll(self) -> ReadState:
        with self._transport._lock:
            if self._released:
                return self.state
            if self._failing or self.state is ReadState.FAILED:
                return self._settle_failure()
            if self.state is ReadState.PENDING:
                try:
                    self.state = _STATES[self._transport._agent.check_xfer_state(self._handle)]
                except tuple(self._transport._errors):
                    return self._settle_failure()
                if self.state is ReadState.FAILED:
                    return self._settle_failure()
            return self.state

    def release(self) -> None:
        with self._transport._lock:
            if self._released:
                return
            if self.poll() is ReadState.PENDING:
                raise TransferError("the read is still pending; wait until it is quiet")
            self._let_go()

    def abort(self) -> None:
        """Cancel what can be cancelled; used when the transport closes."""
        if not self._released:
            self._let_go()
            self.state = ReadState.FAILED if self.state is not ReadState.DONE else ReadState.DONE

    def _settle_failure(self) -> ReadState:
        self._failing = True
        self.state = ReadState.FAILED if self._let_go() else ReadState.PENDING
        return self.state

    def _let_go(self) -> bool:
        if not self._released:
            try:
                self._handle.release()
            except Exception:
                return False
            self._released = True
            self._transport._handles.discard(self)
        return True


class _DoneRead(ReadHandle):
    """A read of nothing: a notify-only rank."""

    def poll(self) -> ReadState:
        return ReadState.DONE

    def release(self) -> None:
        return None


_DONE_READ = _DoneRead()


def _require_ids(ids: npt.NDArray[np.int64], num_blocks: int, side: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_blocks:
        raise LayoutError(f"{side} block {low if low < 0 else high} is outside 0..{num_blocks - 1}; nothing was posted")


def _strided_rows(regions: tuple[KVRegion, ...], offset_bytes: int, length_bytes: int) -> npt.NDArray[np.uint64]:
    runs = [strided_run(r, offset_bytes=offset_bytes, length_bytes=length_bytes) for r in regions]
    return np.array([(r.address, r.length_bytes, r.device_id, r.stride_bytes, r.count) for r in runs], dtype=np.uint64)


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _nixl_api() -> Any:
    # NIXL reports every agent and backend at its default level; warnings and errors still come through.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        api = import_module("nixl._api")
    except ImportError as error:
        raise MissingDependencyError(
            f"NIXL is not usable here ({error}); install it with: pip install 'gk-decode[nixl]', or on a host without "
            "CUDA: pip install --no-deps nixl nixl-cu12"
        ) from error
    # Standard output belongs to the program that uses us.
    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    return api


def _error_table() -> dict[type[BaseException], type[TransferError]]:
    bindings = import_module("nixl._bindings")
    return {getattr(bindings, name): ours for name, ours in FOREIGN_ERRORS.items() if hasattr(bindings, name)}
