"""Every refusal of the simulator: which rule, what the kernel did, what the limit is, and the kernel's line.

SimulationError
├── UsageError          the call is not NKI 0.6: wrong kind of value, unknown name, refused form
├── ConstraintError     the hardware or the documents forbid it: sizes, buffers, dtypes, partitions, domains
├── PoisonError         bytes are read that nothing wrote
├── CapacityError       SBUF or PSUM is full, or two live tensors share an address
├── ReachError          a DMA can address past what its offset can hold
├── BoundsError         an index leaves its tensor (static, or dynamic with oob_mode.error)
└── DivergenceError     ranks or cores do not run the same program
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import NoReturn

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ENTRY = _PACKAGE + "api.py"
Site = tuple[CodeType, int]


class SimulationError(Exception):
    """A kernel broke a rule.

    Attributes:
        rule: the rule, in words.
        got: what the kernel did.
        limit: what is allowed.
        site: `file:line in function` of the kernel's own source, or "" when no kernel line is involved.
        ranks: the ranks concerned, empty when one rank runs.
    """

    def __init__(self, rule: str, got: object, limit: object, site: str = "") -> None:
        self.rule, self.got, self.limit, self.site = rule, str(got), str(limit), site
        self.ranks: tuple[int, ...] = ()
        super().__init__(rule, got, limit, site)

    def __str__(self) -> str:
        where = f" at {self.site}" if self.site else ""
        ranks = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"{self.rule}: got {self.got}; limit: {self.limit}{where}{ranks}"


class UsageError(SimulationError):
    """The call is not NKI 0.6."""


class ConstraintError(SimulationError):
    """The hardware, or its documents, forbid what the call asks for."""


class PoisonError(SimulationError):
    """Bytes are read that nothing ever wrote."""


class CapacityError(SimulationError):
    """SBUF or PSUM is full, or two live tensors share an address."""


class ReachError(SimulationError):
    """A DMA's declared range passes what its offset can address."""


class BoundsError(SimulationError):
    """An index leaves its tensor."""


class DivergenceError(SimulationError):
    """Ranks, or the two cores of one rank, do not run the same program."""


def kernel_frame(depth: int = 1) -> FrameType | None:
    """The innermost frame outside the simulator, or None when the call came from no kernel."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_filename == _ENTRY and frame.f_code.co_name == "simulate":
            return None
        frame = frame.f_back
    return frame


def format_site(site: Site | None) -> str:
    """`file:line in function` of a stored site."""
    if site is None:
        return ""
    code, line = site
    return f"{code.co_filename}:{line} in {code.co_name}"


def kernel_site(depth: int = 1, callers: int = 3) -> str:
    """The kernel's current line, and up to `callers` lines that led there (a helper's line alone says little)."""
    frame = kernel_frame(depth + 1)
    parts: list[str] = []
    while frame is not None and len(parts) <= callers:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            break
        parts.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(parts)


def function_site(function: object) -> str:
    """Where a kernel is defined, for refusals about the call as a whole."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def refuse(rule: str, got: object, limit: object, error: type[SimulationError] = ConstraintError) -> NoReturn:
    """Raise `error` with the kernel's line."""
    raise error(rule, got, limit, kernel_site(2))
