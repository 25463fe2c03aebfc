"""Fixtures of the simulator's tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from gk_kernels.simulator import simulated_nki


@pytest.fixture
def nki() -> Iterator[ModuleType]:
    """The nki package for one test: the real one where it is installed, else the simulator."""
    with simulated_nki() as module:
        yield module
