"""KVTransport and NoticePort over a NIXL agent (UCX by default, LIBFABRIC by option).

Strategy: each side's descriptor list is prepared once in NIXL's strided form, one row per region, so neither set-up
time nor memory grows with the number of blocks. A read names descriptors by index, region-major (region * num_blocks +
block), as int32 arrays, both sides ascending so that NIXL can merge neighbours.

Without a progress thread nothing moves unless both sides poll; the engines do. A progress thread polls for you and
costs one core.

NIXL cannot take a posted read back: released, or with its peer removed, it calls itself failed while UCX goes on with
it, and a peer that was frozen sends its bytes when it thaws. So a read that is under way is never released, and its
peer never removed: disconnecting makes the peer unknown to whoever asks next, and waits for the rest. A peer that ends,
if by SIGKILL, fails its reads at once; one that stays frozen keeps them, and their blocks, until it goes on or ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
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
from gk_core.transfer_plan import BlockPairs, BlockRun, HeadSlice, RankRead

__all__ = ["FOREIGN_ERRORS", "NixlTransport"]

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
_MAX_COUNTS = 64
"""Run lengths whose indices are kept, per list; about 12 kB each for 80 blocks of 36 regions."""

Indices = npt.NDArray[np.int32]


class _BlockList:
    """NIXL's list of one side's blocks, one row per region, and indices into it: region * num_blocks + block.

    Args:
        regions: that side's.
        offset_bytes, length_bytes: the part of each block.
        prepare: hands the rows (address, length, device, stride, count) to NIXL.
    """

    def __init__(
        self,
        regions: tuple[KVRegion, ...],
        offset_bytes: int,
        length_bytes: int,
        prepare: Callable[[npt.NDArray[np.uint64]], Any],
    ) -> None:
        self.num_blocks = regions[0].num_blocks
        self.firsts = np.arange(len(regions), dtype=np.int32) * np.int32(self.num_blocks)
        self._of_count: dict[int, Indices] = {}
        self.handle = prepare(_strided_rows(regions, offset_bytes, length_bytes))

    def of_run(self, start: int, count: int, side: str) -> Indices:
        """Of neighbouring blocks, region-major."""
        if start < 0 or start + count > self.num_blocks:
            raise self.outside(start if start < 0 else start + count - 1, side)
        of_count = self._of_count.get(count)
        if of_count is None:
            if len(self._of_count) >= _MAX_COUNTS:
                self._of_count.clear()
            of_count = (self.firsts[:, None] + np.arange(count, dtype=np.int32)).ravel()
            self._of_count[count] = of_count
        indices: Indices = of_count + np.int32(start)
        return indices

    def outside(self, block: int, side: str) -> LayoutError:
        """What to raise for a block that is not here."""
        return LayoutError(f"{side} block {block} is outside 0..{self.num_blocks - 1}; nothing was posted")


class _ListPair:
    """Our list and a peer's for one head slice, and indices into both at once."""

    def __init__(self, local: _BlockList, remote: _BlockList) -> None:
        self.local, self.remote = local, remote
        self._firsts = np.stack([local.firsts, remote.firsts])[:, :, None]

    def of_runs(self, runs: Sequence[BlockRun]) -> tuple[Indices, Indices]:
        """Of runs on both sides, region-major within each run."""
        if len(runs) == 1:
            run = runs[0]
            return (
                self.local.of_run(run.local_start, run.count, "local"),
                self.remote.of_run(run.remote_start, run.count, "remote"),
            )
        ours = [self.local.of_run(run.local_start, run.count, "local") for run in runs]
        theirs = [self.remote.of_run(run.remote_start, run.count, "remote") for run in runs]
        return np.concatenate(ours), np.concatenate(theirs)

    def of_pairs(self, pairs: BlockPairs) -> tuple[Indices, Indices]:
        """Of scattered blocks, region-major, by our id: NIXL merges what ascends on both sides.

        Raises:
            LayoutError: an id of no block.
        """
        if pairs.local_bound >= self.local.num_blocks:
            raise self.local.outside(pairs.local_bound, "local")
        if pairs.remote_bound >= self.remote.num_blocks:
            raise self.remote.outside(pairs.remote_bound, "remote")
        ids = np.frombuffer(pairs.packed_local + pairs.packed_remote, dtype=np.int32).reshape(2, -1)
        ids = ids.take(ids[0].argsort(), axis=1)
        both = self._firsts + ids[:, None]
        return both[0].ravel(), both[1].ravel()


@mutable(eq=False)
class _Peer:
    """A connected peer: NIXL's name for it, its regions and the descriptor lists prepared so far."""

    agent_metadata: bytes
    name: str
    regions: tuple[KVRegion, ...]
    lists: dict[tuple[int, int, int], _ListPair] = field(factory=dict)
    last_slice: HeadSlice | None = None
    last_lists: Any = None
    num_reads: int = 0
    """Under way."""
    is_leaving: bool = False
    """Disconnected, and removed as soon as no read is under way."""


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
        self._foreign_errors = tuple(self._errors)
        self._backends = [backend]
        self._local_lists: dict[tuple[int, int], _BlockList] = {}
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._leaving: list[_Peer] = []
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
    def agent(self) -> Any:
        """NIXL's own agent, for measurements and diagnostics."""
        return self._agent

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
                self._registration = self._agent.register_memory(rows, self._memory_type, backends=self._backends)
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
            if len(peer.regions) * peer.regions[0].num_blocks > _MAX_INDEX:
                raise LayoutError(
                    f"a peer's {len(peer.regions)} regions of {peer.regions[0].num_blocks} blocks exceed "
                    "NIXL's int32 descriptor indices"
                )
            known = self._peers.get(_of(peer.key))
            if known is not None:
                if known.agent_metadata == peer.agent_metadata and known.regions == peer.regions:
                    return
                self._forget(_of(peer.key))
            if self._has_come_back(peer):
                return
            try:
                with self._foreign("add peer"):
                    name = self._agent.add_remote_agent(peer.agent_metadata)
            except TransferError as error:
                raise PeerLostError(f"peer {peer.key.engine_id}/{peer.key.rank}: metadata refused: {error}") from error
            self._peers[_of(peer.key)] = _Peer(
                agent_metadata=peer.agent_metadata,
                name=name.decode() if isinstance(name, bytes) else name,
                regions=peer.regions,
            )

    def disconnect(self, *, peer: PeerKey) -> None:
        """See `KVTransport.disconnect`; what was prepared for the peer is released once no read needs it."""
        with self._lock:
            if _of(peer) in self._peers:
                self._forget(_of(peer))

    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        """See `KVTransport.read`."""
        with self._lock:
            self._require_open()
            remote = self._peers.get((peer.engine_id, peer.rank))
            if remote is None:
                raise PeerLostError(f"peer {peer.engine_id}/{peer.rank} is not connected")
            if not read.runs:
                return _DONE_READ
            # A peer's map holds its slices, so a request's slice is nearly always the last one's.
            if read.head_slice is not remote.last_slice:
                self._turn_to(remote, read.head_slice)
            lists = remote.last_lists
            runs = read.runs
            ours, theirs = lists.of_pairs(runs) if isinstance(runs, BlockPairs) else lists.of_runs(runs)
            try:
                handle = self._agent.make_prepped_xfer(
                    "READ", lists.local.handle, ours, lists.remote.handle, theirs, b"", self._backends
                )
            except self._foreign_errors as error:
                raise self._ours(error, "prepare a read") from error
            posted = _NixlRead(self, remote, handle)
            try:
                posted.state = self._post(handle)
            except self._foreign_errors as error:
                raise self._ours(error, "post a read") from error
            self._handles.add(posted)
            if posted.state is ReadState.PENDING:
                remote.num_reads += 1
            return posted

    def _post(self, handle: Any) -> ReadState:
        return _STATES[self._agent.transfer(handle)]

    def send_notice(self, *, peer: PeerKey, payload: bytes) -> None:
        """See `NoticePort.send_notice`."""
        with self._lock:
            self._require_open()
            remote = self._peers.get((peer.engine_id, peer.rank))
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
            posted = tuple(self._handles)
            unfinished = [read for read in posted if read.poll() is ReadState.PENDING]
            for read in posted:
                read.abandon()
            try:
                for remote in (*self._peers.values(), *self._leaving):
                    self._remove(remote)
                with self._foreign("release our lists"):
                    for prepared in self._local_lists.values():
                        prepared.handle.release()
                if self._registration is not None:
                    with self._foreign("deregister memory"):
                        self._agent.deregister_memory(self._registration, backends=self._backends)
            finally:
                self._peers.clear()
                self._leaving.clear()
                self._local_lists.clear()
                self._registration = None
                # Nothing holds the agent any more, so its end is here, and with it the end of every read.
                del self._agent
                for read in unfinished:
                    read.state = ReadState.FAILED

    def prepare_again(self) -> Any:
        """A new list of all our blocks, for measurements; `read` prepares each list once and keeps it."""
        with self._lock, self._foreign("prepare descriptors"):
            return self._list(_LOCAL, self._regions, 0, self._regions[0].block_bytes)

    def _list(self, name: str, regions: tuple[KVRegion, ...], offset: int, length: int) -> _BlockList:
        def prepare(rows: npt.NDArray[np.uint64]) -> Any:
            return self._agent.prep_xfer_dlist(name, rows, self._memory_type, backends=self._backends)

        return _BlockList(regions, offset, length, prepare)

    def _turn_to(self, remote: _Peer, cut: HeadSlice) -> None:
        key = (cut.local_offset_bytes, cut.remote_offset_bytes, cut.length_bytes)
        lists = remote.lists.get(key)
        if lists is None:
            lists = remote.lists[key] = self._lists_for(remote, cut)
        remote.last_slice, remote.last_lists = cut, lists

    def _lists_for(self, remote: _Peer, cut: HeadSlice) -> _ListPair:
        ours = (cut.local_offset_bytes, cut.length_bytes)
        with self._foreign("prepare descriptors"):
            if ours not in self._local_lists:
                self._local_lists[ours] = self._list(_LOCAL, self._regions, *ours)
            theirs = self._list(remote.name, remote.regions, cut.remote_offset_bytes, cut.length_bytes)
        return _ListPair(self._local_lists[ours], theirs)

    def _forget(self, key: tuple[str, int]) -> None:
        """Know a peer no more; removed now, or by the end of its last read."""
        remote = self._peers.pop(key)
        if remote.num_reads:
            remote.is_leaving = True
            self._leaving.append(remote)
        else:
            self._remove(remote)

    def _read_ended(self, remote: _Peer) -> None:
        remote.num_reads -= 1
        if remote.is_leaving and not remote.num_reads:
            self._leaving.remove(remote)
            self._remove(remote)

    def _has_come_back(self, peer: PeerAgent) -> bool:
        """Whether a peer is one that is still leaving, and known again from now on.

        Raises:
            PeerLostError: it has come back with other metadata, and its former reads are not quiet yet.
        """
        for remote in self._leaving:
            if remote.agent_metadata == peer.agent_metadata and remote.regions == peer.regions:
                self._leaving.remove(remote)
                remote.is_leaving = False
                self._peers[_of(peer.key)] = remote
                return True
            # NIXL drops what it knows of an agent when another of its name is added, and its reads with it.
            if remote.name.encode() in peer.agent_metadata:
                raise PeerLostError(
                    f"peer {peer.key.engine_id}/{peer.key.rank}: {remote.num_reads} reads of its former life are still "
                    "under way; ask again later"
                )
        return False

    def _remove(self, remote: _Peer) -> None:
        """Release our descriptor lists first, then NIXL's knowledge of the peer."""
        for lists in remote.lists.values():
            lists.remote.handle.release()
        # Whoever still holds a read of this peer must not hold the agent through its lists.
        remote.lists.clear()
        remote.last_slice = remote.last_lists = None
        try:
            with self._foreign("remove peer"):
                self._agent.remove_remote_agent(remote.name)
        except TransferError:
            # NIXL forgets a disconnected peer by itself; either way it is gone.
            return

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError("the transport is closed")

    def _ours(self, error: BaseException, doing: str) -> TransferError:
        return self._errors.get(type(error), TransferError)(f"NIXL could not {doing}: {type(error).__name__}: {error}")

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
    """A posted read. It has ended when NIXL says how, and only then is the handle released."""

    __slots__ = ("_handle", "_peer", "_transport", "state")

    def __init__(self, transport: NixlTransport, peer: _Peer, handle: Any) -> None:
        self._transport = transport
        self._peer = peer
        self._handle = handle
        self.state = ReadState.PENDING

    def poll(self) -> ReadState:
        with self._transport._lock:
            if self.state is ReadState.PENDING and self._handle is not None:
                try:
                    state = _STATES[self._transport._agent.check_xfer_state(self._handle)]
                except self._transport._foreign_errors:
                    state = ReadState.FAILED
                # NIXL keeps the handle of a failed read as long as parts of it are under way.
                if state is ReadState.DONE or (state is ReadState.FAILED and self._let_go()):
                    self.state = state
                    self._transport._read_ended(self._peer)
            return self.state

    def release(self) -> None:
        with self._transport._lock:
            if self.poll() is ReadState.PENDING:
                raise TransferError("the read is still pending; wait until it is quiet")
            self._let_go()

    def abandon(self) -> None:
        """The transport closes: drop the handle, however the read stands, because a handle holds NIXL's agent."""
        self._let_go()
        self._handle = None
        self._transport._handles.discard(self)

    def _let_go(self) -> bool:
        """Release the handle; whether that is done."""
        if self._handle is not None:
            try:
                self._handle.release()
            except self._transport._foreign_errors:
                return False
            self._handle = None
            self._transport._handles.discard(self)
        return True


class _DoneRead(ReadHandle):
    """A read of nothing: a notify-only rank."""

    def poll(self) -> ReadState:
        return ReadState.DONE

    def release(self) -> None:
        return None


_DONE_READ = _DoneRead()


def _strided_rows(regions: tuple[KVRegion, ...], offset_bytes: int, length_bytes: int) -> npt.NDArray[np.uint64]:
    # What fits the smallest block fits them all.
    strided_run(min(regions, key=_block_bytes), offset_bytes=offset_bytes, length_bytes=length_bytes)
    rows = np.empty((len(regions), 5), dtype=np.uint64)
    rows[:, [0, 2, 3, 4]] = list(map(_of_row, regions))
    rows[:, 0] += np.uint64(offset_bytes)
    rows[:, 1] = length_bytes
    return rows


_of_row = attrgetter("base_address", "device_id", "block_stride_bytes", "num_blocks")
_block_bytes = attrgetter("block_bytes")


def _of(key: PeerKey) -> tuple[str, int]:
    # A plain tuple is hashed and compared without running Python code.
    return key.engine_id, key.rank


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
