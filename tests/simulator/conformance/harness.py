"""Runs a kernel of an aws-neuron/nki-library checkout, as it is, in the simulator."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gk_kernels.simulator import simulate
from gk_kernels.simulator.program import Kernel
from tests.simulator.conformance.references import Array, wide


class Library:
    """One checkout. `nki` must be in place as long as it is used."""

    def __init__(self, checkout: Path) -> None:
        source = str(checkout / "src")
        if source not in sys.path:
            sys.path.insert(0, source)

    def value(self, spec: str) -> Any:
        """`module:name` below nkilib."""
        module, name = spec.split(":")
        return getattr(importlib.import_module(f"nkilib_src.nkilib.{module}"), name)

    def wrapper(self, name: str) -> Any:
        """One of our kernels around a sub-kernel of the library."""
        wrappers = importlib.import_module("tests.simulator.conformance.wrappers")
        for name_of, module in list(sys.modules.items()):
            if name_of.startswith("nkilib_src.nkilib.core.moe"):
                _take_jit_off(module)
        expert = self.value("core.moe.moe_tkg.gate_up_projection_mx:gate_up_projection_mx_shard_I")
        vars(wrappers)["gate_up_projection_mx_shard_I"] = expert
        return getattr(wrappers, name)

    def run(self, kernel: Any, *, lnc: int = 1, poison: str = "error", **arguments: Any) -> tuple[Array, ...]:
        """What the kernel returns on rank 0, always as a tuple.

        poison: "nan" where a kernel moves padding partitions that it never wrote and never uses.
        """
        if isinstance(kernel, str):
            kernel = self.value(kernel)
        bound = inspect.signature(getattr(kernel, "function", kernel)).bind(**arguments)
        output = simulate(kernel, *bound.args, lnc=lnc, poison=poison, **bound.kwargs).output
        return tuple(output) if isinstance(output, tuple | list) else (output,)

    def run_ranks(self, kernel: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """What the kernel returns on each rank, given each rank's positional arguments."""
        return simulate(self.value(kernel), ranks=len(arguments), rank_args=arguments).outputs


def _take_jit_off(module: ModuleType) -> None:
    """Leave the plain functions: the mixture-of-experts parts decorate sub-kernels, which NKI refuses from 0.3 on."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Kernel):
            setattr(module, name, value.function)


def assert_within(got: Array, want: Array, *, rtol: float, atol: float) -> None:
    """The library's own measure: no element is off by more than atol + rtol * max |want|."""
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    difference = np.abs(wide(got) - wide(want))
    limit = atol + rtol * float(np.abs(want).max())
    assert np.isfinite(difference).all()
    assert difference.max() <= limit, f"off by {difference.max()}, limit {limit}"
