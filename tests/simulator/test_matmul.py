"""The Tensor Engine: products in fp32, PSUM accumulation, transposes bit for bit."""

from __future__ import annotations

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
from tests.simulator.support import Array, empty, filled, random_array, wide

CASES = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def product(
    stationary: Array, moving: Array, *, out: str = "float32", strided: bool = False, passes: int = 1, **options: Any
) -> Array:
    """stationary^T . moving through PSUM, `passes` times accumulated."""

    def kernel(a: Any, b: Any) -> Any:
        def tile(array: Any) -> Any:
            made = nl.ndarray(array.shape, array.dtype)
            if strided:
                made = nl.ndarray((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., 1::2]
            nisa.dma_copy(made, array)
            return made

        left, right = tile(a), tile(b)
        m, n = left.shape[-1], right.shape[-1]
        psum = nl.ndarray((m, n), ALL[out], nl.psum)
        for _ in range(passes):
            nisa.nc_matmul(psum, left, right, **options)
        moved, result = nl.ndarray((m, n), ALL[out]), nl.ndarray((m, n), ALL[out], nl.shared_hbm)
        nisa.tensor_copy(moved, psum)
        nisa.dma_copy(result, moved)
        return result

    result: Array = simulate(kernel, stationary, moving).output
    return result


@given(
    st.tuples(st.sampled_from([1, 3, 32, 64, 128]), st.integers(1, 17), st.integers(1, 33)),
    seeds,
    st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"]),
    st.booleans(),
)
@CASES
def test_a_product_is_exact_to_fp32(sizes: tuple[int, int, int], seed: int, dtype: str, strided: bool) -> None:
    """Products of the stored values, relative error below 1e-5 of the largest result."""
    k, m, n = sizes
    a, b = random_array(seed, (k, m), dtype), random_array(seed + 1, (k, n), dtype)
    want = wide(a).T @ wide(b)
    got = product(a, b, strided=strided)
    assert np.abs(wide(got) - want).max() <= 1e-5 * max(1.0, np.abs(want).max())


def test_mixed_narrow_dtypes_multiply() -> None:
    """fp8 weights, bf16 activations."""
    a, b = random_array(1, (64, 5), "float8_e5m2"), random_array(2, (64, 7), "bfloat16")
    np.testing.assert_allclose(product(a, b), wide(a).T @ wide(b), rtol=1e-5, atol=1e-4)


def test_the_small_product_by_hand() -> None:
    """[[1, 2], [3, 4]]^T . [[5], [7]]."""
    got = product(np.array([[1, 2], [3, 4]], np.float32), np.array([[5], [7]], np.float32))
    assert got.tolist() == [[26.0], [38.0]]


def test_without_a_flag_the_first_write_overwrites_and_the_next_adds() -> None:
    """Three passes are three times the product; accumulate=False is one."""
    a, b = np.full((2, 2), 1.0, np.float32), np.full((2, 3), 2.0, np.float32)
    assert product(a, b, passes=3).tolist() == [[12.0] * 3] * 2
    assert product(a, b, passes=3, accumulate=False).tolist() == [[4.0] * 3] * 2


def test_accumulate_by_loop_index_sums_the_contraction() -> None:
    """K = 96 in three tiles of 32."""
    a, b = random_array(1, (96, 5)), random_array(2, (96, 7))

    def kernel(a: Any, b: Any) -> Any:
        psum = nl.ndarray((5, 7), nl.float32, nl.psum)
        for i in nl.static_range(3):
            left, right = nl.load(a[32 * i : 32 * i + 32]), nl.load(b[32 * i : 32 * i + 32])
            nisa.nc_matmul(psum, left, right, accumulate=(i > 0))
        moved, out = nl.ndarray((5, 7), nl.float32), nl.ndarray((5, 7), nl.float32, nl.shared_hbm)
        nisa.tensor_copy(moved, psum)
        nisa.dma_copy(out, moved)
        return out

    np.testing.assert_allclose(simulate(kernel, a, b).output, wide(a).T @ wide(b), rtol=1e-5, atol=1e-5)


def test_regions_of_one_psum_tensor_accumulate_separately() -> None:
    """Columns 0-1 twice, columns 2-4 once."""

    def kernel() -> Any:
        psum = nl.ndarray((2, 5), nl.float32, nl.psum)
        ones = filled(4, 2)
        for columns in ((0, 2), (2, 5), (0, 2)):
            nisa.nc_matmul(psum[:, columns[0] : columns[1]], ones, filled(4, columns[1] - columns[0]))
        moved, out = nl.ndarray((2, 5), nl.float32), nl.ndarray((2, 5), nl.float32, nl.shared_hbm)
        nisa.tensor_copy(moved, psum)
        nisa.dma_copy(out, moved)
        return out

    assert simulate(kernel).output.tolist() == [[8.0, 8.0, 4.0, 4.0, 4.0]] * 2


def test_trn3_may_accumulate_onto_what_another_engine_wrote() -> None:
    """A memset of 10, then a matmul that adds 4."""

    def kernel() -> Any:
        psum = filled(2, 3, buffer=nl.psum, value=10.0)
        nisa.nc_matmul(psum[:, 0:3], filled(4, 2), filled(4, 3), accumulate=False)
        nisa.memset(psum, 10.0)
        nisa.nc_matmul(psum, filled(4, 2), filled(4, 3), accumulate=True)
        moved, out = nl.ndarray((2, 3), nl.float32), nl.ndarray((2, 3), nl.float32, nl.shared_hbm)
        nisa.tensor_copy(moved, psum)
        nisa.dma_copy(out, moved)
        return out

    assert simulate(kernel).output.tolist() == [[14.0] * 3] * 2


def test_a_bf16_result_is_rounded_at_each_write() -> None:
    """256 + 1 rounds to 256 in bfloat16, every time."""
    a = np.array([[256.0], [1.0]], np.float32)
    got = product(a, np.array([[1.0], [1.0]], np.float32), out="bfloat16")
    assert got.astype(float).tolist() == [[256.0]]


def test_double_row_contracts_partitions_and_the_pair() -> None:
    """[K, 2, M] and [K, 2, N] contract 2K values."""
    a, b = random_array(1, (32, 2, 5), "float8_e4m3"), random_array(2, (32, 2, 7), "float8_e4m3")
    got = product(a, b, perf_mode=nisa.matmul_perf_mode.double_row)
    np.testing.assert_allclose(got, np.einsum("kim,kin->mn", wide(a), wide(b)), rtol=1e-5, atol=1e-4)


def test_row_tiles_give_the_same_product() -> None:
    """K = 32 in the second row tile of four."""
    a, b = random_array(1, (32, 5)), random_array(2, (32, 7))
    got = product(a, b, tile_position=(32, 0), tile_size=(32, 128))
    np.testing.assert_allclose(got, wide(a).T @ wide(b), rtol=1e-5, atol=1e-5)


@given(st.integers(1, 33), st.integers(1, 40), st.sampled_from(["float32", "bfloat16", "float16"]), seeds)
@CASES
def test_a_transpose_swaps_partitions_and_free_axis(p: int, f: int, dtype: str, seed: int) -> None:
    """On the Tensor Engine into PSUM."""
    data = random_array(seed, (p, f), dtype)

    def kernel(x: Any) -> Any:
        psum = nl.ndarray((f, p), x.dtype, nl.psum)
        nisa.nc_transpose(psum, nl.load(x))
        moved, out = nl.ndarray((f, p), x.dtype), nl.ndarray((f, p), x.dtype, nl.shared_hbm)
        nisa.tensor_copy(moved, psum)
        nisa.dma_copy(out, moved)
        return out

    assert np.array_equal(simulate(kernel, data).output, data.T)


def test_a_transpose_keeps_nan_bits_and_flattens_free_axes() -> None:
    """(2, 2, 2) becomes (4, 2); NaN with a payload survives, as it does with is_transpose."""
    bits = np.array([[[0x7FC1, 1], [2, 3]], [[4, 5], [6, 0xFFFF]]], np.uint16)

    def kernel(x: Any) -> Any:
        tile, eye = nl.load(x), nl.shared_identity_matrix(2, nl.bfloat16)
        outs = []
        for use_matmul in (False, True):
            psum = nl.ndarray((4, 2), nl.bfloat16, nl.psum)
            if use_matmul:
                nisa.nc_matmul(psum, tile, eye, is_transpose=True)
            else:
                nisa.nc_transpose(psum, tile)
            moved, out = nl.ndarray((4, 2), nl.bfloat16), nl.ndarray((4, 2), nl.bfloat16, nl.shared_hbm)
            nisa.tensor_copy(moved, psum)
            nisa.dma_copy(out, moved)
            outs.append(out)
        return tuple(outs)

    for got in simulate(kernel, bits.view(ml_dtypes.bfloat16)).output:
        assert got.view(np.uint16).tolist() == bits.reshape(2, 4).T.tolist()


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_vector_engine_transposes_small_tiles_in_sbuf(dtype: str) -> None:
    """Integers too."""
    data = random_array(2, (5, 32), dtype)

    def kernel(x: Any) -> Any:
        moved, out = nl.ndarray((32, 5), x.dtype), nl.ndarray((32, 5), x.dtype, nl.shared_hbm)
        nisa.nc_transpose(moved, nl.load(x), engine=nisa.engine.vector)
        nisa.dma_copy(out, moved)
        return out

    assert np.array_equal(simulate(kernel, data).output, data.T)


def test_an_fp8_transpose_lands_on_every_second_byte() -> None:
    """The destination has stride 2."""
    data = random_array(2, (5, 7), "float8_e4m3")

    def kernel(x: Any) -> Any:
        psum = nl.ndarray((7, 10), x.dtype, nl.psum)
        nisa.nc_transpose(psum[:, ::2], nl.load(x))
        moved, out = nl.ndarray((7, 5), x.dtype), nl.ndarray((7, 5), x.dtype, nl.shared_hbm)
        nisa.tensor_copy(moved, psum[:, ::2])
        nisa.dma_copy(out, moved)
        return out

    assert np.array_equal(wide(simulate(kernel, data).output), wide(data).T)


def test_a_half_written_psum_is_still_poisoned() -> None:
    """A matmul of two columns does not write the third."""

    def kernel() -> None:
        psum = nl.ndarray((2, 3), nl.float32, nl.psum)
        nisa.nc_matmul(psum[:, 0:2], filled(4, 2), filled(4, 2))
        nisa.tensor_copy(empty(2, 3), psum)

    with pytest.raises(Exception, match="2 of 6 elements"):
        simulate(kernel)
