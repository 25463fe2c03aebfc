"""FakeFabric: an in-memory network on which agents really move bytes, and on which everything can go wrong on demand.

What it refuses: any address outside memory that was registered at either end, whatever a peer claims about itself, and
two reads that would write the same local bytes at once (so a block that is reused before its read is quiet shows).
What can go wrong: reads that fail, stall, lie or land late; notices that are lost, doubled, delayed or overtake others;
agents that die and come back under the same name. Time is counted in polls, so nothing here waits or sleeps.

Two agents, two blocks of four bytes each, block 1 of the peer read into our block 0:

    >>> from gk_adapters.fakes.memory import FakeMemory
    >>> from gk_adapters.fakes.transport import FakeTransport
    >>> from gk_core.kv_layout import KVHalf
    >>> from gk_core.ports import PeerAgent, PeerKey
    >>> from gk_core.region import KVRegion
    >>> from gk_core.transfer_plan import BlockRun, HeadSlice, RankRead
    >>> def make(fabric, name, base):
    ...     memory = FakeMemory.synthetic(base_address=base, size_bytes=8)
    ...     region = KVRegion(buffer_index=0, half=KVHalf.K, base_address=base, num_blocks=2, block_bytes=4,
    ...                       block_stride_bytes=4)
    ...     return memory, region, FakeTransport(fabric, name=name, memories=(memory,))
    >>> fabric = FakeFabric()
    >>> theirs, region_p, p = make(fabric, "prefill", 0x1000)
    >>> ours, region_d, d = make(fabric, "decode", 0x9000)
    >>> theirs.view(0x1004, 4)[:] = b"KVKV"
    >>> blob, key = p.register(regions=(region_p,)), PeerKey(engine_id="P", rank=0)
    >>> _ = d.register(regions=(region_d,))
    >>> d.connect(peer=PeerAgent(key=key, agent_metadata=blob, regions=(region_p,)))
    >>> whole = HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=4)
    >>> handle = d.read(peer=key, read=RankRead(remote_rank=0, head_slice=whole,
    ...                                         runs=(BlockRun(local_start=0, remote_start=1, count=1),)))
    >>> handle.poll(), bytes(ours.view(0x9000, 8))
    (<ReadState.DONE: 'done'>, b'KVKV\\x00\\x00\\x00\\x00')
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from attrs import define, frozen

from gk_core.errors import LayoutError
from gk_core.ports import Notice, ReadState

if TYPE_CHECKING:
    from gk_adapters.fakes.transport import FakeTransport

__all__ = ["FakeFabric", "FaultRates", "Landing", "NoticeFate", "ReadFate"]


class Landing(Enum):
    """Which bytes of a read arrive."""

    ALL = "all"
    HALF = "half"
    NONE = "none"
    LATE = "late"
    """All, but only some polls after the read has said how it ended."""


@frozen(kw_only=True)
class ReadFate:
    """What becomes of one read.

    Attributes:
        polls: how often its handle is polled until it ends; 1 ends at the first poll.
        end: DONE, FAILED, or PENDING for a read that stalls until its peer or its own side dies.
        landing: which bytes arrive; they do at the last poll, never when posted.
        late_polls: with LATE, polls of anything on the fabric until the bytes land.
    """

    polls: int = 1
    end: ReadState = ReadState.DONE
    landing: Landing = Landing.ALL
    late_polls: int = 3


@frozen(kw_only=True)
class NoticeFate:
    """What becomes of one notice.

    Attributes:
        copies: 0 loses it.
        delay: calls of the receiver's `take_notices` that do not see it yet.
        overtakes: arrives before notices that were sent earlier.
    """

    copies: int = 1
    delay: int = 0
    overtakes: bool = False


@frozen(kw_only=True)
class FaultRates:
    """Probabilities of faults, drawn from the fabric's own seeded generator; all zero is a perfect network.

    Attributes:
        read_fails, read_stalls, read_lies: of each read; lying is DONE without bytes.
        read_polls: largest number of polls that a read takes.
        notice_lost, notice_doubled, notice_overtakes: of each notice.
        notice_delay: largest delay of a notice.
    """

    read_fails: float = 0.0
    read_stalls: float = 0.0
    read_lies: float = 0.0
    read_polls: int = 1
    notice_lost: float = 0.0
    notice_doubled: float = 0.0
    notice_overtakes: float = 0.0
    notice_delay: int = 0


@define
class _Late:
    polls_left: int
    move: Callable[[], None]


class FakeFabric:
    """The network. Agents are `FakeTransport`s made over it; one thread drives all of them.

    Args:
        rates: faults for everything that is not scripted.
        seed: of the fabric's random choices.
        disconnect_ends_reads: whether a read under way ends when its peer is disconnected. NIXL cannot end one: off, it
            goes on until it ends by itself or one of its sides dies.
    """

    def __init__(self, *, rates: FaultRates | None = None, seed: int = 0, disconnect_ends_reads: bool = True) -> None:
        self.rates = rates or FaultRates()
        self.disconnect_ends_reads = disconnect_ends_reads
        self._random = random.Random(seed)
        self._agents: dict[str, FakeTransport] = {}
        self._incarnations: dict[str, int] = {}
        self._reads: deque[ReadFate] = deque()
        self._notices: deque[NoticeFate] = deque()
        self._late: list[_Late] = []

    def script_reads(self, *fates: ReadFate) -> None:
        """Fates of the next reads, in order of posting; later ones follow the rates again."""
        self._reads.extend(fates)

    def script_notices(self, *fates: NoticeFate) -> None:
        """Fates of the next notices, in order of sending."""
        self._notices.extend(fates)

    def kill(self, name: str) -> None:
        """End an agent without a word: reads from and by it fail, its notices are gone. Unknown names are harmless."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            agent.mark_dead()

    def settle(self) -> None:
        """Land every late byte now."""
        late, self._late = self._late, []
        for item in late:
            item.move()

    # What follows is for agents.

    def join(self, name: str, agent: FakeTransport) -> int:
        """Enter under a name and get this start's number; a name whose agent died may be taken again.

        Raises:
            LayoutError: the name is in use.
        """
        if name in self._agents:
            raise LayoutError(f"agent {name!r} is on the fabric already; kill it or choose another name")
        self._agents[name] = agent
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        return self._incarnations[name]

    def leave(self, name: str, agent: FakeTransport) -> None:
        """Leave in good order."""
        if self._agents.get(name) is agent:
            del self._agents[name]

    def find(self, name: str, incarnation: int) -> FakeTransport | None:
        """The agent that is reached by this start of a name, None when it is gone."""
        agent = self._agents.get(name)
        return agent if agent is not None and agent.incarnation == incarnation else None

    def read_fate(self) -> ReadFate:
        """Fate of the next read."""
        if self._reads:
            return self._reads.popleft()
        rates, draw = self.rates, self._random.random()
        polls = self._random.randint(1, rates.read_polls) if rates.read_polls > 1 else 1
        if draw < rates.read_fails:
            landing = self._random.choice((Landing.NONE, Landing.HALF))
            return ReadFate(polls=polls, end=ReadState.FAILED, landing=landing)
        if draw < rates.read_fails + rates.read_stalls:
            return ReadFate(polls=polls, end=ReadState.PENDING)
        if draw < rates.read_fails + rates.read_stalls + rates.read_lies:
            return ReadFate(polls=polls, landing=Landing.NONE)
        return ReadFate(polls=polls)

    def deliver(self, inbox: list[tuple[int, Notice]], notice: Notice) -> None:
        """Put a notice into an inbox as its fate wants it."""
        fate = self._notices.popleft() if self._notices else self._notice_fate()
        for _ in range(fate.copies):
            inbox.insert(0 if fate.overtakes else len(inbox), (fate.delay, notice))

    def land_late(self, polls: int, move: Callable[[], None]) -> None:
        """Run `move` after this many polls."""
        self._late.append(_Late(polls_left=polls, move=move))

    def polled(self) -> None:
        """Count one poll of anything."""
        for item in self._late:
            item.polls_left -= 1
        due = [item for item in self._late if item.polls_left <= 0]
        if due:
            self._late = [item for item in self._late if item.polls_left > 0]
            for item in due:
                item.move()

    def _notice_fate(self) -> NoticeFate:
        rates, rng = self.rates, self._random
        copies = 0 if rng.random() < rates.notice_lost else 2 if rng.random() < rates.notice_doubled else 1
        return NoticeFate(
            copies=copies,
            delay=rng.randint(0, rates.notice_delay) if rates.notice_delay else 0,
            overtakes=rng.random() < rates.notice_overtakes,
        )
