"""Every module of the core says what it exports, and what each of it is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import gk_core

MODULES = sorted(m.name for m in pkgutil.iter_modules(gk_core.__path__))


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"gk_core.{request.param}")


def test_all_lists_each_public_name_once(module: ModuleType) -> None:
    """What the module defines without an underscore is exported, and nothing else is."""
    exported = module.__all__
    assert len(set(exported)) == len(exported)
    assert [n for n in exported if not hasattr(module, n)] == []
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    }
    assert defined - set(exported) == set()


def test_each_public_name_is_documented(module: ModuleType) -> None:
    """Module, classes, their methods and properties, functions."""
    assert module.__doc__
    undocumented = []
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not value.__doc__:
            undocumented.append(name)
        for member, thing in vars(value).items() if inspect.isclass(value) else ():
            inner = thing.fget if isinstance(thing, property) else thing
            if not member.startswith("_") and inspect.isfunction(inner) and not inner.__doc__:
                undocumented.append(f"{name}.{member}")
    assert undocumented == []


def test_the_package_lists_its_modules() -> None:
    """The table of contents in gk_core's docstring names every module."""
    contents = gk_core.__doc__ or ""
    assert [m for m in MODULES if not re.search(rf"\b{m}\b", contents)] == []


@pytest.mark.parametrize("package", ["gk_core", "gk_kernels", "gk_adapters"])
def test_each_package_ships_its_types(package: str) -> None:
    """py.typed beside __init__."""
    file = importlib.import_module(package).__file__
    assert file is not None
    assert (Path(file).parent / "py.typed").exists()
