"""The core that runs now, and what it has counted so far.

Only one simulated core runs at any moment (ranks take turns, see program.py), so the running core is a plain module
global: `context.core`. Instructions read it once and hand their operands to `retire`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from gk_kernels.simulator.counters import Counters, Stat
from gk_kernels.simulator.errors import (
    _PACKAGE,
    ConstraintError,
    SimulationError,
    UsageError,
    kernel_site,
)
from gk_kernels.simulator.targets import Target

if TYPE_CHECKING:
    from gk_kernels.simulator.memory import Life, Storage
    from gk_kernels.simulator.tensor import NkiTensor


@dataclass(frozen=True)
class Options:
    """How strict a run is.

    Attributes:
        target: the device.
        trace: check and count only; no data is kept, so tensors of any size cost nothing.
        poison: "error" refuses a read of never-written bytes; "nan" lets NaN through and notes it once per tensor.
        domain: "error" or "warn" for activation inputs outside their documented range.
        capacity: "error" or "warn" for SBUF and PSUM peaks.
        reach_unit: unit in which a DMA's declared reach is held against 2^32: "bytes" or "elements".
        hbm_tensor_limit_bytes: smallest size of an HBM tensor that is refused; None for no limit.
        sections: names of kernel functions to count by; empty counts by the innermost function.
    """

    target: Target
    trace: bool = False
    poison: str = "error"
    domain: str = "error"
    capacity: str = "error"
    reach_unit: str = "bytes"
    hbm_tensor_limit_bytes: int | None = 1 << 32
    sections: frozenset[str] = frozenset()


class Core:
    """One physical core of one rank while its program runs."""

    def __init__(
        self,
        options: Options,
        *,
        rank: int = 0,
        ranks: int = 1,
        core_id: int = 0,
        lnc: int = 1,
        shared: dict[object, NkiTensor] | None = None,
        warnings: list[str] | None = None,
    ) -> None:
        self.options = options
        self.target = options.target
        self.trace = options.trace
        self.rank, self.ranks, self.core_id, self.lnc = rank, ranks, core_id, lnc
        self.tick = 0
        self.counters = Counters()
        self._stats = self.counters.stats
        self._sections = options.sections
        self._section_of: dict[CodeType, bool] = {}
        self.lives: list[Life] = []
        self.names: dict[str, str] = {}
        self.shared = {} if shared is None else shared
        self.site_counts: dict[object, int] = {}
        self.warnings = [] if warnings is None else warnings
        self.registers: dict[str, Any] = {}
        self.in_loop = 0
        # How this core gives up its turn: set by the scheduler when more than one core runs.
        self.rendezvous: Callable[[Any], Any] | None = None

    def section(self) -> str:
        """The kernel function to which the current instruction is counted."""
        frame = sys._getframe(2)
        internal = self._section_of
        wanted = self._sections
        name = ""
        while frame is not None:
            code = frame.f_code
            inside = internal.get(code)
            if inside is None:
                inside = internal[code] = code.co_filename.startswith(_PACKAGE)
            if not inside:
                name = name or code.co_name
                if not wanted or code.co_name in wanted:
                    return code.co_name
            elif name:
                break  # the simulator below the kernel's entry
            frame = frame.f_back  # type: ignore[assignment]
        return "other" if wanted else name or "other"

    def retire(
        self,
        op: str,
        engine: str,
        cycles: int,
        elements: int,
        dst: NkiTensor | None,
        *srcs: Any,
    ) -> Stat:
        """Count one instruction and extend the lives of its operands. Returns the total it was added to."""
        self.tick = tick = self.tick + 1
        if dst is not None:
            life = dst.storage.life
            life.last = tick
            if life.first < 0:
                life.first = tick
        for src in srcs:
            life = src.storage.life
            life.last = tick
            if life.first < 0:  # a second destination
                life.first = tick
        key = (self.section(), op, engine)
        stat = self._stats.get(key)
        if stat is None:
            stat = self._stats[key] = Stat()
        stat.count += 1
        stat.cycles += cycles
        stat.elements += elements
        return stat

    def warn(self, text: str) -> None:
        """Note something that is legal but suspicious, once."""
        line = f"{text} at {kernel_site(2)}"
        if line not in self.warnings:
            self.warnings.append(line)

    def refuse_or_warn(
        self,
        level: str,
        rule: str,
        got: object,
        limit: object,
        error: type[SimulationError] = ConstraintError,
    ) -> None:
        """Raise, or note, as an option says."""
        if level == "error":
            raise error(rule, got, limit, kernel_site(2))
        self.warn(f"{rule}: got {got}; limit: {limit}")


core: Core | None = None


def current(what: str = "an NKI call") -> Core:
    """The running core.

    Raises:
        UsageError: nothing is being simulated.
    """
    if core is None:
        raise UsageError(what, "a call outside a kernel", "a call inside gk_kernels.simulator.simulate",
                         kernel_site(2))  # fmt: skip
    return core


def activate(value: Core | None) -> Core | None:
    """Make `value` the running core; returns the one before."""
    global core
    before, core = core, value
    return before


__all__ = ["Core", "Options", "Storage", "activate", "current"]
