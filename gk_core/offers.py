"""Offers: what a consumer does about a hand-off outside a pull: find its producer, keep its lease warm, decline it."""

from __future__ import annotations

from attrs import frozen

from gk_core.errors import GkError, PeerLostError, TransferError
from gk_core.hand_off import HandOff, require_offer
from gk_core.metrics import NOTICES_LOST
from gk_core.notices import Claim, Release, ReleaseKind
from gk_core.peers import Mailbox, PeerEngine, PeerResolver
from gk_core.ports import Endpoint, Metrics, PeerKey

__all__ = ["Offers", "lease_of"]


def lease_of(hand_off: HandOff) -> tuple[str, str, int]:
    """What names a lease: engine, the producer's request id, generation."""
    return hand_off.engine_id, hand_off.request_id, hand_off.generation


@frozen
class _Declined:
    hand_off: HandOff
    pull_id: str
    give_up_at: float


class Offers:
    """Hand-offs that are not being pulled.

    Args:
        key: who we are.
        peers, mailbox, metrics: ports.
        patience_seconds: how long a declined offer's producer is looked for; after that its lease runs out by itself.
    """

    def __init__(
        self, *, key: PeerKey, peers: PeerResolver, mailbox: Mailbox, metrics: Metrics, patience_seconds: float
    ) -> None:
        self._key = key
        self._peers, self._mailbox, self._metrics = peers, mailbox, metrics
        self._patience = patience_seconds
        self._declined: list[_Declined] = []

    @property
    def has_work(self) -> bool:
        """Whether a producer has yet to be told."""
        return bool(self._declined)

    def find(self, hand_off: HandOff) -> PeerEngine | None:
        """The producer, once it is connected and the hand-off does not contradict what it says of itself.

        Raises:
            RequestError: the hand-off contradicts its producer.
            GkError: the producer cannot be reached, or does not fit.
        """
        peer = self._resolve(hand_off)
        if peer is not None:
            require_offer(hand_off, peer.layout)
        return peer

    def keep_warm(self, hand_off: HandOff, peer: PeerEngine, pull_id: str, digest: str) -> None:
        """Claim a lease for a request that still waits for room.

        Sequence 0 is never a pull's: the answer keeps the lease, or says that it is gone, and proves no read.
        """
        engine_id, request_id, generation = lease_of(hand_off)
        for rank, reader in peer.readers(self._key, pull_id).items():
            claim = Claim(
                engine_id=engine_id,
                request_id=request_id,
                generation=generation,
                reader=reader,
                sequence=0,
                digest=digest,
            )
            self._send(PeerKey(engine_id=engine_id, rank=rank), claim)

    def decline(self, hand_off: HandOff, pull_id: str, *, now: float) -> None:
        """Owe the producer a notice that its offer will not be read."""
        if hand_off.num_tokens > 0:
            self._declined.append(_Declined(hand_off, pull_id, now + self._patience))

    def send_declined(self, *, now: float) -> None:
        """Tell every producer that can be told by now."""
        waiting = []
        for declined in self._declined:
            try:
                peer = self._resolve(declined.hand_off)
                if peer is None and now >= declined.give_up_at:
                    raise PeerLostError(f"{declined.hand_off.engine_id} did not answer in time")
            except GkError:
                self._metrics.count(name=NOTICES_LOST)
                continue
            if peer is None:
                waiting.append(declined)
            else:
                self._tell(declined, peer)
        self._declined = waiting

    def _tell(self, declined: _Declined, peer: PeerEngine) -> None:
        engine_id, request_id, generation = lease_of(declined.hand_off)
        for rank, reader in peer.readers(self._key, declined.pull_id).items():
            release = Release(
                engine_id=engine_id,
                request_id=request_id,
                generation=generation,
                reader=reader,
                kind=ReleaseKind.REJECTED,
            )
            self._send(PeerKey(engine_id=engine_id, rank=rank), release)

    def _resolve(self, hand_off: HandOff) -> PeerEngine | None:
        endpoint = Endpoint(host=hand_off.host, port=hand_off.port)
        return self._peers.resolve(engine_id=hand_off.engine_id, endpoint=endpoint)

    def _send(self, peer: PeerKey, notice: Claim | Release) -> None:
        try:
            self._mailbox.send(peer=peer, notice=notice)
        except TransferError:
            self._metrics.count(name=NOTICES_LOST)
