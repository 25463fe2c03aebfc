"""Stacked weights on disk: built once per checkpoint, rank and layout, then memory-mapped.

Strategy. An entry is a directory `<key>/` with one safetensors file and a manifest of checksums. It is built as
`<key>.partial/` under an exclusive lock and renamed into place whole, so an entry is either absent or complete. Each
finished layer is noted in a journal with its checksums; whoever takes over a partial build checks those layers against
their checksums and builds only the rest. The lock is the kernel's (flock): it goes with its process, however that ends,
and of two builders of one key the second waits and finds the entry.

The key is a hash of the specs (every index of every stack) and of the checkpoint's shard files: name, size, time of
change and header. Layer buffers are written with plain writes, so building needs the memory of a few layers only, and a
full disk is an error rather than a signal.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import queue
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gk_adapters.weight_gather import numpy_dtype
from gk_adapters.weight_stacks import (
    MEMORY_BYTES,
    Progress,
    SliceSource,
    StackPlan,
    Unit,
    num_threads,
    plan_stacks,
    run_units,
    units_of,
)
from gk_core.errors import CapacityError, CheckpointError
from gk_core.weight_parts import StackedWeightSpec, specs_digest

__all__ = ["CachedCheckpoint", "WeightCache", "cache_key"]

Array = NDArray[Any]
Checksums = list[int]
_FORMAT = 1
_STACKS, _MANIFEST, _JOURNAL = "stacks.safetensors", "manifest.json", "journal"
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "uint8": "U8"}
_ALIGN = 64
_CHUNK = 16 << 20


class CachedCheckpoint(SliceSource, Protocol):
    """A checkpoint that also says which file holds a tensor."""

    @property
    def directory(self) -> Path:
        """Where its files lie."""
        ...

    def shard_of(self, name: str) -> str:
        """File name of a tensor's shard."""
        ...


def cache_key(source: CachedCheckpoint, specs: Sequence[StackedWeightSpec]) -> str:
    """Name of the entry that these specs and this checkpoint build.

    Raises:
        CheckpointError: a tensor or its file is missing.
    """
    digest = hashlib.sha256(f"{_FORMAT} {specs_digest(specs)}".encode())
    names = {p.tensor_of_layer(layer) for spec in specs for p in spec.parts for layer in spec.layers}
    for shard in sorted({source.shard_of(name) for name in names}):
        path = source.directory / shard
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                header = file.read(int.from_bytes(file.read(8), "little"))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        digest.update(f"{shard} {stat.st_size} {stat.st_mtime_ns}".encode())
        digest.update(header)
    return digest.hexdigest()[:40]


@frozen(kw_only=True)
class _FileLayout:
    """Where each stack lies in the file; widest elements first, so that every stack is aligned to its own."""

    header: bytes
    starts: dict[str, int]
    size: int

    @classmethod
    def of(cls, key: str, specs: Sequence[StackedWeightSpec]) -> _FileLayout:
        entries: dict[str, object] = {"__metadata__": {"gk_key": key, "gk_format": str(_FORMAT)}}
        at, offsets = 0, {}
        for spec in sorted(specs, key=lambda s: -numpy_dtype(s.dtype).itemsize):
            offsets[spec.name] = at
            end = at + spec.num_bytes
            entries[spec.name] = {
                "dtype": _SAFETENSORS[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, end],
            }  # fmt: skip
            at = end
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        header = len(text).to_bytes(8, "little") + text
        return cls(header=header, starts={n: len(header) + o for n, o in offsets.items()}, size=len(header) + at)

    def offset(self, spec: StackedWeightSpec, layer: int | None) -> int:
        return self.starts[spec.name] + (0 if layer is None else layer * spec.layer_bytes)


@frozen(kw_only=True)
class WeightCache:
    """A directory of built stacks, shared by any number of processes.

    Attributes:
        directory: made when first needed.
    """

    directory: Path

    def load_or_build(
        self,
        source: CachedCheckpoint,
        specs: Sequence[StackedWeightSpec],
        *,
        threads: int | None = None,
        memory_bytes: int = MEMORY_BYTES,
        progress: Progress | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> dict[str, Array]:
        """Stacks by name, memory-mapped; writing to them changes this process's copy only.

        Args:
            on_wait: called once when another process is building the same entry.

        Raises:
            CheckpointError: see `build_stacks`; nothing is left behind but layers that were right.
            CapacityError: the disk has no room for the entry.
        """
        key = self.build(source, specs, threads=threads, memory_bytes=memory_bytes, progress=progress, on_wait=on_wait)
        return self._map(key, specs)

    def build(
        self,
        source: CachedCheckpoint,
        specs: Sequence[StackedWeightSpec],
        *,
        threads: int | None = None,
        memory_bytes: int = MEMORY_BYTES,
        progress: Progress | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> str:
        """Make sure that a good entry exists, and return its key. An entry that fails its checksums is built anew."""
        plan = plan_stacks(source, specs)
        key = cache_key(source, specs)
        if self.is_good(key, specs):
            return key
        self.directory.mkdir(parents=True, exist_ok=True)
        with _locked(self.directory / f"{key}.lock", on_wait):
            if not self.is_good(key, specs):
                self._build(key, plan, threads, memory_bytes, progress)
        return key

    def entry(self, key: str) -> Path:
        """Where an entry lies, or would."""
        return self.directory / key

    def is_good(self, key: str, specs: Sequence[StackedWeightSpec]) -> bool:
        """Whether the entry exists and every byte of it has its checksum."""
        try:
            manifest = json.loads((self.entry(key) / _MANIFEST).read_bytes())
            layout = _FileLayout.of(key, specs)
            path = self.entry(key) / _STACKS
            if manifest["key"] != key or path.stat().st_size != layout.size:
                return False
            with path.open("rb", buffering=0) as file:
                if file.read(len(layout.header)) != layout.header:
                    return False
                bad: list[Unit] = []

                def check(unit: Unit) -> None:
                    if _checksums_on_disk(file.fileno(), layout, unit) != manifest["units"][_unit_name(unit)]:
                        bad.append(unit)

                run_units(units_of(specs), check, os.cpu_count() or 1, None)
                return not bad
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _map(self, key: str, specs: Sequence[StackedWeightSpec]) -> dict[str, Array]:
        """Each stack is a map of its own, so that dropping one frees it."""
        layout = _FileLayout.of(key, specs)
        stacks: dict[str, Array] = {}
        with (self.entry(key) / _STACKS).open("rb") as file:
            for spec in specs:
                start = layout.starts[spec.name]
                skip = start % mmap.ALLOCATIONGRANULARITY
                mapped = mmap.mmap(file.fileno(), skip + spec.num_bytes, access=mmap.ACCESS_COPY, offset=start - skip)
                flat = np.frombuffer(mapped, np.uint8, count=spec.num_bytes, offset=skip)
                stacks[spec.name] = flat.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        return stacks

    def _build(
        self, key: str, plan: StackPlan, threads: int | None, memory_bytes: int, progress: Progress | None
    ) -> None:
        partial = self.directory / f"{key}.partial"
        partial.mkdir(exist_ok=True)
        layout = _FileLayout.of(key, plan.specs)
        done = _resume(partial, layout, plan.units)
        fd = os.open(partial / _STACKS, os.O_RDWR | os.O_CREAT, 0o644)
        journal = os.open(partial / _JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with _disk_full_is_capacity(self.directory, layout.size):
                _reserve(fd, layout)
                writer = _LayerWriter(plan, layout, fd, journal, done)
                for units in _alike(plan.units):
                    todo = [unit for unit in units if _unit_name(unit) not in done]
                    each = max((unit.num_bytes for unit in todo), default=0) + plan.source_bytes
                    finished = sum(unit.num_bytes for unit in plan.units if _unit_name(unit) in done)
                    total = sum(unit.num_bytes for unit in plan.units)
                    run_units(todo, writer.write, num_threads(threads, memory_bytes, each), progress, finished, total)
                os.fsync(fd)
        finally:
            os.close(journal)
            os.close(fd)
        self._publish(key, partial, done)

    def _publish(self, key: str, partial: Path, units: dict[str, Checksums]) -> None:
        with (partial / _MANIFEST).open("w") as file:
            json.dump({"key": key, "format": _FORMAT, "units": units}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(partial)
        entry = self.entry(key)
        if entry.exists():
            entry.rename(self.directory / f"{key}.spoiled-{os.getpid()}")
        partial.rename(entry)
        _sync_directory(self.directory)
        for spoiled in self.directory.glob(f"{key}.spoiled-*"):
            shutil.rmtree(spoiled, ignore_errors=True)
        (entry / _JOURNAL).unlink(missing_ok=True)


class _LayerWriter:
    """Fills a unit in buffers of its own thread, writes it, then notes it in the journal."""

    def __init__(self, plan: StackPlan, layout: _FileLayout, fd: int, journal: int, done: dict[str, Checksums]) -> None:
        self._plan, self._layout, self._fd, self._journal, self._done = plan, layout, fd, journal, done
        self._buffers: queue.SimpleQueue[dict[str, Array]] = queue.SimpleQueue()

    def write(self, unit: Unit) -> None:
        """Layers refill the same buffers: each writes the same places, so padding stays zero."""
        try:
            buffers = self._buffers.get_nowait() if unit.layer is not None else {}
        except queue.Empty:
            buffers = {}
        for spec in unit.specs:
            buffers.setdefault(spec.name, np.zeros(spec.layer_shape, numpy_dtype(spec.dtype)))
        self._plan.fill(unit, lambda spec: buffers[spec.name])
        sums = []
        for spec in unit.specs:
            data = buffers[spec.name].reshape(-1).view(np.uint8).data
            sums.append(zlib.crc32(data))
            _write_all(self._fd, data, self._layout.offset(spec, unit.layer))
        if unit.layer is not None:
            self._buffers.put(buffers)
        name = _unit_name(unit)
        os.write(self._journal, (json.dumps([name, sums]) + "\n").encode())
        self._done[name] = sums


def _alike(units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """Weights outside the layers, then layers: buffers of one kind are alike in size, so memory allows as many."""
    return [unit for unit in units if unit.layer is None], [unit for unit in units if unit.layer is not None]


def _unit_name(unit: Unit) -> str:
    return unit.specs[0].name if unit.layer is None else f"layer {unit.layer}"


def _resume(partial: Path, layout: _FileLayout, units: Sequence[Unit]) -> dict[str, Checksums]:
    """Journalled units whose bytes still have their checksums; anything unclear is built again."""
    noted: dict[str, Checksums] = {}
    try:
        lines = (partial / _JOURNAL).read_bytes().splitlines()
        file = (partial / _STACKS).open("rb", buffering=0)
    except OSError:
        return {}
    for line in lines:
        try:
            name, sums = json.loads(line)
            noted[str(name)] = list(sums)
        except (ValueError, TypeError):
            continue  # the line that an interruption cut
    with file:
        if file.read(len(layout.header)) != layout.header:
            return {}
        names = {_unit_name(unit): unit for unit in units}
        return {
            name: sums
            for name, sums in noted.items()
            if name in names and _checksums_on_disk(file.fileno(), layout, names[name]) == sums
        }


def _checksums_on_disk(fd: int, layout: _FileLayout, unit: Unit) -> Checksums:
    sums = []
    for spec in unit.specs:
        start, crc = layout.offset(spec, unit.layer), 0
        for at in range(0, spec.layer_bytes, _CHUNK):
            crc = zlib.crc32(os.pread(fd, min(_CHUNK, spec.layer_bytes - at), start + at), crc)
        sums.append(crc)
    return sums


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write, and have the disk begin at once, so that it works while later layers are put in order.

    On Linux DONTNEED starts the write-back of dirty pages without waiting for it.
    """
    start, size = offset, len(data)
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
    os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)


def _reserve(fd: int, layout: _FileLayout) -> None:
    """Take the space before any work is done; the header goes last, so that a file with a header has its space."""
    if os.fstat(fd).st_size != layout.size:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, layout.size)
    _write_all(fd, memoryview(layout.header), 0)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None] | None) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait:
                on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def _disk_full_is_capacity(directory: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(directory).free
        raise CapacityError(
            f"the weight cache in {directory} needs {size} bytes, {free} are free; make room or choose another --cache"
        ) from error


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
