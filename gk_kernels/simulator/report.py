"""What a run would cost: the counters of one core against a device's published figures.

Strategy: every engine's busy time is its counted cycles over its clock, DMA time is bytes over the slower
of the HBM share and the DMA engines, and a collective is a fixed start plus its bytes. Engines run side by
side, so a section lasts at least as long as its busiest engine (`floor_us`) and at most as long as all of
them in turn (`serial_us`). Nothing here knows about scheduling: a real run lies between the two at best.

Source: the NKI architecture guides of SDK 2.32 for clocks and rates (targets.py); the collective figures
were measured by a kernel's authors on trn3 with 128 ranks and are an assumption for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gk_kernels.simulator.counters import Counters
from gk_kernels.simulator.targets import Target

# Lanes of a report, in the order in which they are shown.
LANES = ("tensor", "vector", "scalar", "gpsimd", "dma", "collective")
SMALL_DESCRIPTOR_BYTES = 512


@dataclass(frozen=True)
class CollectiveModel:
    """Time of one collective: `base_us` plus the bytes this rank sends over a rate by kind."""

    base_us: float = 7.5
    bytes_per_second: Mapping[str, float] = field(
        default_factory=lambda: {"all_gather": 118.6e9, "reduce_scatter": 31.1e9}
    )
    other_bytes_per_second: float = 31.1e9

    def time_us(self, kind: str, count: int, sent_bytes: int) -> float:
        """Microseconds of `count` collectives of one kind.

        >>> CollectiveModel().time_us("all_gather", 2, 1_186_000)
        25.0
        """
        rate = self.bytes_per_second.get(kind, self.other_bytes_per_second)
        return self.base_us * count + sent_bytes / rate * 1e6


@dataclass(frozen=True)
class SectionCost:
    """One named section of a kernel, or the whole of it.

    Attributes:
        busy_us: microseconds by lane, of the lanes that did anything.
        macs: multiply-accumulates.
        dma_bytes, collective_bytes: moved, and sent by this rank.
        collectives: how many.
    """

    name: str
    instructions: int
    busy_us: Mapping[str, float]
    macs: int
    dma_bytes: int
    collective_bytes: int
    collectives: int

    @property
    def slowest(self) -> str:
        """The busiest lane."""
        return max(self.busy_us, key=lambda lane: self.busy_us[lane], default="none")

    @property
    def floor_us(self) -> float:
        """Lower bound: every lane beside the others, without a gap."""
        return max(self.busy_us.values(), default=0.0)

    @property
    def serial_us(self) -> float:
        """Every lane after the others, without a gap."""
        return sum(self.busy_us.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump."""
        return {
            "section": self.name,
            "instructions": self.instructions,
            "busy_us": dict(self.busy_us),
            "slowest": self.slowest,
            "floor_us": self.floor_us,
            "serial_us": self.serial_us,
            "macs": self.macs,
            "dma_bytes": self.dma_bytes,
            "collective_bytes": self.collective_bytes,
            "collectives": self.collectives,
        }


@dataclass(frozen=True)
class CostReport:
    """Costs by section, with what only the whole run knows.

    Attributes:
        sections: in the order in which the kernel entered them.
        hbm_read_bytes, hbm_write_bytes: by DMA.
        descriptors: descriptor size in bytes -> how many.
        ideal_hbm_bytes: what the kernel must read at least, where the caller knows it.
        peaks: names and sizes of memory peaks, as the simulator reports them.
    """

    kernel: str
    target: Target
    sections: tuple[SectionCost, ...]
    hbm_read_bytes: int
    hbm_write_bytes: int
    descriptors: Mapping[int, int]
    ideal_hbm_bytes: int | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> SectionCost:
        """All sections together, lanes added up."""
        lanes = [lane for lane in LANES if any(lane in s.busy_us for s in self.sections)]
        return SectionCost(
            "total",
            sum(s.instructions for s in self.sections),
            {lane: sum(s.busy_us.get(lane, 0.0) for s in self.sections) for lane in lanes},
            sum(s.macs for s in self.sections),
            sum(s.dma_bytes for s in self.sections),
            sum(s.collective_bytes for s in self.sections),
            sum(s.collectives for s in self.sections),
        )

    @property
    def small_descriptors(self) -> tuple[int, int]:
        """DMA descriptors below 512 bytes, which halve the rate or worse, and all of them."""
        small = sum(n for size, n in self.descriptors.items() if size < SMALL_DESCRIPTOR_BYTES)
        return small, sum(self.descriptors.values())

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What the report says beside the table, as label and value."""
        small, descriptors = self.small_descriptors
        moved = self.hbm_read_bytes + self.hbm_write_bytes
        lines = [
            ("HBM read", f"{self.hbm_read_bytes:,} B"),
            ("HBM written", f"{self.hbm_write_bytes:,} B"),
            ("DMA descriptors", f"{descriptors:,}, of which {small:,} below 512 B"),
        ]
        if self.ideal_hbm_bytes:
            ratio = moved / self.ideal_hbm_bytes
            lines.append(("HBM ideal", f"{self.ideal_hbm_bytes:,} B; moved is {ratio:.2f} times"))
        lines += [(name.replace("_", " "), f"{value:,}") for name, value in self.peaks.items()]
        return tuple(lines)

    def table(self) -> str:
        """The report as plain text."""
        lanes = list(self.total.busy_us)
        head = ["section", "instr", *(f"{lane} us" for lane in lanes), "floor us", "slowest"]
        rows = [head]
        for cost in (*self.sections, self.total):
            busy = [f"{cost.busy_us.get(lane, 0.0):.2f}" for lane in lanes]
            rows.append([cost.name, str(cost.instructions), *busy, f"{cost.floor_us:.2f}", cost.slowest])
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [f"{self.kernel} on {self.target.name}, one core; model, not a measurement"]
        for row in rows:
            first = row[0].ljust(widths[0])
            rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([first, *rest]))
        lines += [f"{label}: {value}" for label, value in self.facts()]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump."""
        small, descriptors = self.small_descriptors
        return {
            "kernel": self.kernel,
            "target": self.target.name,
            "sections": [section.to_json() for section in self.sections],
            "total": self.total.to_json(),
            "hbm_read_bytes": self.hbm_read_bytes,
            "hbm_write_bytes": self.hbm_write_bytes,
            "ideal_hbm_bytes": self.ideal_hbm_bytes,
            "descriptors": {"count": descriptors, "below_512_bytes": small},
            "peaks": dict(self.peaks),
        }

    def write_html(self, path: str | Path) -> None:
        """One self-contained HTML file with the table and two pictures.

        Raises:
            OSError: the file cannot be written.
        """
        from gk_kernels.simulator.report_html import render

        Path(path).write_text(render(self), encoding="utf-8")


def cost_report(
    counters: Counters,
    target: Target,
    *,
    kernel: str = "kernel",
    ideal_hbm_bytes: int | None = None,
    peaks: Mapping[str, int] | None = None,
    collectives: CollectiveModel | None = None,
) -> CostReport:
    """The cost of what one core counted, by section.

    Sections are the kernel's functions, or the names given to the simulator as sections.
    """
    model = collectives or CollectiveModel()
    clocks = {
        "tensor": target.pe_ghz,
        "vector": target.vector_ghz,
        "scalar": target.scalar_ghz,
        "gpsimd": target.gpsimd_ghz,
    }
    dma_rate = min(target.hbm_bytes_per_second, target.dma_bytes_per_second)
    sections = []
    for name in counters.sections:
        busy: dict[str, float] = {}
        for (section, op, engine), stat in counters.stats.items():
            if section != name or engine not in LANES:
                continue
            if engine == "dma":
                spent = stat.bytes / dma_rate * 1e6
            elif engine == "collective":
                spent = model.time_us(op, stat.count, stat.bytes)
            else:
                spent = stat.cycles / clocks[engine] / 1e3
            busy[engine] = busy.get(engine, 0.0) + spent
        total = counters.total(section=name)
        sent = counters.total(section=name, engine="collective")
        moved = counters.total(section=name, engine="dma")
        ordered = {lane: busy[lane] for lane in LANES if lane in busy}
        sections.append(SectionCost(name, total.count, ordered, total.macs, moved.bytes, sent.bytes, sent.count))
    return CostReport(
        kernel,
        target,
        tuple(sections),
        counters.hbm_read_bytes,
        counters.hbm_write_bytes,
        dict(counters.descriptors),
        ideal_hbm_bytes,
        dict(peaks or {}),
    )
