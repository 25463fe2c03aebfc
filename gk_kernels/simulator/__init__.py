"""A strict simulator of NKI 0.6 on NumPy: runs kernels, checks every documented rule, and counts what they cost.

    from gk_kernels.simulator import simulate, simulated_nki

    with simulated_nki():
        from my_kernels import add_kernel
    result = simulate(add_kernel, a, b)
    result.output, result.counters[0].hbm_read_bytes, result.peaks[0]

Read README.md beside this file, then api.py, tensor.py, and isa/.
"""

from __future__ import annotations

from gk_kernels.simulator.api import HbmInput, SimulationResult, input_bytes, simulate
from gk_kernels.simulator.counters import Counters, Stat
from gk_kernels.simulator.errors import (
    BoundsError,
    CapacityError,
    ConstraintError,
    DivergenceError,
    PoisonError,
    ReachError,
    SimulationError,
    UsageError,
)
from gk_kernels.simulator.install import real_nki_present, simulated_nki
from gk_kernels.simulator.memory import Peak
from gk_kernels.simulator.targets import TRN2, TRN3, Target

__all__ = [
    "TRN2",
    "TRN3",
    "BoundsError",
    "CapacityError",
    "ConstraintError",
    "Counters",
    "DivergenceError",
    "HbmInput",
    "Peak",
    "PoisonError",
    "ReachError",
    "SimulationError",
    "SimulationResult",
    "Stat",
    "Target",
    "UsageError",
    "input_bytes",
    "real_nki_present",
    "simulate",
    "simulated_nki",
]
