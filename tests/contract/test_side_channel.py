"""The side channel contract on the fake and on real ZeroMQ."""

from __future__ import annotations

import pytest

from gk_adapters.fakes import FakeSideChannel, FakeSideChannelServer, FakeSwitchboard
from gk_core.ports import SideChannel, SideChannelServer

from .side_channel_contract import SideChannelContract


class TestFakeSideChannel(SideChannelContract):
    @pytest.fixture(autouse=True)
    def _board(self) -> None:
        self.board = FakeSwitchboard()

    def make_server(self) -> SideChannelServer:
        return FakeSideChannelServer(self.board)

    def make_client(self) -> SideChannel:
        return FakeSideChannel(self.board)


class TestZmqSideChannel(SideChannelContract):
    def make_server(self) -> SideChannelServer:
        pytest.importorskip("zmq")
        from gk_adapters.zmq_side_channel import ZmqSideChannelServer

        return ZmqSideChannelServer()

    def make_client(self) -> SideChannel:
        pytest.importorskip("zmq")
        from gk_adapters.zmq_side_channel import ZmqSideChannel

        return ZmqSideChannel()


class TestZmqSideChannelWithKey(TestZmqSideChannel):
    KEY = b"sixteen bytes or more"

    def make_server(self) -> SideChannelServer:
        pytest.importorskip("zmq")
        from gk_adapters.zmq_side_channel import ZmqSideChannelServer

        return ZmqSideChannelServer(key=self.KEY)

    def make_client(self) -> SideChannel:
        pytest.importorskip("zmq")
        from gk_adapters.zmq_side_channel import ZmqSideChannel

        return ZmqSideChannel(key=self.KEY)
