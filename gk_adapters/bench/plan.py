"""`gk bench plan`: from block ids to a prepared read of 10,240 tokens, ours against stock vLLM's worker.

80 full-attention blocks and one sliding block in 36 regions, on caches of 36,175 blocks. Both begin with what a
scheduler half hands to a worker half: ours, `plan_pull` and `NixlTransport.read`, with `GroupBlocks` of both sides;
vLLM's, `_read_blocks_for_req`, with a `ReqMeta`. Both end with NIXL's own make_prepped_xfer, and neither posts: how
long bytes take is `gk bench pull`. The cases `..._from_ids` add the making of our side's value from block ids, with its
checks of type, range and doubles, and of vLLM's from lists.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

from gk_adapters.bench.cache import BenchCache, make_cache
from gk_adapters.bench.form import case, report
from gk_adapters.nixl_transport import NixlTransport
from gk_core.disaggregation import Role
from gk_core.model_geometry import AttentionKind
from gk_core.peer_map import map_peer
from gk_core.ports import PeerAgent, PeerKey, ReadState
from gk_core.transfer_plan import GroupBlocks, plan_pull

__all__ = ["bench_plan", "random_groups"]

_NUM_BLOCKS = 36_175
_NUM_TOKENS = 10_240
_FULL, _SLIDING = 80, 1
_PEER = "vLLM _read_blocks_for_req"

Ids = tuple[tuple[int, ...], tuple[int, ...]]
"""Sliding and full block ids of one request on one side."""


def random_groups(choose: random.Random, num_blocks: int, *, contiguous: bool) -> Ids:
    """Block ids as a pool hands them out: neighbours, or anywhere; fresh ones each time."""
    if contiguous:
        start = choose.randrange(1, num_blocks - _FULL - _SLIDING)
        ids = range(start, start + _FULL + _SLIDING)
    else:
        ids = choose.sample(range(1, num_blocks), _FULL + _SLIDING)  # type: ignore[assignment]
    return tuple(ids[_FULL:]), tuple(ids[:_FULL])


def bench_plan(*, repeats: int = 5, requests: int = 200) -> dict[str, Any]:
    """Microseconds per request: the median request of each repeat.

    Raises:
        MissingDependencyError: NIXL or vLLM is not installed.
    """
    sides = _Sides()
    try:
        cases = [
            sides.case(contiguous=contiguous, from_ids=from_ids, repeats=repeats, requests=requests)
            for from_ids in (False, True)
            for contiguous in (True, False)
        ]
    finally:
        sides.close()
    return report("plan", cases)


class _PreparesOnly(NixlTransport):
    """Posts nothing."""

    def _post(self, handle: Any) -> ReadState:
        return ReadState.DONE


class _Sides:
    """Both ways over the same memory and the same agents."""

    def __init__(self) -> None:
        from gk_adapters.vllm.bench_nixl_worker import NoPost, StockNixlWorker

        here, there = (
            make_cache(engine_id=name, role=role, num_blocks=_NUM_BLOCKS, block_size=128)
            for name, role in (("bench-decode", Role.DECODE), ("bench-prefill", Role.PREFILL))
        )
        self.caches: tuple[BenchCache, BenchCache] = (here, there)
        self.ours = _PreparesOnly(agent_name="gk-bench-plan-here")
        self.theirs = NixlTransport(agent_name="gk-bench-plan-there")
        self.ours.register(regions=here.regions)
        metadata = self.theirs.register(regions=there.regions)
        self.key = PeerKey(engine_id="bench-prefill", rank=0)
        self.ours.connect(peer=PeerAgent(key=self.key, agent_metadata=metadata, regions=there.regions))
        self.map = map_peer(here.peer_layout, {0: there.peer_layout})
        self.stock = StockNixlWorker(NoPost(self.ours.agent), here.regions)
        self.stock.connect("gk-bench-plan-there", there.regions)

    def case(self, *, contiguous: bool, from_ids: bool, repeats: int, requests: int) -> dict[str, Any]:
        name = f"10240_tokens_{'contiguous' if contiguous else 'random'}{'_from_ids' if from_ids else ''}"
        choose = random.Random(contiguous)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            batch = [
                tuple(random_groups(choose, _NUM_BLOCKS, contiguous=contiguous) for _ in range(2))
                for _ in range(requests)
            ]
            for side, prepare in zip(times, (self._ours, self._stock), strict=True):
                side.append(_median_us([prepare(local, remote, from_ids) for local, remote in batch]))
        return case(name, "us", times[0], _PEER, times[1])

    def _ours(self, local: Ids, remote: Ids, from_ids: bool) -> Callable[[], Any]:
        offered, ours = _groups(remote), _groups(local)

        def plan() -> Any:
            groups = _groups(local) if from_ids else ours
            pull = plan_pull(self.map, local=groups, remote=offered, num_tokens=_NUM_TOKENS)
            return self.ours.read(peer=self.key, read=pull.reads[0])

        return plan

    def _stock(self, local: Ids, remote: Ids, from_ids: bool) -> Callable[[], Any]:
        lists = [tuple(list(group) for group in side) for side in (local, remote)]
        request = self.stock.request(*lists)
        return lambda: self.stock.read(self.stock.request(*lists) if from_ids else request)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def _groups(ids: Ids) -> tuple[GroupBlocks, ...]:
    return (
        GroupBlocks(kind=AttentionKind.SLIDING, first_logical=_FULL - 1, block_ids=ids[0]),
        GroupBlocks(kind=AttentionKind.FULL, first_logical=0, block_ids=ids[1]),
    )


def _median_us(plans: list[Callable[[], Any]]) -> float:
    """Handles are let go of outside the clock."""
    took = []
    gc.disable()
    try:
        for plan in plans:
            start = time.perf_counter()
            handle = plan()
            took.append((time.perf_counter() - start) * 1e6)
            handle.release()
    finally:
        gc.enable()
    return sorted(took)[len(took) // 2]
