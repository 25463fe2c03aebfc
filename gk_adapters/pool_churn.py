"""How many reads a request's KV takes once the pools have been in use for a while.

Two pools, one of each engine, live through the same random arrivals, prompt lengths and departures. When a prompt has
been prefilled its blocks are pulled; one read moves blocks that are neighbours on both sides, in one region. This is a
simulation of block ids alone: no bytes move and no time is measured.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence

from attrs import frozen

from gk_adapters.block_pool import BlockOrder, HybridBlockPool, id_runs
from gk_core.block_table import NULL_BLOCK_ID
from gk_core.errors import CapacityError

__all__ = ["ChurnSettings", "paired_runs", "pool_churn"]


@frozen(kw_only=True)
class ChurnSettings:
    """One simulated service.

    Attributes:
        num_blocks, block_size, sliding_window: of both pools.
        num_live: requests on the decode side at once, on average.
        seconds: simulated; pulls of the first quarter only warm the pools up.
        prompt_tokens, output_tokens: shortest and longest, drawn uniformly.
        tokens_per_second: decode speed of one request.
        prefill_chunk: tokens that the prefill side computes at once for one request.
        chunk_seconds: longest wait between two chunks of one request, while others get theirs.
        lease_seconds: longest time from the pull to the prefill side's release.
        seed: of the random choices.
    """

    num_blocks: int = 36_175
    block_size: int = 128
    sliding_window: int = 128
    num_live: int = 240
    seconds: float = 3600.0
    prompt_tokens: tuple[int, int] = (1024, 9216)
    output_tokens: tuple[int, int] = (64, 1024)
    tokens_per_second: float = 20.0
    prefill_chunk: int = 2048
    chunk_seconds: float = 1.0
    lease_seconds: float = 2.0
    seed: int = 0

    @property
    def arrivals_per_second(self) -> float:
        """Arrivals that keep `num_live` requests decoding (Little's law)."""
        return self.num_live * self.tokens_per_second / (sum(self.output_tokens) / 2)


def paired_runs(local: Sequence[int], remote: Sequence[int], *, in_order: bool) -> int:
    """Reads that move remote blocks to local ones, one per run of ids that ascend together on both sides.

    With `in_order` false the pairs are sorted by local id first: to a transfer the order of blocks does not matter.

    >>> paired_runs([5, 4, 7], [9, 8, 3], in_order=True), paired_runs([5, 4, 7], [9, 8, 3], in_order=False)
    (3, 2)
    """
    pairs = list(zip(local, remote, strict=True))
    if not in_order:
        pairs.sort()
    return sum(i == 0 or pairs[i - 1] != (a - 1, b - 1) for i, (a, b) in enumerate(pairs))


def pool_churn(settings: ChurnSettings | None = None) -> dict[str, object]:
    """Reads per pulled request and region, for vLLM's block order as it comes, sorted, and for contiguous blocks.

    Returns a JSON-ready dict: `pulls`, `blocks_per_pull`, `reads_per_pull` with one entry per order (`median`, `mean`,
    `min`, `max`), `decode_side_runs`, the same for the ids of one side alone, and `sorted_vllm_over_contiguous`, the
    ratio of the mean reads.
    """
    settings = settings or ChurnSettings()
    vllm, contiguous = (_Service(settings, order).run() for order in (BlockOrder.VLLM, BlockOrder.CONTIGUOUS))
    return {
        "num_blocks": settings.num_blocks,
        "live_requests": settings.num_live,
        "simulated_seconds": settings.seconds,
        "pulls": len(contiguous.blocks),
        "turned_away": {"vllm": vllm.turned_away, "contiguous": contiguous.turned_away},
        "blocks_per_pull": _summary(contiguous.blocks),
        "reads_per_pull": {
            "vllm_as_handed_out": _summary(vllm.reads_in_order),
            "vllm_sorted": _summary(vllm.reads_sorted),
            "contiguous": _summary(contiguous.reads_sorted),
        },
        "decode_side_runs": {
            "vllm_as_handed_out": _summary(vllm.runs_in_order),
            "vllm_sorted": _summary(vllm.runs_sorted),
            "contiguous": _summary(contiguous.runs_sorted),
        },
        "sorted_vllm_over_contiguous": statistics.fmean(vllm.reads_sorted) / statistics.fmean(contiguous.reads_sorted),
    }


def _summary(values: Sequence[int]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "mean": round(statistics.fmean(values), 3),
        "min": min(values),
        "max": max(values),
    }


class _Service:
    """Both engines' pools under one block order."""

    def __init__(self, settings: ChurnSettings, order: BlockOrder) -> None:
        self._settings = settings
        self._prefill_pool, self._decode_pool = (
            HybridBlockPool(
                num_blocks=settings.num_blocks,
                block_size=settings.block_size,
                sliding_window=settings.sliding_window,
                order=order,
            )
            for _ in range(2)
        )
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now = 0.0
        self._ticket = 0
        self.reads_in_order: list[int] = []
        self.reads_sorted: list[int] = []
        self.runs_in_order: list[int] = []
        self.runs_sorted: list[int] = []
        self.blocks: list[int] = []
        self.turned_away = 0

    def run(self) -> _Service:
        """Live through `seconds`."""
        # All choices are drawn from one stream here, so that every block order meets the same requests.
        settings, choose = self._settings, random.Random(self._settings.seed)
        arrival = 0.0
        while (arrival := arrival + choose.expovariate(settings.arrivals_per_second)) < settings.seconds:
            prompt, output = choose.randint(*settings.prompt_tokens), choose.randint(*settings.output_tokens)
            gap, lease = choose.uniform(0, settings.chunk_seconds), choose.uniform(0, settings.lease_seconds)
            name = f"request {arrival}"
            self._at(arrival, self._prefill, name, 0, prompt, output, gap, lease)
        while self._events and self._now < settings.seconds:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self

    def _at(self, when: float, act: Callable[..., None], *args: object) -> None:
        self._ticket += 1
        heapq.heappush(self._events, (when, self._ticket, lambda: act(*args)))

    def _prefill(self, name: str, done: int, prompt: int, output: int, gap: float, lease: float) -> None:
        chunk = min(self._settings.prefill_chunk, prompt - 1 - done)
        if not self._grow(self._prefill_pool, name, done, chunk):
            return
        if done + chunk < prompt - 1:
            self._at(self._now + gap, self._prefill, name, done + chunk, prompt, output, gap, lease)
        else:
            self._pull(name, prompt, output, lease)

    def _pull(self, name: str, prompt: int, output: int, lease: float) -> None:
        self._at(self._now + lease, lambda: self._prefill_pool.free(request_id=name))
        if not self._grow(self._decode_pool, name, prompt - 1, 0):
            return
        self._decode(name, prompt - 1, prompt + output)
        if self._now > self._settings.seconds / 4:
            self._measure(name, -(-(prompt - 1) // self._settings.block_size))

    def _measure(self, name: str, num_blocks: int) -> None:
        here, there = (p.tables(request_id=name) for p in (self._decode_pool, self._prefill_pool))
        pairs = []
        for local, remote in (
            (here.sliding.block_ids, there.sliding.block_ids),
            (here.full.block_ids, there.full.block_ids),
        ):
            wanted = [(a, b) for a, b in zip(local[:num_blocks], remote, strict=True) if a != NULL_BLOCK_ID]
            pairs.append(([a for a, _ in wanted], [b for _, b in wanted]))
        self.reads_in_order.append(sum(paired_runs(a, b, in_order=True) for a, b in pairs))
        self.reads_sorted.append(sum(paired_runs(a, b, in_order=False) for a, b in pairs))
        self.runs_in_order.append(sum(id_runs(a) for a, _ in pairs))
        self.runs_sorted.append(sum(id_runs(sorted(a)) for a, _ in pairs))
        self.blocks.append(sum(len(a) for a, _ in pairs))

    def _decode(self, name: str, position: int, end: int) -> None:
        """Grow at the first token and at each block's first token, until the request departs."""
        if position >= end:
            self._decode_pool.free(request_id=name)
        elif self._grow(self._decode_pool, name, position, 1):
            size = self._settings.block_size
            until = min((position // size + 1) * size, end)
            seconds = (until - position) / self._settings.tokens_per_second
            self._at(self._now + seconds, self._decode, name, until, end)

    def _grow(self, pool: HybridBlockPool, name: str, computed: int, new: int) -> bool:
        try:
            pool.grow(request_id=name, num_computed_tokens=computed, num_new_tokens=new)
        except CapacityError:
            pool.free(request_id=name)
            self.turned_away += 1
            return False
        return True
