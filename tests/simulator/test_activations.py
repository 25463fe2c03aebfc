"""Activation functions agree with float64 formulas written here, and the accumulators with running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_kernels.simulator import ConstraintError, simulate
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import Array, close, empty, filled, on_tiles, random_array, wide

CASES = settings(max_examples=20, deadline=None)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 7))
seeds = st.integers(0, 2**32 - 1)
erf = np.vectorize(math.erf)


def phi(x: Array) -> Array:
    """The normal distribution function."""
    return np.asarray(0.5 * (1 + erf(x / math.sqrt(2))))


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-x)))


FUNCTIONS: dict[str, tuple[Callable[[Array], Array], float, float]] = {
    "copy": (lambda x: x, -4, 4),
    "square": (np.square, -4, 4),
    "abs": (np.abs, -4, 4),
    "relu": (lambda x: np.maximum(x, 0), -4, 4),
    "sign": (np.sign, -4, 4),
    "exp": (np.exp, -8, 4),
    "log": (np.log, 0.1, 50),
    "sqrt": (np.sqrt, 0.1, 50),
    "rsqrt": (lambda x: x**-0.5, 0.1, 50),
    "reciprocal": (lambda x: 1 / x, 0.1, 50),
    "sin": (np.sin, -3, 3),
    "arctan": (np.arctan, -1.5, 1.5),
    "tanh": (np.tanh, -4, 4),
    "sigmoid": (logistic, -8, 8),
    "erf": (erf, -3, 3),
    "erf_dx": (lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), -3, 3),
    "gelu": (lambda x: x * phi(x), -4, 4),
    "gelu_dx": (lambda x: phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi), -4, 4),
    "gelu_apprx_tanh": (
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), -4, 4,
    ),
    "gelu_apprx_sigmoid": (lambda x: x * logistic(1.702 * x), -4, 4),
    "gelu_apprx_sigmoid_dx": (
        lambda x: logistic(1.702 * x) + 1.702 * x * logistic(1.702 * x) * (1 - logistic(1.702 * x)), -4, 4,
    ),
    "silu": (lambda x: x * logistic(x), -4, 4),
    "silu_dx": (lambda x: logistic(x) + x * logistic(x) * (1 - logistic(x)), -4, 4),
    "softplus": (lambda x: np.log(1 + np.exp(x)), -8, 8),
    "mish": (lambda x: x * np.tanh(np.log(1 + np.exp(x))), -4, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_an_activation_is_its_formula(name: str) -> None:
    """op(data) within fp32 rounding."""
    formula, low, high = FUNCTIONS[name]
    data = random_array(11, (6, 9), low=low, high=high)
    got = on_tiles(lambda d, x: nisa.activation(d, getattr(nl, name), x), [data], ((6, 9), "float32"))
    np.testing.assert_allclose(wide(got), formula(wide(data)), rtol=3e-6, atol=1e-6)


def test_swish_of_gpt_oss_has_its_known_values() -> None:
    """x * sigmoid(1.702 x) at 0, 1 and -1."""
    data = np.array([[0.0, 1.0, -1.0]], np.float32)
    got = on_tiles(lambda d, x: nisa.activation(d, nl.gelu_apprx_sigmoid, x), [data], ((1, 3), "float32"))
    np.testing.assert_allclose(got, [[0.0, 0.84579575, -0.15420423]], rtol=1e-6)


@given(shapes, seeds, st.booleans(), st.booleans(), st.sampled_from(["float32", "bfloat16"]))
@CASES
def test_scale_multiplies_before_bias_adds(
    shape: tuple[int, int], seed: int, scale_column: bool, bias_column: bool, dtype: str
) -> None:
    """exp(data * scale + bias), constants or columns."""
    data = random_array(seed, shape, dtype, -1, 1)
    scale, bias = random_array(seed + 1, (shape[0], 1)), random_array(seed + 2, (shape[0], 1))

    def call(d: Any, x: Any, s: Any, b: Any) -> None:
        nisa.activation(d, nl.exp, x, bias=b if bias_column else -0.5, scale=s if scale_column else 2.0)

    got = on_tiles(call, [data, scale, bias], (shape, "float32"))
    s, b = wide(scale) if scale_column else 2.0, wide(bias) if bias_column else -0.5
    np.testing.assert_allclose(wide(got), np.exp(wide(data) * s + b), rtol=1e-5)


def test_the_sum_is_of_the_fp32_results_not_of_what_was_stored() -> None:
    """1.00390625 rounds to 1.0 in bfloat16, its sum does not."""
    data = np.full((1, 4), 1.00390625, np.float32)

    def call(d: Any, total: Any, x: Any) -> None:
        nisa.activation(d, nl.copy, x, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)

    stored, total = on_tiles(call, [data], ((1, 4), "bfloat16"), ((1, 1), "float32"))
    assert stored.astype(float).tolist() == [[1.0] * 4]
    assert total.tolist() == [[4.015625]]


def test_the_registers_carry_a_sum_over_several_instructions() -> None:
    """reset, reduce without reading, reduce and read."""
    data = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    cmd = nisa.reduce_cmd

    def call(d: Any, total: Any, x: Any) -> None:
        nisa.activation(d, nl.copy, x, reduce_op=nl.add, reduce_cmd=cmd.reset)
        nisa.activation(d, nl.copy, x, reduce_op=nl.add, reduce_cmd=cmd.reduce)
        nisa.activation(d, nl.square, x, reduce_op=nl.add, reduce_res=total, reduce_cmd=cmd.reduce)

    _, total = on_tiles(call, [data], ((2, 2), "float32"), ((2, 1), "float32"))
    assert total.ravel().tolist() == [3.0 + 5.0, 7.0 + 25.0]


def test_activation_reduce_resets_then_sums() -> None:
    """The older name."""
    data = np.array([[1.0, 2.0]], np.float32)
    _, total = on_tiles(
        lambda d, t, x: nisa.activation_reduce(d, nl.exp, x, nl.add, t),
        [data],
        ((1, 2), "float32"),
        ((1, 1), "float32"),
    )
    np.testing.assert_allclose(total, [[math.e + math.e**2]], rtol=1e-6)


def test_a_value_outside_the_range_can_be_let_through() -> None:
    """domain="warn" computes and notes."""
    data = np.array([[4.0]], np.float32)

    def kernel(x: Any) -> Any:
        tile, out = nl.load(x), nl.ndarray((1, 1), nl.float32, nl.shared_hbm)
        nisa.activation(tile, nl.sin, tile)
        nisa.dma_copy(out, tile)
        return out

    result = simulate(kernel, data, domain="warn")
    np.testing.assert_allclose(result.output, np.sin(data), rtol=1e-6)
    assert "input range of nl.sin: got 4.0 at (0, 0)" in result.warnings[0]


def test_the_range_is_checked_after_scale_and_bias() -> None:
    """rsqrt(0 * 1 + eps) is fine; rsqrt(4 - 4) is not."""
    on_tiles(lambda d: (nisa.memset(d, 0.0), nisa.activation(d, nl.rsqrt, d, bias=1e-5)), [], ((2, 3), "float32"))
    with pytest.raises(ConstraintError, match=r"rsqrt: got 0\.0 at \(0, 0\)"):
        on_tiles(lambda d: (nisa.memset(d, 4.0), nisa.activation(d, nl.rsqrt, d, bias=-4.0)), [], ((2, 3), "float32"))


@given(shapes, seeds, st.booleans())
@CASES
def test_exponential_subtracts_the_maximum_and_sums(shape: tuple[int, int], seed: int, column: bool) -> None:
    """exp(src - max), row sums in the registers."""
    data = random_array(seed, shape)
    top = data.max(1, keepdims=True)

    def call(d: Any, total: Any, x: Any, m: Any) -> None:
        nisa.exponential(d, x, m if column else 1.0, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)

    got, total = on_tiles(call, [data, top], (shape, "float32"), ((shape[0], 1), "float32"))
    want = np.exp(wide(data) - (wide(top) if column else 1.0))
    np.testing.assert_allclose(wide(got), want, rtol=1e-5)
    np.testing.assert_allclose(wide(total), want.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "reverse0", "reverse1", "want"),
    [
        (nl.multiply, nl.add, False, False, 3.0 * 2.0 + 5.0),
        (nl.multiply, nl.subtract, False, True, 5.0 - 3.0 * 2.0),
        (nl.subtract, nl.bypass, True, False, 2.0 - 3.0),
        (nl.add, nl.bypass, False, False, 3.0 + 2.0),
        (nl.bypass, nl.bypass, False, False, 3.0),
    ],
)
def test_activate2_has_two_scalar_steps(first: Any, second: Any, reverse0: bool, reverse1: bool, want: float) -> None:
    """(3 op0 2) op1 5."""
    data = np.full((1, 2), 3.0, np.float32)

    def call(d: Any, x: Any) -> None:
        nisa.activate2(d, nl.copy, x, 2.0, 5.0, first, second, reverse0=reverse0, reverse1=reverse1)

    assert on_tiles(call, [data], ((1, 2), "float32")).tolist() == [[want, want]]


def test_activate2_reduces_by_maximum_and_knows_prelu() -> None:
    """prelu with slope 0.25; the largest value of each row."""
    data = np.array([[-4.0, 2.0, 1.0]], np.float32)

    def call(d: Any, top: Any, x: Any) -> None:
        nisa.activate2(
            d, nl.prelu, x, 1.0, 0.0, nl.bypass, nl.bypass, relu_param=0.25,
            reduce_op=nl.maximum, reduce_res=top, reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip

    got, top = on_tiles(call, [data], ((1, 3), "float32"), ((1, 1), "float32"))
    assert got.tolist() == [[-1.0, 2.0, 1.0]]
    assert top.tolist() == [[2.0]]


@given(shapes, seeds, st.sampled_from(["float32", "bfloat16"]))
@CASES
def test_reciprocal_is_one_over(shape: tuple[int, int], seed: int, dtype: str) -> None:
    """The Vector Engine's division."""
    data = random_array(seed, shape, dtype, 0.5, 9)
    close(on_tiles(nisa.reciprocal, [data], (shape, "float32")), 1 / wide(data), "float32")


def test_activate2_reduces_by_largest_magnitude() -> None:
    """abs_max keeps the sign."""
    data = np.array([[1.0, -5.0, 3.0]], np.float32)

    def call(d: Any, top: Any, x: Any) -> None:
        nisa.activate2(
            d, nl.copy, x, 1.0, 0.0, nl.bypass, nl.bypass,
            reduce_op=nl.abs_max, reduce_res=top, reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip

    _, top = on_tiles(call, [data], ((1, 3), "float32"), ((1, 1), "float32"))
    assert top.tolist() == [[-5.0]]


def test_a_poisoned_register_of_another_engine_is_not_used() -> None:
    """Scalar and Vector keep separate registers."""

    def kernel() -> None:
        a, total = filled(2, 3), empty(2, 1)
        nisa.tensor_scalar_reduce(empty(2, 3), a, nl.add, 0.0, nl.add, total)
        nisa.activation(empty(2, 3), nl.copy, a, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reduce)

    with pytest.raises(Exception, match="scalar accumulator registers"):
        simulate(kernel)
