"""MX: packing, scales and products, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_kernels.simulator import HbmInput, mx, simulate
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import Array, random_array, wide

CASES = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**32 - 1)
E4M3, E5M2, FP4 = "float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"


def test_fp4_packs_the_first_value_into_the_lowest_bits() -> None:
    """Nibbles 1, 2, 3, 15 are 0xF321: 0.5, 1.0, 1.5, -6.0."""
    packed = mx.pack_fp4_x4(np.array([[1, 2, 3, 15]], np.uint8))
    assert packed.tolist() == [[0xF321]]
    assert mx.unpack_fp4_x4(packed).tolist() == [[[0.5, 1.0, 1.5, -6.0]]]


def test_fp4_has_its_sixteen_values() -> None:
    """e2m1, as ml_dtypes has it."""
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert mx.E2M1_VALUES.tolist() == theirs.tolist()


def test_fp8_packs_the_first_value_into_the_lowest_byte() -> None:
    """1.0, 2.0, -1.0, 0.0 in e4m3fn are bytes 38, 40, B8, 00."""
    values = np.array([[1.0, 2.0, -1.0, 0.0]], ml_dtypes.float8_e4m3fn)
    packed = mx.pack_fp8_x4(values)
    assert packed.tolist() == [[0x00B84038]]
    assert mx.unpack_x4(packed, E4M3).tolist() == [[[1.0, 2.0, -1.0, 0.0]]]


def test_e8m0_is_a_power_of_two_and_255_is_nan() -> None:
    """127 is 1."""
    values = mx.e8m0_to_f32(np.array([127, 128, 120, 0, 255], np.uint8))
    assert values[:4].tolist() == [1.0, 2.0, 2.0**-7, 2.0**-127]
    assert np.isnan(values[4])


@pytest.mark.parametrize(
    ("largest", "dtype", "doubled", "byte"),
    [
        (1.0, E4M3, True, 127 - 7),
        (1.99, E4M3, True, 127 - 7),
        (2.0, E4M3, True, 127 - 6),
        (1.0, E4M3, False, 127 - 8),
        (1.0, E5M2, True, 127 - 14),
        (448.0, E4M3, True, 127 + 8 - 7),
        (0.0, E4M3, True, 0),
    ],
)
def test_the_scale_is_twice_the_ocp_one(largest: float, dtype: str, doubled: bool, byte: int) -> None:
    """floor(log2 max) - (Emax - 1); zeros get 2^-127."""
    values = np.zeros((8, 4), np.float32)
    values[3, 2] = -largest
    _, scale = mx.quantize(values, dtype, doubled_scale=doubled)
    assert scale.tolist() == [[byte]]


def test_quantised_values_divide_by_the_scale() -> None:
    """A group whose largest value is 3: scale 2^(1-7) = 1/64; 3 becomes 192, 0.5 becomes 32."""
    values = np.full((8, 4), 0.5, np.float32)
    values[0, 0] = 3.0
    packed, scale = mx.quantize(values, E4M3)
    lanes = mx.unpack_x4(packed, E4M3)
    assert scale.tolist() == [[121]]
    assert lanes[0, 0].tolist() == [192.0, 32.0, 32.0, 32.0]
    assert mx.dequantize(packed, E4M3, scale)[0, 0].tolist() == [3.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("partitions", "rows"),
    [(32, [0, 1, 2, 3]), (64, [0, 1, 2, 3, 32, 33, 34, 35]), (128, [q * 32 + r for q in range(4) for r in range(4)])],
)
def test_scale_rows_stay_in_their_quadrant(partitions: int, rows: list[int]) -> None:
    """Four rows per 32 partitions."""
    assert mx.scale_rows(partitions).tolist() == rows


def run_quantize(values: Array, dtype: str, offset: int = 0) -> tuple[Array, Array]:
    """quantize_mx of [P, F]; the scale tile as stored, its rows from `offset` on."""
    p, f = values.shape
    rows = p // 8 if p <= 32 else p

    def kernel(x: Any) -> Any:
        out = nl.ndarray((p, f // 4), getattr(nl, dtype))
        scale = nl.ndarray((rows + offset if p <= 32 else rows, f // 4), nl.uint8)
        nisa.memset(scale, 7)
        target = scale[offset:] if offset else scale
        nisa.quantize_mx(out, nl.load(x), target)
        packed, scales = (nl.ndarray(t.shape, t.dtype, nl.shared_hbm) for t in (out, scale))
        nisa.dma_copy(packed, out)
        nisa.dma_copy(scales, scale)
        return packed, scales

    packed, scales = simulate(kernel, values).output
    return packed, scales


@given(seeds, st.sampled_from([32, 64, 128]), st.integers(1, 4), st.sampled_from([E4M3, E5M2]))
@CASES
def test_quantize_mx_groups_eight_partitions_by_four_values(seed: int, p: int, n: int, dtype: str) -> None:
    """Scales and bytes against a loop over groups; other scale rows stay."""
    values = random_array(seed, (p, 4 * n), "bfloat16", -9, 9)
    packed, scales = run_quantize(values, dtype)
    lanes = mx.unpack_x4(packed, dtype)
    emax, element = (8, ml_dtypes.float8_e4m3fn) if dtype == E4M3 else (15, ml_dtypes.float8_e5m2)
    rows = mx.scale_rows(p)
    for g in range(p // 8):
        for c in range(n):
            group = wide(values)[8 * g : 8 * g + 8, 4 * c : 4 * c + 4]
            exponent = int(np.floor(np.log2(np.abs(group).max()))) - (emax - 1)
            assert scales[rows[g], c] == exponent + 127
            want = (group / 2.0**exponent).astype(np.float32).astype(element).astype(np.float32)
            assert np.array_equal(lanes[8 * g : 8 * g + 8, c], want)
    untouched = np.setdiff1d(np.arange(len(scales)), rows)
    assert (scales[untouched] == 7).all()


def test_scales_of_four_tensors_share_a_quadrant() -> None:
    """Rows 4 to 7 of each quadrant, from a tile sliced at 4."""
    values = np.ones((64, 4), ml_dtypes.bfloat16)
    _, scales = run_quantize(values, E4M3, offset=4)
    assert [int(scales[r, 0]) for r in (3, 4, 7, 8, 35, 36, 39, 40)] == [7, 120, 120, 7, 7, 120, 120, 7]


def run_matmul(a: Array, sa: Array, da: str, b: Array, sb: Array, db: str, out: str = "float32") -> Array:
    """nc_matmul_mx of packed arrays [P, n] with dense scales [P/8, n]."""
    p, m = a.shape
    n = b.shape[1]

    def kernel(a: Any, sa: Any, b: Any, sb: Any) -> Any:
        tiles = []
        for array, scale in ((a, sa), (b, sb)):
            tile = nl.ndarray(array.shape, array.dtype)
            nisa.dma_copy(tile, array)
            spread = nl.ndarray(scale.shape, scale.dtype)
            nisa.dma_copy(spread, scale)
            tiles += [tile, spread]
        psum = nl.ndarray((m, n), getattr(nl, out), nl.psum)
        nisa.nc_matmul_mx(psum, tiles[0], tiles[2], tiles[1], tiles[3])
        moved, result = nl.ndarray((m, n), psum.dtype), nl.ndarray((m, n), psum.dtype, nl.shared_hbm)
        nisa.tensor_copy(moved, psum)
        nisa.dma_copy(result, moved)
        return result

    output: Array = simulate(
        kernel,
        HbmInput(a, da),
        mx.scatter_scales(sa, p),
        HbmInput(b, db),
        mx.scatter_scales(sb, p),
    ).output
    return output


@given(seeds, st.sampled_from([32, 64, 128]), st.sampled_from([E4M3, E5M2, FP4]), st.sampled_from([E4M3, FP4]))
@CASES
def test_nc_matmul_mx_contracts_partitions_and_lanes(seed: int, p: int, left: str, right: str) -> None:
    """Sum over partition and lane of value * 2^scale, for every pair of element types."""
    rng = np.random.default_rng(seed)
    m, n = 6, 5

    def operand(dtype: str, columns: int) -> tuple[Array, Array, Array]:
        scale = rng.integers(120, 134, (p // 8, columns)).astype(np.uint8)
        if dtype == FP4:
            nibbles = rng.integers(0, 16, (p, columns, 4)).astype(np.uint8)
            values = np.take(mx.E2M1_VALUES, nibbles)
            packed = mx.pack_fp4_x4(nibbles.reshape(p, -1))
        else:
            element = ml_dtypes.float8_e4m3fn if dtype == E4M3 else ml_dtypes.float8_e5m2
            lanes = rng.uniform(-8, 8, (p, columns, 4)).astype(element)
            values = lanes.astype(np.float32)
            packed = mx.pack_fp8_x4(lanes.reshape(p, -1))
        factor = 2.0 ** (np.repeat(scale, 8, axis=0).astype(int) - 127)
        return packed, scale, wide(values) * factor[:, :, None]

    (a, sa, va), (b, sb, vb) = operand(left, m), operand(right, n)
    want = np.einsum("pmi,pni->mn", va, vb)
    got = run_matmul(a, sa, left, b, sb, right)
    assert np.abs(wide(got) - want).max() <= 1e-5 * np.abs(want).max()


def test_consecutive_k_needs_no_requantising() -> None:
    """With k = 4 p + lane, a hardware group is 32 consecutive k: a checkpoint's MXFP4 block with its scale."""
    rng = np.random.default_rng(5)
    k, m = 128, 2
    nibbles = rng.integers(0, 16, (k, m)).astype(np.uint8)
    block_scale = rng.integers(120, 130, (k // 32, m)).astype(np.uint8)
    weights = np.take(mx.E2M1_VALUES, nibbles) * 2.0 ** (np.repeat(block_scale, 32, 0).astype(int) - 127)
    packed = mx.pack_fp4_x4(nibbles.reshape(32, 4, m).transpose(0, 2, 1).reshape(32, -1))
    x = np.ones((32, 4, 1), ml_dtypes.float8_e4m3fn)
    activations = mx.pack_fp8_x4(x.transpose(0, 2, 1).reshape(32, -1))
    got = run_matmul(packed, block_scale, FP4, activations, np.full((4, 1), 127, np.uint8), E4M3)
    np.testing.assert_allclose(wide(got)[:, 0], weights.sum(0), rtol=1e-6)


def test_a_bf16_result_is_possible() -> None:
    """The PSUM tile may be bfloat16."""
    a = mx.pack_fp8_x4(np.ones((32, 8), ml_dtypes.float8_e4m3fn))
    one = np.full((4, 2), 127, np.uint8)
    assert run_matmul(a, one, E4M3, a, one, E4M3, "bfloat16").astype(float).tolist() == [[128.0, 128.0]] * 2


def test_an_unwritten_scale_row_is_poison() -> None:
    """Only the rows that are used need to be written."""

    def kernel() -> None:
        data = nl.ndarray((64, 2), nl.float8_e4m3fn_x4)
        nisa.memset(data, 0)
        scale = nl.ndarray((64, 2), nl.uint8)
        nisa.memset(scale[0:4], 127)
        nisa.nc_matmul_mx(nl.ndarray((2, 2), nl.float32, nl.psum), data, data, scale, scale)

    with pytest.raises(Exception, match="8 of 128 elements"):
        simulate(kernel)
