"""FakeTransport: KVTransport and NoticePort over a `FakeFabric`; see there for a worked example."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from attrs import frozen

from gk_adapters.fakes.fabric import FakeFabric, Landing, ReadFate
from gk_adapters.fakes.memory import FakeMemory
from gk_core.errors import LayoutError, PeerLostError, TransferError
from gk_core.ports import KVTransport, Notice, NoticePort, PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.region import KVRegion, block_descriptor
from gk_core.transfer_plan import BlockRun, HeadSlice, RankRead

__all__ = ["FakeRead", "FakeTransport"]

_BLOB = b"gk-fake-agent"


@frozen
class _Piece:
    local: int
    remote: int
    length: int


class FakeRead(ReadHandle):
    """A posted read; ends as its fate says. Made by `FakeTransport.read`."""

    def __init__(
        self, ours: FakeTransport, theirs: FakeTransport, pieces: list[_Piece], fate: ReadFate, fabric: FakeFabric
    ) -> None:
        self._ours, self._theirs, self._pieces = ours, theirs, pieces
        self._fate, self._fabric = fate, fabric
        self._polls_left = fate.polls
        self.state = ReadState.PENDING
        self.released = False

    @property
    def local_pieces(self) -> list[tuple[int, int]]:
        """(address, bytes) that this read writes."""
        return [(p.local, p.length) for p in self._pieces]

    def poll(self) -> ReadState:
        """See `ReadHandle.poll`."""
        self._fabric.polled()
        if self.state is not ReadState.PENDING:
            return self.state
        if self._ours.is_dead or self._theirs.is_dead:
            return self._finish(ReadState.FAILED)
        self._polls_left -= 1
        if self._polls_left > 0 or self._fate.end is ReadState.PENDING:
            return self.state
        if self._fate.landing is Landing.LATE:
            self._fabric.land_late(self._fate.late_polls, lambda: self._land(len(self._pieces)))
        else:
            count = {Landing.ALL: len(self._pieces), Landing.HALF: len(self._pieces) // 2, Landing.NONE: 0}
            self._land(count[self._fate.landing])
        return self._finish(self._fate.end)

    def release(self) -> None:
        """See `ReadHandle.release`.

        Raises:
            TransferError: the read is under way.
        """
        if self.state is ReadState.PENDING:
            raise TransferError("a read that is under way must not be released; poll it until it has ended")
        self.released = True

    def abandon(self) -> None:
        """End without moving anything: the transport closes or forgets the peer."""
        if self.state is ReadState.PENDING:
            self._finish(ReadState.FAILED)

    def _land(self, count: int) -> None:
        for piece in self._pieces[:count]:
            self._ours.bytes_at(piece.local, piece.length)[:] = self._theirs.bytes_at(piece.remote, piece.length)
            self._ours.bytes_read += piece.length

    def _finish(self, state: ReadState) -> ReadState:
        self.state = state
        self._ours.forget_read(self)
        return state


class FakeTransport(KVTransport, NoticePort):
    """One agent.

    Args:
        fabric: the network it joins.
        name: unique among the living; a dead agent's name may come back as a new start.
        memories: the memory that regions may lie in.

    Attributes:
        bytes_read: bytes that landed here so far.
        reads_posted: reads posted so far.
        pieces_posted: copies that these reads consist of; neighbouring whole blocks are one.
        register_calls: successful first registrations; stays 1.
    """

    def __init__(self, fabric: FakeFabric, *, name: str, memories: tuple[FakeMemory, ...]) -> None:
        self._fabric = fabric
        self._name = name
        self._memories = memories
        self._regions: tuple[KVRegion, ...] = ()
        self._bounds: list[tuple[int, int, FakeMemory]] = []
        self._starts: list[int] = []
        self._peers: dict[PeerKey, tuple[PeerAgent, str, int]] = {}
        self._inbox: list[tuple[int, Notice]] = []
        self._pending: list[tuple[PeerKey, FakeRead]] = []
        self.is_dead = False
        self.bytes_read = self.reads_posted = self.pieces_posted = self.register_calls = 0
        self.incarnation = fabric.join(name, self)

    @property
    def name(self) -> str:
        """Agent name; what a receiver sees as a notice's sender."""
        return self._name

    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        """See `KVTransport.register`.

        Raises:
            LayoutError: a region is not inside one of the memories, or there is none.
        """
        self._require_alive()
        if self._regions and regions != self._regions:
            raise TransferError("other regions are registered already; use a new transport for a new cache")
        if not self._regions:
            if not regions:
                raise LayoutError("no regions to register")
            bounds = [(r.base_address, r.end_address, self._memory_of(r)) for r in regions]
            self._bounds = sorted(bounds, key=lambda bound: bound[0])
            self._starts = [start for start, _, _ in self._bounds]
            self._regions = regions
            self.register_calls += 1
        return b"\0".join((_BLOB, self._name.encode(), str(self.incarnation).encode()))

    def connect(self, *, peer: PeerAgent) -> None:
        """See `KVTransport.connect`."""
        self._require_alive()
        if not self._regions:
            raise TransferError("register our regions before connecting to a peer")
        if [(r.buffer_index, r.half) for r in peer.regions] != [(r.buffer_index, r.half) for r in self._regions]:
            raise LayoutError(f"peer's {len(peer.regions)} regions do not pair with our {len(self._regions)} in order")
        known = self._peers.get(peer.key)
        if known is not None and known[0] == peer:
            return
        name, incarnation = _parse_blob(peer)
        if self._fabric.find(name, incarnation) is None:
            raise PeerLostError(f"no agent {name!r} (start {incarnation}) on the fabric")
        self.disconnect(peer=peer.key)
        self._peers[peer.key] = (peer, name, incarnation)

    def disconnect(self, *, peer: PeerKey) -> None:
        """See `KVTransport.disconnect`."""
        self._peers.pop(peer, None)
        for key, read in list(self._pending) if self._fabric.disconnect_ends_reads else []:
            if key == peer:
                read.abandon()

    def read(self, *, peer: PeerKey, read: RankRead) -> FakeRead:
        """See `KVTransport.read`."""
        self._require_alive()
        agent, theirs = self._peer(peer)
        pieces = list(self._pieces(agent.regions, read))
        self._require_disjoint(pieces)
        for piece in pieces:
            self.bytes_at(piece.local, piece.length)
            theirs.bytes_at(piece.remote, piece.length)
        posted = FakeRead(self, theirs, pieces, self._fabric.read_fate(), self._fabric)
        self._pending.append((peer, posted))
        self.reads_posted += 1
        self.pieces_posted += len(pieces)
        return posted

    def send_notice(self, *, peer: PeerKey, payload: bytes) -> None:
        """See `NoticePort.send_notice`."""
        self._require_alive()
        _, theirs = self._peer(peer)
        self._fabric.deliver(theirs._inbox, Notice(sender=self._name, payload=bytes(payload)))

    def take_notices(self) -> tuple[Notice, ...]:
        """See `NoticePort.take_notices`."""
        self._require_alive()
        due = tuple(notice for delay, notice in self._inbox if delay <= 0)
        self._inbox[:] = [(delay - 1, notice) for delay, notice in self._inbox if delay > 0]
        return due

    def close(self) -> None:
        """See `KVTransport.close`."""
        if not self.is_dead:
            self.mark_dead()
            self._fabric.leave(self._name, self)

    def mark_dead(self) -> None:
        """For the fabric: this agent is gone."""
        self.is_dead = True
        for _, read in list(self._pending):
            read.abandon()
        self._peers.clear()
        self._inbox.clear()

    def forget_read(self, read: FakeRead) -> None:
        """For a read that has ended."""
        self._pending = [(key, r) for key, r in self._pending if r is not read]

    def bytes_at(self, address: int, length: int) -> memoryview:
        """Registered bytes.

        Raises:
            LayoutError: they are not all inside one registered region.
        """
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address + length > self._bounds[index][1]:
            raise LayoutError(f"bytes {address:#x}..{address + length:#x} are not registered at agent {self._name!r}")
        return self._bounds[index][2].view(address, length)

    def _pieces(self, remote_regions: tuple[KVRegion, ...], read: RankRead) -> Iterator[_Piece]:
        cut = read.head_slice
        for ours, theirs in zip(self._regions, remote_regions, strict=True):
            whole = _is_whole(cut, ours) and _is_whole(cut, theirs)
            for run in read.runs:
                yield from _run_pieces(ours, theirs, run, cut, whole)

    def _require_disjoint(self, pieces: list[_Piece]) -> None:
        spans = sorted([(p.local, p.length) for p in pieces] + [s for _, r in self._pending for s in r.local_pieces])
        for (a, length), (b, _) in itertools.pairwise(spans):
            if a + length > b:
                raise LayoutError(f"two reads would write the byte at {b:#x} at once; a block is in use twice")

    def _memory_of(self, region: KVRegion) -> FakeMemory:
        for memory in self._memories:
            if memory.base_address <= region.base_address and (
                region.end_address <= memory.base_address + memory.size_bytes
            ):
                return memory
        raise LayoutError(
            f"region of buffer {region.buffer_index} {region.half.name} at {region.base_address:#x} is in none of this "
            "agent's memories"
        )

    def _peer(self, key: PeerKey) -> tuple[PeerAgent, FakeTransport]:
        known = self._peers.get(key)
        if known is None:
            raise PeerLostError(f"peer {key.engine_id}/{key.rank} is not connected")
        theirs = self._fabric.find(known[1], known[2])
        if theirs is None:
            raise PeerLostError(f"peer {key.engine_id}/{key.rank} has gone")
        return known[0], theirs

    def _require_alive(self) -> None:
        if self.is_dead:
            raise TransferError(f"agent {self._name!r} is closed")


def _run_pieces(ours: KVRegion, theirs: KVRegion, run: BlockRun, cut: HeadSlice, whole: bool) -> Iterator[_Piece]:
    """Copies of one run in one region: one for neighbouring whole blocks, else one per block."""

    def piece(i: int) -> _Piece:
        local = block_descriptor(
            ours, run.local_start + i, offset_bytes=cut.local_offset_bytes, length_bytes=cut.length_bytes
        )
        remote = block_descriptor(
            theirs, run.remote_start + i, offset_bytes=cut.remote_offset_bytes, length_bytes=cut.length_bytes
        )
        return _Piece(local.address, remote.address, cut.length_bytes)

    first, last = piece(0), piece(run.count - 1)
    if whole:
        yield _Piece(first.local, first.remote, last.local - first.local + cut.length_bytes)
    else:
        yield from (piece(i) for i in range(run.count))


def _is_whole(cut: HeadSlice, region: KVRegion) -> bool:
    return cut.length_bytes == region.block_bytes == region.block_stride_bytes


def _parse_blob(peer: PeerAgent) -> tuple[str, int]:
    parts = peer.agent_metadata.split(b"\0")
    if len(parts) != 3 or parts[0] != _BLOB or not parts[2].isdigit():
        raise PeerLostError(f"metadata of peer {peer.key.engine_id}/{peer.key.rank} is not a fake agent's")
    return parts[1].decode(errors="replace"), int(parts[2])
