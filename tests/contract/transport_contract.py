"""What every KV transport has to do, and the notices that go with it. Subclass and give `make_transport`.

Memory is real, at real addresses, so that adapters of real networks pass the same tests as the fake.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Protocol

import pytest
from attrs import define, evolve

from gk_core.errors import LayoutError, PeerLostError, TransferError
from gk_core.kv_layout import KVHalf
from gk_core.ports import KVTransport, Notice, NoticePort, PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.region import KVRegion
from gk_core.transfer_plan import BlockRun, HeadSlice, RankRead

BLOCK_BYTES = 24
WHOLE = HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=BLOCK_BYTES)
PATIENCE_SECONDS = 20.0


class NoticeTransport(KVTransport, NoticePort, Protocol):
    """Both ports in one, as every adapter has them."""


@define(eq=False)
class Side:
    """One agent and its memory: two buffers, K and V of each."""

    transport: NoticeTransport
    regions: tuple[KVRegion, ...]
    memory: memoryview
    key: PeerKey
    blob: bytes = b""

    @property
    def agent(self) -> PeerAgent:
        return PeerAgent(key=self.key, agent_metadata=self.blob, regions=self.regions)

    def block(self, region: int, block: int) -> memoryview:
        """The bytes of one block, without its padding."""
        r = self.regions[region]
        start = r.base_address - self.regions[0].base_address + block * r.block_stride_bytes
        return self.memory[start : start + r.block_bytes]

    def stamp(self) -> None:
        """Fill every block with bytes that say where they are: region, block, offset."""
        for i, region in enumerate(self.regions):
            for b in range(region.num_blocks):
                self.block(i, b)[:] = bytes((i * 67 + b * 5 + c + 1) % 256 for c in range(region.block_bytes))


def make_regions(base: int, num_blocks: int, stride: int, block_bytes: int) -> tuple[KVRegion, ...]:
    return tuple(
        KVRegion(
            buffer_index=i // 2,
            half=KVHalf(i % 2),
            base_address=base + i * num_blocks * stride,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            block_stride_bytes=stride,
        )
        for i in range(4)
    )


def run(local: int, remote: int, count: int = 1) -> BlockRun:
    return BlockRun(local_start=local, remote_start=remote, count=count)


def read_of(*runs: BlockRun, cut: HeadSlice = WHOLE) -> RankRead:
    return RankRead(remote_rank=0, head_slice=cut, runs=runs)


class TransportContract:
    """A consumer of 7 blocks (stride 32) reads from a producer of 11 (stride 24)."""

    def make_transport(self, *, name: str, address: int, size_bytes: int, owner: object) -> NoticeTransport:
        """A new agent over memory at a real address."""
        raise NotImplementedError

    _number = 0

    def make_side(
        self, name: str, *, num_blocks: int, stride: int = BLOCK_BYTES, block_bytes: int = BLOCK_BYTES
    ) -> Side:
        """A registered agent; what it is made of is closed when the test ends."""
        size = 4 * num_blocks * stride
        owner = (ctypes.c_ubyte * size)()
        address = ctypes.addressof(owner)
        TransportContract._number += 1
        transport = self.make_transport(
            name=f"{name}-{TransportContract._number}", address=address, size_bytes=size, owner=owner
        )
        regions = make_regions(address, num_blocks, stride, block_bytes)
        side = Side(transport, regions, memoryview(owner).cast("B"), PeerKey(engine_id=name, rank=0))
        side.blob = transport.register(regions=regions)
        self.sides.append(side)
        return side

    @pytest.fixture(autouse=True)
    def _closing(self) -> Iterator[None]:
        self.sides: list[Side] = []
        yield
        for side in reversed(self.sides):
            side.transport.close()

    @pytest.fixture
    def producer(self) -> Side:
        side = self.make_side("P", num_blocks=11)
        side.stamp()
        return side

    @pytest.fixture
    def consumer(self, producer: Side) -> Side:
        side = self.make_side("D", num_blocks=7, stride=32)
        side.transport.connect(peer=producer.agent)
        return side

    def finish(self, handle: ReadHandle, *others: Side) -> ReadState:
        """Poll until the read has ended, the other sides too: some transports move nothing without that."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (state := handle.poll()) is ReadState.PENDING:
            for side in others:
                side.transport.take_notices()
            assert time.monotonic() < deadline, "the read never ended"
        handle.release()
        return state

    def receive(self, side: Side, count: int, sender: Side) -> list[Notice]:
        """Wait for notices; the sender is polled too, as its engine would be."""
        got: list[Notice] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(got) < count:
            got += side.transport.take_notices()
            sender.transport.take_notices()
            assert time.monotonic() < deadline, "the notice never came"
        return got

    # ---- reads

    def test_a_read_lands_each_block_in_its_place_in_every_region(self, producer: Side, consumer: Side) -> None:
        """Local 2, 3 from remote 9, 10 and local 5 from remote 1; all else stays zero."""
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(2, 9, 2), run(5, 1)))
        assert self.finish(handle, producer) is ReadState.DONE
        sources = {2: 9, 3: 10, 5: 1}
        for region in range(4):
            for block in range(7):
                wanted = bytes(producer.block(region, sources[block])) if block in sources else bytes(BLOCK_BYTES)
                assert bytes(consumer.block(region, block)) == wanted, (region, block)

    def test_a_read_never_writes_between_blocks(self, producer: Side, consumer: Side) -> None:
        """Stride 32, block 24: the 8 bytes after each block keep what they had."""
        consumer.memory[:] = b"\xee" * len(consumer.memory)
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(0, 0, 7)))
        assert self.finish(handle, producer) is ReadState.DONE
        for start in range(0, len(consumer.memory), 32):
            assert bytes(consumer.memory[start + 24 : start + 32]) == b"\xee" * 8

    def test_part_of_a_block_can_be_read_to_another_place_in_the_block(self, producer: Side, consumer: Side) -> None:
        """8 bytes from offset 16 there to offset 4 here."""
        cut = HeadSlice(local_offset_bytes=4, remote_offset_bytes=16, length_bytes=8)
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(6, 3), cut=cut))
        assert self.finish(handle, producer) is ReadState.DONE
        for region in range(4):
            wanted = bytes(4) + bytes(producer.block(region, 3)[16:24]) + bytes(12)
            assert bytes(consumer.block(region, 6)) == wanted

    def test_two_reads_at_once_do_not_disturb_each_other(self, producer: Side, consumer: Side) -> None:
        """Both end, in whatever order."""
        first = consumer.transport.read(peer=producer.key, read=read_of(run(1, 4)))
        second = consumer.transport.read(peer=producer.key, read=read_of(run(2, 5)))
        assert self.finish(second, producer) is ReadState.DONE
        assert self.finish(first, producer) is ReadState.DONE
        assert [bytes(consumer.block(3, b)) for b in (1, 2)] == [bytes(producer.block(3, b)) for b in (4, 5)]

    def test_a_read_of_nothing_is_done(self, producer: Side, consumer: Side) -> None:
        """And moves nothing."""
        handle = consumer.transport.read(peer=producer.key, read=read_of())
        assert self.finish(handle, producer) is ReadState.DONE
        assert not any(consumer.memory)

    @pytest.mark.parametrize(("local", "remote"), [(7, 0), (0, 11), (6, 5), (2**31, 0), (0, 2**31)])
    def test_a_block_outside_either_side_is_refused_and_nothing_moves(
        self, producer: Side, consumer: Side, local: int, remote: int
    ) -> None:
        """One past the end here (7), one past the end there (11), a run that leaves in its second block."""
        bad = run(local, remote, 2 if (local, remote) == (6, 5) else 1)
        with pytest.raises(LayoutError):
            consumer.transport.read(peer=producer.key, read=read_of(run(1, 1), bad))
        assert not any(consumer.memory)

    def test_the_last_block_of_both_sides_is_inside(self, producer: Side, consumer: Side) -> None:
        """Local 6, remote 10."""
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(6, 10)))
        assert self.finish(handle, producer) is ReadState.DONE
        assert bytes(consumer.block(3, 6)) == bytes(producer.block(3, 10))

    @pytest.mark.parametrize(
        "cut",
        [
            HeadSlice(local_offset_bytes=0, remote_offset_bytes=17, length_bytes=8),
            HeadSlice(local_offset_bytes=17, remote_offset_bytes=0, length_bytes=8),
            HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=25),
        ],
    )
    def test_bytes_outside_a_block_are_refused(self, producer: Side, consumer: Side, cut: HeadSlice) -> None:
        """A block has 24 bytes on both sides."""
        with pytest.raises(LayoutError):
            consumer.transport.read(peer=producer.key, read=read_of(run(1, 1), cut=cut))

    def test_a_read_from_an_unknown_peer_raises_peer_lost(self, consumer: Side) -> None:
        """Never connected."""
        with pytest.raises(PeerLostError):
            consumer.transport.read(peer=PeerKey(engine_id="nobody", rank=0), read=read_of(run(1, 1)))

    def test_a_handle_may_be_released_twice(self, producer: Side, consumer: Side) -> None:
        """And polled after that: it says what it said."""
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(1, 1)))
        assert self.finish(handle, producer) is ReadState.DONE
        handle.release()
        assert handle.poll() is ReadState.DONE

    # ---- registration and connection

    def test_registering_the_same_regions_again_changes_nothing(self, producer: Side) -> None:
        """Same blob."""
        assert producer.transport.register(regions=producer.regions) == producer.blob

    def test_registering_other_regions_is_refused(self, producer: Side) -> None:
        """One transport, one cache."""
        with pytest.raises(TransferError):
            producer.transport.register(regions=producer.regions[:2])

    def test_connecting_the_same_peer_again_changes_nothing(self, producer: Side, consumer: Side) -> None:
        """And reads still work."""
        consumer.transport.connect(peer=producer.agent)
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(1, 2)))
        assert self.finish(handle, producer) is ReadState.DONE

    def test_a_peer_with_other_regions_than_ours_is_refused(self, producer: Side, consumer: Side) -> None:
        """Three regions against four."""
        other = PeerKey(engine_id="P3", rank=0)
        with pytest.raises(LayoutError):
            consumer.transport.connect(peer=evolve(producer.agent, key=other, regions=producer.regions[:3]))

    @pytest.mark.parametrize("blob", [b"", b"\x00", b"not an agent", b"\xff" * 300])
    def test_a_peer_whose_blob_is_garbage_is_lost(self, producer: Side, consumer: Side, blob: bytes) -> None:
        """A typed error, and the peers that are known stay so."""
        other = PeerKey(engine_id="P4", rank=0)
        with pytest.raises(PeerLostError):
            consumer.transport.connect(peer=evolve(producer.agent, key=other, agent_metadata=blob))
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(1, 2)))
        assert self.finish(handle, producer) is ReadState.DONE

    def test_other_metadata_under_the_same_key_replaces_the_peer(self, producer: Side, consumer: Side) -> None:
        """A producer that came back: reads go to the new one."""
        again = self.make_side("P", num_blocks=9)
        again.memory[:] = b"\x77" * len(again.memory)
        consumer.transport.connect(peer=again.agent)
        handle = consumer.transport.read(peer=again.key, read=read_of(run(1, 8)))
        assert self.finish(handle, again) is ReadState.DONE
        assert bytes(consumer.block(0, 1)) == b"\x77" * BLOCK_BYTES
        with pytest.raises(LayoutError):
            consumer.transport.read(peer=again.key, read=read_of(run(1, 9)))

    def test_a_peer_that_was_disconnected_is_lost_until_it_is_connected_again(
        self, producer: Side, consumer: Side
    ) -> None:
        """Twice is harmless; a stranger too."""
        for _ in range(2):
            consumer.transport.disconnect(peer=producer.key)
        consumer.transport.disconnect(peer=PeerKey(engine_id="stranger", rank=5))
        with pytest.raises(PeerLostError):
            consumer.transport.read(peer=producer.key, read=read_of(run(1, 1)))
        with pytest.raises(PeerLostError):
            consumer.transport.send_notice(peer=producer.key, payload=b"x")
        consumer.transport.connect(peer=producer.agent)
        handle = consumer.transport.read(peer=producer.key, read=read_of(run(1, 1)))
        assert self.finish(handle, producer) is ReadState.DONE

    def test_a_read_that_is_under_way_when_its_peer_is_disconnected_ends(self, producer: Side, consumer: Side) -> None:
        """Done or failed, but not pending for ever; blocks wait for this."""
        handles = [consumer.transport.read(peer=producer.key, read=read_of(run(b, b))) for b in range(7)]
        consumer.transport.disconnect(peer=producer.key)
        assert {self.finish(handle, producer) for handle in handles} <= {ReadState.DONE, ReadState.FAILED}

    def test_closing_twice_is_harmless_and_a_closed_transport_refuses(self, producer: Side, consumer: Side) -> None:
        """With a typed error."""
        for _ in range(2):
            consumer.transport.close()
        with pytest.raises(TransferError):
            consumer.transport.read(peer=producer.key, read=read_of(run(1, 1)))

    # ---- notices

    def test_a_notice_arrives_whole_once_and_names_its_sender(self, producer: Side, consumer: Side) -> None:
        """Every byte value, and from the agent's own name."""
        payload = bytes(range(256))
        consumer.transport.send_notice(peer=producer.key, payload=payload)
        (notice,) = self.receive(producer, 1, consumer)
        assert notice.payload == payload
        assert notice.sender.startswith("D-")
        assert producer.transport.take_notices() == ()

    def test_several_notices_all_arrive(self, producer: Side, consumer: Side) -> None:
        """In whatever order."""
        sent = [f"n{i}".encode() for i in range(20)]
        for payload in sent:
            consumer.transport.send_notice(peer=producer.key, payload=payload)
        assert sorted(n.payload for n in self.receive(producer, 20, consumer)) == sorted(sent)

    def test_notices_go_both_ways_once_both_are_connected(self, producer: Side, consumer: Side) -> None:
        """The producer answers a claim."""
        producer.transport.connect(peer=consumer.agent)
        producer.transport.send_notice(peer=consumer.key, payload=b"held")
        (notice,) = self.receive(consumer, 1, producer)
        assert notice.payload == b"held"

    def test_a_notice_to_an_unknown_peer_raises_peer_lost(self, consumer: Side) -> None:
        """Never connected."""
        with pytest.raises(PeerLostError):
            consumer.transport.send_notice(peer=PeerKey(engine_id="nobody", rank=0), payload=b"x")
