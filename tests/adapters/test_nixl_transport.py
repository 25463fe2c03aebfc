"""NixlTransport where the contract cannot look: NIXL's errors, its lists and its threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from importlib import import_module

import pytest

from gk_adapters.nixl_transport import FOREIGN_ERRORS, NixlTransport
from gk_core.errors import LayoutError, PeerLostError, TransferError, UnsupportedError
from gk_core.kv_layout import KVHalf
from gk_core.ports import PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.region import KVRegion
from gk_core.transfer_plan import BlockPairs, BlockRun, HeadSlice, RankRead

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl")

BLOCK_BYTES, NUM_BLOCKS = 40, 24
WHOLE = HeadSlice(local_offset_bytes=0, remote_offset_bytes=0, length_bytes=BLOCK_BYTES)
PRODUCER = PeerKey(engine_id="P", rank=0)


def region(base: int, index: int = 0, num_blocks: int = NUM_BLOCKS) -> KVRegion:
    return KVRegion(
        buffer_index=index // 2,
        half=KVHalf(index % 2),
        base_address=base + index * num_blocks * BLOCK_BYTES,
        num_blocks=num_blocks,
        block_bytes=BLOCK_BYTES,
        block_stride_bytes=BLOCK_BYTES,
    )


class Agent:
    """A transport over two regions of its own memory."""

    count = 0

    def __init__(self, name: str, *, progress_thread: bool = False) -> None:
        Agent.count += 1
        self.memory = (ctypes.c_ubyte * (2 * NUM_BLOCKS * BLOCK_BYTES))()
        base = ctypes.addressof(self.memory)
        self.regions = tuple(region(base, i) for i in range(2))
        self.transport = NixlTransport(agent_name=f"{name}-{Agent.count}", progress_thread=progress_thread)
        self.blob = self.transport.register(regions=self.regions)

    def block(self, index: int, block: int) -> bytes:
        start = (index * NUM_BLOCKS + block) * BLOCK_BYTES
        return bytes(self.memory[start : start + BLOCK_BYTES])


@pytest.fixture
def pair() -> Iterator[tuple[Agent, Agent]]:
    """(producer with a pattern, consumer that knows it)."""
    producer, consumer = Agent("producer"), Agent("consumer")
    producer.memory[:] = [i * 7 % 251 for i in range(len(producer.memory))]
    consumer.transport.connect(peer=PeerAgent(key=PRODUCER, agent_metadata=producer.blob, regions=producer.regions))
    yield producer, consumer
    consumer.transport.close()
    producer.transport.close()


def finish(handle: ReadHandle, producer: Agent) -> ReadState:
    for _ in range(1_000_000):
        producer.transport.take_notices()
        if (state := handle.poll()) is not ReadState.PENDING:
            handle.release()
            return state
    raise AssertionError("the read does not end")


def read_of(*runs: BlockRun) -> RankRead:
    return RankRead(remote_rank=0, head_slice=WHOLE, runs=runs)


def test_every_error_of_the_binding_is_mapped() -> None:
    """By name: a NIXL that raises something new turns this red."""
    bindings = import_module("nixl._bindings")
    raised = {
        name for name, value in vars(bindings).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert raised == set(FOREIGN_ERRORS)
    assert {FOREIGN_ERRORS[n] for n in ("nixlNotFoundError", "nixlRemoteDisconnectError")} == {PeerLostError}


def test_a_hundred_requests_register_memory_once(pair: tuple[Agent, Agent]) -> None:
    """However many pulls, and whatever their shape."""
    producer, consumer = pair
    for i in range(100):
        run = BlockRun(local_start=i % 20, remote_start=i % 17, count=1 + i % 4)
        assert finish(consumer.transport.read(peer=PRODUCER, read=read_of(run)), producer) is ReadState.DONE
    assert (consumer.transport.num_register_calls, producer.transport.num_register_calls) == (1, 1)


def test_metadata_does_not_grow_with_the_number_of_blocks() -> None:
    """One entry per region: a pool a thousand times as large has as many bytes of metadata, give or take its digits."""
    sizes = []
    for num_blocks in (8, 8000):
        memory = (ctypes.c_ubyte * (num_blocks * BLOCK_BYTES))()
        transport = NixlTransport(agent_name=f"metadata-{num_blocks}")
        sizes.append(len(transport.register(regions=(region(ctypes.addressof(memory), 0, num_blocks),))))
        transport.close()
    assert abs(sizes[1] - sizes[0]) < 64


def test_scattered_blocks_land_where_they_belong_in_every_region(pair: tuple[Agent, Agent]) -> None:
    """Pairs in no order; every byte is right and no other block is touched."""
    producer, consumer = pair
    there = {3: 20, 11: 2, 4: 5, 5: 6, 23: 0}
    pairs = BlockPairs.of(local_ids=tuple(there), remote_ids=tuple(there.values()))
    read = RankRead(remote_rank=0, head_slice=WHOLE, runs=pairs)
    assert finish(consumer.transport.read(peer=PRODUCER, read=read), producer) is ReadState.DONE
    for index in range(2):
        for block in range(NUM_BLOCKS):
            wanted = producer.block(index, there[block]) if block in there else bytes(BLOCK_BYTES)
            assert consumer.block(index, block) == wanted


@pytest.mark.parametrize(
    ("local", "remote"),
    [((24,), (1,)), ((1,), (24,)), ((-1,), (1,)), ((1,), (-1,)), ((2**40,), (1,)), ((1,), (2**70,)), ((1, 2), (1,))],
)
def test_no_address_outside_a_region_is_formed(
    pair: tuple[Agent, Agent], local: tuple[int, ...], remote: tuple[int, ...]
) -> None:
    """Ids one past the end, below zero, beyond 32 and 64 bits, and unpaired: refused, nothing posted."""
    _, consumer = pair

    def read() -> ReadHandle:
        pairs = BlockPairs.of(local_ids=local, remote_ids=remote)
        return consumer.transport.read(peer=PRODUCER, read=RankRead(remote_rank=0, head_slice=WHOLE, runs=pairs))

    with pytest.raises(LayoutError):
        read()
    assert bytes(consumer.memory) == bytes(len(consumer.memory))


@pytest.mark.parametrize("side", ["packed_local", "packed_remote"])
def test_packed_bytes_of_no_block_are_refused_by_side(pair: tuple[Agent, Agent], side: str) -> None:
    """Bytes that would be -1 as int32 are the block 4294967295, which nobody has."""
    _, consumer = pair
    good = (5).to_bytes(4, sys.byteorder)
    pairs = BlockPairs(**{"packed_local": good, "packed_remote": good, side: bytes([255] * 4)})
    with pytest.raises(LayoutError, match=f"{side[7:]} block 4294967295 is outside 0..{NUM_BLOCKS - 1}"):
        consumer.transport.read(peer=PRODUCER, read=RankRead(remote_rank=0, head_slice=WHOLE, runs=pairs))
    assert bytes(consumer.memory) == bytes(len(consumer.memory))


def test_a_peer_with_more_blocks_than_an_index_holds_is_refused(pair: tuple[Agent, Agent]) -> None:
    """2 regions of 2**30 blocks are 2**31 entries; NIXL's indices are int32."""
    _, consumer = pair
    regions = tuple(
        KVRegion(
            buffer_index=0,
            half=KVHalf(i),
            base_address=i * 2**50,
            num_blocks=2**30,
            block_bytes=BLOCK_BYTES,
            block_stride_bytes=BLOCK_BYTES,
        )
        for i in range(2)
    )
    with pytest.raises(LayoutError, match="int32"):
        consumer.transport.connect(
            peer=PeerAgent(key=PeerKey(engine_id="big", rank=0), agent_metadata=b"x", regions=regions)
        )


def test_a_peer_whose_regions_have_unequal_block_counts_is_refused(pair: tuple[Agent, Agent]) -> None:
    """One number for all of them turns a block id into an index."""
    producer, consumer = pair
    first, second = producer.regions
    regions = (first, region(first.base_address, 1, NUM_BLOCKS - 1))
    assert second.num_blocks != regions[1].num_blocks
    with pytest.raises(LayoutError, match="must all have the same number of blocks"):
        consumer.transport.connect(
            peer=PeerAgent(key=PeerKey(engine_id="uneven", rank=0), agent_metadata=producer.blob, regions=regions)
        )


def test_a_peers_regions_that_it_never_registered_are_refused_before_anything_moves(
    pair: tuple[Agent, Agent],
) -> None:
    """A hello that lies about addresses: NIXL knows what the peer's agent registered."""
    producer, consumer = pair
    liar = PeerKey(engine_id="liar", rank=0)
    elsewhere = tuple(region(producer.regions[0].base_address + 2**33, i) for i in range(2))
    consumer.transport.connect(peer=PeerAgent(key=liar, agent_metadata=producer.blob, regions=elsewhere))
    with pytest.raises(TransferError, match="NIXL could not"):
        consumer.transport.read(peer=liar, read=read_of(BlockRun(local_start=1, remote_start=1, count=1)))
    assert bytes(consumer.memory) == bytes(len(consumer.memory))


def test_threads_may_read_send_and_connect_at_once(pair: tuple[Agent, Agent]) -> None:
    """The engine's thread reads while handshakes connect on theirs."""
    producer, consumer = pair
    again = PeerAgent(key=PRODUCER, agent_metadata=producer.blob, regions=producer.regions)
    stop, failures = threading.Event(), list[BaseException]()

    def busy() -> None:
        try:
            while not stop.is_set():
                consumer.transport.connect(peer=again)
                consumer.transport.send_notice(peer=PRODUCER, payload=b"n")
                producer.transport.take_notices()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(50):
        read = read_of(BlockRun(local_start=i % 20, remote_start=(i * 3) % 20, count=1 + i % 4))
        assert finish(consumer.transport.read(peer=PRODUCER, read=read), producer) is ReadState.DONE
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_backend_that_is_not_there_is_a_typed_error() -> None:
    """Which ones there are is said."""
    with pytest.raises((UnsupportedError, TransferError)):
        NixlTransport(agent_name="no-backend", backend="NO_SUCH_FABRIC")


def test_nixl_says_nothing_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """It belongs to the program."""
    NixlTransport(agent_name="quiet").close()
    assert capfd.readouterr().out == ""


class TestStuckReads:
    """Over TCP a producer that nobody polls sends nothing: for its reader it is a machine that has frozen."""

    @pytest.fixture
    def sides(
        self, monkeypatch: pytest.MonkeyPatch, progress_thread: bool
    ) -> Iterator[tuple[Agent, Agent, ReadHandle]]:
        """(frozen producer, consumer, a read between them that is under way)."""
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        producer, consumer = Agent("frozen"), Agent("waiting", progress_thread=progress_thread)
        producer.memory[:] = [1 + i % 250 for i in range(len(producer.memory))]
        consumer.transport.connect(peer=self.agent_of(producer))
        handle = consumer.transport.read(peer=PRODUCER, read=read_of(BlockRun(local_start=1, remote_start=2, count=4)))
        assert {handle.poll() for _ in range(2000)} == {ReadState.PENDING}
        yield producer, consumer, handle
        consumer.transport.close()
        producer.transport.close()

    def agent_of(self, side: Agent) -> PeerAgent:
        return PeerAgent(key=PRODUCER, agent_metadata=side.blob, regions=side.regions)

    def thaw(self, producer: Agent, *handles: ReadHandle) -> list[ReadState]:
        """Poll both sides for as long as anything could still arrive."""
        for _ in range(20_000):
            producer.transport.take_notices()
            states = [handle.poll() for handle in handles]
        return states

    @pytest.mark.parametrize("progress_thread", [False, True])
    def test_a_read_has_not_ended_as_long_as_its_bytes_can_land(self, sides: tuple[Agent, Agent, ReadHandle]) -> None:
        """Its peer is disconnected and it stays pending; the thawed peer sends, and only then has it ended."""
        producer, consumer, handle = sides
        consumer.transport.disconnect(peer=PRODUCER)
        assert {handle.poll() for _ in range(2000)} == {ReadState.PENDING}
        with pytest.raises(PeerLostError, match="not connected"):
            consumer.transport.read(peer=PRODUCER, read=read_of(BlockRun(local_start=9, remote_start=2, count=1)))
        assert finish(handle, producer) is ReadState.DONE
        assert consumer.block(1, 4) == producer.block(1, 5)
        arrived = bytes(consumer.memory)
        self.thaw(producer, handle)
        assert bytes(consumer.memory) == arrived

    @pytest.mark.parametrize("progress_thread", [False])
    def test_a_peer_that_ends_fails_its_reads_at_once(self, sides: tuple[Agent, Agent, ReadHandle]) -> None:
        """Disconnected or not; nothing has landed and nothing will."""
        producer, consumer, handle = sides
        consumer.transport.disconnect(peer=PRODUCER)
        producer.transport.close()
        assert finish(handle, consumer) is ReadState.FAILED
        assert bytes(consumer.memory) == bytes(len(consumer.memory))

    @pytest.mark.parametrize("progress_thread", [False])
    def test_reads_that_have_failed_unseen_do_not_hinder_closing(self, sides: tuple[Agent, Agent, ReadHandle]) -> None:
        """Three of them; whoever holds them is told when asking."""
        producer, consumer, handle = sides
        run = BlockRun(local_start=9, remote_start=2, count=1)
        handles = [handle, *(consumer.transport.read(peer=PRODUCER, read=read_of(run)) for _ in range(2))]
        producer.transport.close()
        for _ in range(2000):
            consumer.transport.take_notices()
        consumer.transport.close()
        assert [h.poll() for h in handles] == [ReadState.FAILED] * 3

    @pytest.mark.parametrize("progress_thread", [False])
    def test_a_peer_that_comes_back_before_it_was_gone_is_the_same(
        self, sides: tuple[Agent, Agent, ReadHandle]
    ) -> None:
        """Both reads are good, and disconnecting it again after them removes it."""
        producer, consumer, handle = sides
        consumer.transport.disconnect(peer=PRODUCER)
        consumer.transport.connect(peer=self.agent_of(producer))
        second = consumer.transport.read(peer=PRODUCER, read=read_of(BlockRun(local_start=9, remote_start=2, count=1)))
        assert self.thaw(producer, handle, second) == [ReadState.DONE, ReadState.DONE]
        assert consumer.block(0, 9) == producer.block(0, 2)
        consumer.transport.disconnect(peer=PRODUCER)
        with pytest.raises(PeerLostError, match="not connected"):
            consumer.transport.send_notice(peer=PRODUCER, payload=b"x")

    @pytest.mark.parametrize("progress_thread", [False])
    def test_another_life_of_an_agents_name_waits_for_the_reads_of_the_former_one(
        self, sides: tuple[Agent, Agent, ReadHandle]
    ) -> None:
        """NIXL would drop them as failed and let their bytes land; the peer is asked for again later."""
        producer, consumer, handle = sides
        again = Agent.__new__(Agent)
        again.memory = (ctypes.c_ubyte * (2 * NUM_BLOCKS * BLOCK_BYTES))()
        again.regions = tuple(region(ctypes.addressof(again.memory), i) for i in range(2))
        again.transport = NixlTransport(agent_name=f"frozen-{Agent.count - 1}")
        again.blob = again.transport.register(regions=again.regions)
        with pytest.raises(PeerLostError, match="1 reads of its former life are still under way"):
            consumer.transport.connect(peer=self.agent_of(again))
        assert finish(handle, producer) is ReadState.DONE
        consumer.transport.connect(peer=self.agent_of(again))
        again.transport.close()

    @pytest.mark.parametrize("progress_thread", [False, True])
    def test_nothing_lands_after_close(self, sides: tuple[Agent, Agent, ReadHandle]) -> None:
        """The read is failed because NIXL's agent is gone, though the handle is still held here."""
        producer, consumer, handle = sides
        consumer.transport.close()
        assert handle.poll() is ReadState.FAILED
        self.thaw(producer, handle)
        assert bytes(consumer.memory) == bytes(len(consumer.memory))
        handle.release()
