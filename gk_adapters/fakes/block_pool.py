"""FakeBlockPool: the real block pool, small by default, that counts all of its blocks after every call.

It hands out real ids and keeps real tables; what is fake is only that it looks over its own shoulder and remembers
which blocks the window left behind. Eight blocks of four tokens, a window of four:

    >>> pool = FakeBlockPool(num_blocks=8, block_size=4, sliding_window=4)
    >>> pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=6).full.block_ids
    (3, 4)
    >>> pool.grow(request_id="a", num_computed_tokens=7, num_new_tokens=1).sliding.block_ids
    (0, 2)
    >>> pool.evicted
    (('a', 0, 1),)
    >>> pool.num_free_blocks()
    4
"""

from __future__ import annotations

from gk_adapters.block_pool import BlockOrder, HybridBlockPool
from gk_core.block_table import NULL_BLOCK_ID, BlockId
from gk_core.errors import LayoutError
from gk_core.ports import GroupTables

__all__ = ["FakeBlockPool"]


class FakeBlockPool(HybridBlockPool):
    """A block pool for tests: same ids, same tables, same errors as `HybridBlockPool`, checked as it goes.

    Args:
        num_blocks, block_size, sliding_window: as for the real pool.
        order: vLLM's by default, whose ids are easy to work out by hand: 1, 2, 3, ...
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        sliding_window: int = 128,
        order: BlockOrder = BlockOrder.VLLM,
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, sliding_window=sliding_window, order=order)
        self._evicted: list[tuple[str, int, BlockId]] = []

    @property
    def evicted(self) -> tuple[tuple[str, int, BlockId], ...]:
        """Every block that a window left behind so far: (request id, logical block, block id)."""
        return tuple(self._evicted)

    def grow(self, *, request_id: str, num_computed_tokens: int, num_new_tokens: int) -> GroupTables:
        """See `BlockPool.grow`."""
        before = self._sliding(request_id)
        try:
            return super().grow(
                request_id=request_id, num_computed_tokens=num_computed_tokens, num_new_tokens=num_new_tokens
            )
        finally:
            after = self._sliding(request_id)
            self._evicted += [
                (request_id, logical, old)
                for logical, (old, new) in enumerate(zip(before, after, strict=False))
                if old != NULL_BLOCK_ID and new == NULL_BLOCK_ID
            ]
            self.check_invariants()

    def free(self, *, request_id: str) -> None:
        """See `BlockPool.free`."""
        super().free(request_id=request_id)
        self.check_invariants()

    def _sliding(self, request_id: str) -> tuple[BlockId, ...]:
        try:
            return self.tables(request_id=request_id).sliding.block_ids
        except LayoutError:
            return ()
