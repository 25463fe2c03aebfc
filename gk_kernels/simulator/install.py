"""Put `nki` in place for the time of a `with` block, only where the real package is absent.

A kernel module that is imported inside keeps working afterwards: it holds references to these modules.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gk_kernels.simulator import collectives, isa, language, program
from gk_kernels.simulator.isa import constants


def real_nki_present() -> bool:
    """Whether the Neuron SDK's own nki is installed (an empty package of that name does not count)."""
    present = sys.modules.get("nki.language")
    if present is not None and present is not language:
        return True
    try:
        return present is None and importlib.util.find_spec("nki.language") is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _modules() -> dict[str, ModuleType]:
    nki = ModuleType("nki", "The simulator in the place of nki.")
    nki.__path__ = []
    nki.jit = program.jit  # type: ignore[attr-defined]
    nki.simulate = _simulate  # type: ignore[attr-defined]
    nki.dtype = language.dtype  # type: ignore[attr-defined]
    nki.language, nki.isa, nki.collectives = language, isa, collectives  # type: ignore[attr-defined]
    nki.__version__ = "0.6.0"  # type: ignore[attr-defined]
    # Older spelling that AWS's own library still imports.
    typing = ModuleType("neuronxcc.nki.typing")
    typing.tensor = typing.mutable_tensor = language.NkiTensor  # type: ignore[attr-defined]
    outer, inner = ModuleType("neuronxcc"), ModuleType("neuronxcc.nki")
    outer.__path__, inner.__path__ = [], []
    outer.nki, inner.typing = inner, typing  # type: ignore[attr-defined]
    return {
        "nki": nki,
        "nki.language": language,
        "nki.isa": isa,
        "nki.isa.constants": constants,
        "nki.collectives": collectives,
        "neuronxcc": outer,
        "neuronxcc.nki": inner,
        "neuronxcc.nki.typing": typing,
    }


def _simulate(kernel: Any) -> Any:
    """nki.simulate(kernel)(*args): outputs only."""
    from gk_kernels.simulator.api import simulate

    return lambda *args, **kwargs: simulate(kernel, *args, **kwargs).outputs[0]


@contextmanager
def simulated_nki(*, force: bool = False) -> Iterator[ModuleType]:
    """`import nki` inside the block gives the simulator, unless the real nki is installed, which then is used.

    Yields the nki module. On leaving, sys.modules is as it was before.

    Args:
        force: the simulator even where the real nki is installed.
    """
    if not force and real_nki_present():
        yield importlib.import_module("nki")
        return
    modules = _modules()
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield modules["nki"]
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
