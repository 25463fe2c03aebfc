"""The transport contract on the fake and on real NIXL."""

from __future__ import annotations

import pytest

from gk_adapters.fakes import FakeFabric, FakeMemory, FakeTransport

from .transport_contract import NoticeTransport, TransportContract


class TestFakeTransport(TransportContract):
    @pytest.fixture(autouse=True)
    def _fabric(self) -> None:
        self.fabric = FakeFabric()

    def make_transport(self, *, name: str, address: int, size_bytes: int, owner: object) -> NoticeTransport:
        memory = FakeMemory.at(address=address, size_bytes=size_bytes, owner=owner)
        return FakeTransport(self.fabric, name=name, memories=(memory,))


@pytest.mark.nixl
class TestNixlTransport(TransportContract):
    def make_transport(self, *, name: str, address: int, size_bytes: int, owner: object) -> NoticeTransport:
        pytest.importorskip("nixl")
        from gk_adapters.nixl_transport import NixlTransport

        return NixlTransport(agent_name=name)
