"""What a run cost: instructions, element-cycles per engine, DMA bytes and descriptors, matmul work, collectives.

Counts are exact. Cycles are a model: one pass of N elements per partition takes max(N, 64) cycles of its engine
(the fixed start of an instruction is about 64 cycles), a vector instruction with two full operands that are not both
16 bit or narrower takes 2N, a reciprocal on the Vector Engine 8N, a matmul max(N, 64), times four for fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MIN_CYCLES = 64
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "dma", "sync", "collective")


class Stat:
    """Totals of one instruction in one section on one engine.

    Attributes:
        count: instructions.
        cycles: engine cycles (0 for DMA and collectives, whose cost is bytes).
        elements: elements per partition, summed.
        macs: multiply-accumulates of matmuls.
        bytes: bytes moved by DMA (of the destination), or sent by this rank into a collective.
    """

    __slots__ = ("bytes", "count", "cycles", "elements", "macs")

    def __init__(self) -> None:
        self.count = self.cycles = self.elements = self.macs = self.bytes = 0

    def add(self, other: Stat) -> None:
        """Add another total to this one."""
        self.count += other.count
        self.cycles += other.cycles
        self.elements += other.elements
        self.macs += other.macs
        self.bytes += other.bytes

    def as_dict(self) -> dict[str, int]:
        """The five totals by name."""
        return {name: getattr(self, name) for name in ("count", "cycles", "elements", "macs", "bytes")}


@dataclass
class Counters:
    """Everything counted for one physical core.

    Attributes:
        stats: (section, instruction, engine) -> Stat.
        dma_bytes: route such as "hbm>sbuf" -> bytes.
        descriptors: descriptor size in bytes -> how many (a descriptor is one contiguous run on both sides).
        hbm_read_bytes: read from HBM by DMA.
        hbm_write_bytes: written to HBM by DMA.
        skipped_rows: rows that an indirect DMA skipped because of oob_mode.skip.
    """

    stats: dict[tuple[str, str, str], Stat] = field(default_factory=dict)
    dma_bytes: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[int] = field(default_factory=Counter)
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    skipped_rows: int = 0

    def total(self, *, section: str | None = None, op: str | None = None, engine: str | None = None) -> Stat:
        """Sum of the stats that match every given part of the key."""
        result = Stat()
        for (a_section, an_op, an_engine), stat in self.stats.items():
            if section in (None, a_section) and op in (None, an_op) and engine in (None, an_engine):
                result.add(stat)
        return result

    @property
    def instructions(self) -> int:
        """Instructions issued, all engines."""
        return self.total().count

    @property
    def matmul_macs(self) -> int:
        """Multiply-accumulates of all matmuls (transposes excluded)."""
        return self.total().macs

    @property
    def engine_cycles(self) -> dict[str, int]:
        """Cycles per engine."""
        return {engine: self.total(engine=engine).cycles for engine in ENGINES}

    @property
    def collectives(self) -> dict[str, dict[str, int]]:
        """Per kind of collective: how many, and the bytes that this rank sent."""
        found: dict[str, Stat] = {}
        for (_, op, engine), stat in self.stats.items():
            if engine == "collective":
                found.setdefault(op, Stat()).add(stat)
        return {op: {"count": s.count, "bytes": s.bytes} for op, s in sorted(found.items())}

    @property
    def sections(self) -> tuple[str, ...]:
        """Section names, in the order they were first entered."""
        return tuple(dict.fromkeys(section for section, _, _ in self.stats))

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump."""
        return {
            "instructions": self.instructions,
            "engine_cycles": self.engine_cycles,
            "matmul_macs": self.matmul_macs,
            "dma_bytes": dict(self.dma_bytes),
            "descriptors": {str(size): n for size, n in sorted(self.descriptors.items())},
            "hbm_read_bytes": self.hbm_read_bytes,
            "hbm_write_bytes": self.hbm_write_bytes,
            "skipped_rows": self.skipped_rows,
            "collectives": self.collectives,
            "stats": [
                {"section": section, "op": op, "engine": engine, **stat.as_dict()}
                for (section, op, engine), stat in self.stats.items()
            ],
        }


def merge(parts: Iterable[Counters]) -> Counters:
    """The sum over cores or ranks."""
    result = Counters()
    for part in parts:
        for key, stat in part.stats.items():
            result.stats.setdefault(key, Stat()).add(stat)
        result.dma_bytes.update(part.dma_bytes)
        result.descriptors.update(part.descriptors)
        result.hbm_read_bytes += part.hbm_read_bytes
        result.hbm_write_bytes += part.hbm_write_bytes
        result.skipped_rows += part.skipped_rows
    return result
