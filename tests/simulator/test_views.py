"""Views share storage and agree with NumPy's own strided views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from gk_kernels.simulator import simulate
from tests.simulator.support import Array, empty, filled


def inside(check: Any, **options: Any) -> Any:
    """Run a check where tensors can be made."""
    return simulate(check, **options)


def test_a_fresh_tensor_is_row_major() -> None:
    """The worked example of NKI's language guide."""

    def check() -> None:
        t = nl.ndarray((128, 64), nl.float32)
        assert (t.shape, t.strides, t.offset) == ((128, 64), (64, 1), 0)
        assert (t.dtype, t.buffer, t.ndim, t.size) == (nl.float32, nl.sbuf, 2, 8192)

    inside(check)


def test_a_slice_moves_the_offset_and_keeps_the_strides() -> None:
    """t[:, 8:24] of (128, 64) is [[64, 128], [1, 16]] at 8, and so is the pattern made by hand."""

    def check() -> None:
        t = empty(128, 64)
        u = t.slice(dim=1, start=8, end=24)
        v = t.ap(pattern=[[64, 128], [1, 16]], offset=8)
        assert u.get_pattern() == v.get_pattern() == [[64, 128], [1, 16]]
        assert u.offset == v.offset == 8

    inside(check)


def test_a_step_scales_the_stride() -> None:
    """Columns 1, 4, 7 of 10 are three elements three apart."""

    def check() -> None:
        u = empty(3, 10)[:, 1:10:3]
        assert (u.shape, u.strides, u.offset) == ((3, 3), (10, 3), 1)

    inside(check)


def test_an_integer_keeps_the_partition_and_drops_other_dimensions() -> None:
    """On chip dimension 0 stays at size 1 and two dimensions remain; in HBM the dimension goes."""

    def check() -> None:
        t, h = empty(7, 5, 3), empty(7, 5, 3, buffer=nl.private_hbm)
        assert t[2].shape == (1, 5, 3)
        assert t[:, :, 1].shape == (7, 5)
        assert t[:, 0, 1].shape == (7, 1)
        assert h[2].shape == (5, 3)
        assert h[2, 4, 1].shape == (1,)
        assert h[..., -1].shape == (7, 5)
        assert t[nl.ds(2, 3), :, 0:1].shape == (3, 5, 1)

    inside(check)


def test_negative_bounds_count_from_the_end() -> None:
    """As in Python."""

    def check() -> None:
        t = empty(7, 10)
        assert (t[:, -4:-1].shape, t[:, -4:-1].offset) == ((7, 3), 6)
        assert t.slice(-1, 2, 5).offset == 2
        assert t[-1].offset == 60

    inside(check)


def test_trivial_reshapes_give_the_same_view() -> None:
    """Splitting into one part, merging one dimension, dimensions of size 1, a lone partition dimension."""

    def check() -> None:
        t = empty(6, 1, 8)
        assert t.reshape_dim(0, (6,)).get_pattern() == t.flatten_dims(1, 1).get_pattern() == t.get_pattern()
        assert t.flatten_dims(1, 2).shape == (6, 8)
        assert t.reshape((6, 8, 1)).strides == (8, 1, 1)
        assert empty(6, 1).reshape((6,)).shape == (6, 1)
        assert empty(6, 1, buffer=nl.private_hbm).reshape((1, 6)).shape == (1, 6)
        assert t.rearrange(("p", "a", "b"), ("p", (), "b", "a")).shape == (6, 1, 8, 1)

    inside(check)


def test_an_indirect_view_can_be_shaped_in_its_other_dimensions() -> None:
    """Select, permute, split, squeeze beside the gathered dimension; the index still means rows."""
    table = np.arange(5 * 2 * 3, dtype=np.float32).reshape(5, 2, 3)

    def kernel(table: Any) -> Any:
        at = empty(2, 1, dtype=nl.int32)
        nisa.iota(at, [[1, 1]], offset=1, channel_multiplier=3)  # rows 1 and 4
        rows = table.vector_select(0, at)
        assert rows.is_indirect()
        views = [
            rows.permute((0, 2, 1)),
            rows[:, 1],
            rows[:, :, 1:3],
            rows.reshape((2, 6)),
            rows.expand_dim(1).squeeze_dim(1),
            table.reshape((5, 2, 3)).select(1, 1).vector_select(0, at),
        ]
        outs = []
        for view in views:
            tile = nl.ndarray(view.shape, nl.float32)
            nisa.dma_copy(tile, view)
            out = nl.ndarray(view.shape, nl.float32, nl.shared_hbm)
            nisa.dma_copy(out, tile)
            outs.append(out)
        return tuple(outs)

    picked = table[[1, 4]]
    wants = [picked.transpose(0, 2, 1), picked[:, 1], picked[:, :, 1:3], picked.reshape(2, 6), picked, picked[:, 1]]
    for got, want in zip(simulate(kernel, table).output, wants, strict=True):
        assert np.array_equal(got, want)


def test_a_dynamic_slice_moves_with_permutes_and_indices() -> None:
    """nl.ds with a register on dimension 1, then other dimensions change around it."""
    table = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)

    def kernel(table: Any) -> Any:
        window = table[:, nl.ds(nisa.register_alloc(3), 2), :]
        views = [window.permute((1, 0, 2)), window[2], window[:, :, 1], window[0:2]]
        outs = []
        for view in views:
            out = nl.ndarray(view.shape, nl.float32, nl.shared_hbm)
            nisa.dma_copy(out, view)
            outs.append(out)
        return tuple(outs)

    window = table[:, 3:5]
    wants = [window.transpose(1, 0, 2), window[2], window[:, :, 1], window[0:2]]
    for got, want in zip(simulate(kernel, table).output, wants, strict=True):
        assert np.array_equal(got, want)


def test_rearrange_splits_then_reorders() -> None:
    """The documents' example: (128, 24) as b (h w) to b w h with h = 4."""

    def check() -> None:
        t = empty(128, 24)
        u = t.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})
        assert (u.shape, u.strides) == ((128, 6, 4), (24, 1, 6))
        assert u.rearrange(("b", "w", "h"), ("b", ("w",), "h")).shape == (128, 6, 4)
        merged = t.reshape((128, 4, 6)).rearrange(("b", "h", "w"), ("b", ("h", "w")))
        assert merged.strides == (24, 1)

    inside(check)


def test_view_scales_the_last_dimension_by_the_size_ratio() -> None:
    """fp32 (128, 64) is uint8 (128, 256), and back."""

    def check() -> None:
        t = empty(128, 64)
        assert t.view(nl.uint8).shape == (128, 256)
        assert t.view(nl.int32).shape == (128, 64)
        assert t.view(nl.uint8)[:, 8:16].view(nl.float32).get_pattern() == [[64, 128], [1, 2]]
        assert t.view(nl.uint8)[:, 8:16].view(nl.float32).offset == 2
        assert t.view(nl.uint8).reinterpret_cast(nl.bfloat16).shape == (128, 128)

    inside(check)


def test_ap_addresses_the_storage_not_the_view() -> None:
    """A chain of two ap is the second alone; without an offset the view's own start is kept."""

    def check() -> None:
        t = empty(128, 256)
        inner = t.ap(pattern=[[256, 128], [2, 128]])
        outer = inner.ap(pattern=[[256, 128], [1, 64]])
        assert outer.get_pattern() == [[256, 128], [1, 64]]
        assert t[:, 16:32].ap([[256, 128], [1, 4]]).offset == 16

    inside(check)


def test_an_explicit_ap_offset_on_an_offset_view_is_noted() -> None:
    """The documents disagree whether the two add; it is taken as given, and said."""

    def check() -> None:
        assert empty(4, 8)[:, 2:4].ap([[8, 4], [1, 2]], offset=4).offset == 4

    assert "documents disagree" in inside(check).warnings[0]


def test_a_dtype_in_ap_reinterprets_in_units_of_the_new_dtype() -> None:
    """Four bytes at element 1 of uint32 are elements 2 and 3 of bfloat16."""

    def kernel() -> Any:
        tile = empty(1, 2, dtype=nl.uint32)
        nisa.memset(tile, 0x40003F80)  # bfloat16 1.0 then 2.0
        out = nl.ndarray((1, 2), nl.bfloat16, nl.shared_hbm)
        nisa.dma_copy(out, tile.ap([[4, 1], [1, 2]], offset=2, dtype=nl.bfloat16))
        return out

    assert inside(kernel).output.astype(float).tolist() == [[1.0, 2.0]]


def test_writing_through_one_view_is_seen_through_another() -> None:
    """The documents' example: a reshape and a slice of one tensor."""

    def kernel() -> Any:
        t = filled(4, 64, value=0.0)
        nisa.memset(t.reshape((4, 8, 8))[:, 2], 1.0)
        out = nl.ndarray((4, 16), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, t[:, 8:24])
        return out

    assert inside(kernel).output[3].tolist() == [0.0] * 8 + [1.0] * 8


def test_is_contiguous_looks_within_a_partition() -> None:
    """On chip the partition stride does not count; in HBM it does."""

    def check() -> None:
        t, h = empty(4, 6, 2), empty(4, 6, 2, buffer=nl.private_hbm)
        assert t[0:2].is_contiguous()
        assert t[:, 0:3].is_contiguous()
        assert not t.permute((0, 2, 1)).is_contiguous()
        assert not h[:, 0:3].is_contiguous()
        assert h[1:3].is_contiguous()

    inside(check)


def test_dynamic_select_uses_the_index_of_the_run() -> None:
    """Row 3 of a table, by a tensor, by a register, and through ap with the multiplier of the base shape."""
    table = np.arange(5 * 4 * 3, dtype=np.float32).reshape(5, 4, 3)

    def kernel(table: Any) -> Any:
        row = filled(1, 1, dtype=nl.int32, value=3)
        register = nisa.register_alloc(3)
        views = [
            table.select(0, row),
            table[register],
            table.ap([[3, 4], [1, 3]], scalar_offset=row, indirect_dim=0),
            table[nl.ds(register, 1)],
            table[:, 2].select(0, row),
            table.select(1, filled(1, 1, dtype=nl.int32, value=2))[3],
        ]
        outs = []
        for view in views:
            tile = nl.ndarray((1, view.size), nl.float32)
            nisa.dma_copy(tile, view)
            out = nl.ndarray((view.size,), nl.float32, nl.shared_hbm)
            nisa.dma_copy(out, tile)
            outs.append(out)
        return tuple(outs)

    outs = simulate(kernel, table).output
    for out in outs[:4]:
        assert out.tolist() == table[3].ravel().tolist()
    assert outs[4].tolist() == outs[5].tolist() == table[3, 2].tolist()


def test_a_dynamic_free_index_works_in_compute_instructions() -> None:
    """On chip a register may choose a free column."""

    def kernel() -> Any:
        tile = empty(2, 5)
        nisa.iota(tile, [[1, 5]], offset=0, channel_multiplier=10)
        out, column = nl.ndarray((2, 1), nl.float32, nl.shared_hbm), empty(2, 1)
        nisa.tensor_copy(column, tile.select(1, nisa.register_alloc(4)))
        nisa.dma_copy(out, column)
        return out

    assert simulate(kernel).output.tolist() == [[4.0], [14.0]]


@st.composite
def chains(draw: Any) -> tuple[tuple[int, ...], bool, list[tuple[Any, ...]]]:
    """A shape, whether it is on chip, and a chain of view operations that are legal on it."""
    on_chip = draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2 if on_chip else 1, max_size=4)))
    first = 1 if on_chip else 0
    steps: list[tuple[Any, ...]] = []
    sizes = list(shape)
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["slice", "permute", "split", "expand", "squeeze", "broadcast", "index"]))
        dim = draw(st.integers(0, len(sizes) - 1))
        if kind == "slice":
            start = draw(st.integers(0, sizes[dim] - 1))
            stop = draw(st.integers(start + 1, sizes[dim]))
            step = draw(st.integers(1, 3)) if dim >= first else 1
            steps.append(("slice", dim, start, stop, step))
            sizes[dim] = -(-(stop - start) // step)
        elif kind == "permute":
            order = draw(st.permutations(range(first, len(sizes))))
            order = list(range(first)) + list(order)
            steps.append(("permute", tuple(order)))
            sizes = [sizes[d] for d in order]
        elif kind == "split" and dim >= first and len(sizes) < 5:
            parts = [p for p in range(1, sizes[dim] + 1) if sizes[dim] % p == 0]
            outer = draw(st.sampled_from(parts))
            steps.append(("split", dim, (outer, sizes[dim] // outer)))
            sizes[dim : dim + 1] = [outer, sizes[dim] // outer]
        elif kind == "expand" and dim >= first and len(sizes) < 5:
            steps.append(("expand", dim))
            sizes.insert(dim, 1)
        elif kind == "squeeze" and dim >= first and sizes[dim] == 1 and len(sizes) > (2 if on_chip else 1):
            steps.append(("squeeze", dim))
            del sizes[dim]
        elif kind == "broadcast" and dim >= first and sizes[dim] == 1:
            steps.append(("broadcast", dim, 3))
            sizes[dim] = 3
        elif kind == "index" and dim >= first and len(sizes) > (2 if on_chip else 1):
            steps.append(("index", dim, draw(st.integers(0, sizes[dim] - 1))))
            del sizes[dim]
    return shape, on_chip, steps


def _apply(tensor: Any, array: Array, step: tuple[Any, ...]) -> tuple[Any, Array]:
    kind, *args = step
    if kind == "slice":
        dim, start, stop, by = args
        return tensor.slice(dim, start, stop, by), array[(slice(None),) * dim + (slice(start, stop, by),)]
    if kind == "permute":
        return tensor.permute(args[0]), array.transpose(args[0])
    if kind == "split":
        dim, parts = args
        return tensor.reshape_dim(dim, parts), array.reshape(array.shape[:dim] + parts + array.shape[dim + 1 :])
    if kind == "expand":
        return tensor.expand_dim(args[0]), np.expand_dims(array, args[0])
    if kind == "squeeze":
        return tensor.squeeze_dim(args[0]), array.squeeze(args[0])
    if kind == "index":
        return tensor.select(args[0], args[1]), np.take(array, args[1], axis=args[0])
    dim, size = args
    shape = (*array.shape[:dim], size, *array.shape[dim + 1 :])
    return tensor.broadcast(dim, size), np.broadcast_to(array, shape)


@given(chains())
@settings(max_examples=150, deadline=None)
def test_a_chain_of_views_sees_what_numpy_sees(chain: tuple[tuple[int, ...], bool, list[tuple[Any, ...]]]) -> None:
    """Each element is stamped with its place, so a wrong stride or offset shows."""
    shape, on_chip, steps = chain

    def kernel(array: Any) -> None:
        tensor = array
        if on_chip:
            tensor = nl.ndarray(shape, nl.int32)
            nisa.dma_copy(tensor, array)
        expected = stamped
        for step in steps:
            tensor, expected = _apply(tensor, expected, step)
            assert tensor.shape == expected.shape
            assert tensor.numpy_view().tolist() == expected.tolist()

    stamped = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    simulate(kernel, stamped)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
@settings(max_examples=80, deadline=None)
def test_reshape_needs_no_copy_or_is_refused(shape: list[int], data: Any) -> None:
    """Wherever a reshape is given, it agrees with NumPy's; wherever NumPy can do it in place, it is given."""
    order = data.draw(st.permutations(range(len(shape))))
    stamped = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    turned = stamped.transpose(order)
    sizes = [int(n) for n in turned.shape]
    cut = data.draw(st.integers(0, len(sizes)))
    target = (int(np.prod(sizes[:cut])), int(np.prod(sizes[cut:])))
    reshaped = turned.reshape(target)

    def kernel(array: Any) -> None:
        view = array.permute(tuple(order))
        try:
            got = view.reshape(target)
        except Exception:
            assert not np.shares_memory(reshaped, stamped)
        else:
            assert got.numpy_view().tolist() == reshaped.tolist()

    simulate(kernel, stamped)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_flatten_merges_neighbours_only(start: int) -> None:
    """Any pair of neighbours of a fresh tensor merges."""

    def check() -> None:
        h = empty(2, 3, 5, 7, buffer=nl.private_hbm)
        shape = list(h.shape)
        shape[start : start + 2] = [shape[start] * shape[start + 1]]
        assert h.flatten_dims(start, start + 1).shape == tuple(shape)

    inside(check)
