"""The cache on disk: whatever interrupts or spoils it, an entry is absent, or found out, or right in every byte."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.weight_cache import WeightCache, cache_key
from gk_adapters.weight_stacks import BuildProgress, build_stacks
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import CheckpointError
from gk_core.weight_layouts import ExpertFormat, WeightLayout
from tests.adapters.weight_build_child import MEDIUM, CountingCheckpoint, medium_specs
from tests.synthetic_checkpoint import SMALL, all_specs, rewrite_header, write_small

MXFP4 = ExpertFormat.MXFP4
SPECS = all_specs(SMALL, DecodeMesh(tp_size=2, ep_size=2), 1, WeightLayout.NKI, MXFP4)
Stacks = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> HFCheckpoint:
    directory = tmp_path_factory.mktemp("small")
    write_small(directory, MXFP4)
    return HFCheckpoint(directory)


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> HFCheckpoint:
    directory = tmp_path_factory.mktemp("medium")
    write_small(directory, MXFP4, MEDIUM)
    return HFCheckpoint(directory)


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(directory=tmp_path / "cache")


def same(got: Stacks, wanted: Stacks) -> bool:
    return got.keys() == wanted.keys() and all(
        got[n].dtype == w.dtype and got[n].shape == w.shape and got[n].tobytes() == w.tobytes()
        for n, w in wanted.items()
    )


def test_an_entry_holds_what_a_build_in_memory_gives(small: HFCheckpoint, cache: WeightCache) -> None:
    """Names, shapes, dtypes and every byte, before and after the entry exists."""
    wanted = build_stacks(small, SPECS)
    assert same(cache.load_or_build(small, SPECS), wanted)
    again = CountingCheckpoint(small)
    assert same(cache.load_or_build(again, SPECS), wanted)
    assert again.reads == 0


def test_writing_to_a_loaded_stack_leaves_the_entry_alone(small: HFCheckpoint, cache: WeightCache) -> None:
    """Maps are copy-on-write."""
    stacks = cache.load_or_build(small, SPECS)
    stacks["sink"][...] = 7
    assert (cache.load_or_build(small, SPECS)["sink"] != 7).all()


def touch_time(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def touch_header(path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["__metadata__"] = {"format": "np"}

    rewrite_header(path, change)


@pytest.mark.parametrize("change", [touch_time, touch_header])
def test_a_changed_shard_is_another_key(change: Callable[[Path], None], tmp_path: Path) -> None:
    """Time of change or header: either is enough; the directory's name is not part of it."""
    write_small(tmp_path / "a", MXFP4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = cache_key(HFCheckpoint(tmp_path / "a"), SPECS)
    assert cache_key(HFCheckpoint(tmp_path / "b"), SPECS) == before
    change(tmp_path / "b" / "model-00001-of-00002.safetensors")
    assert cache_key(HFCheckpoint(tmp_path / "b"), SPECS) != before


def test_ranks_and_layouts_have_keys_of_their_own(small: HFCheckpoint) -> None:
    """Two ranks, two layouts, two dtypes: eight keys."""
    mesh = DecodeMesh(tp_size=2, ep_size=2)
    keys = {
        cache_key(small, all_specs(SMALL, mesh, rank, layout, MXFP4, dtype))
        for rank in (0, 1)
        for layout in WeightLayout
        for dtype in ("bfloat16", "float32")
    }
    assert len(keys) == 8


def flip_byte(entry: Path) -> None:
    with (entry / "stacks.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def cut(entry: Path) -> None:
    os.truncate(entry / "stacks.safetensors", 100_000)


def spoil_header(entry: Path) -> None:
    with (entry / "stacks.safetensors").open("r+b") as file:
        file.seek(20)
        file.write(b"#")


SPOILERS: list[Callable[[Path], object]] = [
    flip_byte,
    cut,
    spoil_header,
    lambda entry: (entry / "stacks.safetensors").unlink(),
    lambda entry: (entry / "manifest.json").unlink(),
    lambda entry: (entry / "manifest.json").write_text('{"key": '),
    lambda entry: (entry / "manifest.json").write_text("[]"),
    lambda entry: (entry / "manifest.json").write_text('{"key": "another", "units": {}}'),
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_spoiled_entry_is_found_out_and_built_anew(
    spoil: Callable[[Path], object], small: HFCheckpoint, cache: WeightCache
) -> None:
    """One flipped bit is enough; what others left behind is gone afterwards."""
    key = cache.build(small, SPECS)
    assert cache.is_good(key, SPECS)
    spoil(cache.entry(key))
    (cache.directory / f"{key}.spoiled-1").mkdir()  # as a killed process leaves it
    assert not cache.is_good(key, SPECS)
    assert same(cache.load_or_build(small, SPECS), build_stacks(small, SPECS))
    assert sorted(p.name for p in cache.directory.iterdir()) == [key, f"{key}.lock"]
    assert sorted(p.name for p in cache.entry(key).iterdir()) == ["manifest.json", "stacks.safetensors"]


def test_a_build_that_fails_leaves_no_entry_and_its_good_layers(small: HFCheckpoint, cache: WeightCache) -> None:
    """Interrupted at layer 2 of 3, the next build reads layer 2 only; a spoiled layer is read again."""
    whole = CountingCheckpoint(small)
    cache.build(whole, SPECS, threads=1)
    shutil.rmtree(cache.directory)
    with pytest.raises(KeyboardInterrupt):
        cache.build(CountingCheckpoint(small, fail_on="model.layers.2."), SPECS, threads=1)
    key = cache_key(small, SPECS)
    assert not cache.entry(key).exists()
    partial = cache.directory / f"{key}.partial"
    stored = (partial / "stacks.safetensors").stat()
    assert stored.st_blocks * 512 >= stored.st_size > sum(s.num_bytes for s in SPECS)  # space is taken first
    noted = [json.loads(line)[0] for line in (partial / "journal").read_text().splitlines()]
    assert noted == ["embed_tokens", "lm_head", "final_norm", "layer 0", "layer 1"]
    spoiled = cache.directory / "copy"
    shutil.copytree(partial, spoiled)

    seen: list[BuildProgress] = []
    rest = CountingCheckpoint(small)
    assert same(cache.load_or_build(rest, SPECS, progress=seen.append), build_stacks(small, SPECS))
    per_layer = (whole.reads - 6) // 3  # each slice is asked for twice, first to prefetch it; three lie outside layers
    assert (whole.reads, rest.reads) == (6 + 3 * per_layer, per_layer)
    assert seen[-1].bytes_done == seen[-1].bytes_total == sum(s.num_bytes for s in SPECS)

    shutil.rmtree(cache.entry(key))
    spoiled.rename(partial)
    flip_byte(partial)  # the last byte belongs to layer 2
    with (partial / "stacks.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff" * 8)
    with (partial / "journal").open("a") as journal:
        journal.write('["layer 2", [1, 2')  # cut by an interruption
    again = CountingCheckpoint(small)
    assert same(cache.load_or_build(again, SPECS), build_stacks(small, SPECS))
    assert per_layer < again.reads < whole.reads


def test_a_refused_value_leaves_no_entry(cache: WeightCache, tmp_path: Path) -> None:
    """A NaN scale in the last layer, found when that layer is built."""
    places = write_small(tmp_path / "model", MXFP4)
    path, start = places["model.layers.2.mlp.experts.down_proj_scales"]
    with path.open("r+b") as file:
        file.seek(start + 5 * 544 * 3)  # expert 5, which rank 1 of two has
        file.write(b"\xff")
    source = HFCheckpoint(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.experts\.down_proj_scales"):
        cache.build(source, SPECS)
    assert not cache.entry(cache_key(source, SPECS)).exists()


class Child:
    """A process that builds when told to; see `weight_build_child`."""

    def __init__(self, checkpoint: Path, cache: Path, *extra: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.weight_build_child", str(checkpoint), str(cache), *extra],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.expect("ready")

    def expect(self, *words: str) -> dict[str, str]:
        """The next lines, which begin with these words in any order; the rest of each by its word."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in words]
        found = {line.split()[0]: line.partition(" ")[2].strip() for line in lines if line.strip()}
        assert found.keys() == set(words), lines
        return found

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def start(cache: WeightCache) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def begin(checkpoint: HFCheckpoint, *extra: str) -> Child:
        started.append(Child(checkpoint.directory, cache.directory, *extra))
        return started[-1]

    yield begin
    for child in started:
        child.process.communicate()


def test_a_build_killed_at_any_moment_leaves_no_entry_or_a_good_one(
    medium: HFCheckpoint, cache: WeightCache, start: Callable[..., Child]
) -> None:
    """SIGKILL at 20 random moments of a build, most continuing what the last one left; then one runs to its end."""
    specs = medium_specs()
    key = cache_key(medium, specs)
    child = start(medium)
    began = time.perf_counter()
    child.go()
    child.expect("pid", "done")
    duration = time.perf_counter() - began
    child.expect("ended")
    moments = random.Random(20)
    killed = 0
    for attempt in range(20):
        if attempt % 4 == 0 or cache.entry(key).exists():
            shutil.rmtree(cache.directory)
        child.go()
        pid = int(child.expect("pid")["pid"])
        time.sleep(moments.uniform(0, duration))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert child.process.stdout is not None
        ended = next(line for line in iter(child.process.stdout.readline, "") if line.startswith("ended"))
        killed += ended.split() == ["ended", "-9"]
        assert cache.is_good(key, specs) or not cache.entry(key).exists()
    assert killed >= 5
    assert same(cache.load_or_build(medium, specs), build_stacks(medium, specs))


def test_of_two_builders_one_builds_and_the_other_finds_its_entry(
    medium: HFCheckpoint, cache: WeightCache, start: Callable[..., Child]
) -> None:
    """Both start while the lock is held by a third; whoever comes second reads nothing."""
    key = cache_key(medium, medium_specs())
    cache.directory.mkdir(parents=True)
    lock = os.open(cache.directory / f"{key}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    children = [start(medium), start(medium)]
    for child in children:
        child.go()
        child.expect("pid", "waiting")
    os.close(lock)
    done = [child.expect("done")["done"].split() for child in children]
    assert [found for found, _ in done] == [key, key]
    reads = sorted(int(count) for _, count in done)
    assert reads[0] == 0
    assert reads[1] > 100
    assert cache.is_good(key, medium_specs())


def test_threads_of_one_process_build_an_entry_once(small: HFCheckpoint, cache: WeightCache) -> None:
    """Four at once; all get the same bytes."""
    sources = [CountingCheckpoint(small) for _ in range(4)]
    found: list[Stacks] = []
    threads = [threading.Thread(target=lambda s=s: found.append(cache.load_or_build(s, SPECS))) for s in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(s.reads > 0 for s in sources) == [False, False, False, True]
    wanted = build_stacks(small, SPECS)
    assert len(found) == 4
    assert all(same(stacks, wanted) for stacks in found)


def test_a_full_disk_is_a_capacity_error_that_says_how_much_is_needed(
    medium: HFCheckpoint, cache: WeightCache, start: Callable[..., Child]
) -> None:
    """Found before any layer is built, by reserving; here a limit on file size stands for the disk."""
    child = start(medium, "1000000")
    child.go()
    message = child.expect("pid", "CapacityError:")["CapacityError:"]
    size = sum(s.num_bytes for s in medium_specs())
    assert message.startswith(f"the weight cache in {cache.directory} needs ")
    assert size < int(message.rpartition(" needs ")[2].split()[0]) < size + 10_000
    assert not cache.entry(cache_key(medium, medium_specs())).exists()


def test_stacks_of_an_entry_are_aligned_to_their_elements(small: HFCheckpoint, cache: WeightCache) -> None:
    """Odd byte counts of some do not push others off their alignment."""
    for name, stack in cache.load_or_build(small, SPECS).items():
        assert stack.ctypes.data % stack.dtype.itemsize == 0, name
        assert stack.flags.c_contiguous
        assert isinstance(stack, np.ndarray)
