"""The library fixture: present where GK_NKI_LIBRARY points at a checkout of aws-neuron/nki-library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gk_kernels.simulator import simulated_nki
from tests.simulator.conformance.harness import Library


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    """The checkout's kernels, with the simulator in the place of nki."""
    checkout = os.environ.get("GK_NKI_LIBRARY")
    if not checkout:
        pytest.skip("set GK_NKI_LIBRARY to a checkout of aws-neuron/nki-library to run its kernels")
    path = Path(checkout)
    if not (path / "src" / "nkilib_src").is_dir():
        pytest.fail(f"GK_NKI_LIBRARY={checkout} holds no src/nkilib_src")
    with simulated_nki():
        yield Library(path)
