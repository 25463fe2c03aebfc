"""gk's worker half over vLLM's own cache: two real ones over NIXL, and every way in which a read can go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gk_adapters.vllm.engine_facts import engine_facts
from gk_adapters.vllm.handshake_channel import HandshakeListener, encode_payload
from gk_adapters.vllm.hma import HmaPlanner, layer_name
from gk_adapters.vllm.served import free_ports
from gk_core.ports import Endpoint
from tests.vllm.deployment import eventually
from tests.vllm.engine_configs import engine_config, transfer_config

pytestmark = [pytest.mark.vllm, pytest.mark.nixl]

NUM_BLOCKS = 9
PATIENCE_SECONDS = 60.0


class ScriptedAgent:
    """The worker's own NIXL agent, but for the state of reads for which one is set."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.states: dict[Any, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def check_xfer_state(self, handle: Any) -> str:
        """What was set, or what NIXL says."""
        return self.states.get(handle) or str(self._agent.check_xfer_state(handle))


class Half:
    """One worker and its caches, [blocks, kv, block, 2 * d]: two group buffers of a sliding and a full layer each."""

    def __init__(self, checkpoint: Path, engine_id: str, role: str, seed: int) -> None:
        from gk_adapters.vllm.stock_cache import _GuardedWorker

        config = engine_config(
            checkpoint, kv_transfer_config=transfer_config(role), additional_config={"neuron_config": {}}
        )
        plan = HmaPlanner(config).kv_cache_config(specs=engine_facts(config).specs, memory_bytes=2**28)
        plan.num_blocks = NUM_BLOCKS
        self.engine_id = engine_id
        self.worker = _GuardedWorker(config, engine_id, plan)
        self.agent = self.worker.nixl_wrapper = ScriptedAgent(self.worker.nixl_wrapper)
        generator = torch.Generator().manual_seed(seed)
        self.buffers = [torch.rand(NUM_BLOCKS, 2, 128, 2 * 64, generator=generator) for _ in range(2)]
        self.worker.register_kv_caches({layer_name(i): self.buffers[i // 2] for i in range(4)})
        self.failed_blocks: set[int] = set()

    def listen(self, port: int) -> HandshakeListener:
        """Answer handshakes, as the scheduler half does."""
        answer = encode_payload(self.worker.xfer_handshake_metadata)
        return HandshakeListener(endpoint=Endpoint(host="127.0.0.1", port=port), answers={(0, 0): answer})

    def finished(self) -> tuple[set[str], set[str]]:
        """One poll: requests sent and received; ids of blocks that failed are gathered."""
        sent, received = self.worker.get_finished()
        self.failed_blocks |= self.worker.get_block_ids_with_load_errors()
        return sent, received

    def close(self) -> None:
        """Give everything back to NIXL."""
        self.worker.shutdown()


class Halves:
    """A producer that listens and a consumer."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint, self.port = checkpoint, free_ports(1)[0]
        self.consumer = Half(checkpoint, "D", "kv_consumer", seed=2)
        self.producer, self.listener = self._producer(seed=1)
        self.sent: list[str] = []
        self.received: list[str] = []

    def _producer(self, seed: int) -> tuple[Half, HandshakeListener]:
        half = Half(self.checkpoint, "P", "kv_producer", seed=seed)
        return half, half.listen(self.port)

    def restart_producer(self) -> None:
        """Another process under the old one's name and address, as far as a peer can tell."""
        self.listener.close()
        self.producer.close()
        self.producer, self.listener = self._producer(seed=3)

    def ask(
        self,
        request_id: str,
        *,
        local: tuple[list[int], ...] = ([1], [2, 3]),
        remote: tuple[list[int], ...] = ([4], [5, 6]),
        age: float = 0.0,
        expiry: float | None = None,
        missing: set[int] | None = None,
    ) -> None:
        """One step in which a request's read is ordered; `age`: seconds since it arrived."""
        metadata = self._metadata()
        metadata.add_new_req_to_recv(
            request_id,
            local,
            {
                "remote_block_ids": remote, "remote_engine_id": "P", "remote_request_id": f"p-{request_id}",
                "remote_host": "127.0.0.1", "remote_port": self.port, "remote_blocks_expiry_time": expiry,
            },
        )  # fmt: skip
        metadata.gk_age[request_id] = age
        if missing is not None:
            metadata.gk_missing[request_id] = missing
        self.consumer.worker.start_load_kv(metadata)

    def _metadata(self) -> Any:
        from gk_adapters.vllm.seams import ConnectorMetadata

        metadata = ConnectorMetadata()
        metadata.gk_age, metadata.gk_missing = {}, {}
        return metadata

    def step(self) -> set[str]:
        """One step without new requests: what the consumer reports of it."""
        self.consumer.worker.start_load_kv(self._metadata())
        self.sent += self.producer.finished()[0]
        received = self.consumer.finished()[1]
        self.received += received
        return received

    def run_until(self, condition: Callable[[], object]) -> None:
        """Step until it holds.

        Raises:
            AssertionError: it never did.
        """

        def stepped() -> bool:
            self.step()
            return bool(condition())

        eventually(stepped, PATIENCE_SECONDS)

    def wait_for(self, request_id: str) -> None:
        """Until the consumer reports it.

        Raises:
            AssertionError: it does not.
        """
        self.run_until(lambda: request_id in self.received)

    def arrived(self, local: tuple[list[int], ...], remote: tuple[list[int], ...]) -> bool:
        """Whether every pair of blocks has the same bytes in both buffers."""
        pairs = [p for ours, theirs in zip(local, remote, strict=True) for p in zip(ours, theirs, strict=True)]
        return all(
            torch.equal(mine[a], other[b])
            for mine, other in zip(self.consumer.buffers, self.producer.buffers, strict=True)
            for a, b in pairs
        )

    def close(self) -> None:
        """End both."""
        self.listener.close()
        for half in (self.consumer, self.producer):
            half.close()


@pytest.fixture
def halves(bf16_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Halves]:
    """Two workers of engines with one rank each, in this process."""
    from gk_adapters.vllm.seams import GUARDS_VLLMS_CACHE

    if not GUARDS_VLLMS_CACHE:
        pytest.skip("this vLLM is refused over its own cache layouts: test_start_up_refusals")
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    # What vLLM's worker asks of a process group and of a model that this process does not have.
    monkeypatch.setattr(base_worker, "get_current_attn_backends", lambda config: [CPUAttentionBackend])
    monkeypatch.setattr(base_worker, "get_kv_cache_layout", lambda: "HND")
    monkeypatch.setattr(base_worker, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(base_worker, "get_tensor_model_parallel_world_size", lambda: 1)
    made = Halves(bf16_checkpoint)
    yield made
    made.close()


LOCAL, REMOTE = ([1], [2, 3]), ([4], [5, 6])


def test_a_read_brings_the_blocks_and_tells_the_producer(halves: Halves) -> None:
    """Pair by pair, and no block fails."""
    halves.producer.worker._reqs_to_process.add("p-r")
    halves.ask("r")
    halves.run_until(lambda: halves.sent and halves.received)
    assert (halves.sent, halves.received) == (["p-r"], ["r"])
    assert halves.arrived(LOCAL, REMOTE)
    assert halves.consumer.failed_blocks == set()


def test_a_read_that_ends_after_the_lease_is_not_used(halves: Halves) -> None:
    """The request has been here for the whole lease: the bytes came, and every block counts as not received."""
    halves.ask("r", age=halves.consumer.worker._gk_lease_seconds)
    halves.wait_for("r")
    assert halves.arrived(LOCAL, REMOTE)
    assert halves.consumer.failed_blocks == {1, 2, 3}


@pytest.mark.parametrize(("ahead", "failed"), [(0.25, {1, 2, 3}), (30.0, set())])
def test_a_producer_that_says_when_it_lets_go_is_believed(halves: Halves, ahead: float, failed: set[int]) -> None:
    """Half a second is kept for the clocks."""
    halves.ask("r", expiry=time.perf_counter() + ahead)
    halves.wait_for("r")
    assert halves.consumer.failed_blocks == failed


def test_a_failed_read_fails_all_groups_and_is_reported_once(halves: Halves) -> None:
    """vLLM's own code marks no block where there are two groups."""
    halves.ask("first")
    halves.wait_for("first")
    halves.ask("r", local=([4], [5, 6]))
    (handle,) = halves.consumer.worker._recving_transfers["r"]
    halves.consumer.agent.states[handle] = "ERR"
    reported = [halves.step() for _ in range(4)]
    assert sum("r" in done for done in reported) == 1
    assert halves.consumer.failed_blocks == {4, 5, 6}


def test_a_failed_request_waits_for_its_other_reads(halves: Halves) -> None:
    """Of two reads one fails; the other still writes, so the request is not reported before it has ended."""
    halves.ask("first")
    halves.wait_for("first")
    halves.ask("r")
    reads = halves.consumer.worker._recving_transfers
    (one,) = reads["r"]
    halves.ask("s")
    (other,) = reads.pop("s")
    del halves.consumer.worker._recving_metadata["s"]
    reads["r"].append(other)
    halves.consumer.agent.states.update({one: "ERR", other: "PROC"})
    for _ in range(3):
        assert "r" not in halves.step()
    halves.consumer.agent.states[other] = "DONE"
    halves.wait_for("r")
    assert halves.consumer.failed_blocks == {1, 2, 3}


def test_a_restarted_producer_is_found_again_after_a_failed_read(halves: Halves) -> None:
    """Its name and address are the old ones, its memory is not: the next read has the new start's bytes."""
    halves.ask("first")
    halves.wait_for("first")
    halves.ask("r")
    (handle,) = halves.consumer.worker._recving_transfers["r"]
    halves.consumer.agent.states[handle] = "ERR"
    halves.wait_for("r")
    assert "P" not in halves.consumer.worker._remote_agents
    halves.restart_producer()
    halves.ask("again", local=([7], [5, 6]))
    halves.wait_for("again")
    assert halves.arrived(([7], [5, 6]), REMOTE)
    assert halves.consumer.failed_blocks == {1, 2, 3}


def test_blocks_that_the_producer_does_not_have_are_not_asked_for(
    halves: Halves, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last block is 8: the request fails, and the engine goes on."""
    caplog.set_level("WARNING", logger="vllm.gk")
    halves.ask("r", remote=([4], [5, NUM_BLOCKS]))
    halves.wait_for("r")
    assert halves.consumer.failed_blocks == {1, 2, 3}
    assert "block 9 is named, its producer has 9" in caplog.text
    halves.ask("s", remote=([4], [5, NUM_BLOCKS - 1]))
    halves.wait_for("s")
    assert halves.arrived(LOCAL, ([4], [5, NUM_BLOCKS - 1]))


def test_blocks_that_are_missing_over_there_are_reported_and_the_rest_is_let_go(halves: Halves) -> None:
    """What the scheduler half found that it cannot pair: nothing is read, the producer hears that it may let go."""
    halves.producer.worker._reqs_to_process.add("p-r")
    halves.ask("r", local=(), remote=(), missing={1, 2})
    halves.run_until(lambda: halves.sent)
    assert (halves.sent, halves.received) == (["p-r"], ["r"])
    assert halves.consumer.failed_blocks == {1, 2}


def test_a_producer_that_cannot_be_reached_fails_its_requests_only(halves: Halves) -> None:
    """Refused by hash: nothing is read, and the request is computed here."""
    halves.listener.close()
    halves.producer.worker.xfer_handshake_metadata.compatibility_hash = "of another model"
    halves.listener = halves.producer.listen(halves.port)
    halves.ask("r")
    halves.wait_for("r")
    assert halves.consumer.failed_blocks == {1, 2, 3}


def test_a_stock_producer_is_taken_by_its_own_hash(halves: Halves) -> None:
    """A producer of ours is asked for first."""
    halves.listener.close()
    worker = halves.producer.worker
    assert worker.xfer_handshake_metadata.compatibility_hash == f"gk-one-token-short-{worker.compat_hash}"
    worker.xfer_handshake_metadata.compatibility_hash = worker.compat_hash
    halves.listener = halves.producer.listen(halves.port)
    halves.ask("r")
    halves.wait_for("r")
    assert halves.arrived(LOCAL, REMOTE)
    assert halves.consumer.failed_blocks == set()


@pytest.mark.parametrize("notice", [b"", b"\xff\xfe", b"p-r", b"p-r:", b"p-r:0", b"p-r:-1", b"p-r:many", b":1"])
def test_notices_that_are_none_do_not_end_the_producer(halves: Halves, notice: bytes) -> None:
    """vLLM's own code decodes and counts whatever comes; a good notice after it still counts."""
    halves.producer.worker._reqs_to_process.add("p-r")
    halves.ask("first")
    halves.wait_for("first")
    (name,) = halves.consumer.worker._remote_agents["P"].values()
    halves.consumer.agent.send_notif(name, notif_msg=notice)
    halves.consumer.agent.send_notif(name, notif_msg=b"p-r:1")
    halves.run_until(lambda: halves.sent)
    assert halves.sent == ["p-r"]


def test_leases_end_in_any_order(halves: Halves) -> None:
    """The one that came later is over first; vLLM's own loop stops at the first that is not."""
    worker, now = halves.producer.worker, time.perf_counter()
    worker._reqs_to_process |= {"long", "short"}
    worker._reqs_to_send = {"long": now + 60, "short": now - 1}
    assert halves.producer.finished()[0] == {"short"}
    assert set(worker._reqs_to_send) == {"long"}
