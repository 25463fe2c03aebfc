"""These tests are about vLLM's later era; they run in the environment of `make test-vllm-next`."""

from __future__ import annotations

import pytest

from gk_adapters.vllm.versions import Era, served_era
from tests.vllm.conftest import bf16_checkpoint

__all__ = ["bf16_checkpoint"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where the installed vLLM is of the other era."""
    if served_era() is not Era.LAYOUTS:
        reason = pytest.mark.skip(reason="needs vLLM 0.30 to 0.32: make test-vllm-next")
        for item in items:
            if "vllm_next" in item.path.parts:
                item.add_marker(reason)
