"""Run a kernel that lies in a file on inputs that lie in a file: what `gk simulate` does.

Inputs come from an .npz whose names are the kernel's parameters. `x@3` is `x` for rank 3 only; `x` is for every rank.
NumPy files cannot name the narrow floats and the packed types, so those are given as bytes with a dtype beside them;
narrow outputs are widened to float32, which loses nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gk_kernels.simulator.api import HbmInput, SimulationResult, simulate
from gk_kernels.simulator.dtypes import as_dtype
from gk_kernels.simulator.errors import SimulationError
from gk_kernels.simulator.install import real_nki_present, simulated_nki
from gk_kernels.simulator.program import Kernel
from gk_kernels.simulator.report import CostReport, cost_report
from gk_kernels.simulator.subset import Violation, check_file

Array = npt.NDArray[Any]

NARROW_FLOATS = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
PACKED = ("float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4")


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

    dtypes: parameter name to one of NARROW_FLOATS or PACKED, for arrays that hold its bytes.

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
        if dtype not in NARROW_FLOATS + PACKED:
            raise LaunchError(f"dtype of {name} must be one of {', '.join(NARROW_FLOATS + PACKED)}, got {dtype}")
        size = as_dtype(dtype).itemsize
        if array.dtype.itemsize != size:
            raise LaunchError(f"{name} has {array.dtype.itemsize}-byte elements, {dtype} has {size}")
        if dtype in PACKED:
            return HbmInput(array=array, dtype=dtype)
        return array.view(np.dtype(getattr(ml_dtypes, dtype)))
    if array.dtype.kind == "V":
        raise LaunchError(f"{name} holds raw bytes of {array.dtype.itemsize}; name its dtype")
    return array.item() if array.ndim == 0 else array


def bind(kernel: Callable[..., Any], inputs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """The inputs of every rank in the order of the kernel's parameters, defaults filled in.

    Raises:
        LaunchError: an unknown name, or one left out that has no default.
    """
    function = kernel.function if isinstance(kernel, Kernel) else kernel
    parameters = inspect.signature(function).parameters
    bound = []
    for rank, given in enumerate(inputs):
        unknown = sorted(set(given) - set(parameters))
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in given]
        if unknown or missing:
            problems = [f"there is no {', '.join(unknown)}"] if unknown else []
            problems += [f"{', '.join(missing)} is missing"] if missing else []
            raise LaunchError(
                f"the inputs of rank {rank} do not fit {function.__name__}({', '.join(parameters)}): "
                + "; ".join(problems)
            )
        bound.append(tuple(given.get(name, parameter.default) for name, parameter in parameters.items()))
    return bound


@dataclass(frozen=True)
class FileRun:
    """A finished run of a kernel file.

    Attributes:
        name: the kernel's function.
        result: what the simulator gave.
        report: costs of rank 0's first core.
        violations: where the source leaves the NKI subset.
    """

    name: str
    result: SimulationResult
    report: CostReport
    violations: tuple[Violation, ...]

    @property
    def warnings(self) -> list[str]:
        """Legal but suspicious things, with their lines."""
        return self.result.warnings

    @property
    def outputs(self) -> dict[str, Any]:
        """What each rank returned: output_0, output_1, ..., with @rank where several ran."""
        named = {}
        for rank, returned in enumerate(self.result.outputs):
            values = returned if isinstance(returned, tuple) else (returned,)
            for index, value in enumerate(values):
                named[f"output_{index}" if len(self.result.outputs) == 1 else f"output_{index}@{rank}"] = value
        return named

    @property
    def output_lines(self) -> list[str]:
        """One line per output: name, dtype and shape."""
        return [
            f"{name}: {value.dtype.name} {list(value.shape)}" if isinstance(value, np.ndarray) else f"{name}: {value!r}"
            for name, value in self.outputs.items()
        ]

    def save_outputs(self, path: str | Path) -> None:
        """Write the arrays among the outputs as .npz; narrow floats become float32.

        Raises:
            OSError: the file cannot be written.
        """
        arrays = {}
        for name, value in self.outputs.items():
            if isinstance(value, np.ndarray):
                arrays[name] = value.astype(np.float32) if value.dtype.name in NARROW_FLOATS else value
        with open(path, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # the names are never allow_pickle

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump: outputs by shape and dtype, peaks, warnings, costs."""
        shapes = {
            name: {"shape": list(value.shape), "dtype": value.dtype.name}
            for name, value in self.outputs.items()
            if isinstance(value, np.ndarray)
        }
        return {
            "kernel": self.name,
            "outputs": shapes,
            "warnings": list(self.result.warnings),
            "violations": [str(violation) for violation in self.violations],
            "cost": self.report.to_json(),
        }


def run_file(
    spec: str,
    inputs: str | Path,
    *,
    dtypes: Mapping[str, str],
    values: Mapping[str, Any],
    ranks: int,
    lnc: int,
    target: str,
    sections: Sequence[str] = (),
) -> FileRun:
    """Run `FILE.py:function` on the arrays of an .npz file.

    dtypes: narrow floats by input name. values: further arguments by name, the same for every rank.

    Raises:
        LaunchError: the file, the function or the inputs do not fit together.
        SimulationError: the kernel broke a rule of NKI.
    """
    if real_nki_present():
        raise LaunchError("the Neuron SDK's own nki is installed; run the kernel with nki.simulate")
    path, function = split_spec(spec)
    given = [{**one, **values} for one in load_inputs(inputs, dtypes, ranks)]
    with simulated_nki():
        kernel = load_kernel(path, function)
        try:
            result = simulate(
                kernel, ranks=ranks, lnc=lnc, target=target, rank_args=bind(kernel, given), sections=sections
            )
        except (SimulationError, LaunchError):
            raise
        except Exception as error:  # whatever a user's kernel does
            raise LaunchError(f"{function} failed: {type(error).__name__}: {error}") from error
    sbuf, psum = result.peaks[0]
    peaks = {
        "sbuf_peak_bytes_per_partition": sbuf.bytes_per_partition,
        "sbuf_no_reuse_bytes_per_partition": sbuf.no_reuse_bytes_per_partition,
        "psum_peak_banks": psum.banks,
    }
    counters = result.core_counters[0][0] if result.core_counters else result.counters[0]
    report = cost_report(counters, result.target, kernel=function, peaks=peaks)
    return FileRun(function, result, report, check_file(path))
