"""The block pool contract on the pool's two orders and on the fake."""

from __future__ import annotations

from gk_adapters.block_pool import BlockOrder, HybridBlockPool
from gk_adapters.fakes.block_pool import FakeBlockPool
from gk_core.ports import BlockPool

from .block_pool_contract import BlockPoolContract


class TestContiguousPool(BlockPoolContract):
    def make_pool(self, *, num_blocks: int, block_size: int = 4, sliding_window: int = 6) -> BlockPool:
        return HybridBlockPool(num_blocks=num_blocks, block_size=block_size, sliding_window=sliding_window)


class TestVllmOrderPool(BlockPoolContract):
    def make_pool(self, *, num_blocks: int, block_size: int = 4, sliding_window: int = 6) -> BlockPool:
        return HybridBlockPool(
            num_blocks=num_blocks, block_size=block_size, sliding_window=sliding_window, order=BlockOrder.VLLM
        )


class TestFakePool(BlockPoolContract):
    def make_pool(self, *, num_blocks: int, block_size: int = 4, sliding_window: int = 6) -> BlockPool:
        return FakeBlockPool(num_blocks=num_blocks, block_size=block_size, sliding_window=sliding_window)
