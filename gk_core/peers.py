"""Peers as an engine sees them: who is connected, and a mailbox for notices that are typed already."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

from attrs import frozen

from gk_core.notices import PeerNotice, Reader
from gk_core.peer_layout import PeerLayout
from gk_core.peer_map import PeerMap, map_peer, notifying_ranks
from gk_core.ports import Endpoint, PeerKey

__all__ = ["Mailbox", "PeerEngine", "PeerResolver", "peer_engine"]


@frozen(kw_only=True)
class PeerEngine:
    """A producer that was checked, and whose ranks are connected.

    Attributes:
        layout: of one of its ranks.
        map: its ranks, mapped onto ours.
        num_readers: per mapped rank, in the map's order: how many of our engine's ranks it hears from.
    """

    layout: PeerLayout
    map: PeerMap
    num_readers: tuple[int, ...]

    @property
    def engine_id(self) -> str:
        """Serving instance."""
        return self.map.engine_id

    def readers(self, key: PeerKey, pull_id: str) -> dict[int, Reader]:
        """One rank of ours as the reader that each mapped rank hears from, by their rank."""
        return {
            rank.tp_rank: Reader(key=key, pull_id=pull_id, num_readers=count)
            for rank, count in zip(self.map.ranks, self.num_readers, strict=True)
        }


def peer_engine(ours: PeerLayout, theirs: Mapping[int, PeerLayout]) -> PeerEngine:
    """Map a producer that has answered for all its target ranks; errors as of `map_peer`."""
    mapped = map_peer(ours, theirs)
    first = theirs[mapped.ranks[0].tp_rank]
    return PeerEngine(
        layout=first,
        map=mapped,
        num_readers=tuple(
            len(notifying_ranks(producer=first.grid, consumer=ours.grid, producer_rank=rank.tp_rank))
            for rank in mapped.ranks
        ),
    )


class PeerResolver(Protocol):
    """Finds producers, checks them once, and connects the transport to their ranks."""

    @abstractmethod
    def resolve(self, *, engine_id: str, endpoint: Endpoint) -> PeerEngine | None:
        """The peer, or None while the question is under way: ask again later. Never blocks for long.

        Raises:
            PeerLostError: nobody there, or somebody with another engine id; the next call asks anew.
            PeerMismatchError: its cache does not fit ours.
            TransferError: any other failure of side channel or transport; the next call asks anew.
        """
        ...

    @abstractmethod
    def forget(self, *, engine_id: str) -> None:
        """Drop what is known of a peer that did not do as it should: the next `resolve` shakes hands again.

        Reads that are under way go on; an agent that is still the same stays connected.
        """
        ...


class Mailbox(Protocol):
    """Typed notices over whatever carries them. Loss, doubling and reordering are allowed."""

    @abstractmethod
    def send(self, *, peer: PeerKey, notice: PeerNotice) -> None:
        """Send without blocking.

        Raises:
            PeerLostError: the peer is not connected or has gone.
            TransferError: the transport refused.
        """
        ...

    @abstractmethod
    def take(self) -> tuple[PeerNotice, ...]:
        """Notices since the last call that could be decoded; the others are counted and dropped."""
        ...
