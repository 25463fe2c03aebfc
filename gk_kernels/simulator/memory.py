"""Storage behind tensors: bytes, which of them were written, and when each tensor was alive.

On chip, a storage is `partitions` rows of `row_bytes`; in HBM it is one row. A byte's mark is 1 until something writes
it. Marks are dropped (`unwritten = None`) as soon as every byte is written, after which reads cost nothing extra.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import CapacityError, Site, format_site
from gk_kernels.simulator.targets import PSUM_BANK_BYTES, PSUM_BANKS

if TYPE_CHECKING:
    from gk_kernels.simulator.context import Core


class MemoryRegion(Enum):
    """Where a tensor lives. `nl.hbm` is `private_hbm`."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    def __repr__(self) -> str:
        return f"nl.{self.value}"


class Life:
    """When one storage was used, in instructions of its core.

    Attributes:
        first: first write, -1 before.
        last: last read or write.
    """

    __slots__ = ("buffer", "first", "free_start", "last", "name", "partition_start", "partitions",
                 "row_bytes", "site")  # fmt: skip

    def __init__(self, buffer: MemoryRegion, name: str, site: Site | None, partitions: int, row_bytes: int) -> None:
        self.buffer, self.name, self.site = buffer, name, site
        self.partitions, self.row_bytes = partitions, row_bytes
        self.partition_start = 0
        self.free_start = -1
        self.first = self.last = -1

    def describe(self) -> str:
        """Name, size and where it was allocated."""
        return f"{self.name or 'unnamed'} ({self.row_bytes} bytes/partition) allocated at {format_site(self.site)}"


class Storage:
    """The bytes of one allocation."""

    __slots__ = ("buffer", "data", "frozen", "life", "matmul", "nbytes", "on_chip", "partition_start",
                 "pending", "row_bytes", "unwritten", "version")  # fmt: skip

    def __init__(
        self,
        buffer: MemoryRegion,
        nbytes: int,
        row_bytes: int,
        life: Life,
        data: Array | None,
        *,
        written: bool,
        frozen: bool = False,
    ) -> None:
        self.buffer = buffer
        self.on_chip = buffer is MemoryRegion.sbuf or buffer is MemoryRegion.psum
        self.nbytes, self.row_bytes, self.life = nbytes, row_bytes, life
        self.data = data
        # A frozen storage is a caller's array that must not change: the first write copies it.
        self.frozen = frozen
        self.version = 0
        self.partition_start = life.partition_start
        self.unwritten: Array | None = None
        if data is not None and not written:
            self.unwritten = np.ones(nbytes, np.uint8)
        self.pending = 0
        # PSUM only: who wrote last. None: no matmul yet. 1 or 2 for the whole storage, else one mark per byte:
        # 0 nothing, 1 a matmul, 2 another instruction after a matmul.
        self.matmul: Array | int | None = None

    def thaw(self) -> None:
        """Give a frozen storage its own copy of the bytes."""
        assert self.data is not None
        self.data = self.data.copy()
        self.frozen = False
        self.version += 1

    def settle(self) -> None:
        """Drop the marks if every byte is written by now."""
        self.pending = 0
        if self.unwritten is not None and not self.unwritten.any():
            self.unwritten = None


@dataclass(frozen=True)
class Peak:
    """Use of one on-chip memory over a run.

    Attributes:
        bytes_per_partition: most bytes alive at once, by lifetimes (a lower bound on what an allocator needs).
        no_reuse_bytes_per_partition: all allocations side by side (an upper bound).
        banks: PSUM banks alive at the peak (0 for SBUF).
        lives: up to eight tensors alive at the peak, largest first.
    """

    bytes_per_partition: int
    no_reuse_bytes_per_partition: int
    banks: int
    lives: tuple[Life, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors alive at the peak, described."""
        return tuple(life.describe() for life in self.lives)


def _banks(life: Life) -> int:
    return -(-life.row_bytes // PSUM_BANK_BYTES)


def measure(lives: list[Life], buffer: MemoryRegion) -> Peak:
    """The peak of one memory. PSUM is counted in whole banks unless a tensor names its address."""
    used = [life for life in lives if life.buffer is buffer and life.last >= 0]
    psum = buffer is MemoryRegion.psum

    def size(life: Life) -> int:
        return _banks(life) * PSUM_BANK_BYTES if psum else life.row_bytes

    events: dict[int, int] = {}
    for life in used:
        if life.free_start >= 0:
            continue
        start = life.first if life.first >= 0 else life.last
        events[start] = events.get(start, 0) + size(life)
        events[life.last + 1] = events.get(life.last + 1, 0) - size(life)
    total = best = best_tick = 0
    for tick in sorted(events):
        total += events[tick]
        if total > best:
            best, best_tick = total, tick
    placed = [life for life in used if life.free_start >= 0]
    placed_top = max((life.free_start + life.row_bytes for life in placed), default=0)
    alive = sorted((x for x in used if x.free_start < 0 and x.first <= best_tick <= x.last), key=lambda x: -x.row_bytes)
    peak = max(best, placed_top)
    return Peak(
        bytes_per_partition=peak,
        no_reuse_bytes_per_partition=sum(size(x) for x in used if x.free_start < 0) + placed_top,
        banks=-(-peak // PSUM_BANK_BYTES) if psum else 0,
        lives=tuple(alive[:8]),
    )


def _check_overlaps(lives: list[Life], buffer: MemoryRegion) -> None:
    placed = sorted(
        (x for x in lives if x.buffer is buffer and x.free_start >= 0 and x.last >= 0), key=lambda x: x.first
    )
    alive: list[Life] = []
    for life in placed:
        alive = [other for other in alive if other.last > life.first]
        for other in alive:
            rows = min(life.partition_start + life.partitions, other.partition_start + other.partitions) - max(
                life.partition_start, other.partition_start
            )
            columns = min(life.free_start + life.row_bytes, other.free_start + other.row_bytes) - max(
                life.free_start, other.free_start
            )
            if rows > 0 and columns > 0:
                raise CapacityError(
                    f"two {buffer.value} tensors with explicit addresses are alive at once",
                    f"{life.describe()} at byte {life.free_start} and {other.describe()} at byte {other.free_start}",
                    "addresses that do not overlap while both are in use",
                    format_site(life.site),
                )
        alive.append(life)


def check_capacity(core: Core) -> tuple[Peak, Peak]:
    """SBUF and PSUM peaks of a finished core.

    Raises:
        CapacityError: a peak is above the usable size, or placed tensors overlap (option `capacity`).
    """
    level = core.options.capacity
    for buffer in (MemoryRegion.sbuf, MemoryRegion.psum):
        try:
            _check_overlaps(core.lives, buffer)
        except CapacityError as error:
            if level == "error":
                raise
            core.warnings.append(str(error))
    sbuf, psum = measure(core.lives, MemoryRegion.sbuf), measure(core.lives, MemoryRegion.psum)
    usable = core.target.sbuf_usable_bytes
    if sbuf.bytes_per_partition > usable:
        _over(
            core,
            sbuf,
            f"SBUF capacity on {core.target.name}",
            f"{sbuf.bytes_per_partition} bytes per partition",
            f"{usable} usable bytes per partition",
        )
    if psum.banks > PSUM_BANKS:
        _over(
            core,
            psum,
            f"PSUM capacity on {core.target.name}",
            f"{psum.banks} banks",
            f"{PSUM_BANKS} banks of {PSUM_BANK_BYTES} bytes per partition",
        )
    return sbuf, psum


def _over(core: Core, peak: Peak, rule: str, got: str, limit: str) -> None:
    """Refuse, or note, a peak; the line is that of the largest tensor alive."""
    error = CapacityError(
        rule,
        f"{got} alive at once: " + "; ".join(life.describe() for life in peak.lives),
        limit,
        format_site(peak.lives[0].site) if peak.lives else "",
    )
    if core.options.capacity == "error":
        raise error
    core.warnings.append(str(error))
