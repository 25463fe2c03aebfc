"""What simulator tests share: tiles that are ready to use, and running one instruction on NumPy arrays."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gk_kernels.simulator import ConstraintError, SimulationError, simulate
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from gk_kernels.simulator.dtypes import ALL

Array = npt.NDArray[Any]


def filled(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf, value: float = 1.0) -> Any:
    """A tensor whose every element is `value`."""
    tile = nl.ndarray(shape, dtype, buffer)
    if buffer in (nl.sbuf, nl.psum):
        nisa.memset(tile, 0 if tile.dtype.kind == "x" else value)
    else:
        rows = nl.ndarray((1, tile.size), dtype)
        nisa.memset(rows, 0 if tile.dtype.kind == "x" else value)
        nisa.dma_copy(tile, rows)
    return tile


def empty(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Any:
    """A tensor that nothing wrote."""
    return nl.ndarray(shape, dtype, buffer)


def psum(*shape: int, dtype: Any = nl.float32) -> Any:
    """An unwritten PSUM tensor."""
    return nl.ndarray(shape, dtype, nl.psum)


def on_tiles(
    call: Callable[..., Any],
    inputs: Sequence[Array],
    *outs: tuple[Sequence[int], str],
    strided: bool = False,
    start: Array | None = None,
    **options: Any,
) -> Any:
    """Load arrays into SBUF, run `call(dst..., *tiles)`, and return what the destinations hold.

    `strided` puts every second element of wider tiles to use, inputs and outputs; `start` presets the destination.
    """

    def tile(shape: Sequence[int], dtype: Any) -> Any:
        if not strided:
            return nl.ndarray(tuple(shape), dtype)
        wide = nl.ndarray((*shape[:-1], 2 * shape[-1]), dtype)
        return wide[..., ::2]

    def kernel(start: Any, *arrays: Any) -> Any:
        tiles = []
        for array in arrays:
            made = tile(array.shape, array.dtype)
            nisa.dma_copy(made, array)
            tiles.append(made)
        targets = [tile(shape, ALL[dtype]) for shape, dtype in outs]
        if start is not None:
            nisa.dma_copy(targets[0], start)
        call(*targets, *tiles)
        stored = []
        for target in targets:
            result = nl.ndarray(target.shape, target.dtype, nl.shared_hbm)
            nisa.dma_copy(result, target)
            stored.append(result)
        return tuple(stored)

    results = simulate(kernel, start, *inputs, **options).output
    return results[0] if len(results) == 1 else results


def random_array(seed: int, shape: Sequence[int], dtype: str = "float32", low: float = -4, high: float = 4) -> Array:
    """Uniform values of a dtype; integers are whole numbers in [low, high)."""
    rng = np.random.default_rng(seed)
    kind = ALL[dtype]
    if kind.kind in "iu":
        return rng.integers(int(max(low, 0 if kind.kind == "u" else low)), int(high), shape).astype(kind.np)
    return rng.uniform(low, high, shape).astype(np.float32).astype(kind.np)


def wide(values: Any) -> Array:
    """float64 of any array."""
    return np.asarray(values).astype(np.float64)


TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-9, "float8_e4m3": 2.0**-3, "float8_e4m3fn": 2.0**-3}


def close(got: Array, want: Array, dtype: str, scale: float = 1.0) -> None:
    """Equal within one step of the dtype, relative to the value or to `scale`."""
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(wide(got), wide(want), rtol=tolerance, atol=tolerance * 1e-2 * scale)


@dataclass(frozen=True)
class Broken:
    """A kernel that breaks a rule, and what the refusal says."""

    kernel: Callable[[], Any]
    rule: str
    got: str
    limit: str
    error: type[SimulationError] = ConstraintError
    needs_data: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class RuleBook:
    """Collects breaking kernels; the line that breaks carries the comment `# breaks`."""

    def __init__(self) -> None:
        self.cases: list[Broken] = []

    def __call__(
        self,
        rule: str,
        got: str,
        limit: str,
        error: type[SimulationError] = ConstraintError,
        needs_data: bool = False,
        **options: Any,
    ) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def register(kernel: Callable[[], Any]) -> Callable[[], Any]:
            self.cases.append(Broken(kernel, rule, got, limit, error, needs_data, options))
            return kernel

        return register

    @property
    def ids(self) -> list[str]:
        """Test ids: the kernels' names."""
        return [case.kernel.__name__ for case in self.cases]


def check_refusal(case: Broken, **more: Any) -> None:
    """The kernel is refused with the rule, the value, the limit and its own line."""
    with pytest.raises(SimulationError) as caught:
        simulate(case.kernel, **case.options, **more)
    error = caught.value
    assert type(error) is case.error, f"{type(error).__name__}: {error}"
    assert case.rule in error.rule, str(error)
    assert case.got in error.got, str(error)
    assert case.limit in error.limit, str(error)
    path, line = error.site.split(" in ")[0].rsplit(":", 1)
    assert "# breaks" in linecache.getline(path, int(line)), str(error)
