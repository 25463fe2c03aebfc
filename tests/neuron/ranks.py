"""Runs one function on several ranks: forked processes, torch.distributed over gloo, results in rank order."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run_ranks"]

_SECONDS = 120


def run_ranks(directory: Path, world: int, work: Callable[[int, int], Any]) -> list[Any]:
    """What work(rank, world) returned on each rank, through JSON."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(directory, world, rank, work)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_SECONDS)
    stuck = [p for p in ranks if p.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    assert not stuck
    assert [p.exitcode for p in ranks] == [0] * world
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(world)]


def _rank(directory: Path, world: int, rank: int, work: Callable[[int, int], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=_SECONDS),
    )
    result = work(rank, world)
    (directory / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
