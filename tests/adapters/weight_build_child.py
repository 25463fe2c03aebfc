"""A process that builds one cache entry each time it is told to, for tests that interrupt it or run two of them.

Prints 'ready', then for each line on standard input forks a build and prints 'pid PID'. The build prints 'waiting'
when another builds, 'done KEY READS' when it is through; after it 'ended STATUS' follows, minus the signal if killed.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve
from numpy.typing import NDArray

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.weight_cache import WeightCache
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import GkError
from gk_core.model_geometry import alternating_kinds
from gk_core.ports import WeightInfo
from gk_core.weight_layouts import ExpertFormat, WeightLayout
from gk_core.weight_parts import StackedWeightSpec
from tests.synthetic_checkpoint import SMALL, all_specs

MEDIUM = evolve(
    SMALL,
    num_layers=12,
    hidden_size=1056,
    intermediate_size=1120,
    head_size=32,
    num_experts=3,
    attention_kinds=alternating_kinds(12),
)
"""12 layers of about 5 MB: long enough to be interrupted anywhere."""


def medium_specs() -> tuple[StackedWeightSpec, ...]:
    """Rank 1 of two."""
    return all_specs(MEDIUM, DecodeMesh(tp_size=2, ep_size=2), 1, WeightLayout.NKI, ExpertFormat.MXFP4)


class CountingCheckpoint:
    """A checkpoint that counts its reads and can fail at one."""

    def __init__(self, inner: HFCheckpoint, fail_on: str | None = None) -> None:
        self.inner = inner
        self.reads = 0
        self.fail_on = fail_on
        self.directory = inner.directory

    def tensors(self) -> Mapping[str, WeightInfo]:
        """As the checkpoint has them."""
        return self.inner.tensors()

    def shard_of(self, name: str) -> str:
        """As the checkpoint has it."""
        return self.inner.shard_of(name)

    def read_slice(self, *, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """One more read."""
        self.reads += 1
        if self.fail_on is not None and name.startswith(self.fail_on):
            raise KeyboardInterrupt
        return self.inner.read_slice(name=name, index=index)


def main(checkpoint: Path, cache: Path, file_limit: int | None) -> None:
    """Build, under a limit on file size where one is given."""
    source = CountingCheckpoint(HFCheckpoint(checkpoint))
    specs = medium_specs()
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    print("ready", flush=True)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            build(source, specs, cache)
        print(f"pid {pid}", flush=True)
        print(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)


def build(source: CountingCheckpoint, specs: tuple[StackedWeightSpec, ...], cache: Path) -> None:
    """In the forked process; never returns."""
    try:
        key = WeightCache(directory=cache).build(source, specs, threads=1, on_wait=lambda: print("waiting", flush=True))
    except GkError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)
    print(f"done {key} {source.reads}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
