"""Run a kernel that lies in a file on inputs that lie in a file: what `gk simulate` does.

Inputs come from an .npz whose names are the kernel's parameters. `x@3` is `x` for rank 3 only; `x` is for every rank.
NumPy files cannot name the narrow floats, so those are given as bytes with a dtype beside them; outputs in them are
widened to float32, which loses nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gk_kernels.simulator.errors import SimulationError

Array = npt.NDArray[Any]

NARROW_FLOATS = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


class LaunchError(ValueError):
    """The kernel or its inputs cannot be found or do not fit together; the message says what to do."""


def split_spec(spec: str) -> tuple[Path, str]:
    """File and function of `KERNEL.py:function`.

    Raises:
        LaunchError: no colon, no such file.
    """
    file, _, function = spec.rpartition(":")
    if not file or not function.isidentifier():
        raise LaunchError(f"a kernel is named FILE.py:function, got {spec!r}")
    path = Path(file)
    if not path.is_file():
        raise LaunchError(f"there is no file {file}")
    return path, function


def load_kernel(path: Path, function: str) -> Callable[..., Any]:
    """The function of a kernel file; nki must be importable.

    A file inside a package is imported by its dotted name, so that its relative imports work.

    Raises:
        LaunchError: the file does not import, or has no such function.
    """
    try:
        module = _import_file(path.resolve())
    except SimulationError:
        raise
    except Exception as error:  # whatever a user's module level does
        raise LaunchError(f"{path} does not import: {type(error).__name__}: {error}") from error
    kernel = getattr(module, function, None)
    if not callable(kernel):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise LaunchError(f"{path} has no function {function}; it has {', '.join(known) or 'none'}")
    return kernel  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(parts)
    if len(parts) > 1:
        return importlib.import_module(name)
    found = importlib.util.spec_from_file_location(f"gk_kernel_file_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


def load_inputs(path: str | Path, dtypes: Mapping[str, str], ranks: int) -> list[dict[str, Any]]:
    """Arguments of every rank by name; 0-dimensional arrays become Python values.

    dtypes: parameter name to one of NARROW_FLOATS, for arrays that hold its bytes.

    Raises:
        LaunchError: not an .npz, a rank that does not exist, a dtype that does not fit.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise LaunchError(f"{path} is not a readable .npz file: {error}") from error
    common: dict[str, Any] = {}
    own: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, array in arrays.items():
        name, _, rank = key.partition("@")
        value = _as_value(name, array, dtypes.get(name))
        if not rank:
            common[name] = value
        elif not rank.isdigit() or int(rank) >= ranks:
            raise LaunchError(f"{key} in {path}: ranks are 0 to {ranks - 1}")
        else:
            own[int(rank)][name] = value
    unknown = sorted(set(dtypes) - {key.partition("@")[0] for key in arrays})
    if unknown:
        raise LaunchError(f"a dtype is given for {', '.join(unknown)}, which {path} does not have")
    return [{**common, **mine} for mine in own]


def _as_value(name: str, array: Array, dtype: str | None) -> Any:
    if dtype is not None:
        if dtype not in NARROW_FLOATS:
            raise LaunchError(f"dtype of {name} must be one of {', '.join(NARROW_FLOATS)}, got {dtype}")
        narrow = np.dtype(getattr(ml_dtypes, dtype))
        if array.dtype.itemsize != narrow.itemsize:
            raise LaunchError(f"{name} has {array.dtype.itemsize}-byte elements, {dtype} has {narrow.itemsize}")
        return array.view(narrow)
    if array.dtype.kind == "V":
        raise LaunchError(f"{name} holds raw bytes of {array.dtype.itemsize}; name its dtype")
    return array.item() if array.ndim == 0 else array


def check_names(kernel: Callable[..., Any], inputs: Sequence[Mapping[str, Any]]) -> None:
    """Whether the inputs fit the kernel's parameters.

    Raises:
        LaunchError: an unknown name, or one left out that has no default.
    """
    parameters = inspect.signature(getattr(kernel, "func", kernel)).parameters
    for rank, given in enumerate(inputs):
        unknown = sorted(set(given) - set(parameters))
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in given]
        if unknown or missing:
            parts = [f"it has no {', '.join(unknown)}"] * bool(unknown) + [f"it needs {', '.join(missing)}"] * bool(
                missing
            )
            raise LaunchError(f"inputs of rank {rank} do not fit {', '.join(parameters)}: {'; '.join(parts)}")


def named_outputs(outputs: Sequence[Sequence[Array]]) -> dict[str, Array]:
    """Arrays to save: output_0, output_1, ... of one rank, output_0@rank of several."""
    named = {}
    for rank, arrays in enumerate(outputs):
        for index, array in enumerate(arrays):
            key = f"output_{index}" if len(outputs) == 1 else f"output_{index}@{rank}"
            named[key] = array.astype(np.float32) if array.dtype.name in NARROW_FLOATS else array
    return named
