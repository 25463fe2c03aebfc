"""The block pool of both engines: one set of ids for the sliding and the full group, block 0 never handed out.

Which logical blocks a request holds follows vLLM's hybrid KV-cache manager exactly. Which *ids* it gets is a choice:
vLLM's own free queue, or long runs of neighbouring ids, so that moving a request's KV takes few large reads instead of
one per block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from attrs import define, field, frozen

from gk_adapters.free_runs import FreeRuns
from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable, first_window_block
from gk_core.errors import CapacityError, LayoutError
from gk_core.ports import BlockPool, GroupTables

__all__ = ["BlockOrder", "HybridBlockPool", "PoolUsage", "id_runs"]


class BlockOrder(Enum):
    """Which free ids are handed out first.

    VLLM: vLLM's free queue without prefix caching: last freed, first used; ids equal vLLM's own.
    CONTIGUOUS: neighbouring ids; a growing table continues its last run where it can.
    """

    VLLM = "vllm"
    CONTIGUOUS = "contiguous"


@frozen(kw_only=True)
class PoolUsage:
    """Where the pool's blocks are; full + sliding + free + the null block = num_blocks."""

    full: int
    sliding: int
    free: int


class _FreeIds(Protocol):
    """Free block ids."""

    def __len__(self) -> int: ...

    def ids(self) -> Iterable[int]: ...

    def take(self, count: int, *, after: int | None, passing: bool) -> list[int]: ...

    def give(self, ids: Sequence[int]) -> None: ...


class _VllmQueue:
    """Last freed first; ids freed together come out in the reverse of the order in which they were given.

    Source: vllm/v1/core/block_pool.py@0.28.0, free_blocks without caching.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue = deque(range(1, num_blocks))

    def __len__(self) -> int:
        return len(self._queue)

    def ids(self) -> Iterable[int]:
        return self._queue

    def take(self, count: int, *, after: int | None, passing: bool) -> list[int]:
        return [self._queue.popleft() for _ in range(count)]

    def give(self, ids: Sequence[int]) -> None:
        self._queue.extendleft(ids)


@define(kw_only=True)
class _Held:
    """One request's blocks; the first `num_evicted` entries of `sliding` are the null block."""

    sliding: list[BlockId] = field(factory=list)
    full: list[BlockId] = field(factory=list)
    num_evicted: int = 0
    num_computed_tokens: int = 0
    tables: GroupTables | None = None


class HybridBlockPool(BlockPool):
    """Blocks of one cache, handed out to requests by group.

    Args:
        num_blocks: blocks of every buffer, the null block included.
        block_size: tokens per block, of both groups.
        sliding_window: tokens.
        order: which free ids come first.

    Raises:
        LayoutError: fewer than two blocks, or a size below one token.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, sliding_window: int, order: BlockOrder = BlockOrder.CONTIGUOUS
    ) -> None:
        if num_blocks < 2:
            raise LayoutError(f"num_blocks must be >= 2 because block 0 is the null block, got {num_blocks}")
        for name, value in (("block_size", block_size), ("sliding_window", sliding_window)):
            if value < 1:
                raise LayoutError(f"{name} must be >= 1 token, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.order = order
        self._free: _FreeIds = _VllmQueue(num_blocks) if order is BlockOrder.VLLM else FreeRuns(range(1, num_blocks))
        self._requests: dict[str, _Held] = {}

    def grow(self, *, request_id: str, num_computed_tokens: int, num_new_tokens: int) -> GroupTables:
        """See `BlockPool.grow`."""
        held = self._requests.get(request_id)
        known = held or _Held()
        self._check_counts(request_id, known, num_computed_tokens, num_new_tokens)
        outside = first_window_block(num_computed_tokens, self.sliding_window, self.block_size)
        # Blocks behind the window are given back even when the growth then fails: nobody reads them again, and the
        # retry needs the room.
        self._evict(known, min(outside, len(known.sliding)))
        known.num_computed_tokens = num_computed_tokens
        wanted = -(-(num_computed_tokens + num_new_tokens) // self.block_size)
        more_sliding = max(wanted - max(len(known.sliding), outside), 0)
        more_full = max(wanted - len(known.full), 0)
        if more_sliding + more_full > len(self._free):
            raise CapacityError(
                f"request {request_id!r} needs {more_sliding} sliding and {more_full} full blocks for "
                f"{num_computed_tokens + num_new_tokens} tokens, {len(self._free)} of {self.num_blocks - 1} are free; "
                "wait, preempt another request or give the cache more memory"
            )
        if held is None:
            self._requests[request_id] = known
        missing = outside - len(known.sliding)
        if missing > 0:
            known.sliding += [NULL_BLOCK_ID] * missing
            known.num_evicted = outside
        if more_sliding or more_full or missing > 0:
            known.tables = None
            self._extend(known, -(-num_computed_tokens // self.block_size), wanted)
        return self.tables(request_id=request_id)

    def tables(self, *, request_id: str) -> GroupTables:
        """See `BlockPool.tables`."""
        held = self._requests.get(request_id)
        if held is None:
            raise LayoutError(f"request {request_id!r} holds no blocks")
        if held.tables is None:
            held.tables = GroupTables(
                full=BlockTable(block_ids=tuple(held.full), block_size=self.block_size),
                sliding=BlockTable(block_ids=tuple(held.sliding), block_size=self.block_size),
            )
        return held.tables

    def free(self, *, request_id: str) -> None:
        """See `BlockPool.free`."""
        held = self._requests.pop(request_id, None)
        if held is not None:
            self._free.give(held.sliding[held.num_evicted :])
            self._free.give(held.full)

    def num_free_blocks(self) -> int:
        """See `BlockPool.num_free_blocks`."""
        return len(self._free)

    def request_ids(self) -> tuple[str, ...]:
        """Requests that hold blocks, oldest first."""
        return tuple(self._requests)

    def check_invariants(self) -> PoolUsage:
        """Count every block: each id of 1..num_blocks-1 is held once or free once, never both, never neither.

        Raises:
            LayoutError: naming the first id that is not.
        """
        seen: dict[int, str] = {}

        def note(ids: Iterable[int], owner: str) -> int:
            count = 0
            for block_id in ids:
                if not 0 < block_id < self.num_blocks:
                    raise LayoutError(f"block {block_id} of {owner} is outside 1..{self.num_blocks - 1}")
                if block_id in seen:
                    raise LayoutError(f"block {block_id} belongs to {seen[block_id]} and to {owner}")
                seen[block_id] = owner
                count += 1
            return count

        full = sliding = 0
        for request_id, held in self._requests.items():
            if any(b != NULL_BLOCK_ID for b in held.sliding[: held.num_evicted]):
                raise LayoutError(f"request {request_id!r} kept a sliding block that the window had left")
            full += note(held.full, f"request {request_id!r} (full)")
            sliding += note(held.sliding[held.num_evicted :], f"request {request_id!r} (sliding)")
        free = note(self._free.ids(), "the free list")
        if full + sliding + free != self.num_blocks - 1 or free != len(self._free):
            lost = next(b for b in range(1, self.num_blocks) if b not in seen)
            raise LayoutError(f"block {lost} is neither held nor free")
        return PoolUsage(full=full, sliding=sliding, free=free)

    def _check_counts(self, request_id: str, held: _Held, computed: int, new: int) -> None:
        if new < 0 or computed < 0 or computed + new < 1:
            raise LayoutError(
                f"request {request_id!r} needs token counts >= 0 and at least one token, got {computed} computed and "
                f"{new} new"
            )
        if computed < held.num_computed_tokens:
            raise LayoutError(
                f"request {request_id!r} has {held.num_computed_tokens} computed tokens and cannot go back to "
                f"{computed}: its window may have moved on; free it and start again"
            )

    def _evict(self, held: _Held, outside: int) -> None:
        gone = held.sliding[held.num_evicted : outside]
        if gone:
            held.sliding[held.num_evicted : outside] = [NULL_BLOCK_ID] * len(gone)
            held.num_evicted = outside
            held.tables = None
            self._free.give(gone)

    def _extend(self, held: _Held, computed_blocks: int, wanted: int) -> None:
        """Lengthen both tables to `wanted` entries.

        vLLM first covers the tokens that arrive by transfer, for both groups, then the new ones; its ids depend on
        that. (A window of one token keeps no arrived token, so its group has no part in the first round.) Contiguous
        ids want each group's share in one piece, and the first choice for the blocks that stay.
        """
        sliding, full = held.sliding, held.full
        shares = [(full, wanted), (sliding, wanted)]
        if self.order is BlockOrder.VLLM:
            arrived = computed_blocks if self.sliding_window > 1 else 0
            shares = [(sliding, arrived), (full, computed_blocks), (sliding, wanted), (full, wanted)]
        for ids, upto in shares:
            if upto > len(ids):
                after = ids[-1] if ids and ids[-1] != NULL_BLOCK_ID else None
                ids += map(BlockId, self._free.take(upto - len(ids), after=after, passing=ids is sliding))


def id_runs(block_ids: Iterable[int]) -> int:
    """Runs of ascending neighbours in a list of ids.

    >>> id_runs([4, 5, 6, 9, 8, 10])
    4
    """
    runs, previous = 0, None
    for block_id in block_ids:
        runs += previous is None or block_id != previous + 1
        previous = block_id
    return runs
