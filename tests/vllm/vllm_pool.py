"""Real vLLM's KV-cache manager and worker block tables behind the block pool port, as an oracle for tests."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import attrs

from gk_adapters.vllm.hma import HmaPlanner, planning_config
from gk_adapters.vllm.versions import Era, served_era
from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable
from gk_core.errors import CapacityError, LayoutError
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.model_geometry import GPT_OSS_120B
from gk_core.ports import BlockPool, GroupTables

__all__ = ["MAX_MODEL_LEN", "VllmPool"]

MAX_MODEL_LEN = 4096
_MAX_BATCHED = 1024


class VllmPool(BlockPool):
    """36 honest specs, two groups, vLLM's own manager.

    Args:
        num_blocks, block_size, sliding_window: of the cache.
        caching: prefix caching. Off, ids come from vLLM's plain free queue; on, its hybrid coordinator runs, every
            prompt being unlike every other.
        num_rows: worker block-table rows, one per live request.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, sliding_window: int, caching: bool = False, num_rows: int = 9
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        geometry = attrs.evolve(GPT_OSS_120B, sliding_window=sliding_window)
        specs = honest_specs(geometry, tp_size=8, block_size=block_size, dtype=KVDtype.FP8_E4M3FN)
        memory_bytes = num_blocks * len(specs) * specs[0].half_block_bytes
        self.config = _planner().kv_cache_config(specs=specs, memory_bytes=memory_bytes)
        assert self.config.num_blocks == num_blocks
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.manager = KVCacheManager(
            self.config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            max_in_flight_tokens=_MAX_BATCHED,
            enable_caching=caching,
        )
        self._requests: dict[str, Any] = {}
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(num_rows))
        self._worker_tables = _worker_tables(block_size, num_rows)
        self._num_rows = num_rows
        self._prompts = 0
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)

    def grow(self, *, request_id: str, num_computed_tokens: int, num_new_tokens: int) -> GroupTables:
        """As vLLM's scheduler does it; tokens of a new request that are computed already arrive by a connector."""
        if num_computed_tokens < 0 or num_new_tokens < 0 or num_computed_tokens + num_new_tokens < 1:
            raise LayoutError(f"at least one token, got {num_computed_tokens} computed and {num_new_tokens} new")
        request = self._requests.get(request_id)
        arriving = 0
        if request is None:
            request = self._new_request(request_id)
            arriving = num_computed_tokens
        elif num_computed_tokens < request.num_computed_tokens:
            raise LayoutError(
                f"{request_id} has {request.num_computed_tokens} computed tokens and cannot go back to "
                f"{num_computed_tokens}"
            )
        else:
            request.num_computed_tokens = num_computed_tokens
        if num_new_tokens == 0 and not arriving:
            self.manager.remove_skipped_blocks(request_id, num_computed_tokens)
            return self.tables(request_id=request_id)
        new_blocks = self.manager.allocate_slots(
            request,
            num_new_tokens,
            num_external_computed_tokens=arriving,
            delay_cache_blocks=bool(arriving) and num_new_tokens == 0,
        )
        if new_blocks is None:
            if request_id not in self._requests:
                self.manager.free(request)
            raise CapacityError(
                f"request '{request_id}' needs room for {num_computed_tokens + num_new_tokens} tokens, "
                f"{self.num_free_blocks()} of {self.num_blocks - 1} are free"
            )
        self._requests[request_id] = request
        request.num_computed_tokens = num_computed_tokens
        if num_new_tokens:
            self._tell_worker(request_id, new_blocks)
        return self.tables(request_id=request_id)

    def tables(self, *, request_id: str) -> GroupTables:
        """The manager's block ids: group 0 slides, group 1 is full."""
        if request_id not in self._requests:
            raise LayoutError(f"request '{request_id}' holds no blocks")
        sliding, full = (
            BlockTable(block_ids=tuple(map(BlockId, ids)), block_size=self.block_size)
            for ids in self.manager.get_block_ids(request_id)
        )
        return GroupTables(full=full, sliding=sliding)

    def free(self, *, request_id: str) -> None:
        """Finish or abort."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.manager.free(request)
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._worker_tables.clear_row(row)
            self._free_rows.append(row)

    def num_free_blocks(self) -> int:
        """Of the manager's pool."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def slots(self, request_id: str, positions: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots of the sliding and of the full group, by the worker's own tables and kernel."""
        import torch

        row = self._rows[request_id]
        starts = torch.zeros(self._num_rows + 1, dtype=torch.int32)
        starts[row + 1 :] = len(positions)
        self._worker_tables.commit_block_table(self._num_rows)
        self._worker_tables.compute_slot_mapping(self._num_rows, starts, torch.tensor(positions, dtype=torch.int64))
        sliding, full = (tuple(self._worker_tables[g].slot_mapping.gpu[: len(positions)].tolist()) for g in range(2))
        return sliding, full

    def worker_row(self, request_id: str, group: int) -> tuple[int, ...]:
        """The worker's block table of one request; entries behind the window are stale, not null."""
        row = self._rows[request_id]
        count = int(self._worker_tables[group].num_blocks_per_row[row])
        return tuple(self._worker_tables[group].get_numpy_array()[row, :count].tolist())

    def check_null_block(self) -> None:
        """vLLM hands out block 0 as little as we do."""
        assert self.manager.block_pool.null_block.block_id == NULL_BLOCK_ID

    def _new_request(self, request_id: str) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._prompts += 1
        return Request(
            request_id=request_id,
            prompt_token_ids=[self._prompts] * MAX_MODEL_LEN,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher if self.manager.enable_caching else None,
        )

    def _tell_worker(self, request_id: str, new_blocks: Any) -> None:
        if request_id in self._rows:
            self._worker_tables.append_row(new_blocks.get_block_ids(), self._rows[request_id])
        else:
            self._rows[request_id] = self._free_rows.pop()
            self._worker_tables.add_row(self.manager.get_block_ids(request_id), self._rows[request_id])


@functools.cache
def _planner() -> HmaPlanner:
    return HmaPlanner(planning_config(max_model_len=1, max_num_batched_tokens=1))


def _worker_tables(block_size: int, num_rows: int) -> Any:
    import torch
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()

    module: Any = importlib.import_module("vllm.v1.worker.block_table")
    # What vLLM's CPU runner does at start-up: its C++ kernel in place of the Triton one.
    sizes: dict[str, list[int]] = {}
    if served_era() is Era.SHAPES:
        module._compute_slot_mapping_kernel = cpu_triton_utils.compute_slot_mapping_kernel
        sizes["kernel_block_sizes"] = [block_size, block_size]
    else:
        platform: Any = current_platform
        platform.register_triton_kernel_overrides()
    tables = module.MultiGroupBlockTable(
        max_num_reqs=num_rows,
        max_num_batched_tokens=_MAX_BATCHED,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=[block_size, block_size],
        max_num_blocks=[-(-MAX_MODEL_LEN // block_size)] * 2,
        **sizes,
    )
    for table in tables.block_tables:
        for buffer in (table.block_table, table.slot_mapping):
            buffer.gpu = buffer.cpu
    return tables
