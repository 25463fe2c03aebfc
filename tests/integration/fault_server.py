"""`gk prefill-server` or `gk decode-server` with faults that a test switches on by files in `GK_TEST_FAULTS`.

hold     reads wait, posted to nobody, until the file is gone; `holding` appears once one does
stop     the process stops itself as soon as it has posted a read
flying   appears once a read that was posted is seen to be under way; nothing switches it
drop     names of notices, one a line (Claim, ClaimReply, Release, ...), that are lost on their way out

python -m tests.integration.fault_server prefill-server --checkpoint ...
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from attrs import evolve

from gk_adapters import nodes
from gk_adapters.cli.main import run
from gk_adapters.peer_codec import decode_notice
from gk_core.errors import GkError
from gk_core.ports import KVTransport, Notice, NoticePort, PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.region import KVRegion
from gk_core.transfer_plan import RankRead


class FaultyLink(KVTransport, NoticePort):
    """A real link behind switches."""

    def __init__(self, link: nodes.Link, folder: Path) -> None:
        self.link, self.folder = link, folder

    @property
    def is_holding(self) -> bool:
        return (self.folder / "hold").exists()

    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        return self.link.register(regions=regions)

    def connect(self, *, peer: PeerAgent) -> None:
        self.link.connect(peer=peer)

    def disconnect(self, *, peer: PeerKey) -> None:
        self.link.disconnect(peer=peer)

    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        return HeldRead(self, peer, read)

    def send_notice(self, *, peer: PeerKey, payload: bytes) -> None:
        drop = self.folder / "drop"
        if drop.exists() and type(decode_notice(payload)).__name__ in drop.read_text().split():
            return
        self.link.send_notice(peer=peer, payload=payload)

    def take_notices(self) -> tuple[Notice, ...]:
        return self.link.take_notices()

    def close(self) -> None:
        self.link.close()


class HeldRead(ReadHandle):
    """Posted once nobody holds it up; a refused post is a failed read."""

    def __init__(self, link: FaultyLink, peer: PeerKey, read: RankRead) -> None:
        self.link, self.peer, self.what = link, peer, read
        self.posted: ReadHandle | None = None
        self.refused = False

    def poll(self) -> ReadState:
        if self.refused:
            return ReadState.FAILED
        if self.posted is None:
            if self.link.is_holding:
                (self.link.folder / "holding").touch()
                return ReadState.PENDING
            try:
                self.posted = self.link.link.read(peer=self.peer, read=self.what)
            except GkError:
                self.refused = True
                return ReadState.FAILED
            if (self.link.folder / "stop").exists():
                (self.link.folder / "flying").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
        state = self.posted.poll()
        if state is ReadState.PENDING:
            (self.link.folder / "flying").touch()
        return state

    def release(self) -> None:
        if self.posted is not None:
            self.posted.release()


def faulty(wiring: nodes.Wiring, folder: Path) -> nodes.Wiring:
    return evolve(wiring, link=lambda *of_node: FaultyLink(wiring.link(*of_node), folder))


if __name__ == "__main__":
    make_wiring = nodes.nixl_wiring

    def nixl_wiring(**options: Any) -> nodes.Wiring:
        return faulty(make_wiring(**options), Path(os.environ["GK_TEST_FAULTS"]))

    nodes.nixl_wiring = nixl_wiring
    run()
