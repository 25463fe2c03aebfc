"""The subset of Python and of NKI 0.6 that kernels are written in, and its checker."""

from __future__ import annotations

from gk_kernels.simulator.subset.checker import check_file, check_source
from gk_kernels.simulator.subset.rules import RULES, Rule, Violation

__all__ = ["RULES", "Rule", "Violation", "check_file", "check_source"]
