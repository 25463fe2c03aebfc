"""The fake network: what it refuses, and what goes wrong on it when told to."""

from __future__ import annotations

import pytest
from attrs import evolve

from gk_adapters.fakes import FakeFabric, FakeMemory, FakeTransport, FaultRates, Landing, NoticeFate, ReadFate
from gk_core.errors import LayoutError, PeerLostError, TransferError
from gk_core.kv_layout import KVHalf
from gk_core.ports import PeerAgent, PeerKey, ReadState
from gk_core.region import KVRegion
from gk_core.transfer_plan import BlockRun, HeadSlice, RankRead

DONE, FAILED, PENDING = ReadState.DONE, ReadState.FAILED, ReadState.PENDING
WHOLE = HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=4)
P, D = PeerKey(engine_id="P", rank=0), PeerKey(engine_id="D", rank=0)


def make_region(base: int, num_blocks: int = 6) -> KVRegion:
    return KVRegion(
        buffer_index=0, half=KVHalf.K, base_address=base, num_blocks=num_blocks, block_bytes=4, block_stride_bytes=4
    )


def make_agent(fabric: FakeFabric, name: str, base: int) -> tuple[FakeTransport, FakeMemory, PeerAgent]:
    """An agent with one region of six blocks of four bytes, in memory that is larger than that."""
    memory = FakeMemory.synthetic(base_address=base, size_bytes=64)
    region = make_region(base)
    transport = FakeTransport(fabric, name=name, memories=(memory,))
    blob = transport.register(regions=(region,))
    return transport, memory, PeerAgent(key=P if name == "p" else D, agent_metadata=blob, regions=(region,))


class Net:
    """Producer p with blocks aaaa, bbbb, ..., consumer d, connected both ways."""

    def __init__(self, rates: FaultRates | None = None, seed: int = 0) -> None:
        self.fabric = FakeFabric(rates=rates, seed=seed)
        self.p, self.p_memory, self.p_agent = make_agent(self.fabric, "p", 0x1000)
        self.d, self.d_memory, self.d_agent = make_agent(self.fabric, "d", 0x9000)
        self.p_memory.view(0x1000, 24)[:] = b"aaaabbbbccccddddeeeeffff"
        self.d.connect(peer=self.p_agent)
        self.p.connect(peer=self.d_agent)

    def read(self, *runs: tuple[int, int, int], cut: HeadSlice = WHOLE) -> RankRead:
        """Runs of (local, remote, count)."""
        return RankRead(
            remote_rank=0,
            head_slice=cut,
            runs=tuple(BlockRun(local_start=a, remote_start=b, count=n) for a, b, n in runs),
        )

    def here(self) -> bytes:
        """All bytes of the consumer's region."""
        return bytes(self.d_memory.view(0x9000, 24))


class TestMemory:
    """Bytes with an address."""

    def test_a_view_is_the_memory_itself(self) -> None:
        """Address 0x1004 is byte 4."""
        memory = FakeMemory.synthetic(base_address=0x1000, size_bytes=8)
        memory.view(0x1004, 2)[:] = b"xy"
        assert bytes(memory.view(0x1000, 8)) == b"\0\0\0\0xy\0\0"

    @pytest.mark.parametrize(("address", "length"), [(0xFFF, 1), (0x1008, 1), (0x1007, 2), (0x1000, 9), (0x1004, -1)])
    def test_one_byte_outside_is_refused(self, address: int, length: int) -> None:
        """Just before, just after, across the end."""
        with pytest.raises(LayoutError, match="outside the memory's"):
            FakeMemory.synthetic(base_address=0x1000, size_bytes=8).view(address, length)

    def test_it_stands_on_memory_that_somebody_else_owns(self) -> None:
        """A NumPy array, at its real address: both see the same bytes."""
        numpy = pytest.importorskip("numpy")
        array = numpy.zeros(16, dtype=numpy.uint8)
        memory = FakeMemory.at(address=array.ctypes.data, size_bytes=16, owner=array)
        memory.view(array.ctypes.data + 3, 1)[:] = b"\x07"
        assert array.tolist() == [0, 0, 0, 7] + [0] * 12


class TestRefusals:
    """No byte outside registered memory, and none that is written twice at once."""

    def test_a_region_outside_the_agents_memory_is_not_registered(self) -> None:
        """The memory has 64 bytes, the region 68."""
        transport = FakeTransport(
            FakeFabric(), name="p", memories=(FakeMemory.synthetic(base_address=0, size_bytes=64),)
        )
        with pytest.raises(LayoutError, match="in none of this agent's memories"):
            transport.register(regions=(make_region(0, 17),))

    def test_memory_that_was_not_registered_is_not_read_whatever_the_peer_claims(self) -> None:
        """The peer claims 16 blocks; it registered 6, though its memory would hold 16."""
        net = Net()
        net.d.connect(peer=evolve(net.p_agent, regions=(make_region(0x1000, 16),)))
        assert net.d.read(peer=P, read=net.read((0, 5, 1))).poll() is DONE
        with pytest.raises(LayoutError, match=r"0x1018\.\.0x101c are not registered at agent 'p'"):
            net.d.read(peer=P, read=net.read((0, 6, 1)))

    def test_a_peer_that_claims_another_address_is_not_read_there(self) -> None:
        """One byte before its region, inside nothing."""
        net = Net()
        net.d.connect(peer=evolve(net.p_agent, regions=(make_region(0xFFF),)))
        with pytest.raises(LayoutError, match="are not registered at agent 'p'"):
            net.d.read(peer=P, read=net.read((0, 0, 1)))

    def test_two_reads_of_one_local_block_at_once_are_refused(self) -> None:
        """Until the first has ended."""
        net = Net()
        net.fabric.script_reads(ReadFate(polls=2))
        first = net.d.read(peer=P, read=net.read((1, 0, 2)))
        with pytest.raises(LayoutError, match="a block is in use twice"):
            net.d.read(peer=P, read=net.read((2, 4, 1)))
        assert [first.poll(), first.poll()] == [PENDING, DONE]
        assert net.d.read(peer=P, read=net.read((2, 4, 1))).poll() is DONE

    def test_one_read_that_writes_a_block_twice_is_refused(self) -> None:
        """Two runs into local block 2."""
        net = Net()
        with pytest.raises(LayoutError, match="a block is in use twice"):
            net.d.read(peer=P, read=net.read((1, 0, 2), (2, 4, 1)))

    def test_a_handle_cannot_be_released_while_the_read_is_under_way(self) -> None:
        """Afterwards it can, twice."""
        net = Net()
        handle = net.d.read(peer=P, read=net.read((1, 0, 1)))
        with pytest.raises(TransferError, match="under way"):
            handle.release()
        handle.poll()
        handle.release()
        handle.release()

    def test_a_name_is_taken_once_while_its_agent_lives(self) -> None:
        """And may come back after its death."""
        net = Net()
        with pytest.raises(LayoutError, match="'p' is on the fabric already"):
            make_agent(net.fabric, "p", 0x5000)
        net.fabric.kill("p")
        make_agent(net.fabric, "p", 0x5000)

    @pytest.mark.parametrize("blob", [b"gk-fake-agent\0p", b"gk-fake-agent\0p\0one", b"other\0p\x001"])
    def test_a_blob_that_is_not_a_fake_agents_is_refused(self, blob: bytes) -> None:
        """Too short, not a number, somebody else's."""
        net = Net()
        with pytest.raises(PeerLostError, match="is not a fake agent's"):
            net.d.connect(peer=evolve(net.p_agent, key=PeerKey(engine_id="X", rank=0), agent_metadata=blob))


class TestReads:
    """Bytes land when the fate says so, and only those."""

    def test_nothing_lands_before_the_last_poll(self) -> None:
        """Three polls."""
        net = Net()
        net.fabric.script_reads(ReadFate(polls=3))
        handle = net.d.read(peer=P, read=net.read((1, 3, 1)))
        states = []
        for _ in range(4):
            states.append((handle.poll(), net.here()[4:8]))
        assert states == [(PENDING, b"\0" * 4)] * 2 + [(DONE, b"dddd")] * 2

    def test_bytes_are_those_of_the_moment_at_which_they_land(self) -> None:
        """A block that is recycled under a read brings its new owner's bytes, as on a real network."""
        net = Net()
        handle = net.d.read(peer=P, read=net.read((1, 3, 1)))
        net.p_memory.view(0x100C, 4)[:] = b"NEW!"
        handle.poll()
        assert net.here()[4:8] == b"NEW!"

    @pytest.mark.parametrize(
        ("landing", "first", "later"),
        [
            (Landing.ALL, b"aaaacccc", b"aaaacccc"),
            (Landing.HALF, b"aaaa\0\0\0\0", b"aaaa\0\0\0\0"),
            (Landing.NONE, b"\0" * 8, b"\0" * 8),
            (Landing.LATE, b"\0" * 8, b"aaaacccc"),
        ],
    )
    @pytest.mark.parametrize("end", [DONE, FAILED])
    def test_what_lands_and_when(self, landing: Landing, first: bytes, later: bytes, end: ReadState) -> None:
        """Two blocks, at the end of the read and after three more polls."""
        net = Net()
        net.fabric.script_reads(ReadFate(landing=landing, end=end))
        handle = net.d.read(peer=P, read=net.read((0, 0, 1), (1, 2, 1)))
        assert (handle.poll(), net.here()[:8]) == (end, first)
        for _ in range(3):
            handle.poll()
        assert net.here()[:8] == later

    def test_late_bytes_land_at_once_when_the_network_settles(self) -> None:
        """Without counting polls."""
        net = Net()
        net.fabric.script_reads(ReadFate(landing=Landing.LATE, late_polls=99))
        net.d.read(peer=P, read=net.read((0, 1, 1))).poll()
        net.fabric.settle()
        assert net.here()[:4] == b"bbbb"

    def test_a_stalled_read_ends_only_with_its_peer(self) -> None:
        """Pending for ever, then failed, with nothing landed."""
        net = Net()
        net.fabric.script_reads(ReadFate(end=PENDING))
        handle = net.d.read(peer=P, read=net.read((0, 1, 1)))
        assert {handle.poll() for _ in range(50)} == {PENDING}
        net.fabric.kill("p")
        assert handle.poll() is FAILED
        assert net.here() == bytes(24)

    @pytest.mark.parametrize("how", ["disconnect", "close", "kill"])
    def test_a_read_fails_when_its_own_side_lets_go(self, how: str) -> None:
        """Nothing lands any more."""
        net = Net()
        handle = net.d.read(peer=P, read=net.read((0, 1, 1)))
        if how == "disconnect":
            net.d.disconnect(peer=P)
        elif how == "close":
            net.d.close()
        else:
            net.fabric.kill("d")
        assert handle.poll() is FAILED
        assert net.here() == bytes(24)

    def test_neighbouring_whole_blocks_are_one_copy_and_parts_are_one_each(self) -> None:
        """A run of three: 1 piece whole, 3 pieces of two bytes."""
        net = Net()
        net.d.read(peer=P, read=net.read((0, 1, 3))).poll()
        assert (net.d.pieces_posted, net.d.bytes_read, net.here()[:12]) == (1, 12, b"bbbbccccdddd")
        half = HeadSlice(local_offset_bytes=2, remote_offset_bytes=0, length_bytes=2)
        net.d.read(peer=P, read=net.read((3, 4, 2), cut=half)).poll()
        assert (net.d.pieces_posted, net.d.bytes_read) == (3, 16)
        assert net.here()[12:20] == b"\0\0ee\0\0ff"

    def test_rates_of_one_make_every_read_fail_stall_or_lie(self) -> None:
        """And zero makes every one good."""
        for rates, state, first in (
            (FaultRates(read_fails=1.0), FAILED, None),
            (FaultRates(read_stalls=1.0), PENDING, b"\0" * 4),
            (FaultRates(read_lies=1.0), DONE, b"\0" * 4),
            (FaultRates(), DONE, b"bbbb"),
        ):
            net = Net(rates)
            assert net.d.read(peer=P, read=net.read((0, 1, 1))).poll() is state
            assert first is None or net.here()[:4] == first

    def test_the_same_seed_gives_the_same_faults(self) -> None:
        """And another seed others."""

        def states(seed: int) -> list[ReadState]:
            net = Net(FaultRates(read_fails=0.5), seed)
            return [net.d.read(peer=P, read=net.read((0, 1, 1))).poll() for _ in range(30)]

        assert states(4) == states(4) != states(5)
        assert {*states(4)} == {DONE, FAILED}


class TestRestart:
    """A name that comes back is somebody else."""

    def test_reads_and_notices_to_the_old_start_fail_until_the_new_one_is_connected(self) -> None:
        """Its blob differs although its name and key do not."""
        net = Net()
        net.fabric.kill("p")
        again, memory, agent = make_agent(net.fabric, "p", 0x1000)
        memory.view(0x1000, 4)[:] = b"anew"
        for attempt in (
            lambda: net.d.read(peer=P, read=net.read((0, 0, 1))),
            lambda: net.d.send_notice(peer=P, payload=b"x"),
        ):
            with pytest.raises(PeerLostError, match="has gone"):
                attempt()
        with pytest.raises(PeerLostError, match=r"start 1\) on the fabric"):
            net.d.connect(peer=evolve(net.p_agent, key=PeerKey(engine_id="other", rank=0)))
        assert agent.agent_metadata != net.p_agent.agent_metadata
        net.d.connect(peer=agent)
        assert net.d.read(peer=P, read=net.read((0, 0, 1))).poll() is DONE
        assert net.here()[:4] == b"anew"
        assert again.register_calls == 1


class TestNotices:
    """Lost, doubled, late, overtaking."""

    def send(self, net: Net, *payloads: bytes) -> None:
        for payload in payloads:
            net.d.send_notice(peer=P, payload=payload)

    def taken(self, net: Net) -> list[bytes]:
        return [n.payload for n in net.p.take_notices()]

    def test_a_perfect_network_keeps_order(self) -> None:
        """And each notice comes once."""
        net = Net()
        self.send(net, b"a", b"b", b"c")
        assert (self.taken(net), self.taken(net)) == ([b"a", b"b", b"c"], [])

    def test_a_lost_notice_never_comes_and_a_doubled_one_comes_twice(self) -> None:
        """The sender is told nothing."""
        net = Net()
        net.fabric.script_notices(NoticeFate(copies=0), NoticeFate(copies=2))
        self.send(net, b"a", b"b", b"c")
        assert self.taken(net) == [b"b", b"b", b"c"]

    def test_a_late_notice_comes_after_those_that_were_sent_later(self) -> None:
        """Two calls late."""
        net = Net()
        net.fabric.script_notices(NoticeFate(delay=2))
        self.send(net, b"a", b"b")
        assert [self.taken(net) for _ in range(3)] == [[b"b"], [], [b"a"]]

    def test_a_notice_may_overtake(self) -> None:
        """The last one comes first."""
        net = Net()
        net.fabric.script_notices(NoticeFate(), NoticeFate(overtakes=True))
        self.send(net, b"a", b"b")
        assert self.taken(net) == [b"b", b"a"]

    def test_a_notice_may_overtake_the_data_of_a_read_that_was_posted_before_it(self) -> None:
        """It is here while not one byte is."""
        net = Net()
        net.fabric.script_reads(ReadFate(polls=2))
        handle = net.d.read(peer=P, read=net.read((0, 1, 1)))
        net.p.send_notice(peer=D, payload=b"finished")
        assert [n.payload for n in net.d.take_notices()] == [b"finished"]
        assert (handle.poll(), net.here()) == (PENDING, bytes(24))

    def test_rates_of_one_lose_double_and_delay_every_notice(self) -> None:
        """One after the other."""
        net = Net(FaultRates(notice_lost=1.0))
        self.send(net, b"a")
        assert self.taken(net) == []
        net = Net(FaultRates(notice_doubled=1.0, notice_overtakes=1.0))
        self.send(net, b"a", b"b")
        assert self.taken(net) == [b"b", b"b", b"a", b"a"]
        net = Net(FaultRates(notice_delay=3), seed=1)
        self.send(net, *[bytes([i]) for i in range(50)])
        got = [len(self.taken(net)) for _ in range(4)]
        assert sum(got) == 50
        assert min(got) > 0
