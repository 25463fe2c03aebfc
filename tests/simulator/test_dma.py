"""DMA moves what it says, and counts it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_kernels.simulator import BoundsError, simulate
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import empty, filled, random_array

CASES = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
SKIP = nisa.oob_mode.skip


def out_like(shape: Any, dtype: Any = nl.float32) -> Any:
    """A kernel output."""
    return nl.ndarray(shape, dtype, nl.shared_hbm)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), seeds)
@CASES
def test_a_copy_keeps_row_major_order_across_shapes(a: int, b: int, c: int, seed: int) -> None:
    """(a, b, c) into (a, b * c) and back, through a strided tile."""
    data = random_array(seed, (a, b, c))

    def kernel(x: Any) -> Any:
        tile = empty(a, 2 * b * c)[:, ::2]
        nisa.dma_copy(tile, x)
        out = out_like((c, a, b))
        nisa.dma_copy(out, tile)
        return out

    assert np.array_equal(simulate(kernel, data).output.ravel(), data.ravel())


@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "int32"), ("int32", "float16")])
def test_different_dtypes_convert_through_fp32(source: str, target: str) -> None:
    """Rounded to nearest even once."""
    data = random_array(1, (3, 5), source, -100, 100)

    def kernel(x: Any) -> Any:
        out = out_like((3, 5), getattr(nl, target))
        nisa.dma_copy(out, x)
        return out

    got = simulate(kernel, data).output
    want = data.astype(np.float32)
    want = np.rint(want) if target == "int32" else want
    assert np.array_equal(got, want.astype(got.dtype))


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 8), seeds, st.sampled_from(["int32", "uint32"]))
@CASES
def test_a_gather_reads_the_indexed_rows(rows: int, width: int, count: int, seed: int, index_dtype: str) -> None:
    """By vector_select and by ap, whole rows and parts of rows."""
    table = random_array(seed, (rows, width))
    index = np.random.default_rng(seed).integers(0, rows, (count, 1)).astype(index_dtype)
    part = width - width // 2

    def kernel(table: Any, index: Any) -> Any:
        at = nl.load(index)
        whole, piece = empty(count, width), empty(count, part)
        nisa.dma_copy(whole, table.vector_select(0, at))
        pattern = [[width, count], [1, part]]
        nisa.dma_copy(piece, table.ap(pattern, offset=width // 2, vector_offset=at, indirect_dim=0))
        outs = out_like((count, width)), out_like((count, part))
        nisa.dma_copy(outs[0], whole)
        nisa.dma_copy(outs[1], piece)
        return outs

    whole, piece = simulate(kernel, table, index).output
    assert np.array_equal(whole, table[index[:, 0]])
    assert np.array_equal(piece, table[index[:, 0], width // 2 :])


def test_the_multiplier_comes_from_the_tensor_that_ap_is_called_on() -> None:
    """A reshaped table indexes in its own rows; the leading stride of the pattern is not used."""
    table = np.arange(24, dtype=np.float32).reshape(4, 6)

    def kernel(table: Any) -> Any:
        at = empty(2, 1, dtype=nl.int32)
        nisa.iota(at, [[1, 1]], offset=1, channel_multiplier=4)  # 1, 5
        view = table.reshape((8, 3))
        tile, out = empty(2, 3), out_like((2, 3))
        nisa.dma_copy(tile, view.ap([[999, 2], [1, 3]], vector_offset=at))
        nisa.dma_copy(out, tile)
        return out

    assert simulate(kernel, table).output.tolist() == [[3.0, 4.0, 5.0], [15.0, 16.0, 17.0]]


@given(st.integers(2, 9), st.integers(1, 5), seeds)
@CASES
def test_a_scatter_writes_the_indexed_rows_only(rows: int, width: int, seed: int) -> None:
    """The caller's array is the cache, and is written in place."""
    rng = np.random.default_rng(seed)
    cache = random_array(seed, (rows, width))
    before = cache.copy()
    count = int(rng.integers(1, rows + 1))
    index = rng.permutation(rows)[:count].astype(np.int32)[:, None]
    values = random_array(seed + 1, (count, width))

    def kernel(cache: Any, index: Any, values: Any) -> Any:
        nisa.dma_copy(cache.vector_select(0, nl.load(index)), nl.load(values))
        return cache

    output = simulate(kernel, cache, index, values).output
    before[index[:, 0]] = values
    assert np.array_equal(cache, before)
    assert np.array_equal(output, before)


def test_skip_leaves_the_rows_of_bad_indices_and_counts_them() -> None:
    """-1, as int32 and as uint32, and one past the end."""
    for dtype in ("int32", "uint32"):
        index = np.array([[2], [-1], [0], [4]]).astype(dtype)
        table = np.arange(8, dtype=np.float32).reshape(4, 2)

        def kernel(table: Any, index: Any) -> Any:
            tile, out = filled(4, 2, value=-7.0), out_like((4, 2))
            nisa.dma_copy(tile, table.vector_select(0, nl.load(index)), oob_mode=SKIP)
            nisa.dma_copy(out, tile)
            return out

        result = simulate(kernel, table, index)
        assert result.output.tolist() == [[4, 5], [-7, -7], [0, 1], [-7, -7]]
        assert result.counters[0].skipped_rows == 2
        assert "2 of 4 indices are skipped" in result.warnings[0]


def test_a_scatter_skips_padded_rows() -> None:
    """-1 rows write nothing."""
    cache = np.zeros((3, 2), np.float32)

    def kernel(cache: Any, index: Any) -> None:
        nisa.dma_copy(cache.vector_select(0, nl.load(index)), filled(3, 2, value=9.0), oob_mode=SKIP)

    simulate(kernel, cache, np.array([[-1], [1], [-1]], np.int32))
    assert cache.tolist() == [[0, 0], [9, 9], [0, 0]]


def test_one_bad_row_with_oob_error_changes_nothing() -> None:
    """The refusal comes before any byte is written."""
    cache = np.zeros((3, 2), np.float32)

    def kernel(cache: Any, index: Any) -> None:
        nisa.dma_copy(cache.vector_select(0, nl.load(index)), filled(2, 2, value=9.0))

    with pytest.raises(BoundsError, match="index 3 in row 1"):
        simulate(kernel, cache, np.array([[1], [3]], np.int32))
    assert not cache.any()


def test_skipping_every_row_changes_nothing() -> None:
    """A gather and a gather-add of only bad indices."""

    def kernel(table: Any, index: Any) -> Any:
        at, tile, out = nl.load(index), filled(2, 2, value=3.0), out_like((2, 2))
        nisa.dma_copy(tile, table.vector_select(0, at), oob_mode=SKIP)
        nisa.dma_compute(tile, [tile, table.vector_select(0, at)], nl.add, oob_mode=SKIP)
        nisa.dma_copy(out, tile)
        return out

    result = simulate(kernel, np.ones((3, 2), np.float32), np.array([[-1], [3]], np.int32))
    assert result.output.tolist() == [[3.0, 3.0]] * 2


def test_an_indirect_transpose_skips_columns() -> None:
    """Bad indices leave their column of the destination."""
    table = np.arange(12, dtype=np.float16).reshape(4, 3)
    index = np.full((16, 1), 9, np.uint32)
    index[2, 0] = 1

    def kernel(table: Any, index: Any) -> Any:
        tile, out = filled(3, 16, dtype=nl.float16, value=-1.0), out_like((3, 16), nl.float16)
        nisa.dma_transpose(tile, table.vector_select(0, nl.load(index)), oob_mode=SKIP)
        nisa.dma_copy(out, tile)
        return out

    result = simulate(kernel, table, index)
    assert result.output[:, 2].tolist() == [3.0, 4.0, 5.0]
    assert (np.delete(result.output, 2, axis=1) == -1).all()
    assert result.counters[0].skipped_rows == 15


def test_a_scatter_into_a_fresh_table_writes_only_its_rows() -> None:
    """The other rows stay never-written; a read-only table is copied first."""
    table = np.zeros((3, 2), np.float32)
    table.flags.writeable = False

    def kernel(given: Any, index: Any) -> Any:
        fresh, at = nl.ndarray((3, 2), nl.float32, nl.private_hbm), nl.load(index)
        for target in (fresh, given):
            nisa.dma_copy(target.vector_select(0, at), filled(2, 2, value=4.0))
        out = out_like((2, 2))
        nisa.dma_copy(out, fresh[0:2])
        return out, given

    out, given = simulate(kernel, table, np.array([[1], [0]], np.int32)).output
    assert out.tolist() == [[4.0, 4.0]] * 2
    assert given.tolist() == [[4.0, 4.0], [4.0, 4.0], [0.0, 0.0]]
    assert not table.any()


def test_a_copy_within_one_hbm_tensor_may_overlap() -> None:
    """Rows 0..2 move to 1..3."""
    table = np.arange(4, dtype=np.float32)[:, None].copy()

    def kernel(table: Any) -> None:
        nisa.dma_copy(table[1:4], table[0:3])

    simulate(kernel, table)
    assert table.ravel().tolist() == [0.0, 0.0, 1.0, 2.0]


def test_a_plain_number_for_an_enum_is_taken_with_a_note() -> None:
    """AWS's own library spells dge_mode.none as 3."""

    def kernel(x: Any) -> None:
        nisa.dma_copy(empty(2, 3), x, dge_mode=3)  # type: ignore[arg-type]

    result = simulate(kernel, np.zeros((2, 3), np.float32))
    assert "dge_mode=3 as a plain number" in result.warnings[0]


def test_two_rows_to_one_place_are_noted() -> None:
    """Which one stays is not defined."""

    def kernel(cache: Any, index: Any) -> None:
        nisa.dma_copy(cache.vector_select(0, nl.load(index)), filled(2, 2))

    result = simulate(kernel, np.zeros((3, 2), np.float32), np.array([[1], [1]], np.int32))
    assert "write the same destination" in result.warnings[0]


def test_a_scalar_index_past_the_end_can_be_skipped() -> None:
    """The destination stays as it was."""

    def kernel(table: Any) -> Any:
        tile, out = filled(1, 2, value=5.0), out_like((1, 2))
        at = filled(1, 1, dtype=nl.int32, value=9)
        nisa.dma_copy(tile, table.select(0, at), oob_mode=SKIP)
        nisa.dma_copy(out, tile)
        return out

    assert simulate(kernel, np.zeros((3, 2), np.float32)).output.tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7), (5, 2, 3, 7)])
def test_dma_transpose_swaps_first_and_last(shape: tuple[int, ...]) -> None:
    """(1, 0), (2, 1, 0) and (3, 1, 2, 0)."""
    data = random_array(1, shape)
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    turned = tuple(shape[a] for a in axes)

    def kernel(x: Any) -> Any:
        tile, out = empty(*turned), out_like(turned)
        nisa.dma_transpose(tile, x, axes=axes)
        nisa.dma_copy(out, tile)
        return out

    assert np.array_equal(simulate(kernel, data).output, data.transpose(axes))


@pytest.mark.parametrize(("height", "width", "rows"), [(32, 1, 16), (128, 2, 256)])
def test_an_indirect_transpose_gathers_by_columns_of_the_index(height: int, width: int, rows: int) -> None:
    """flat = indices.T.ravel()[:rows]."""
    rng = np.random.default_rng(3)
    table = random_array(1, (40, 8), "bfloat16")
    index = rng.integers(0, 40, (height, width)).astype(np.uint32)

    def kernel(table: Any, index: Any) -> Any:
        tile, out = empty(8, rows, dtype=nl.bfloat16), out_like((8, rows), nl.bfloat16)
        nisa.dma_transpose(tile, table.ap([[8, rows], [1, 8]], vector_offset=nl.load(index)), axes=(1, 0))
        nisa.dma_copy(out, tile)
        return out

    flat = index.T.ravel()[:rows]
    assert np.array_equal(simulate(kernel, table, index).output, table[flat].T)


def test_dma_compute_adds_in_fp32() -> None:
    """Three bf16 sources: 256 + 1 + 1 is 258, not 256."""

    def kernel() -> Any:
        parts = [filled(1, 2, dtype=nl.bfloat16, value=v) for v in (256.0, 1.0, 1.0)]
        out = out_like((1, 2))
        nisa.dma_compute(out, parts, nl.add)
        return out

    assert simulate(kernel).output.tolist() == [[258.0, 258.0]]


def test_dma_compute_scatters_and_gathers_sums() -> None:
    """cache[rows] += tile, then tile += cache[rows]."""
    cache = np.arange(8, dtype=np.float32).reshape(4, 2)
    index = np.array([[3], [1]], np.int32)

    def kernel(cache: Any, index: Any) -> Any:
        at, tile, out = nl.load(index), filled(2, 2, value=10.0), out_like((2, 2))
        rows = cache.vector_select(0, at)
        nisa.dma_compute(rows, [rows, tile], nl.add)
        nisa.dma_compute(tile, [tile, cache.vector_select(0, at)], nl.add)
        nisa.dma_copy(out, tile)
        return out

    assert simulate(kernel, cache, index).output.tolist() == [[26, 27], [22, 23]]
    assert cache.tolist() == [[0, 1], [12, 13], [4, 5], [16, 17]]


def test_bytes_and_descriptors_are_counted() -> None:
    """(4, 6) fp32: whole is 4 partition rows of 24 bytes; every second column is 12 elements of 4 bytes."""
    data = np.zeros((4, 6), np.float32)

    def kernel(x: Any) -> Any:
        tile, out = empty(4, 6), out_like((4, 6))
        nisa.dma_copy(tile, x)
        nisa.dma_copy(tile[:, 0:3], x[:, ::2])
        nisa.dma_copy(out, tile)
        other = nl.ndarray((24,), nl.float32, nl.private_hbm)
        nisa.dma_copy(other, x)
        return out

    counters = simulate(kernel, data).counters[0]
    assert dict(counters.dma_bytes) == {"hbm>sbuf": 96 + 48, "sbuf>hbm": 96, "hbm>hbm": 96}
    assert counters.hbm_read_bytes == 96 + 48 + 96
    assert counters.hbm_write_bytes == 96 + 96
    assert dict(counters.descriptors) == {24: 4 + 4, 4: 12, 96: 1}


def test_a_read_only_input_is_copied_on_the_first_write() -> None:
    """The caller's array stays; the kernel sees its own writes."""
    cache = np.zeros((2, 3), np.float32)
    cache.flags.writeable = False

    def kernel(cache: Any) -> Any:
        nisa.dma_copy(cache[0:1], filled(1, 3, value=4.0))
        return cache

    assert simulate(kernel, cache).output.tolist() == [[4.0] * 3, [0.0] * 3]
    assert not cache.any()
