"""Every rule of DMA, allocation, views and registers has a kernel that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from gk_kernels.simulator import BoundsError, CapacityError, PoisonError, ReachError, UsageError
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import Broken, RuleBook, check_refusal, empty, filled, psum

breaks = RuleBook()
HBM, PSUM = nl.private_hbm, nl.psum
GIB = 1 << 30


# DMA ------------------------------------------------------------------------------------------------------------------


@breaks("dma_copy: dst buffer", "psum", "DMA reaches no PSUM")
def dma_into_psum() -> None:
    nisa.dma_copy(psum(2, 3), filled(2, 3, buffer=HBM))  # breaks


@breaks("dma_copy: src buffer", "psum", "DMA reaches no PSUM")
def dma_from_psum() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=PSUM))  # breaks


@breaks("dma_copy: element count", "src (2, 4), dst (2, 3)", "equal element counts")
def dma_of_different_sizes() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 4, buffer=HBM))  # breaks


@breaks("dma_copy: cast with hwdge", "float32 to bfloat16", "equal dtypes")
def dma_cast_by_hardware_descriptors() -> None:
    target = empty(2, 3, dtype=nl.bfloat16)
    nisa.dma_copy(target, filled(2, 3, buffer=HBM), dge_mode=nisa.dge_mode.hwdge)  # breaks


@breaks("dma_copy: cast", "uint32 to float8_e4m3fn_x4", "no cast of x4 dtypes")
def dma_casts_into_x4() -> None:
    target = empty(2, 3, dtype=nl.float8_e4m3fn_x4)
    nisa.dma_copy(target, filled(2, 3, dtype=nl.uint32, buffer=HBM))  # breaks


@breaks("dma_copy: dst", "stride 0 over 3 elements", "each element is written once")
def dma_into_a_broadcast() -> None:
    nisa.dma_copy(empty(2, 1).broadcast(1, 3), filled(2, 3, buffer=HBM))  # breaks


@breaks("dma_copy: oob_mode", "'skip'", "a member of nisa.oob_mode", UsageError)
def an_oob_mode_as_a_string() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=HBM), oob_mode="skip")  # type: ignore[arg-type]  # breaks


@breaks("dma_copy: engine", "sync", "only with dge_mode.hwdge")
def a_dma_engine_without_hwdge() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=HBM), engine=nisa.engine.sync)  # breaks


@breaks("dma_copy: engine", "vector", "sync or scalar")
def a_dma_on_the_vector_engine() -> None:
    mode = nisa.dge_mode.hwdge
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=HBM), dge_mode=mode, engine=nisa.engine.vector)  # breaks


@breaks("dma_copy: priority", "4", "0 to 3")
def a_priority_of_four() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=HBM), priority=4)  # breaks


@breaks("dma_copy: priority", "1", "trn3 or newer", target="trn2")
def a_priority_on_trn2() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=HBM), priority=1)  # breaks


def _rows(*values: int, dtype: Any = nl.int32) -> Any:
    index = empty(len(values), 1, dtype=dtype)
    for i, value in enumerate(values):
        one = filled(1, 1, dtype=dtype, value=value)
        nisa.dma_copy(index[i : i + 1], one)
    return index


@breaks("dma_copy: dynamic index out of bounds", "index 5 in row 1", "0 to 4 (oob_mode.error)", BoundsError, True)
def a_gather_past_the_table() -> None:
    nisa.dma_copy(empty(3, 2), filled(5, 2, buffer=HBM).vector_select(0, _rows(4, 5, 0)))  # breaks


@breaks("dma_copy: dynamic index out of bounds", "index -1 in row 0", "0 to 4 (oob_mode.error)", BoundsError, True)
def a_scatter_before_the_table() -> None:
    nisa.dma_copy(filled(5, 2, buffer=HBM).vector_select(0, _rows(-1)), filled(1, 2))  # breaks


@breaks("dma_copy: vector_offset dtype", "float32", "int32 or uint32")
def a_gather_by_floats() -> None:
    nisa.dma_copy(empty(3, 2), filled(5, 2, buffer=HBM).vector_select(0, filled(3, 1)))  # breaks


@breaks("dma_copy: vector_offset shape", "(4, 1)", "(3, 1)")
def a_gather_with_too_many_indices() -> None:
    table, index = filled(5, 2, buffer=HBM), filled(4, 1, dtype=nl.int32)
    nisa.dma_copy(empty(3, 2), table.ap([[2, 3], [1, 2]], vector_offset=index))  # breaks


@breaks("dma_copy: vector_offset buffer", "private_hbm", "sbuf")
def a_gather_with_indices_in_hbm() -> None:
    table, index = filled(5, 2, buffer=HBM), filled(3, 1, dtype=nl.int32, buffer=HBM)
    nisa.dma_copy(empty(3, 2), table.ap([[2, 3], [1, 2]], vector_offset=index))  # breaks


@breaks("the other side of an indirect DMA", "private_hbm", "sbuf")
def a_gather_into_hbm() -> None:
    table, index = filled(5, 2, buffer=HBM), filled(3, 1, dtype=nl.int32)
    nisa.dma_copy(empty(3, 2, buffer=HBM), table.vector_select(0, index))  # breaks


@breaks("dge_mode of an indirect DMA", "hwdge", "unknown or swdge")
def a_gather_by_hardware_descriptors() -> None:
    table, index = filled(5, 2, buffer=HBM), filled(3, 1, dtype=nl.int32)
    nisa.dma_copy(empty(3, 2), table.vector_select(0, index), dge_mode=nisa.dge_mode.hwdge)  # breaks


@breaks("an indirect view by vector_offset", "a compute instruction", "DMA instructions only", needs_data=True)
def a_register_load_that_gathers() -> None:
    table, index = filled(5, dtype=nl.int32, buffer=HBM), filled(1, 1, dtype=nl.int32)
    nisa.register_load(nisa.register_alloc(), table.vector_select(0, index))  # breaks


@breaks("dynamic index out of bounds", "7", "0 to 4", BoundsError, True)
def a_dynamic_select_past_the_end() -> None:
    nisa.dma_copy(empty(1, 2), filled(5, 2, buffer=HBM).select(0, filled(1, 1, dtype=nl.int32, value=7)))  # breaks


@breaks("dynamic access out of bounds", "index 4 reaches element 11", "10 elements", BoundsError, True)
def a_dynamic_pattern_past_the_end() -> None:
    table, index = filled(5, 2, buffer=HBM), filled(1, 1, dtype=nl.int32, value=4)
    nisa.dma_copy(empty(2, 2), table.ap([[2, 2], [1, 2]], scalar_offset=index))  # breaks


@breaks("dma_transpose: axes", "(0, 1)", "(1, 0), (2, 1, 0) or (3, 1, 2, 0)")
def a_transpose_that_keeps_the_order() -> None:
    nisa.dma_transpose(empty(2, 3), filled(2, 3, buffer=HBM), axes=(0, 1))  # breaks


@breaks("dma_transpose: dst shape", "(2, 3)", "(3, 2)")
def a_transpose_into_the_same_shape() -> None:
    nisa.dma_transpose(empty(2, 3), filled(2, 3, buffer=HBM))  # breaks


@breaks("dma_transpose: dst buffer", "private_hbm", "sbuf")
def a_transpose_into_hbm() -> None:
    nisa.dma_transpose(empty(3, 2, buffer=HBM), filled(2, 3, buffer=HBM))  # breaks


@breaks("dma_transpose: dtypes", "float32 to bfloat16", "equal dtypes")
def a_dma_transpose_that_casts() -> None:
    nisa.dma_transpose(empty(3, 2, dtype=nl.bfloat16), filled(2, 3, buffer=HBM))  # breaks


@breaks("dma_transpose: oob_mode", "skip", "error unless src is indirect")
def a_transpose_that_skips_nothing() -> None:
    nisa.dma_transpose(empty(3, 2), filled(2, 3, buffer=HBM), oob_mode=nisa.oob_mode.skip)  # breaks


@breaks("dma_transpose with hwdge: src.shape[0]", "8", "16")
def a_hardware_transpose_of_eight_rows() -> None:
    source = filled(8, 4, dtype=nl.bfloat16, buffer=HBM)
    nisa.dma_transpose(empty(4, 8, dtype=nl.bfloat16), source, dge_mode=nisa.dge_mode.hwdge)  # breaks


@breaks("dma_transpose with hwdge: src dtype", "float32", "2 bytes")
def a_hardware_transpose_of_fp32() -> None:
    nisa.dma_transpose(empty(4, 16), filled(16, 4, buffer=HBM), dge_mode=nisa.dge_mode.hwdge)  # breaks


@breaks("dma_transpose: gathered rows", "24", "a multiple of 16")
def an_indirect_transpose_of_24_rows() -> None:
    table, index = filled(40, 4, dtype=nl.bfloat16, buffer=HBM), filled(32, 1, dtype=nl.uint32)
    view = table.ap([[4, 24], [1, 4]], vector_offset=index)
    nisa.dma_transpose(empty(4, 24, dtype=nl.bfloat16), view)  # breaks


@breaks("dma_transpose: indices", "int32 (16, 1)", "2-D uint32 in SBUF")
def an_indirect_transpose_by_signed_indices() -> None:
    table, index = filled(40, 4, dtype=nl.bfloat16, buffer=HBM), filled(16, 1, dtype=nl.int32)
    nisa.dma_transpose(empty(4, 16, dtype=nl.bfloat16), table.vector_select(0, index))  # breaks


@breaks("dma_compute: reduce_op", "nl.multiply", "nl.add")
def dma_compute_multiplies() -> None:
    tile = filled(2, 3)
    nisa.dma_compute(empty(2, 3), [tile, tile], nl.multiply)  # breaks


@breaks("dma_compute: srcs", "[]", "1 to 16 tensors", UsageError)
def dma_compute_of_nothing() -> None:
    nisa.dma_compute(empty(2, 3), [], nl.add)  # breaks


@breaks("dma_compute: scales", "(2.0,)", "1.0 for every source")
def dma_compute_scales() -> None:
    nisa.dma_compute(empty(2, 3), [filled(2, 3)], nl.add, scales=(2.0,))  # breaks


@breaks("dma_compute: sources of a read-modify-write", "1", "2")
def dma_compute_scatters_one_source() -> None:
    table, index = filled(5, 2, buffer=HBM), filled(3, 1, dtype=nl.int32)
    nisa.dma_compute(table.vector_select(0, index), [filled(3, 2)], nl.add)  # breaks


# Reach and size -------------------------------------------------------------------------------------------------------


@breaks("HBM tensor size", f"{4 * GIB} bytes", f"below {4 * GIB} bytes")
def an_hbm_tensor_of_4_gib() -> None:
    nl.ndarray((4, GIB), nl.uint8, HBM)  # breaks


# Allocation -----------------------------------------------------------------------------------------------------------


@breaks("ndarray: partitions", "129", "128")
def a_tensor_of_129_partitions() -> None:
    nl.ndarray((129, 4), nl.float32)  # breaks


@breaks("ndarray: on-chip dimensions", "(128,)", "2 or more", UsageError)
def a_tensor_of_one_dimension_on_chip() -> None:
    nl.ndarray((128,), nl.float32)  # breaks


@breaks("ndarray: sbuf bytes per partition", "262148", "262144", CapacityError)
def a_row_larger_than_a_partition() -> None:
    nl.ndarray((1, 65537), nl.float32)  # breaks


@breaks("ndarray: psum bytes per partition", "16388", "16384", CapacityError)
def a_row_larger_than_psum() -> None:
    nl.ndarray((1, 4097), nl.float32, nl.psum)  # breaks


@breaks("dtype must be an nki.language dtype", "float32", "bfloat16", UsageError)
def a_numpy_dtype() -> None:
    import numpy as np

    nl.ndarray((2, 3), np.float32)  # breaks


@breaks("ndarray: buffer", "'sbuf'", "nl.sbuf", UsageError)
def a_buffer_as_a_string() -> None:
    nl.ndarray((2, 3), nl.float32, "sbuf")  # type: ignore[arg-type]  # breaks


@breaks("ndarray: name", "'k_tile' is taken by sbuf (2, 3)", "a name of its own", UsageError)
def two_tensors_of_one_name() -> None:
    nl.ndarray((2, 3), nl.float32, name="k_tile")
    nl.ndarray((2, 5), nl.float32, name="k_tile")  # breaks


@breaks("ndarray: shape", "(2, 0)", "positive integers", UsageError)
def an_empty_tensor() -> None:
    nl.ndarray((2, 0), nl.float32)  # breaks


@breaks("ndarray: address", "(0, 262140)", "ends by byte 262144", CapacityError)
def an_address_past_the_partition() -> None:
    nl.ndarray((2, 2), nl.float32, address=(0, 262140))  # breaks


@breaks("start partition", "40 partitions from partition 32", "0 or 64")
def an_address_off_its_partitions() -> None:
    nl.ndarray((40, 2), nl.float32, address=(32, 0))  # breaks


# Views ----------------------------------------------------------------------------------------------------------------


@breaks("slice of dimension 1", "2:6:1", "stop <= 5", BoundsError)
def a_slice_past_the_end() -> None:
    empty(3, 5)[:, 2:6]  # breaks


@breaks("slice of dimension 0", "2:2:1", "start < stop", BoundsError)
def an_empty_slice() -> None:
    empty(3, 5)[2:2]  # breaks


@breaks("index of dimension 1", "5", "0 to 4", BoundsError)
def an_index_past_the_end() -> None:
    empty(3, 5)[:, 5]  # breaks


@breaks("nl.ds on dimension 1", "3:6", "inside 0..5", BoundsError)
def a_dynamic_slice_past_the_end() -> None:
    empty(3, 5)[:, nl.ds(3, 3)]  # breaks


@breaks("indexing", "3 indices", "2 dimensions", UsageError)
def too_many_indices() -> None:
    empty(3, 5)[0, 0, 0]  # breaks


@breaks("indexing", "a float", "int, slice, nl.ds", UsageError)
def an_index_that_is_a_float() -> None:
    empty(3, 5)[0.5]  # breaks


@breaks("permute", "dimension 0", "the partition dimension stays first", UsageError)
def permute_the_partitions() -> None:
    empty(3, 5).permute((1, 0))  # breaks


@breaks("permute", "(0, 0)", "a permutation of 0..1", UsageError)
def permute_a_dimension_twice() -> None:
    empty(3, 5).permute((0, 0))  # breaks


@breaks("broadcast", "dimension 0", "the partition dimension stays first", UsageError)
def broadcast_the_partitions() -> None:
    empty(1, 5).broadcast(0, 4)  # breaks


@breaks("broadcast", "size 5", "a dimension of size 1", UsageError)
def broadcast_a_full_dimension() -> None:
    empty(3, 5).broadcast(1, 10)  # breaks


@breaks("reshape", "(4, 6) to (8, 3)", "the partition dimension keeps its size", UsageError)
def reshape_the_partitions() -> None:
    empty(4, 6).reshape((8, 3))  # breaks


@breaks("reshape", "(4, 7)", "24 elements", UsageError)
def reshape_to_another_size() -> None:
    empty(4, 6).reshape((4, 7))  # breaks


@breaks("reshape", "strides (1, 3) to (12,)", "a layout that needs no copy", UsageError)
def reshape_a_transposed_tensor() -> None:
    empty(4, 3, buffer=HBM).permute((1, 0)).reshape((12,))  # breaks


@breaks("flatten_dims", "strides (30, 10, 1)", "dimensions contiguous with each other", UsageError)
def flatten_a_sliced_tensor() -> None:
    empty(4, 3, 10)[:, :, 0:5].flatten_dims(1, 2)  # breaks


@breaks("squeeze_dim", "size 3", "size 1", UsageError)
def squeeze_a_full_dimension() -> None:
    empty(4, 3, 5).squeeze_dim(1)  # breaks


@breaks("view(dtype)", "last stride 2", "a contiguous last dimension", UsageError)
def reinterpret_a_strided_tensor() -> None:
    empty(4, 6)[:, ::2].view(nl.bfloat16)  # breaks


@breaks("view(dtype)", "shape (4, 3)", "multiples of 2", UsageError)
def reinterpret_an_odd_row() -> None:
    empty(4, 3, dtype=nl.bfloat16).view(nl.float32)  # breaks


@breaks("ap partition stride", "12", "6, the elements per partition")
def skip_every_second_partition() -> None:
    empty(4, 6).ap([[12, 2], [1, 6]])  # breaks


@breaks("ap bounds", "element 29", "24 elements, 6 per partition", BoundsError)
def an_access_pattern_past_the_storage() -> None:
    nisa.memset(empty(4, 6).ap([[6, 4], [1, 6]], offset=6), 0.0)  # breaks


@breaks("ap bounds", "element 21", "24 elements, 6 per partition", BoundsError)
def an_access_pattern_into_the_next_partition() -> None:
    nisa.memset(empty(4, 6).ap([[6, 3], [1, 6]], offset=4), 0.0)  # breaks


@breaks("ap vector_offset", "indirect_dim 1", "indirect_dim 0 of an HBM tensor")
def a_vector_offset_inside() -> None:
    empty(4, 6, buffer=HBM).ap([[6, 3], [1, 6]], vector_offset=empty(3, 1, dtype=nl.int32), indirect_dim=1)  # breaks


@breaks("ap scalar_offset on chip", "indirect_dim 0", "a free dimension")
def a_scalar_offset_over_partitions() -> None:
    empty(4, 6).ap([[6, 1], [1, 6]], scalar_offset=empty(1, 1, dtype=nl.int32))  # breaks


@breaks("ap", "scalar_offset and vector_offset", "at most one", UsageError)
def two_dynamic_offsets() -> None:
    index = empty(1, 1, dtype=nl.int32)
    empty(4, 6, buffer=HBM).ap([[6, 1], [1, 6]], scalar_offset=index, vector_offset=index)  # breaks


@breaks("scalar_offset dtype", "float32", "int32 or uint32")
def a_float_scalar_offset() -> None:
    empty(4, 6, buffer=HBM).select(0, empty(1, 1))  # breaks


@breaks("one dynamic index", "a second dynamic index", "before the dynamic index", UsageError)
def select_twice_dynamically() -> None:
    index = empty(1, 1, dtype=nl.int32)
    empty(4, 6, 2, buffer=HBM).select(0, index).select(0, index)  # breaks


@breaks("one dynamic index", "a slice of the indexed dimension", "before the dynamic index", UsageError)
def slice_a_gathered_dimension() -> None:
    index = empty(3, 1, dtype=nl.int32)
    empty(4, 6, buffer=HBM).vector_select(0, index)[0:2]  # breaks


@breaks("vector_select", "dimension 0 of a tensor in sbuf", "dimension 0 of an HBM tensor", UsageError)
def gather_from_sbuf() -> None:
    empty(4, 6).vector_select(0, empty(3, 1, dtype=nl.int32))  # breaks


@breaks("tensor indirection", "indirect()", "not simulated", UsageError)
def tensor_indirection() -> None:
    empty(4, 6).indirect(empty(4, 1, dtype=nl.int32))  # breaks


@breaks("assignment to a tensor", "t[...] = x", "nisa.tensor_copy", UsageError)
def assign_to_a_slice() -> None:
    tile = empty(4, 6)
    tile[:, 0] = 1.0  # breaks


@breaks("Python arithmetic on a tensor", "an operator", "nisa.tensor_tensor", UsageError)
def add_two_tensors() -> None:
    filled(4, 6) + filled(4, 6)  # breaks


@breaks("Python arithmetic on a tensor", "an operator", "nisa.tensor_tensor", UsageError)
def branch_on_a_tensor() -> None:
    if filled(1, 1):  # breaks
        filled(1, 2)


# Registers and loops --------------------------------------------------------------------------------------------------


@breaks("a register must be set", "an uninitialised register", "register_load first", PoisonError)
def read_an_unset_register() -> None:
    nisa.register_move(nisa.register_alloc(), nisa.register_alloc())  # breaks


@breaks("a register's value is not known", "Python arithmetic", "scalar_offset", UsageError)
def add_to_a_register() -> None:
    nisa.register_alloc(3) + 1  # breaks


@breaks("register_load: tensor", "(1, 2)", "one element")
def load_two_values_into_a_register() -> None:
    nisa.register_load(nisa.register_alloc(), filled(1, 2, dtype=nl.int32))  # breaks


@breaks("register_store: src", "3", "a register from register_alloc", UsageError)
def store_a_number() -> None:
    nisa.register_store(empty(1, 1, dtype=nl.int32), 3)  # type: ignore[arg-type]  # breaks


@breaks("a static loop bound", "a register or tensor", "nl.fori_loop", UsageError)
def a_static_loop_over_a_register() -> None:
    for _ in nl.affine_range(nisa.register_alloc(3)):  # type: ignore[arg-type]  # breaks
        pass


@breaks("device loop step", "0", "a positive integer", UsageError)
def a_device_loop_that_stands_still() -> None:
    nl.fori_loop(0, 4, lambda i: None, step=0)  # breaks


# Poison ---------------------------------------------------------------------------------------------------------------


@breaks("read of never-written bytes", "6 of 6 elements", "write before read; allocated at", PoisonError, True)
def read_a_fresh_tile() -> None:
    nisa.tensor_copy(empty(2, 3), empty(2, 3))  # breaks


@breaks("read of never-written bytes", "1 of 6 elements of a tensor (2, 3), the first at (1, 2)", "", PoisonError, True)
def read_a_tile_with_one_hole() -> None:
    tile = empty(2, 3)
    nisa.dma_copy(tile[0:1], filled(1, 3))
    nisa.dma_copy(tile[1:2, 0:2], filled(1, 2))
    nisa.tensor_copy(empty(2, 3), tile)  # breaks


@breaks("read of never-written bytes", "2 of 4 elements", "write before read", PoisonError, True)
def store_half_a_tile() -> None:
    tile = empty(1, 4)
    nisa.memset(tile[:, 0:2], 0.0)
    nisa.dma_copy(empty(1, 4, buffer=HBM), tile)  # breaks


@breaks("read of never-written bytes", "1 of 2 elements", "write before read", PoisonError, True)
def read_four_bytes_of_which_two_are_written() -> None:
    tile = empty(1, 4, dtype=nl.bfloat16)
    nisa.memset(tile[:, 0:3], 0.0)
    nisa.tensor_copy(empty(1, 2), tile.view(nl.float32))  # breaks


@breaks("read of never-written bytes", "2 of 6 elements", "write before read", PoisonError, True)
def gather_a_row_that_nothing_wrote() -> None:
    table = empty(5, 2, buffer=HBM)
    nisa.dma_copy(table[0:4], filled(4, 2))
    nisa.dma_copy(empty(3, 2), table.vector_select(0, _rows(3, 4, 0)))  # breaks


@breaks("read of never-written bytes", "8 of 8 elements", "write before read", PoisonError, True)
def a_predicated_copy_leaves_the_rest_unwritten() -> None:
    target, keep = empty(2, 4), filled(2, 4, dtype=nl.uint8, value=0)
    nisa.tensor_copy_predicated(target, filled(2, 4), keep)
    nisa.tensor_copy(empty(2, 4), target)  # breaks


@breaks("read of never-written bytes", "4 of 8 elements", "write before read", PoisonError, True)
def a_skipped_gather_row_stays_unwritten() -> None:
    target = empty(2, 4)
    nisa.dma_copy(target, filled(3, 4, buffer=HBM).vector_select(0, _rows(1, 9)), oob_mode=nisa.oob_mode.skip)
    nisa.tensor_copy(empty(2, 4), target)  # breaks


@breaks("scalar accumulator registers", "reduce", "reset_reduce or load_reduce first", PoisonError, True)
def accumulate_into_unset_registers() -> None:
    nisa.activation(  # breaks
        empty(2, 3), nl.exp, filled(2, 3), reduce_op=nl.add, reduce_res=empty(2, 1), reduce_cmd=nisa.reduce_cmd.reduce
    )


@pytest.mark.parametrize("case", breaks.cases, ids=breaks.ids)
def test_a_broken_rule_is_refused_with_its_numbers_and_line(case: Broken) -> None:
    """Message: rule, got, limit; site: the line that breaks it."""
    check_refusal(case)


@pytest.mark.parametrize("case", [c for c in breaks.cases if not c.needs_data], ids=lambda c: c.kernel.__name__)
def test_a_trace_refuses_the_same(case: Broken) -> None:
    """Checks need no data."""
    check_refusal(case, trace=True)


# Reach: declared shapes, no data --------------------------------------------------------------------------------------


def _stacked(blocks: int, dtype: Any = nl.uint8) -> Any:
    """Row gather from a [blocks, 8192] cache."""

    def kernel() -> None:
        table = nl.ndarray((blocks, 8192), dtype, HBM)
        index, rows = filled(4, 1, dtype=nl.int32), empty(4, 8192, dtype=dtype)
        nisa.dma_copy(rows, table.vector_select(0, index))  # breaks

    return kernel


def _reach(kernel: Any, unit: str, got: str) -> Broken:
    options = {"reach_unit": unit, "hbm_tensor_limit_bytes": None}
    return Broken(kernel, "dynamic DMA reach", got, str(1 << 32), ReachError, options=options)


def test_a_dynamic_reach_past_2_to_the_32_bytes_is_refused() -> None:
    """524,288 rows of 8192 one-byte elements end exactly at 2^32; one more does not fit."""
    from gk_kernels.simulator import simulate

    fits = simulate(_stacked(524288), trace=True, hbm_tensor_limit_bytes=None)
    assert any("above 2^31" in w for w in fits.warnings)
    check_refusal(_reach(_stacked(524289), "bytes", "4294975488 bytes"), trace=True)


def test_the_reach_unit_decides_what_is_counted() -> None:
    """Two-byte elements reach 2^32 bytes at half as many rows as they reach 2^32 elements."""
    from gk_kernels.simulator import simulate

    two_bytes = _stacked(300000, nl.bfloat16)
    check_refusal(_reach(two_bytes, "bytes", "4915200000 bytes"), trace=True)
    simulate(two_bytes, trace=True, hbm_tensor_limit_bytes=None, reach_unit="elements")
    check_refusal(_reach(_stacked(524289, nl.bfloat16), "elements", "4294975488 elements"), trace=True)


def test_the_reach_comes_from_the_declared_shape_not_from_the_indices() -> None:
    """A trace has no indices, and the reach is refused all the same; a static access of the first rows is not."""
    from gk_kernels.simulator import simulate

    def first_rows() -> None:
        table = nl.ndarray((524289, 8192), nl.uint8, HBM)
        nisa.dma_copy(empty(4, 8192, dtype=nl.uint8), table[0:4])

    assert simulate(first_rows, trace=True, hbm_tensor_limit_bytes=None).warnings == []


def test_a_static_access_past_2_to_the_32_is_refused() -> None:
    """The last rows of the same table."""

    def last_rows() -> None:
        table = nl.ndarray((524289, 8192), nl.uint8, HBM)
        nisa.dma_copy(empty(4, 8192, dtype=nl.uint8), table[524285:524289])  # breaks

    case = Broken(last_rows, "static DMA reach", "4294975488 bytes", str(1 << 32), ReachError,
                  options={"hbm_tensor_limit_bytes": None})  # fmt: skip
    check_refusal(case, trace=True)
