"""Benchmark: one 120B rank's stacked weights (TP8, EP128, NKI layout) from a checkpoint of real size.

Each measurement is a process of its own, so that peaks of memory are its own too; sides take turns. The checkpoint is
made up unless one is given; made-up shards are sparse and take about a gigabyte of disk.

Cases, `ratio` = ours / peer, so below 1 is ahead:

- `rank_120b`, `rank_120b_cpu`, `rank_120b_peak_rss`: in memory, against loading each layer with torch and stacking
  them at the end;
- `rank_120b_to_disk`: building a cache entry, against reading the same slices and writing as many bytes, in order and
  without moving any, by as many threads; both with a cold page cache and both synced;
- `rank_120b_in_memory`: the same without files to write, page cache warm: what the reordering itself costs.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gk_adapters.bench_checkpoint import write_checkpoint
from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.weight_cache import WeightCache
from gk_adapters.weight_stacks import Unit, build_stacks, plan_stacks, run_units
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import CheckpointError
from gk_core.model_geometry import GPT_OSS_120B
from gk_core.stacked_weights import build_stacked_weight_specs, total_bytes
from gk_core.weight_layouts import ExpertFormat, WeightLayout
from gk_core.weight_parts import StackedWeightSpec

__all__ = ["bench_stacking", "measure", "rank_120b_specs"]

_RANK = 77


def rank_120b_specs() -> tuple[StackedWeightSpec, ...]:
    """The stacks that are built: rank 77 of TP8 x DP16."""
    mesh = DecodeMesh(tp_size=8, dp_size=16, ep_size=128)
    return build_stacked_weight_specs(GPT_OSS_120B, mesh, _RANK, WeightLayout.NKI, ExpertFormat.MXFP4)


def bench_stacking(*, repeats: int = 3, checkpoint: Path | None = None) -> dict[str, Any]:
    """Seconds and bytes, see the module's docstring.

    Args:
        checkpoint: a 120B directory to read; made up in the temporary directory when None.

    Raises:
        CheckpointError: the checkpoint is not a 120B MXFP4 one.
    """
    with tempfile.TemporaryDirectory(prefix="gk-bench-") as scratch:
        if checkpoint is None:
            checkpoint = Path(scratch) / "checkpoint"
            write_checkpoint(checkpoint, GPT_OSS_120B, ExpertFormat.MXFP4, specs=rank_120b_specs())
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
        for _ in range(repeats):
            for way in _WAYS:
                runs[way].append(measure(way, checkpoint, Path(scratch)))
    naive, copy = "per-layer load with safetensors, then torch.stack", "reading and writing the same bytes"
    cases = [
        _case("rank_120b", "seconds", runs["stacks"], runs["naive"], naive),
        _case("rank_120b_cpu", "cpu_seconds", runs["stacks"], runs["naive"], naive),
        _case("rank_120b_peak_rss", "bytes", runs["stacks"], runs["naive"], naive),
        _case("rank_120b_to_disk", "seconds", runs["cache"], runs["copy_to_disk"], copy),
        _case("rank_120b_in_memory", "seconds", runs["stacks"], runs["copy"], copy),
    ]
    return {"name": "stacking", "machine": f"{platform.machine()}, {platform.processor() or 'cpu'}", "cases": cases}


def _case(
    name: str, unit: str, ours: list[dict[str, float]], peer: list[dict[str, float]], peer_name: str
) -> dict[str, Any]:
    sides = [[run[unit] for run in runs] for runs in (ours, peer)]
    mine, theirs = ({"median": statistics.median(side), "min": min(side), "max": max(side)} for side in sides)
    return {
        "case": name, "unit": unit, "ours": mine, "peer": {"name": peer_name, **theirs},
        "ratio": mine["median"] / theirs["median"],
    }  # fmt: skip


def measure(way: str, checkpoint: Path, scratch: Path) -> dict[str, float]:
    """One way in a process of its own: `seconds`, `cpu_seconds`, and `bytes` of peak resident memory."""
    result = subprocess.run(
        [sys.executable, "-m", "gk_adapters.bench_stacking", way, str(checkpoint), str(scratch)],
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, float] = json.loads(result.stdout)
    return answer


def _stacks(checkpoint: HFCheckpoint, scratch: Path) -> object:
    return build_stacks(checkpoint, rank_120b_specs())


def _cache(checkpoint: HFCheckpoint, scratch: Path) -> object:
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        return WeightCache(directory=Path(directory)).build(checkpoint, rank_120b_specs())


def _naive(checkpoint: HFCheckpoint, scratch: Path) -> object:
    from gk_adapters.bench_naive_stacks import naive_stacks

    return naive_stacks(checkpoint.directory, rank_120b_specs())


def _copy(checkpoint: HFCheckpoint, scratch: Path) -> object:
    """Same slices in, same bytes out, same threads; nothing changes its place."""
    plan = plan_stacks(checkpoint, rank_120b_specs())
    stacks = {spec.name: np.zeros(spec.num_bytes, np.uint8) for spec in plan.specs}

    def work(unit: Unit) -> None:
        plan.copy(unit, lambda spec: _layer_of(stacks[spec.name], spec, unit))

    run_units(plan.units, work, os.cpu_count() or 1, None)
    return stacks


def _layer_of(stack: NDArray[Any], spec: StackedWeightSpec, unit: Unit) -> NDArray[Any]:
    start = (unit.layer or 0) * spec.layer_bytes
    return stack[start : start + spec.layer_bytes]


def _copy_to_disk(checkpoint: HFCheckpoint, scratch: Path) -> object:
    """The same, layer by layer through buffers that are used again, into one file."""
    plan = plan_stacks(checkpoint, rank_120b_specs())
    ends = accumulate(spec.num_bytes for spec in plan.specs)
    starts = {spec.name: end - spec.num_bytes for spec, end in zip(plan.specs, ends, strict=True)}
    buffers = threading.local()
    with tempfile.TemporaryFile(dir=scratch) as file:
        os.posix_fallocate(file.fileno(), 0, total_bytes(plan.specs))

        def work(unit: Unit) -> None:
            mine = buffers.__dict__
            for spec in unit.specs:
                mine.setdefault(spec.name, np.zeros(spec.layer_bytes, np.uint8))
            plan.copy(unit, lambda spec: mine[spec.name])
            for spec in unit.specs:
                os.pwrite(file.fileno(), mine[spec.name].data, starts[spec.name] + (unit.layer or 0) * spec.layer_bytes)

        run_units(plan.units, work, os.cpu_count() or 1, None)
        os.fsync(file.fileno())
    return starts


_WAYS: dict[str, Callable[[HFCheckpoint, Path], object]] = {
    "stacks": _stacks, "naive": _naive, "copy": _copy, "cache": _cache, "copy_to_disk": _copy_to_disk,
}  # fmt: skip
_COLD = ("cache", "copy_to_disk")


def _main(way: str, directory: Path, scratch: Path) -> None:
    checkpoint = HFCheckpoint(directory)
    if checkpoint.config.geometry.num_experts != GPT_OSS_120B.num_experts:
        raise CheckpointError(f"{directory} is not a 120B checkpoint")
    if way in _COLD:
        _forget_page_cache(directory)
    work = _WAYS[way]
    if way == "naive":
        import gk_adapters.bench_naive_stacks  # noqa: F401  (importing torch is not what is measured)
    start, cpu = time.perf_counter(), time.process_time()
    result = work(checkpoint, scratch)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    del result
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Peak resident memory since this program began; getrusage would count the parent's too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_page_cache(directory: Path) -> None:
    """Have the kernel drop what it holds of the shards; clean pages only, hence the sync."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
