"""`gk bench pull`: 10,240 tokens of KV, 22.5 MB in 36 regions, read from another process over real NIXL.

Contiguous blocks against one descriptor of as many bytes, and against copying them inside this process; random blocks
against stock vLLM's worker, which reads the same blocks of the same process through the same agent. Times run from the
planned read to its last byte, both processes polling, without a progress thread.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from gk_adapters.bench.cache import BenchCache, make_cache
from gk_adapters.bench.form import alternate, case, report
from gk_adapters.nixl_transport import NixlTransport
from gk_core.disaggregation import Role
from gk_core.errors import TransferError
from gk_core.peer_map import map_peer
from gk_core.ports import PeerAgent, PeerKey, ReadHandle, ReadState
from gk_core.region import KVRegion
from gk_core.transfer_plan import BlockPairs, BlockRun, RankRead

__all__ = ["bench_pull"]

_NUM_BLOCKS = 1024
_BLOCKS = 80
_NAME = "gk-bench-pull-there"
_KEY = PeerKey(engine_id="bench-prefill", rank=0)
_ONE = PeerKey(engine_id="bench-one", rank=0)
_PATIENCE_SECONDS = 60.0


def bench_pull(*, repeats: int = 15) -> dict[str, Any]:
    """Milliseconds per pull.

    Raises:
        MissingDependencyError: NIXL or vLLM is not installed.
        TransferError: a read failed.
    """
    from gk_adapters.vllm.bench_nixl_worker import StockNixlWorker

    here = make_cache(engine_id="bench-decode", role=Role.DECODE, num_blocks=_NUM_BLOCKS, block_size=128)
    _touch(here)
    ours = NixlTransport(agent_name="gk-bench-pull-here")
    ours.register(regions=here.regions)
    one = NixlTransport(agent_name="gk-bench-pull-one-here")
    one.register(regions=(_one_region(here.regions),))
    with _producer() as (metadata, metadata_of_one, regions):
        ours.connect(peer=PeerAgent(key=_KEY, agent_metadata=metadata, regions=regions))
        one.connect(peer=PeerAgent(key=_ONE, agent_metadata=metadata_of_one, regions=(_one_region(regions),)))
        stock = StockNixlWorker(ours.agent, here.regions)
        stock.connect(_NAME, regions)
        cut = map_peer(here.peer_layout, {0: evolve(here.peer_layout, engine_id=_KEY.engine_id, role=Role.PREFILL)})
        whole = cut.ranks[0].head_slice
        choose = random.Random(1)

        def pull(read: RankRead, peer: PeerKey = _KEY, transport: NixlTransport = ours) -> float:
            return _timed(lambda: transport.read(peer=peer, read=read), _ended)

        def contiguous() -> float:
            starts = [choose.randrange(1, _NUM_BLOCKS - _BLOCKS) for _ in range(2)]
            run = BlockRun(local_start=starts[0], remote_start=starts[1], count=_BLOCKS)
            return pull(RankRead(remote_rank=0, head_slice=whole, runs=(run,)))

        size = len(here.regions) * _BLOCKS * here.layout.block_bytes
        single = evolve(whole, length_bytes=size)

        def one_big() -> float:
            run = BlockRun(local_start=0, remote_start=0, count=1)
            return pull(RankRead(remote_rank=0, head_slice=single, runs=(run,)), _ONE, one)

        def scattered() -> tuple[list[int], list[int]]:
            first, second = (choose.sample(range(1, _NUM_BLOCKS), _BLOCKS) for _ in range(2))
            return first, second

        def random_ours() -> float:
            local, remote = scattered()
            pairs = BlockPairs.of(local_ids=tuple(local), remote_ids=tuple(remote))
            return pull(RankRead(remote_rank=0, head_slice=whole, runs=pairs))

        def random_stock() -> float:
            local, remote = scattered()
            request = stock.request(([], local), ([], remote))
            return _timed(lambda: stock.read(request), stock.is_done)

        source = (ctypes.c_char * size)()

        def memcpy() -> float:
            start = time.perf_counter()
            ctypes.memmove(here.address, source, size)
            return (time.perf_counter() - start) * 1e3

        cases = [
            _case("contiguous_vs_one_big", repeats, contiguous, "one descriptor of as many bytes", one_big, size),
            _case("random_vs_stock", repeats, random_ours, "vLLM _read_blocks_for_req", random_stock, size),
            _case("contiguous_vs_memcpy", repeats, contiguous, "memcpy inside one process", memcpy, size),
        ]
        one.close()
        ours.close()
    return report("pull", cases)


def _case(
    name: str, repeats: int, ours: Callable[[], float], peer_name: str, peer: Callable[[], float], size: int
) -> dict[str, Any]:
    mine, theirs = alternate(repeats, ours, peer, warm_up=2)
    return case(name, "ms", mine, peer_name, theirs, bytes=size, best_ratio=min(mine) / min(theirs))


def _timed(post: Callable[[], Any], is_done: Callable[[Any], bool]) -> float:
    start = time.perf_counter()
    handle = post()
    while not is_done(handle):
        if time.perf_counter() - start > _PATIENCE_SECONDS:
            raise TransferError(f"a read did not end within {_PATIENCE_SECONDS:g} s")
    milliseconds = (time.perf_counter() - start) * 1e3
    handle.release()
    return milliseconds


def _ended(handle: ReadHandle) -> bool:
    state = handle.poll()
    if state is ReadState.FAILED:
        raise TransferError("a read failed")
    return state is ReadState.DONE


def _one_region(regions: tuple[KVRegion, ...]) -> KVRegion:
    """All of a cache as one block."""
    first = regions[0]
    size = sum(r.size_bytes for r in regions)
    return evolve(first, num_blocks=1, block_bytes=size, block_stride_bytes=size)


def _touch(cache: BenchCache) -> None:
    """Have every page, so that no first write is measured."""
    for start in range(0, len(cache.memory), 4096):
        cache.memory[start] = 1


@contextmanager
def _producer() -> Iterator[tuple[bytes, bytes, tuple[KVRegion, ...]]]:
    """The other process: serves its memory until it is told to stop."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gk_adapters.bench.pull"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address, *metadata = process.stdout.readline().decode().split()
        cache = make_cache(engine_id=_KEY.engine_id, role=Role.PREFILL, num_blocks=_NUM_BLOCKS, block_size=128)
        moved = int(address) - cache.regions[0].base_address
        regions = tuple(evolve(r, base_address=r.base_address + moved) for r in cache.regions)
        yield bytes.fromhex(metadata[0]), bytes.fromhex(metadata[1]), regions
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _serve() -> None:
    import select

    cache = make_cache(engine_id=_KEY.engine_id, role=Role.PREFILL, num_blocks=_NUM_BLOCKS, block_size=128)
    _touch(cache)
    # One descriptor of everything lies in one registration, so it has an agent of its own.
    transports = [NixlTransport(agent_name=name) for name in (_NAME, f"{_NAME}-one")]
    blobs = [
        transport.register(regions=regions).hex()
        for transport, regions in zip(transports, (cache.regions, (_one_region(cache.regions),)), strict=True)
    ]
    print(cache.regions[0].base_address, *blobs, flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for transport in transports:
            transport.take_notices()
    for transport in transports:
        transport.close()


if __name__ == "__main__":
    _serve()
