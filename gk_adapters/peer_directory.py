"""Who is who: handshakes over a side channel, checked and remembered; and typed notices over a transport.

A handshake is one request and one reply. The asker sends which rank it wants to speak to and its own hello; the answer
is that rank's hello. Both sides then check the other and connect their transports, the answering side because claims
have to be answered. Wire form of the request: rank, 4 bytes big-endian, then the hello.

A peer that comes back under the same name is noticed in two ways: with a new engine id it answers for another engine
than the hand-off names and is refused by both ids; with the same id but new transport metadata, whoever fails to reach
it forgets it, shakes hands again, and connecting replaces what was known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from attrs import define, evolve, frozen

from gk_adapters.peer_codec import decode_hello, decode_notice, encode_hello, encode_notice
from gk_core.errors import GkError, PeerLostError, PeerMismatchError, RequestError
from gk_core.handshake import PeerHello, check_peer
from gk_core.metrics import NOTICES_BAD, NullMetrics
from gk_core.notices import PeerNotice
from gk_core.peer_map import target_ranks
from gk_core.peers import Mailbox, PeerEngine, PeerResolver, peer_engine
from gk_core.ports import Clock, Endpoint, KVTransport, Metrics, NoticePort, PeerAgent, PeerKey, SideChannel

__all__ = ["DirectorySettings", "HandshakeServer", "NoticeMailbox", "PeerDirectory", "endpoint_of_rank"]

_RANK_BYTES = 4
_MAX_RANK = 4096


def endpoint_of_rank(endpoint: Endpoint, rank: int) -> Endpoint:
    """Where a rank of an engine listens: the hand-off's port for rank 0, then one port each."""
    return evolve(endpoint, port=endpoint.port + rank)


@frozen(kw_only=True)
class DirectorySettings:
    """Times of a directory.

    Attributes:
        timeout_seconds: of one handshake request.
        retry_after_seconds: a peer that could not be reached is not asked again before; everybody who asks meanwhile
            gets the same error.
        background: shake hands on threads, so that a silent peer delays nobody; off, `resolve` waits.
        num_threads: of these.
    """

    timeout_seconds: float = 5.0
    retry_after_seconds: float = 1.0
    background: bool = True
    num_threads: int = 4


@define
class _Entry:
    """What is known of one engine; neither peer nor error while the question is under way."""

    peer: PeerEngine | None = None
    error: GkError | None = None
    since: float = 0.0


class PeerDirectory(PeerResolver):
    """The asking side.

    Args:
        hello: what we say of ourselves.
        channel: side channel.
        transport: connected to each rank that answers.
        clock: time.
        settings: times.
        where: endpoint of a rank, from the hand-off's endpoint.
    """

    def __init__(
        self,
        *,
        hello: PeerHello,
        channel: SideChannel,
        transport: KVTransport,
        clock: Clock,
        settings: DirectorySettings | None = None,
        where: Callable[[Endpoint, int], Endpoint] = endpoint_of_rank,
    ) -> None:
        self._hello = hello
        self._channel, self._transport, self._clock = channel, transport, clock
        self._settings = settings or DirectorySettings()
        self._where = where
        self._lock = threading.Lock()
        self._known: dict[tuple[str, Endpoint], _Entry] = {}
        self._threads = (
            ThreadPoolExecutor(self._settings.num_threads, thread_name_prefix="gk-handshake")
            if self._settings.background
            else None
        )

    def resolve(self, *, engine_id: str, endpoint: Endpoint) -> PeerEngine | None:
        """See `PeerResolver.resolve`."""
        key = (engine_id, endpoint)
        with self._lock:
            entry = self._known.get(key)
            stale = (
                entry is not None
                and entry.error is not None
                and (self._clock.now() - entry.since >= self._settings.retry_after_seconds)
            )
            if entry is None or stale:
                entry = self._known[key] = _Entry()
                started = True
            else:
                started = False
        if started:
            if self._threads is None:
                self._ask(key, entry)
            else:
                self._threads.submit(self._ask, key, entry)
        with self._lock:
            if entry.error is not None:
                raise entry.error
            return entry.peer

    def forget(self, *, engine_id: str) -> None:
        """See `PeerResolver.forget`; a handshake that is under way is left alone."""
        with self._lock:
            for key, entry in tuple(self._known.items()):
                if key[0] == engine_id and entry.peer is not None:
                    del self._known[key]

    def close(self) -> None:
        """Stop asking; harmless twice."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, key: tuple[str, Endpoint], entry: _Entry) -> None:
        peer: PeerEngine | None = None
        error: GkError | None = None
        try:
            peer = self._shake(*key)
        except GkError as caught:
            error = caught
        except Exception as caught:
            # Whatever it was, whoever asked must not wait for ever.
            error = PeerLostError(f"handshake with {key[0]} failed: {type(caught).__name__}: {caught}")
        with self._lock:
            entry.peer, entry.error, entry.since = peer, error, self._clock.now()

    def _shake(self, engine_id: str, endpoint: Endpoint) -> PeerEngine:
        ours = self._hello.layout
        first = self._hello_of(engine_id, endpoint, 0)
        hellos = {0: first}
        for rank in target_ranks(ours, first.layout):
            if rank not in hellos:
                hellos[rank] = self._hello_of(engine_id, endpoint, rank)
        # Nothing is connected before every rank has answered and fits: half a peer is none.
        peer = peer_engine(ours, {rank: hello.layout for rank, hello in hellos.items()})
        for mapped in peer.map.ranks:
            self._transport.connect(peer=_agent(hellos[mapped.tp_rank]))
        return peer

    def _hello_of(self, engine_id: str, endpoint: Endpoint, rank: int) -> PeerHello:
        reply = self._channel.request(
            endpoint=self._where(endpoint, rank),
            message=rank.to_bytes(_RANK_BYTES, "big") + encode_hello(self._hello),
            timeout_seconds=self._settings.timeout_seconds,
        )
        return decode_hello(reply, ours=self._hello.layout, expected=PeerKey(engine_id=engine_id, rank=rank))


class HandshakeServer:
    """The answering side; give `handle` to a `SideChannelServer`.

    Args:
        hellos: what this process says of each rank that it runs, by rank.
        transports: that rank's transport, connected to everybody who asks and fits.
        max_peers: connections kept per rank; the one that asked longest ago makes room.
    """

    def __init__(
        self, *, hellos: Mapping[int, PeerHello], transports: Mapping[int, KVTransport], max_peers: int = 1024
    ) -> None:
        self._hellos = dict(hellos)
        self._transports = dict(transports)
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._peers: dict[int, OrderedDict[PeerKey, None]] = {rank: OrderedDict() for rank in self._hellos}
        self.refused = 0
        """Askers that did not fit; each was told why by the same comparison on its own side."""

    def handle(self, message: bytes) -> bytes:
        """Answer one request. An asker that does not fit gets our hello all the same, so that it can say why.

        Raises:
            RequestError: not a handshake, or a rank that does not live here.
            PeerLostError: not a hello.
        """
        if len(message) <= _RANK_BYTES:
            raise RequestError(f"a handshake has more than {_RANK_BYTES} bytes, got {len(message)}")
        rank = int.from_bytes(message[:_RANK_BYTES], "big")
        ours = self._hellos.get(rank)
        if ours is None:
            raise RequestError(f"rank {min(rank, _MAX_RANK)} is not served here, only {sorted(self._hellos)}")
        try:
            theirs = decode_hello(message[_RANK_BYTES:], ours=ours.layout)
            fits = not check_peer(ours.layout, theirs.layout)
        except PeerMismatchError:
            fits = False
        if fits:
            self._connect(rank, theirs)
        else:
            self.refused += 1
        return encode_hello(ours)

    def _connect(self, rank: int, theirs: PeerHello) -> None:
        agent, transport = _agent(theirs), self._transports[rank]
        with self._lock:
            transport.connect(peer=agent)
            known = self._peers[rank]
            known[agent.key] = None
            known.move_to_end(agent.key)
            while len(known) > self._max_peers:
                oldest, _ = known.popitem(last=False)
                transport.disconnect(peer=oldest)


class NoticeMailbox(Mailbox):
    """Notices through a transport's own small messages.

    Args:
        port: carries bytes.
        metrics: where undecodable notices are counted.
    """

    def __init__(self, *, port: NoticePort, metrics: Metrics | None = None) -> None:
        self._port = port
        self._metrics = metrics or NullMetrics()

    def send(self, *, peer: PeerKey, notice: PeerNotice) -> None:
        """See `Mailbox.send`."""
        self._port.send_notice(peer=peer, payload=encode_notice(notice))

    def take(self) -> tuple[PeerNotice, ...]:
        """See `Mailbox.take`."""
        notices = []
        for raw in self._port.take_notices():
            try:
                notices.append(decode_notice(raw.payload))
            except RequestError:
                self._metrics.count(name=NOTICES_BAD)
        return tuple(notices)


def _agent(hello: PeerHello) -> PeerAgent:
    key = PeerKey(engine_id=hello.layout.engine_id, rank=hello.layout.tp_rank)
    return PeerAgent(key=key, agent_metadata=hello.agent_metadata, regions=hello.regions)
