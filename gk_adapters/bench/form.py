"""The form of every benchmark: cases with our figures, a peer's, and their ratio."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["alternate", "case", "machine_name", "report"]


def machine_name() -> str:
    """Processor and number of cores of this machine, for whoever reads the figures elsewhere."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def case(
    name: str, unit: str, ours: Sequence[float], peer_name: str, peer: Sequence[float], **more: object
) -> dict[str, Any]:
    """One case; `ratio` = median of ours / median of the peer's, so below 1 is ahead.

    >>> case("x", "us", [1.0, 2.0, 9.0], "other", [4.0])["ratio"]
    0.5
    """
    mine, theirs = spread(ours), spread(peer)
    return {
        "case": name,
        "unit": unit,
        "ours": mine,
        "peer": {"name": peer_name, **theirs},
        "ratio": mine["median"] / theirs["median"] if theirs["median"] else float("inf"),
        **more,
    }


def report(name: str, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A whole benchmark."""
    return {"name": name, "machine": machine_name(), "cases": list(cases)}


def alternate(
    repeats: int, ours: Callable[[], float], peer: Callable[[], float], *, warm_up: int = 1
) -> tuple[list[float], list[float]]:
    """Both sides turn by turn, so that whatever else the machine does disturbs both."""
    for _ in range(warm_up):
        ours()
        peer()
    mine, theirs = [], []
    for _ in range(repeats):
        mine.append(ours())
        theirs.append(peer())
    return mine, theirs
