"""`gk bench registration`: describing a cache of 36 regions x 36,175 blocks to NIXL, ours against stock vLLM's worker.

Ours is one strided row per region; vLLM's is one descriptor per block. Both run over the same registered memory in the
same process; `..._first_call` is the first description that a process makes. Two more figures give the bytes of
resident memory that stay for it, each in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gk_adapters.bench.cache import make_cache
from gk_adapters.bench.form import alternate, case, report
from gk_adapters.nixl_transport import NixlTransport
from gk_core.disaggregation import Role

__all__ = ["bench_registration"]

_NUM_BLOCKS = 36_175
_BLOCK_SIZE = 8  # 512 bytes: descriptors cost the same whatever they are long, and this fits any machine
_PEER = "vLLM register_local_xfer_handler"


def bench_registration(*, repeats: int = 7) -> dict[str, Any]:
    """Microseconds and bytes.

    Raises:
        MissingDependencyError: NIXL or vLLM is not installed.
    """
    ours, peer, close = _sides()
    try:
        first = case("36x36175_first_call", "us", [_timed(ours)], _PEER, [_timed(peer)])
        mine, theirs = alternate(repeats, lambda: _median_of_five(ours), lambda: _median_of_five(peer))
        times = case("36x36175", "us", mine, _PEER, theirs)
    finally:
        close()
    kept = [[_kept_bytes(side) for _ in range(2)] for side in ("ours", "peer")]
    return report("registration", [times, first, case("36x36175_kept", "bytes", kept[0], _PEER, kept[1])])


def _sides() -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], None]]:
    from gk_adapters.vllm.bench_nixl_worker import StockNixlWorker

    cache = make_cache(engine_id="bench", role=Role.DECODE, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE)
    transport = NixlTransport(agent_name="gk-bench-registration")
    transport.register(regions=cache.regions)
    stock = StockNixlWorker(transport.agent, cache.regions)
    return transport.prepare_again, stock.register_local, transport.close


def _timed(side: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = side()
    seconds = time.perf_counter() - start
    del result
    return seconds * 1e6


def _median_of_five(side: Callable[[], Any]) -> float:
    """Of five in a row: the peer's 90 MB in between would leave ours to fill caches."""
    return statistics.median(_timed(side) for _ in range(5))


def _kept_bytes(side: str) -> int:
    """Growth of resident memory while one description is held."""
    result = subprocess.run(
        [sys.executable, "-m", "gk_adapters.bench.registration", side], stdout=subprocess.PIPE, check=True
    )
    return int(json.loads(result.stdout.splitlines()[-1]))


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    ours, peer, close = _sides()
    before = _resident_bytes()
    held = (ours if sys.argv[1] == "ours" else peer)()
    after = _resident_bytes()
    del held
    close()
    print(json.dumps(max(after - before, 0)))
