"""Masks, searches and movement agree with plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_kernels.simulator import BoundsError
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import Array, on_tiles, random_array, wide

CASES = settings(max_examples=20, deadline=None)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 7))
seeds = st.integers(0, 2**32 - 1)
FLOAT = "float32"
FP32_MIN = -3.4028234663852886e38


def test_affine_select_makes_a_causal_mask() -> None:
    """Keep where p - f >= 0."""
    data = np.arange(12, dtype=np.float32).reshape(3, 4) + 1
    got = on_tiles(
        lambda d, x: nisa.affine_select(d, [[-1, 4]], 1, x, -9.0, cmp_op=nl.greater_equal), [data], ((3, 4), FLOAT)
    )
    assert got.tolist() == [[1, -9, -9, -9], [5, 6, -9, -9], [9, 10, 11, -9]]


@given(shapes, seeds, st.sampled_from(["equal", "less", "greater_equal", "not_equal"]))
@CASES
def test_affine_select_evaluates_its_expression(shape: tuple[int, int], seed: int, name: str) -> None:
    """offset + p * channel_multiplier + f * step against 0."""
    rng = np.random.default_rng(seed)
    step, channel, offset = (int(v) for v in rng.integers(-3, 4, 3))
    data = random_array(seed, shape)
    got = on_tiles(
        lambda d, x: nisa.affine_select(d, [[step, shape[1]]], channel, x, 7.0, getattr(nl, name), offset),
        [data],
        (shape, FLOAT),
    )
    p, f = np.indices(shape)
    assert np.array_equal(
        got, np.where(getattr(np, name)(offset + p * channel + f * step, 0), data, 7.0).astype(data.dtype)
    )


@given(shapes, seeds, st.integers(0, 5))
@CASES
def test_range_select_keeps_indices_between_two_bounds(shape: tuple[int, int], seed: int, start: int) -> None:
    """low <= start + f < high, FP32_MIN elsewhere, and the row maximum."""
    data = random_array(seed, shape)
    rng = np.random.default_rng(seed)
    low, high = (rng.integers(0, 9, (shape[0], 1)).astype(np.float32) for _ in range(2))

    def call(d: Any, top: Any, x: Any, a: Any, b: Any) -> None:
        nisa.range_select(d, x, nl.greater_equal, nl.less, a, b, reduce_res=top, range_start=start)

    got, top = on_tiles(call, [data, low, high], (shape, FLOAT), ((shape[0], 1), FLOAT))
    index = start + np.arange(shape[1])[None, :]
    want = np.where((index >= low) & (index < high), wide(data), FP32_MIN)
    assert np.array_equal(wide(got), want)
    assert np.array_equal(wide(top), want.max(1, keepdims=True))


@given(shapes, seeds, st.booleans(), st.booleans())
@CASES
def test_select_reduce_chooses_by_predicate(shape: tuple[int, int], seed: int, reverse: bool, column: bool) -> None:
    """on_true or on_false (a constant or a column), and the row maximum."""
    data, other = random_array(seed, shape), random_array(seed + 1, (shape[0], 1))
    keep = random_array(seed + 2, shape, "uint8", 0, 2)

    def call(d: Any, top: Any, k: Any, x: Any, y: Any) -> None:
        nisa.select_reduce(d, k, x, y if column else -2.0, top, nisa.reduce_cmd.reset_reduce, reverse_pred=reverse)

    got, top = on_tiles(call, [keep, data, other], (shape, FLOAT), ((shape[0], 1), FLOAT))
    want = np.where((keep != 0) ^ reverse, data, other if column else np.float32(-2.0))
    assert np.array_equal(got, want)
    assert np.array_equal(top, want.max(1, keepdims=True))


@given(shapes, seeds, st.booleans(), st.booleans(), st.sampled_from(["uint8", "uint16", "uint32"]))
@CASES
def test_tensor_copy_predicated_leaves_the_rest(
    shape: tuple[int, int], seed: int, reverse: bool, strided: bool, dtype: str
) -> None:
    """Where the predicate is not 0 (or is, reversed)."""
    before, data = random_array(seed, shape), random_array(seed + 1, shape)
    keep = random_array(seed + 2, shape, dtype, 0, 3)
    got = on_tiles(
        lambda d, x, k: nisa.tensor_copy_predicated(d, x, k, reverse_pred=reverse),
        [data, keep],
        (shape, FLOAT),
        start=before,
        strided=strided,
    )
    assert np.array_equal(got, np.where((keep != 0) ^ reverse, data, before))


def test_tensor_copy_predicated_takes_a_constant() -> None:
    """-1 where the predicate holds."""
    keep = np.array([[0, 1, 2]], np.uint8)
    got = on_tiles(
        lambda d, k: nisa.tensor_copy_predicated(d, -1.0, k), [keep], ((1, 3), "bfloat16"),
        start=random_array(1, (1, 3), "bfloat16", 1, 2),
    )  # fmt: skip
    assert got.astype(float)[0, 1:].tolist() == [-1.0, -1.0]
    assert got.astype(float)[0, 0] >= 1.0


@given(st.tuples(st.integers(1, 5), st.integers(8, 20)), seeds)
@CASES
def test_max8_then_find_index8_gives_the_top_values_and_places(shape: tuple[int, int], seed: int) -> None:
    """Descending values; ties take successive places."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 12, shape).astype(np.float32)  # many ties

    def call(values: Any, places: Any, x: Any) -> None:
        nisa.max8(values, x)
        nisa.nc_find_index8(places, x, values)

    values, places = on_tiles(call, [data], ((shape[0], 8), FLOAT), ((shape[0], 8), "uint32"))
    for row, best, where in zip(data, values, places, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:8]
        assert best.tolist() == [row[i] for i in order]
        assert where.tolist() == order


def test_a_value_that_is_absent_gets_all_ones() -> None:
    """0xFFFFFFFF, and 0xFFFF in uint16."""
    data = np.arange(8, dtype=np.float32)[None]
    vals = np.array([[7, 0, 99, 3, 99, 1, 1, 2]], np.float32)
    got = on_tiles(nisa.nc_find_index8, [data, vals], ((1, 8), "uint32"))
    assert got.tolist() == [[7, 0, 0xFFFFFFFF, 3, 0xFFFFFFFF, 1, 0xFFFFFFFF, 2]]
    got = on_tiles(nisa.nc_find_index8, [data, vals], ((1, 8), "uint16"))
    assert got[0, 2] == 0xFFFF


def test_match_replace_pairs_repeats_from_the_last_value_down() -> None:
    """The documents' example."""
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    replaced, places = on_tiles(
        lambda d, i, x, v: nisa.nc_match_replace8(d, x, v, -1.0, i), [data, vals], ((1, 11), FLOAT), ((1, 8), "uint32")
    )
    assert places.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert replaced.tolist() == [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]]


def test_sequence_bounds_give_first_and_one_past_last() -> None:
    """Segment 0 is padding: (n, -1)."""
    ids = np.array([[1, 1, 2, 2, 2, 0]], np.int32)
    got = on_tiles(nisa.sequence_bounds, [ids], ((1, 2, 6), "int32"))
    assert got.tolist() == [[[0, 0, 2, 2, 2, 6], [2, 2, 5, 5, 5, -1]]]


@given(seeds, st.sampled_from([32, 64, 128]), st.integers(1, 5))
@CASES
def test_stream_shuffle_moves_partitions_inside_each_quadrant(seed: int, partitions: int, free: int) -> None:
    """255 leaves the destination."""
    rng = np.random.default_rng(seed)
    mask = [int(m) if m < 32 else 255 for m in rng.integers(0, 36, 32)]
    before, data = random_array(seed, (partitions, free)), random_array(seed + 1, (partitions, free))
    got = on_tiles(lambda d, x: nisa.nc_stream_shuffle(d, x, mask), [data], ((partitions, free), FLOAT), start=before)
    for p in range(partitions):
        want = before[p] if mask[p % 32] == 255 else data[p // 32 * 32 + mask[p % 32]]
        assert np.array_equal(got[p], want)


def test_stream_shuffle_broadcasts_one_partition() -> None:
    """A source of one partition, mask all 0."""
    data = np.array([[1.0, 2.0]], np.float32)
    got = on_tiles(lambda d, x: nisa.nc_stream_shuffle(d, x, [0] * 32), [data], ((7, 2), FLOAT))
    assert got.tolist() == [[1.0, 2.0]] * 7


def test_stream_shuffle_from_a_missing_partition_is_refused() -> None:
    """The source has one partition."""
    with pytest.raises(BoundsError, match="source partition 1"):
        on_tiles(lambda d, x: nisa.nc_stream_shuffle(d, x, [1] * 32), [random_array(0, (1, 2))], ((7, 2), FLOAT))


@given(st.tuples(st.integers(1, 5), st.integers(1, 9)), st.integers(1, 7), seeds)
@CASES
def test_n_gather_takes_elements_within_each_partition(shape: tuple[int, int], count: int, seed: int) -> None:
    """dst[p, i] = data[p, indices[p, i]]."""
    data = random_array(seed, shape)
    index = np.random.default_rng(seed).integers(0, shape[1], (shape[0], count)).astype(np.uint32)
    got = on_tiles(nisa.nc_n_gather, [data, index], ((shape[0], count), FLOAT))
    assert np.array_equal(got, np.take_along_axis(data, index.astype(int), 1))


def test_local_gather_reads_indices_partition_first() -> None:
    """Two cores of 16 partitions, two index columns: 32 indices each."""
    data = random_array(3, (32, 8))
    index = np.random.default_rng(4).integers(0, 7, (32, 2)).astype(np.uint16)
    got = on_tiles(
        lambda d, x, i: nisa.local_gather(d, x, i, num_elem_per_idx=2, num_valid_indices=20), [data, index],
        ((32, 40), FLOAT), start=np.zeros((32, 40), np.float32),
    )  # fmt: skip
    for core in range(2):
        rows = slice(16 * core, 16 * core + 16)
        flat = [int(index[16 * core + p, column]) for column in range(2) for p in range(16)][:20]
        columns = [i + e for i in flat for e in range(2)]
        assert np.array_equal(got[rows], data[rows][:, columns])


@pytest.mark.parametrize(("name", "function"), [("add", np.sum), ("maximum", np.max), ("average", np.mean)])
def test_partition_reduce_reduces_over_partitions(name: str, function: Any) -> None:
    """One row comes out."""
    data = random_array(7, (5, 4))
    got = on_tiles(lambda d, x: nisa.tensor_partition_reduce(d, getattr(nl, name), x), [data], ((1, 4), FLOAT))
    np.testing.assert_allclose(wide(got)[0], function(wide(data), axis=0), rtol=1e-6)


def test_bits_reduce_over_partitions() -> None:
    """12 | 3, 12 & 10."""
    data = np.array([[12, 12], [3, 10]], np.uint8)
    got = on_tiles(lambda d, x: nisa.tensor_partition_reduce(d, nl.bitwise_or, x), [data], ((1, 2), "uint8"))
    assert got.tolist() == [[15, 14]]
    got = on_tiles(lambda d, x: nisa.tensor_partition_reduce(d, nl.bitwise_and, x), [data], ((1, 2), "uint8"))
    assert got.tolist() == [[0, 8]]


def test_a_shuffle_that_leaves_everything_does_nothing() -> None:
    """All 255."""
    before = random_array(1, (32, 2))
    got = on_tiles(lambda d, x: nisa.nc_stream_shuffle(d, x, [255] * 32), [before * 2], ((32, 2), FLOAT), start=before)
    assert np.array_equal(got, before)


def test_nonzero_lists_indices_then_padding_then_the_count() -> None:
    """The documents' example, on partition 16; partition 1 stays."""
    data = np.zeros((17, 8), np.float32)
    data[16, [1, 2, 5]] = 1
    data[1] = 1
    got = on_tiles(
        lambda d, x: nisa.nonzero_with_count(d, x, index_offset=16), [data], ((17, 9), "int32"),
        start=np.full((17, 9), 77, np.int32),
    )  # fmt: skip
    assert got[16].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    assert got[0].tolist() == [-1] * 8 + [0]
    assert got[1].tolist() == [77] * 9


def test_topk_reads_a_snake_and_gives_ascending_values() -> None:
    """n = 18 over 16 partitions: two columns, the second with two elements."""
    data = np.zeros((16, 2), np.float32)
    flat = np.arange(18, dtype=np.float32) * np.where(np.arange(18) % 2, -1, 1)
    for i, value in enumerate(flat):
        data[i % 16, i // 16] = value
    values, places = on_tiles(
        lambda v, i, x: nisa.topk(v, i, x, 18), [data.astype("bfloat16")], ((16, 3), "bfloat16"), ((16, 3), "uint32")
    )
    assert values.astype(float)[5].tolist() == [12.0, 14.0, 16.0]
    assert places[5].tolist() == [12, 14, 16]


@given(st.tuples(st.integers(1, 4), st.integers(1, 9)), seeds)
@CASES
def test_bn_stats_then_aggr_give_mean_and_variance(shape: tuple[int, int], seed: int) -> None:
    """Population variance, over even and odd elements."""
    data = random_array(seed, shape)

    def call(result: Any, stats: Any, x: Any) -> None:
        nisa.bn_stats(stats, x)
        nisa.bn_aggr(result, stats)

    got, stats = on_tiles(call, [data], ((shape[0], 2), FLOAT), ((shape[0], 6), FLOAT))
    assert stats[0, 0] == (shape[1] + 1) // 2
    np.testing.assert_allclose(wide(got)[:, 0], wide(data).mean(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(wide(got)[:, 1], wide(data).var(1), rtol=1e-4, atol=1e-5)


def test_random_numbers_lie_where_they_should() -> None:
    """rand2 in its range, rng of its dtype, dropout zeroes about its share; a seed repeats the sequence."""
    seed = np.array([[7]], np.uint32)

    def call(a: Any, b: Any, c: Any, d: Any, s: Any) -> None:
        nisa.set_rng_seed(s)
        nisa.rand2(a, 2.0, 3.0)
        nisa.set_rng_seed(s)
        nisa.rand2(b, 2.0, 3.0)
        nisa.rng(c)
        nisa.dropout(d, a, 0.25)

    shape = (64, 64)
    a, b, c, d = on_tiles(call, [seed], (shape, FLOAT), (shape, FLOAT), (shape, "uint8"), (shape, FLOAT))
    assert np.array_equal(a, b)
    assert 2.0 <= a.min() < a.max() < 3.0
    assert len(np.unique(c)) > 200
    assert 0.2 < float((d == 0).mean()) < 0.3
    kept: Array = d[d != 0]
    assert np.array_equal(kept, a[d != 0])
