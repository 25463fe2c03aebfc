"""Every example with inputs for each rank and the outputs that NumPy says it must have."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Inputs = Mapping[str, Array]

BF16 = ml_dtypes.bfloat16
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


@dataclass(frozen=True)
class Example:
    """One kernel and how to check it.

    Attributes:
        name: module and function name in this package.
        idea: what it shows, one line.
        make_inputs: generator to the arguments of every rank, by parameter name.
        expected: those arguments to the output of every rank, by NumPy alone.
        rtol, atol: tolerance; 0 and 0 where no rounding happens.
        ranks: how many ranks take part.
        targets: devices that have the instructions.
        warning: what the simulator warns of, "" for nothing.
    """

    name: str
    idea: str
    make_inputs: Callable[[np.random.Generator], Sequence[Inputs]]
    expected: Callable[[Sequence[Inputs]], Sequence[Array]]
    rtol: float = 0.0
    atol: float = 0.0
    ranks: int = 1
    targets: tuple[str, ...] = ("trn2", "trn3")
    warning: str = ""

    @property
    def path(self) -> Path:
        """The kernel's source file."""
        return Path(__file__).with_name(f"{self.name}.py")

    def load(self) -> Any:
        """The kernel; nki, real or simulated, must be importable."""
        module = importlib.import_module(f"gk_kernels.examples.{self.name}")
        return getattr(module, self.name)


def _normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def _one_rank(
    function: Callable[..., Array],
) -> Callable[[Sequence[Inputs]], Sequence[Array]]:
    def expected(inputs: Sequence[Inputs]) -> Sequence[Array]:
        return [function(**one) for one in inputs]

    return expected


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _rmsnorm(x: Array, gain: Array) -> Array:
    wide = x.astype(np.float32)
    scale = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    return np.asarray((wide * scale * gain).astype(x.dtype))


def _rope(x: Array, cosines: Array, sines: Array) -> Array:
    first, second = np.split(x, 2, axis=2)
    cos, sin = cosines[:, None, :], sines[:, None, :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return np.asarray(np.concatenate(rotated, axis=2))


def _rope_inputs(rng: np.random.Generator) -> Sequence[Inputs]:
    tokens, heads, half = 11, 5, 32
    angles = np.outer(np.arange(tokens), 150000.0 ** (-np.arange(half) / half)).astype(np.float32)
    x = _normal(rng, tokens, heads, 2 * half)
    return [{"x": x, "cosines": np.cos(angles), "sines": np.sin(angles)}]


def _gather_inputs(rng: np.random.Generator) -> Sequence[Inputs]:
    num_blocks, width, wanted = 23, 48, 9
    ids = rng.permutation(num_blocks)[:wanted].astype(np.int32)
    return [{"cache": _normal(rng, num_blocks, width), "block_ids": ids[:, None]}]


def _scatter_inputs(rng: np.random.Generator) -> Sequence[Inputs]:
    num_slots, width, count = 29, 48, 7
    slots = rng.permutation(num_slots)[:count].astype(np.int32)
    slots[[2, 5]] = num_slots  # rows 2 and 5 are inactive
    cache, rows = _normal(rng, num_slots, width), _normal(rng, count, width)
    return [{"cache": cache, "rows": rows, "slots": slots[:, None]}]


def _scatter(cache: Array, rows: Array, slots: Array) -> Array:
    out = cache.copy()
    for row, slot in zip(rows, slots[:, 0], strict=True):
        if slot < len(cache):
            out[slot] = row
    return np.asarray(out)


def decode_fp4(nibbles: Array) -> Array:
    """Values of 4-bit e2m1 codes: bit 3 is the sign, the rest an index into FP4_VALUES."""
    sign = np.where(nibbles & 8, -1, 1).astype(np.float32)
    return np.asarray(sign * FP4_VALUES[nibbles & 7])


def _mx_inputs(rng: np.random.Generator) -> Sequence[Inputs]:
    k_size, tokens, features = 512, 6, 40
    nibbles = rng.integers(0, 16, (k_size // 4, 4, features), dtype=np.uint16)
    packed = sum(nibbles[:, lane, :] << np.uint16(4 * lane) for lane in range(4))
    scales = rng.integers(120, 124, (k_size // 32, features), dtype=np.uint8)
    x = _normal(rng, k_size, tokens, dtype=BF16)
    return [{"x": x, "weights": np.asarray(packed), "weight_scales": scales}]


def _quantised(x: Array) -> Array:
    """`x` [K, tokens] after MXFP8 (e4m3fn) and back: groups of 32 along K, doubled OCP scale."""
    k_size, tokens = x.shape
    groups = x.astype(np.float32).reshape(k_size // 32, 32, tokens)
    scale = 2.0 ** (np.floor(np.log2(np.abs(groups).max(axis=1, keepdims=True))) - 7)
    rounded = (groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return np.asarray(rounded.reshape(k_size, tokens))


def _mx_matmul(x: Array, weights: Array, weight_scales: Array) -> Array:
    lanes = [decode_fp4(weights >> np.uint16(4 * lane) & 15) for lane in range(4)]
    values = np.stack(lanes, axis=1).reshape(512, -1)
    scales = np.repeat(2.0 ** (weight_scales.astype(np.float32) - 127), 32, axis=0)
    return np.asarray(_quantised(x).T @ (values * scales))


TP_RANKS = 4


def _mlp_inputs(rng: np.random.Generator) -> Sequence[Inputs]:
    own, hidden, inner = 6, 64, 40
    return [
        {
            "x": _normal(rng, own, hidden),
            "up": _normal(rng, hidden, inner),
            "down": _normal(rng, inner, hidden),
        }
        for _ in range(TP_RANKS)
    ]


def _mlp(inputs: Sequence[Inputs]) -> Sequence[Array]:
    x = np.concatenate([one["x"] for one in inputs])
    up = np.concatenate([one["up"] for one in inputs], axis=1)
    down = np.concatenate([one["down"] for one in inputs])
    return np.split(np.maximum(x @ up, 0) @ down, TP_RANKS)


EXAMPLES: tuple[Example, ...] = (
    Example(
        "copy_tiles",
        "HBM to SBUF and back, 128 rows at a time",
        lambda rng: [{"x": _normal(rng, 300, 70)}],
        _one_rank(lambda x: x),
    ),
    Example(
        "add_broadcast",
        "broadcasting along the free dimension and across partitions",
        lambda rng: [{"x": _normal(rng, 100, 70), "row": _normal(rng, 1, 70), "column": _normal(rng, 100, 1)}],
        _one_rank(lambda x, row, column: np.asarray((x + row) + column)),
    ),
    Example(
        "row_softmax",
        "a reduction, an activation that also sums, a scale per partition",
        lambda rng: [{"x": 3 * _normal(rng, 100, 70)}],
        _one_rank(_softmax),
        rtol=1e-5,
        atol=1e-7,
    ),
    Example(
        "rmsnorm",
        "the norm of a decoder layer in three passes, bfloat16 in and out",
        lambda rng: [{"x": _normal(rng, 100, 96, dtype=BF16), "gain": _normal(rng, 1, 96)}],
        _one_rank(_rmsnorm),
        rtol=1e-2,
        atol=1e-5,
    ),
    Example(
        "tiled_matmul",
        "tiles of 128 x 128 x 512 accumulated in PSUM",
        lambda rng: [{"left_transposed": _normal(rng, 200, 150), "right": _normal(rng, 200, 600)}],
        _one_rank(lambda left_transposed, right: np.asarray(left_transposed.T @ right)),
        rtol=1e-4,
        atol=1e-4,
    ),
    Example(
        "rope",
        "slices of the free dimension and a stride of 0 over heads",
        _rope_inputs,
        _one_rank(_rope),
        rtol=1e-5,
        atol=1e-6,
    ),
    Example(
        "paged_gather",
        "indirect DMA: one row index per partition",
        _gather_inputs,
        _one_rank(lambda cache, block_ids: cache[block_ids[:, 0]]),
    ),
    Example(
        "paged_scatter",
        "indirect DMA into a cache, inactive rows skipped",
        _scatter_inputs,
        _one_rank(_scatter),
        warning="mixing valid and skipped rows",
    ),
    Example(
        "mx_matmul",
        "MXFP4 weights, activations quantised to MXFP8 on the device",
        _mx_inputs,
        _one_rank(_mx_matmul),
        rtol=1e-5,
        atol=1e-4,
        targets=("trn3",),
    ),
    Example(
        "tp_mlp",
        "all-gather and reduce-scatter over four ranks",
        _mlp_inputs,
        _mlp,
        rtol=1e-4,
        atol=1e-3,
        ranks=TP_RANKS,
    ),
)
