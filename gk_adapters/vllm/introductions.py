"""How a consumer makes itself known to a producer's worker, which answers its claims.

vLLM's side channel hands out what a producer's workers said of themselves once, at start-up, and tells the workers
nothing of who asked. So a consumer that has connected to a producer's worker sends its own hello after it, as its first
notice; the worker checks it and connects back.
"""

from __future__ import annotations

from gk_adapters.peer_codec import decode_notice
from gk_adapters.peer_directory import HandshakeServer
from gk_core.errors import GkError
from gk_core.metrics import NOTICES_BAD
from gk_core.notices import PeerNotice
from gk_core.ports import KVTransport, Metrics, NoticePort, PeerAgent, PeerKey, ReadHandle
from gk_core.region import KVRegion
from gk_core.transfer_plan import RankRead

__all__ = ["IntroducingTransport", "take_notices"]

_INTRODUCTION = b"GK-HELLO"
_RANK_BYTES = 4


class IntroducingTransport(KVTransport):
    """A transport that says who we are to every peer that it connects to.

    Args:
        transport: carries blocks.
        notices: the same agent's small messages.
    """

    def __init__(self, *, transport: KVTransport, notices: NoticePort) -> None:
        self._transport, self._notices = transport, notices
        self.hello = b""
        """What we say of ourselves; set once the regions are registered."""

    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        """See `KVTransport.register`."""
        return self._transport.register(regions=regions)

    def connect(self, *, peer: PeerAgent) -> None:
        """See `KVTransport.connect`. A lost introduction is made again when the peer is looked up again."""
        self._transport.connect(peer=peer)
        rank = peer.key.rank.to_bytes(_RANK_BYTES, "big")
        self._notices.send_notice(peer=peer.key, payload=_INTRODUCTION + rank + self.hello)

    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        """See `KVTransport.read`."""
        return self._transport.read(peer=peer, read=read)

    def disconnect(self, *, peer: PeerKey) -> None:
        """See `KVTransport.disconnect`."""
        self._transport.disconnect(peer=peer)

    def close(self) -> None:
        """See `KVTransport.close`."""
        self._transport.close()


def take_notices(*, port: NoticePort, handshakes: HandshakeServer, metrics: Metrics) -> tuple[PeerNotice, ...]:
    """Notices since the last call. Introductions are dealt with here; what cannot be decoded is counted and dropped.

    Raises:
        TransferError: the transport is closed.
    """
    notices: list[PeerNotice] = []
    for raw in port.take_notices():
        try:
            if raw.payload.startswith(_INTRODUCTION):
                handshakes.handle(raw.payload[len(_INTRODUCTION) :])
            else:
                notices.append(decode_notice(raw.payload))
        except GkError:
            metrics.count(name=NOTICES_BAD)
    return tuple(notices)
