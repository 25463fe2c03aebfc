"""Element-wise instructions and reductions agree with plain NumPy over random shapes, strides and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from gk_kernels.simulator import simulate
from gk_kernels.simulator.dtypes import ALL
from tests.simulator.support import Array, close, empty, filled, on_tiles, random_array, wide

FLOATS = ("float32", "bfloat16", "float16")
CASES = settings(max_examples=25, deadline=None)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 7))
seeds = st.integers(0, 2**32 - 1)
floats = st.sampled_from(FLOATS)
flags = st.booleans()

ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": lambda a, b: np.where(a == b, 1.0, 0.0),
    "not_equal": lambda a, b: np.where(a != b, 1.0, 0.0),
    "less": lambda a, b: np.where(a < b, 1.0, 0.0),
    "less_equal": lambda a, b: np.where(a <= b, 1.0, 0.0),
    "greater": lambda a, b: np.where(a > b, 1.0, 0.0),
    "greater_equal": lambda a, b: np.where(a >= b, 1.0, 0.0),
    "logical_and": lambda a, b: np.where((a != 0) & (b != 0), 1.0, 0.0),
    "logical_or": lambda a, b: np.where((a != 0) | (b != 0), 1.0, 0.0),
    "logical_xor": lambda a, b: np.where((a != 0) ^ (b != 0), 1.0, 0.0),
    "abs_max": lambda a, b: np.where(np.abs(a) > np.abs(b), a, b),
    "abs_min": lambda a, b: np.where(np.abs(a) < np.abs(b), a, b),
}
operators = st.sampled_from(sorted(ARITHMETIC))


def op(name: str) -> Any:
    """An operator of nki.language by name."""
    return getattr(nl, name)


@given(shapes, seeds, operators, floats, floats, flags)
@CASES
def test_tensor_tensor_is_the_operator_in_fp32(
    shape: tuple[int, int], seed: int, name: str, dtype: str, out: str, strided: bool
) -> None:
    """dst = data1 op data2, cast once."""
    a, b = random_array(seed, shape, dtype), random_array(seed + 1, shape, dtype)
    got = on_tiles(lambda d, x, y: nisa.tensor_tensor(d, x, y, op(name)), [a, b], (shape, out), strided=strided)
    close(got, ARITHMETIC[name](wide(a), wide(b)), out, 16)


@given(shapes, seeds, operators, operators, floats, flags, flags, flags)
@CASES
def test_tensor_scalar_applies_both_operators_in_order(
    shape: tuple[int, int], seed: int, first: str, second: str, dtype: str, column: bool, reverse0: bool, reverse1: bool
) -> None:
    """(data op0 a) op1 b with constants or columns, each side reversible."""
    data = random_array(seed, shape, dtype)
    a = random_array(seed + 1, (shape[0], 1))
    b = np.float32(1.5)

    def call(d: Any, x: Any, y: Any) -> None:
        operand0 = y if column else 0.75
        nisa.tensor_scalar(d, x, op(first), operand0, reverse0, op(second), float(b), reverse1)

    got = on_tiles(call, [data, a], (shape, "float32"))
    operand = wide(a) if column else np.float64(0.75)
    step = ARITHMETIC[first](operand, wide(data)) if reverse0 else ARITHMETIC[first](wide(data), operand)
    step = step.astype(np.float32).astype(np.float64)
    want = ARITHMETIC[second](wide(b), step) if reverse1 else ARITHMETIC[second](step, wide(b))
    close(got, want, "float32", 64)


@given(shapes, seeds, operators, operators, floats, flags)
@CASES
def test_scalar_tensor_tensor_is_a_scalar_step_then_a_tensor_step(
    shape: tuple[int, int], seed: int, first: str, second: str, dtype: str, reverse1: bool
) -> None:
    """(data op0 2.5) op1 tile."""
    data, tile = random_array(seed, shape, dtype), random_array(seed + 1, shape)

    def call(d: Any, x: Any, y: Any) -> None:
        nisa.scalar_tensor_tensor(d, x, op(first), 2.5, op(second), y, reverse1=reverse1)

    got = on_tiles(call, [data, tile], (shape, "float32"))
    step = ARITHMETIC[first](wide(data), np.float64(2.5)).astype(np.float32).astype(np.float64)
    want = ARITHMETIC[second](wide(tile), step) if reverse1 else ARITHMETIC[second](step, wide(tile))
    close(got, want, "float32", 64)


UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "square": np.square,
    "relu": lambda a: np.maximum(a, 0),
    "reciprocal": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a),
}


@pytest.mark.parametrize("name", sorted(UNARY))
def test_tensor_scalar_takes_unary_operators(name: str) -> None:
    """The unary ALU operators ignore the operand."""
    data = random_array(3, (5, 7), low=0.5)
    got = on_tiles(lambda d, x: nisa.tensor_scalar(d, x, op(name), 0), [data], ((5, 7), "float32"))
    close(got, UNARY[name](wide(data)), "float32")


@given(shapes, seeds, st.sampled_from(["bitwise_and", "bitwise_or", "bitwise_xor"]), st.sampled_from([8, 16, 32]))
@CASES
def test_bitwise_operators_see_bits(shape: tuple[int, int], seed: int, name: str, bits: int) -> None:
    """Integers of any width, no cast."""
    dtype = f"uint{bits}"
    a, b = (random_array(seed + i, shape, dtype, high=2**bits - 1) for i in range(2))
    got = on_tiles(lambda d, x, y: nisa.tensor_tensor(d, x, y, op(name)), [a, b], (shape, dtype))
    assert np.array_equal(got, getattr(np, name)(a, b))
    masked = on_tiles(
        lambda d, x: nisa.tensor_scalar(d, x, nl.right_shift, 3, op1=op(name), operand1=0x15), [a], (shape, dtype)
    )
    assert np.array_equal(masked, getattr(np, name)(a >> 3, np.array(0x15, a.dtype)))


def test_shifts_are_logical_and_invert_flips_every_bit() -> None:
    """-8 >> 1 shifts in a zero."""
    data = np.array([[-8, 5]], np.int32)
    got = on_tiles(lambda d, x: nisa.tensor_scalar(d, x, nl.right_shift, 1), [data], ((1, 2), "int32"))
    assert got.tolist() == [[0x7FFFFFFC, 2]]
    got = on_tiles(lambda d, x: nisa.tensor_scalar(d, x, nl.left_shift, 2), [data], ((1, 2), "int32"))
    assert got.tolist() == [[-32, 20]]
    got = on_tiles(lambda d, x: nisa.tensor_scalar(d, x, nl.invert, None), [data], ((1, 2), "int32"))
    assert got.tolist() == [[7, -6]]


def test_a_bitwise_column_is_per_partition() -> None:
    """An integer [P, 1] operand."""
    data, column = np.array([[12, 10], [12, 10]], np.int32), np.array([[8], [2]], np.int32)
    got = on_tiles(lambda d, x, c: nisa.tensor_scalar(d, x, nl.bitwise_and, c), [data, column], ((2, 2), "int32"))
    assert got.tolist() == [[8, 8], [0, 2]]


def test_32_bit_integers_add_exactly_on_gpsimd_and_in_fp32_on_vector() -> None:
    """2^24 + 1 survives on GpSimd and not in fp32."""
    a, b = np.array([[2**24]], np.int32), np.array([[1]], np.int32)
    exact = on_tiles(lambda d, x, y: nisa.tensor_tensor(d, x, y, nl.add), [a, b], ((1, 1), "int32"))
    rounded = on_tiles(
        lambda d, x, y: nisa.tensor_tensor(d, x, y, nl.add, engine=nisa.engine.vector), [a, b], ((1, 1), "int32")
    )
    assert (exact[0, 0], rounded[0, 0]) == (16777217, 16777216)


def test_power_runs_on_gpsimd() -> None:
    """x ** y."""
    a, b = random_array(1, (3, 4), low=0.5), random_array(2, (3, 4))
    got = on_tiles(lambda d, x, y: nisa.tensor_tensor(d, x, y, nl.power), [a, b], ((3, 4), "float32"))
    close(got, wide(a) ** wide(b), "float32", 10)


@given(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)), seeds, st.integers(1, 2), floats, flags)
@CASES
def test_tensor_reduce_reduces_the_last_axes(
    shape: tuple[int, int, int], seed: int, first: int, dtype: str, negate: bool
) -> None:
    """Sum, maximum and minimum over axes first..2, optionally negated."""
    data = random_array(seed, shape, dtype)
    axes = tuple(range(first, 3))
    kept = shape[:first] if first > 1 else (shape[0], 1)
    for name, function in (("add", np.sum), ("maximum", np.max), ("minimum", np.min)):
        got = on_tiles(
            lambda d, x, name=name: nisa.tensor_reduce(d, op(name), x, axes, negate=negate), [data], (kept, "float32")
        )
        want = function(wide(data), axis=axes).reshape(kept)
        close(got, -want if negate else want, "float32", 100)


def test_tensor_reduce_multiplies_subtracts_and_takes_logic() -> None:
    """Literal rows: product, first minus the rest, any, all, bits."""
    data = np.array([[2.0, 3.0, 4.0], [0.0, 5.0, 1.0]], np.float32)
    want = {"multiply": [24, 0], "subtract": [-5, -6], "logical_or": [1, 1], "logical_and": [1, 0]}
    for name, row in want.items():
        got = on_tiles(lambda d, x, n=name: nisa.tensor_reduce(d, op(n), x, 1), [data], ((2, 1), "float32"))
        assert got.ravel().tolist() == row
    bits = np.array([[12, 10], [1, 2]], np.uint8)
    got = on_tiles(lambda d, x: nisa.tensor_reduce(d, nl.bitwise_or, x, 1), [bits], ((2, 1), "uint8"))
    assert got.ravel().tolist() == [14, 3]


def test_tensor_scalar_reduce_also_returns_the_row_total_and_keeps_it() -> None:
    """The registers carry over between instructions; load_reduce presets them; negate only changes what is read."""
    data = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    cmd = nisa.reduce_cmd

    def call(d: Any, first: Any, second: Any, third: Any, x: Any) -> None:
        nisa.tensor_scalar_reduce(d, x, nl.multiply, 2.0, nl.add, first)
        nisa.tensor_scalar_reduce(d, x, nl.multiply, 1.0, nl.add, second, reduce_cmd=cmd.reduce)
        nisa.tensor_scalar_reduce(
            d, x, nl.add, 0.0, nl.maximum, third, reduce_cmd=cmd.load_reduce, reduce_init=3.5, reduce_res_negate=True
        )

    column = ((2, 1), "float32")
    _, first, second, third = on_tiles(call, [data], ((2, 2), "float32"), column, column, column)
    assert first.ravel().tolist() == [6.0, 14.0]
    assert second.ravel().tolist() == [9.0, 21.0]
    assert third.ravel().tolist() == [-3.5, -4.0]


@given(shapes, seeds, st.sampled_from(["add", "multiply", "maximum", "minimum"]))
@CASES
def test_tensor_scalar_cumulative_is_a_running_reduction(shape: tuple[int, int], seed: int, name: str) -> None:
    """out[i] = op1(in[i] + 0.25, out[i-1])."""
    data = random_array(seed, shape, low=-1, high=1)
    got = on_tiles(lambda d, x: nisa.tensor_scalar_cumulative(d, x, nl.add, op(name), 0.25), [data], (shape, "float32"))
    running: dict[str, Any] = {"add": np.cumsum, "multiply": np.cumprod}
    values = wide(data) + 0.25
    extreme = np.maximum if name == "maximum" else np.minimum
    want = running[name](values, axis=1) if name in running else extreme.accumulate(values, axis=1)
    close(got, want, "float32", 10)


@given(shapes, seeds, flags)
@CASES
def test_tensor_tensor_scan_feeds_each_result_into_the_next(shape: tuple[int, int], seed: int, column: bool) -> None:
    """state = a[i] * state + b[i]."""
    a, b = random_array(seed, shape, low=-1, high=1), random_array(seed + 1, shape)
    initial = random_array(seed + 2, (shape[0], 1))

    def call(d: Any, x: Any, y: Any, z: Any) -> None:
        nisa.tensor_tensor_scan(d, x, y, z if column else 0.5, nl.multiply, nl.add)

    got = on_tiles(call, [a, b, initial], (shape, "float32"))
    state = wide(initial).ravel() if column else np.full(shape[0], 0.5)
    for i in range(shape[1]):
        state = wide(a)[:, i] * state + wide(b)[:, i]
        np.testing.assert_allclose(got[:, i], state, rtol=1e-5, atol=1e-5)


def test_iota_counts_over_its_pattern_and_the_partitions() -> None:
    """offset 5, 100 per partition, [[10, 2], [1, 3]]."""
    got = on_tiles(
        lambda d: nisa.iota(d, [[10, 2], [1, 3]], offset=5, channel_multiplier=100), [], ((2, 2, 3), "int32")
    )
    assert got.tolist() == [[[5, 6, 7], [15, 16, 17]], [[105, 106, 107], [115, 116, 117]]]


@pytest.mark.parametrize("dtype", [d for d in ALL if ALL[d].kind != "x" and d != "float8_e8m0fnu"])
def test_memset_writes_one_in_every_dtype(dtype: str) -> None:
    """The ml_dtypes kinds are 'V'; a bfloat16 one is 0x3F80, not zero."""
    got = on_tiles(lambda d: nisa.memset(d, 1), [], ((2, 3), dtype))
    assert got.astype(np.float32).tolist() == [[1.0] * 3] * 2


def test_memset_bfloat16_has_the_right_bits() -> None:
    """-2.5 is 0xC020."""
    got = on_tiles(lambda d: nisa.memset(d, -2.5), [], ((1, 2), "bfloat16"))
    assert got.view(np.uint16).tolist() == [[0xC020, 0xC020]]


def test_fp32_to_integers_rounds_to_even_and_saturates() -> None:
    """Halves go to the even neighbour; NaN becomes 0."""
    data = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0, np.nan]], np.float32)
    for dtype, row in (
        ("int8", [0, 2, 2, 0, -2, 127, -128, 0]),
        ("uint8", [0, 2, 2, 0, 0, 255, 0, 0]),
        ("int16", [0, 2, 2, 0, -2, 300, -300, 0]),
    ):
        got = on_tiles(lambda d, x: nisa.tensor_copy(d, x), [data], ((1, 8), dtype))
        assert got.tolist() == [row]
    big = np.array([[3e9, -3e9, 2147483520.0]], np.float32)
    assert on_tiles(nisa.tensor_copy, [big], ((1, 3), "int32")).tolist() == [[2147483647, -2147483648, 2147483520]]
    assert on_tiles(nisa.tensor_copy, [big], ((1, 3), "uint32")).tolist() == [[3000000000, 0, 2147483520]]


def test_fp32_to_narrow_floats_rounds_to_even_and_overflows_as_the_format_does() -> None:
    """e4m3fn ends at 448 and has no infinity; e4m3 ends at 240 and has."""
    data = np.array([[1.0625, 1.1875, 448.0, 1000.0, 248.0]], np.float32)
    fn = on_tiles(nisa.tensor_copy, [data], ((1, 5), "float8_e4m3fn")).astype(np.float32)[0]
    assert fn[:3].tolist() == [1.0, 1.25, 448.0]
    assert math.isnan(fn[3])
    ieee = on_tiles(nisa.tensor_copy, [data], ((1, 5), "float8_e4m3")).astype(np.float32)[0]
    assert ieee.tolist() == [1.0, 1.25, math.inf, math.inf, math.inf]
    tf32 = on_tiles(nisa.tensor_copy, [np.array([[1 + 2**-11, 1 + 3 * 2**-11]], np.float32)], ((1, 2), "tfloat32"))
    assert tf32.tolist() == [[1.0, 1 + 2**-9]]


def test_a_copy_between_equal_dtypes_keeps_every_bit() -> None:
    """A NaN with a payload survives."""
    bits = np.array([[0x7FC1, 0x8001, 0x0001]], np.uint16)
    got = on_tiles(nisa.tensor_copy, [bits.view(ml_dtypes.bfloat16)], ((1, 3), "bfloat16"))
    assert got.view(np.uint16).tolist() == bits.tolist()


def test_a_copy_within_one_tile_may_overlap() -> None:
    """Columns 0..3 move to 1..4."""
    got = on_tiles(lambda d: (nisa.iota(d, [[1, 5]]), nisa.tensor_copy(d[:, 1:5], d[:, 0:4])), [], ((1, 5), "float32"))
    assert got.tolist() == [[0.0, 0.0, 1.0, 2.0, 3.0]]


def test_language_wrappers_compute_what_they_say() -> None:
    """nl.add and kin make new tiles."""
    x = random_array(5, (8, 8), low=0.5)

    def kernel(x: Any) -> Any:
        t = nl.load(x)
        results = [
            nl.add(t, t),
            nl.subtract(1.0, t),
            nl.divide(t, nl.full((8, 8), 2.0, nl.float32)),
            nl.negative(t),
            nl.exp(t),
            nl.softmax(t),
            nl.transpose(t),
            nl.where(nl.greater(t, 2.0), t, nl.zeros_like(t)),
            nl.matmul(t, t),
            nl.broadcast_to(nl.sum(t, 1), (8, 8)),
            nl.broadcast_to(nl.mean(t, 1), (8, 8)),
            nl.broadcast_to(nl.max(t, 1), (8, 8)),
            nl.broadcast_to(nl.expand_dims(nl.sum(t, 1, keepdims=True), 1).squeeze_dim(1), (8, 8)),
            nl.divide(t, 4.0),
            nl.square(t),
            nl.logical_not(nl.greater(t, 2.0)),
            nl.broadcast_to(nl.all(nl.greater(t, 1.0), 1), (8, 8)),
            nl.load_transpose2d(x),
            nl.multiply(nl.ones((8, 8), nl.float32), t),
        ]
        outs = []
        for result in results:
            out = nl.ndarray((8, 8), nl.float32, nl.shared_hbm)
            if result.buffer is nl.psum:
                moved = nl.empty_like(result, buffer=nl.sbuf)
                nisa.tensor_copy(moved, result)
                result = moved
            nl.store(out, result)
            outs.append(out)
        return tuple(outs)

    outs = simulate(kernel, x).output
    v = wide(x)
    soft = np.exp(v - v.max(1, keepdims=True))
    wants = [
        v + v,
        1 - v,
        v / 2,
        -v,
        np.exp(v),
        soft / soft.sum(1, keepdims=True),
        v.T,
        np.where(v > 2, v, 0),
        v @ v,
        np.broadcast_to(v.sum(1, keepdims=True), v.shape),
        np.broadcast_to(v.mean(1, keepdims=True), v.shape),
        np.broadcast_to(v.max(1, keepdims=True), v.shape),
        np.broadcast_to(v.sum(1, keepdims=True), v.shape),
        v / 4,
        v * v,
        np.where(v > 2, 0, 1),
        np.broadcast_to((v > 1).all(1, keepdims=True), v.shape),
        v.T,
        v,
    ]
    for got, want in zip(outs, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_identity_and_constants_can_be_asked_for() -> None:
    """One identity per size and dtype; a constant in shared HBM."""

    def kernel() -> Any:
        eye = nl.shared_identity_matrix(3, nl.float32)
        assert nl.shared_identity_matrix(3, nl.float32) is eye
        out = nl.ndarray((3, 3), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, eye)
        return out, nl.shared_constant(np.arange(4, dtype=np.int32)), nl.full((2, 5), 3.0, nl.float32, nl.shared_hbm)

    eye, constant, filled_hbm = simulate(kernel).output
    assert eye.tolist() == np.eye(3).tolist()
    assert constant.tolist() == [0, 1, 2, 3]
    assert filled_hbm.tolist() == [[3.0] * 5] * 2


def test_a_broadcast_view_can_be_read() -> None:
    """A column read across four elements."""
    column = np.array([[1.0], [2.0]], np.float32)
    got = on_tiles(lambda d, x: nisa.tensor_copy(d, x.broadcast(1, 4)), [column], ((2, 4), "float32"))
    assert got.tolist() == [[1.0] * 4, [2.0] * 4]


def test_inputs_of_other_free_shapes_are_read_in_order() -> None:
    """(2, 6) and (2, 2, 3) hold the same elements per partition."""
    a = np.arange(12, dtype=np.float32).reshape(2, 6)
    b = a.reshape(2, 2, 3)
    got = on_tiles(lambda d, x, y: nisa.tensor_tensor(d, x, y, nl.add), [a, b], ((2, 3, 2), "float32"))
    assert got.ravel().tolist() == (2 * a).ravel().tolist()


def test_psum_can_be_an_operand() -> None:
    """One input in PSUM, and the result in PSUM."""

    def kernel() -> Any:
        a, b = filled(2, 3, buffer=nl.psum, value=2.0), filled(2, 3, value=5.0)
        c, d = empty(2, 3, buffer=nl.psum), empty(2, 3)
        nisa.tensor_tensor(c, a, b, nl.multiply)
        nisa.tensor_copy(d, c)
        out = nl.ndarray((2, 3), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, d)
        return out

    assert simulate(kernel).output.tolist() == [[10.0] * 3] * 2
