"""Every worked example in the docstrings of the core and of the fakes is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import gk_adapters.fakes
import gk_core

MODULES = sorted(
    f"{package.__name__}.{module.name}"
    for package in (gk_core, gk_adapters.fakes)
    for module in pkgutil.iter_modules(package.__path__)
)
WITH_EXAMPLES = (
    "gk_adapters.fakes.block_pool",
    "gk_adapters.fakes.clock",
    "gk_adapters.fakes.fabric",
    "gk_adapters.fakes.kernel",
    "gk_adapters.fakes.memory",
    "gk_adapters.fakes.prefill",
    "gk_adapters.fakes.side_channel",
    "gk_core.block_table",
    "gk_core.decode_step",
    "gk_core.kv_layout",
    "gk_core.region",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    """As doctest runs them; these modules have some."""
    result = doctest.testmod(importlib.import_module(name), verbose=False)
    assert result.failed == 0
    if name in WITH_EXAMPLES:
        assert result.attempted > 0
