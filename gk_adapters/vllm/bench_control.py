"""Benchmark: control tensors of one decode step, ours in NumPy against vLLM's own block tables, in one process.

Both sides start from the same lists of new block ids and end with tables and slots that a kernel can read. vLLM's side
is what its CPU worker runs: append_row, commit_block_table on tensors that alias the device's, and
compute_slot_mapping with the C++ operator. Ours also makes the trimmed tables, window-frame positions and window
starts.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gk_adapters.control_tensors import IncrementalControl
from gk_adapters.vllm.versions import Era, require_era
from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable
from gk_core.decode_step import ControlShape, DecodeRow
from gk_core.errors import MissingDependencyError

__all__ = ["bench_control"]

_BLOCK = 128
_MAX_LEN = 10_240
_START_BLOCKS = 40


def bench_control(*, num_steps: int = 128, repeats: int = 5) -> dict[str, Any]:
    """Microseconds per step; `ratio` = ours / peer, so below 1 is ahead.

    Cases: rows_8 and rows_1024 are a steady state in which one row in 128 begins a block; in all_rows_cross each of
    1024 rows begins a block in the same step.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    cases = [
        _case("rows_8", 8, num_steps, repeats, crossing_together=False),
        _case("rows_1024", 1024, num_steps, repeats, crossing_together=False),
        _case("all_rows_cross", 1024, max(num_steps // 8, 4), repeats, crossing_together=True),
    ]
    return {"name": "control", "machine": f"{platform.machine()}, {platform.processor() or 'cpu'}", "cases": cases}


class _Ours:
    def __init__(self, positions: list[int], ids: Iterator[int]) -> None:
        shape = ControlShape(num_rows=len(positions), block_size=_BLOCK, sliding_window=_BLOCK, max_model_len=_MAX_LEN)
        self.control = IncrementalControl(shape)
        for row, position in enumerate(positions):
            blocks = position // _BLOCK + 1
            full, sliding = ([BlockId(next(ids)) for _ in range(blocks)] for _ in range(2))
            oldest = max(position - _BLOCK + 1, 0) // _BLOCK
            sliding[:oldest] = [NULL_BLOCK_ID] * oldest
            self.control.set_row(
                row, DecodeRow(position=position, full_table=_table(full), sliding_table=_table(sliding))
            )
        self.control.advance()

    def step(self, rows: list[int], full: list[int], sliding: list[int]) -> None:
        if rows:
            self.control.append_blocks(rows, full, sliding)
        self.control.advance()

    def slots(self) -> Any:
        return self.control.arrays.update_index[:, 0], self.control.arrays.update_index_swa[:, 0]


class _VLLM:
    def __init__(self, positions: list[int], ids: Iterator[int]) -> None:
        try:
            import torch
            import vllm.utils.cpu_triton_utils as cpu_kernels
            import vllm.v1.worker.block_table as block_table
            from vllm.platforms import current_platform
        except ImportError as error:
            raise MissingDependencyError(f"bench control needs vLLM: {error}; install gk-decode[vllm]") from error
        require_era(Era.SHAPES, "the peer of bench control")
        current_platform.import_kernels()
        block_table._compute_slot_mapping_kernel = cpu_kernels.compute_slot_mapping_kernel
        rows = len(positions)
        self.rows = rows
        self.tables = block_table.MultiGroupBlockTable(
            max_num_reqs=rows, max_num_batched_tokens=rows, pin_memory=False, device=torch.device("cpu"),
            block_sizes=[_BLOCK] * 2, kernel_block_sizes=[_BLOCK] * 2, max_num_blocks=[_MAX_LEN // _BLOCK] * 2,
        )  # fmt: skip
        for table in self.tables.block_tables:
            for buffer in (table.block_table, table.slot_mapping):
                buffer.gpu = buffer.cpu
        for row, position in enumerate(positions):
            blocks = position // _BLOCK + 1
            self.tables.add_row(tuple([next(ids) for _ in range(blocks)] for _ in range(2)), row)
        self.positions = torch.tensor(positions, dtype=torch.int64)
        self.starts = torch.arange(rows + 1, dtype=torch.int32)

    def step(self, rows: list[int], full: list[int], sliding: list[int]) -> None:
        for row, f, s in zip(rows, full, sliding, strict=True):
            self.tables.append_row(([f], [s]), row)
        self.positions += 1
        self.tables.commit_block_table(self.rows)
        self.tables.compute_slot_mapping(self.rows, self.starts, self.positions)

    def slots(self) -> Any:
        return tuple(t.slot_mapping.np[: self.rows] for t in self.tables.block_tables)


def _table(ids: list[BlockId]) -> BlockTable:
    return BlockTable(block_ids=tuple(ids), block_size=_BLOCK)


def _case(name: str, num_rows: int, num_steps: int, repeats: int, *, crossing_together: bool) -> dict[str, Any]:
    """Both sides take the same steps, turn by turn, and must end with the same slots."""
    stagger = [0 if crossing_together else (row * _BLOCK) // num_rows for row in range(num_rows)]
    positions = [_START_BLOCKS * _BLOCK - 1 + s for s in stagger]
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(repeats):
        ours, peer = _Ours(positions, iter(range(1, 10**9))), _VLLM(positions, iter(range(1, 10**9)))
        at, fresh = np.array(positions), iter(range(10**6, 10**9))
        samples: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(num_steps):
            if crossing_together:
                at = _skip_to_block_end(at, ours, peer)
            at = at + 1
            crossing = np.flatnonzero(at % _BLOCK == 0)
            rows = crossing.tolist()
            full, sliding = ([next(fresh) for _ in rows] for _ in range(2))
            for side, engine in (("ours", ours), ("peer", peer)):
                samples[side].append(_timed(engine.step, rows, full, sliding))
        if not all(np.array_equal(a, b) for a, b in zip(ours.slots(), peer.slots(), strict=True)):
            raise AssertionError("both sides must end with the same slots")
        for side, values in samples.items():
            times[side].append(statistics.median(values))
    ours_us, peer_us = times["ours"], times["peer"]
    return {
        "case": name,
        "unit": "us",
        "ours": _spread(ours_us),
        "peer": {"name": "vLLM block tables on the CPU"} | _spread(peer_us),
        "ratio": statistics.median(ours_us) / statistics.median(peer_us),
    }


def _skip_to_block_end(at: Any, ours: _Ours, peer: _VLLM) -> Any:
    """Untimed steps until every row stands on the last token of its block."""
    while (at[0] + 1) % _BLOCK:
        at = at + 1
        ours.step([], [], [])
        peer.step([], [], [])
    return at


def _timed(step: Callable[..., None], *arguments: list[int]) -> float:
    start = time.perf_counter()
    step(*arguments)
    return (time.perf_counter() - start) * 1e6


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
