"""The less common rules: each has a kernel that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from gk_kernels.simulator import BoundsError, PoisonError, UsageError
from gk_kernels.simulator import collectives as ncc
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import Broken, RuleBook, check_refusal, empty, filled, psum

breaks = RuleBook()
HBM, PSUM = nl.private_hbm, nl.psum
ONE = ncc.ReplicaGroup(((0,),))
CMD = nisa.reduce_cmd


def table_and_index(rows: int = 5, count: int = 3, dtype: Any = nl.float32, value: int = 0) -> tuple[Any, Any]:
    """A [rows, 2] HBM table and `count` equal indices."""
    return filled(rows, 2, dtype=dtype, buffer=HBM), filled(count, 1, dtype=nl.int32, value=value)


# Collectives ----------------------------------------------------------------------------------------------------------


@breaks("all_gather: src", "an indirect view", "a whole dense tensor")
def a_collective_on_an_indirect_view() -> None:
    table, _ = table_and_index()
    ncc.all_gather([table.select(0, filled(1, 1, dtype=nl.int32))], [empty(2, buffer=HBM)], ONE, 0)  # breaks


@breaks("all_reduce: dtype", "float8_e4m3fn_x4", "a dtype with arithmetic")
def a_reduction_of_packed_values() -> None:
    tile = filled(2, 3, dtype=nl.float8_e4m3fn_x4)
    ncc.all_reduce([tile], [empty(2, 3, dtype=nl.float8_e4m3fn_x4)], ONE, nl.add)  # breaks


@breaks("reduce_scatter: src.shape[0]", "3", "a multiple of the 2 ranks")
def a_scatter_that_does_not_divide() -> None:
    group = ncc.ReplicaGroup(((0, 1),))
    ncc.reduce_scatter([filled(3, 2, buffer=HBM)], [empty(1, 2, buffer=HBM)], group, 0, nl.add)  # breaks


@breaks("all_to_all: src.shape[0]", "3", "a multiple of the 2 ranks")
def an_exchange_that_does_not_divide() -> None:
    group = ncc.ReplicaGroup(((0, 1),))
    ncc.all_to_all([filled(3, 2, buffer=HBM)], [empty(3, 2, buffer=HBM)], group, 0)  # breaks


@breaks("all_to_all: collective_dim", "1", "0")
def an_exchange_of_columns() -> None:
    ncc.all_to_all([filled(3, 2, buffer=HBM)], [empty(3, 2, buffer=HBM)], ONE, 1)  # breaks


@breaks("collective_permute: tensors", "2", "1")
def a_permutation_of_two_tensors() -> None:
    a, b = filled(3, buffer=HBM), empty(3, buffer=HBM)
    ncc.collective_permute([a, a], [b, b], [(0, 0)])  # breaks


@breaks("collective_permute: source_target_pairs", "((0, 4),)", "targets below 1")
def a_permutation_to_a_missing_rank() -> None:
    ncc.collective_permute([filled(3, buffer=HBM)], [empty(3, buffer=HBM)], [(0, 4)])  # breaks


@breaks("collective_permute_implicit: srcs_by_channel", "[2]", "one tensor per channel")
def a_ring_of_two_tensors_in_a_channel() -> None:
    a, b = filled(3, buffer=HBM), empty(3, buffer=HBM)
    ncc.collective_permute_implicit([[a, a]], [[b]], ONE)  # breaks


@breaks("all_reduce: priority", "9", "0 to 3")
def a_collective_of_priority_nine() -> None:
    ncc.all_reduce([filled(3, buffer=HBM)], [empty(3, buffer=HBM)], ONE, nl.add, priority=9)  # breaks


# Accumulators and activations -----------------------------------------------------------------------------------------


@breaks("tensor_scalar_reduce: reduce_cmd", "3", "a member of nisa.reduce_cmd", UsageError)
def a_reduce_cmd_as_a_number() -> None:
    nisa.tensor_scalar_reduce(  # breaks
        empty(2, 3),
        filled(2, 3),
        nl.add,
        1.0,
        nl.add,
        empty(2, 1),
        reduce_cmd=3,  # type: ignore[arg-type]
    )


@breaks("tensor_scalar_reduce: initial value", "None", "a value when reduce_cmd is load_reduce", UsageError)
def load_reduce_without_a_value() -> None:
    nisa.tensor_scalar_reduce(  # breaks
        empty(2, 3), filled(2, 3), nl.add, 1.0, nl.add, empty(2, 1), reduce_cmd=CMD.load_reduce
    )


@breaks("tensor_scalar_reduce: op0", "nl.bitwise_and", "an arithmetic operator")
def a_bitwise_step_before_a_sum() -> None:
    tile = filled(2, 3, dtype=nl.uint8)
    nisa.tensor_scalar_reduce(empty(2, 3), tile, nl.bitwise_and, 1, nl.add, empty(2, 1))  # breaks


@breaks("vector accumulator registers", "registers that this kernel never set", "reset_reduce", PoisonError, True)
def accumulate_on_other_partitions() -> None:
    nisa.tensor_scalar_reduce(empty(32, 3), filled(32, 3), nl.add, 0.0, nl.add)
    data, out = filled(64, 3), empty(64, 3)
    nisa.tensor_scalar_reduce(out[32:64], data[32:64], nl.add, 0.0, nl.add, reduce_cmd=CMD.reduce)  # breaks


@breaks("vector accumulator registers", "read before any reduction", "a reduce_cmd first", PoisonError, True)
def read_registers_that_hold_nothing() -> None:
    keep = filled(2, 3, dtype=nl.uint8)
    nisa.select_reduce(empty(2, 3), keep, filled(2, 3), 0.0, reduce_res=empty(2, 1))  # breaks


@breaks("activate2: reverse", "reverse of bypass", "an operator to reverse", UsageError)
def reverse_a_bypass() -> None:
    nisa.activate2(empty(2, 3), nl.exp, filled(2, 3), 1.0, 1.0, nl.bypass, nl.bypass, reverse0=True)  # breaks


@breaks("activate2: imm dtypes", "float32 and bfloat16", "equal dtypes")
def immediates_of_two_dtypes() -> None:
    a, b = filled(2, 1), filled(2, 1, dtype=nl.bfloat16)
    nisa.activate2(empty(2, 3), nl.exp, filled(2, 3), a, b, nl.multiply, nl.add)  # breaks


@breaks("activate2: reduce_op", "nl.multiply", "add, maximum, minimum, abs_max or abs_min")
def activate2_reduces_by_multiply() -> None:
    nisa.activate2(  # breaks
        empty(2, 3), nl.exp, filled(2, 3), 1.0, 1.0, nl.bypass, nl.bypass, reduce_op=nl.multiply
    )


@breaks("exponential: reduce_cmd", "reset", "idle, reset_reduce, reduce or load_reduce", UsageError)
def exponential_resets_only() -> None:
    nisa.exponential(empty(2, 3), filled(2, 3), reduce_cmd=CMD.reset)  # breaks


for _name, _call in {
    "activation": lambda d, x: nisa.activation(d, nl.exp, x),  # breaks
    "tensor_tensor": lambda d, x: nisa.tensor_tensor(d, x, x, nl.add),  # breaks
    "tensor_scalar": lambda d, x: nisa.tensor_scalar(d, x, nl.add, 1.0),  # breaks
    "scalar_tensor_tensor": lambda d, x: nisa.scalar_tensor_tensor(d, x, nl.add, 1.0, nl.add, x),  # breaks
    "reciprocal": nisa.reciprocal,
    "memset": lambda d, x: nisa.memset(d, 0.0),  # breaks
    "tensor_copy_predicated": lambda d, x: nisa.tensor_copy_predicated(d, x, x),  # breaks
}.items():

    def _broadcast(call: Any = _call) -> None:
        target, source = empty(2, 1).broadcast(1, 3), filled(2, 3)
        call(target, source)  # breaks

    _broadcast.__name__ = f"{_name}_into_a_broadcast"
    breaks(f"{_name}: dst", "stride 0 over 3 elements", "each element is written once")(_broadcast)


# Elementwise ----------------------------------------------------------------------------------------------------------


@breaks("tensor_tensor: an input", "1.0", "an NkiTensor", UsageError)
def a_constant_as_a_tensor() -> None:
    nisa.tensor_tensor(empty(2, 3), filled(2, 3), 1.0, nl.add)  # type: ignore[arg-type]  # breaks


@breaks("iota: dst", "None", "an NkiTensor", UsageError)
def an_iota_without_destination() -> None:
    nisa.iota(None, [[1, 3]])  # type: ignore[arg-type]  # breaks


@breaks("tensor_scalar: op0", "nl.exp", "an ALU operator")
def an_activation_function_as_alu_operator() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.exp, 1.0)  # breaks


@breaks("tensor_tensor_scan: operators", "nl.bitwise_or and nl.add", "arithmetic operators")
def a_bitwise_scan() -> None:
    tile = filled(2, 3)
    nisa.tensor_tensor_scan(empty(2, 3), tile, tile, 0.0, nl.bitwise_or, nl.add)  # breaks


@breaks("arithmetic on packed x4 elements", "an x4 dtype", "quantize_mx, nc_matmul_mx or a bit view", UsageError, True)
def add_packed_values() -> None:
    tile = filled(2, 3, dtype=nl.float8_e4m3fn_x4)
    nisa.tensor_scalar(empty(2, 3), tile, nl.add, 1.0)  # breaks


# Selections -----------------------------------------------------------------------------------------------------------


@breaks("affine_select: on_false_value", "None", "a float32 constant", UsageError)
def affine_select_without_a_value() -> None:
    nisa.affine_select(empty(2, 3), [[1, 3]], 0, filled(2, 3), None)  # type: ignore[arg-type]  # breaks


@breaks("range_select: comparison", "not_equal", "equal, less, less_equal, greater or greater_equal")
def range_select_by_not_equal() -> None:
    low, high = filled(2, 1), filled(2, 1)
    nisa.range_select(empty(2, 3), filled(2, 3), nl.not_equal, nl.less, low, high)  # breaks


@breaks("range_select: on_true_tile dtype", "int32", "a float dtype")
def range_select_from_integers() -> None:
    low, high, tile = filled(2, 1), filled(2, 1), filled(2, 3, dtype=nl.int32)
    nisa.range_select(empty(2, 3), tile, nl.greater, nl.less, low, high)  # breaks


@breaks("range_select: largest index", "16777219", "2^24")
def range_select_past_fp32_integers() -> None:
    low, high = filled(2, 1), filled(2, 1)
    nisa.range_select(empty(2, 3), filled(2, 3), nl.greater, nl.less, low, high, range_start=2**24)  # breaks


@breaks("range_select: reduce_op", "nl.add", "nl.maximum")
def range_select_sums() -> None:
    low, high = filled(2, 1), filled(2, 1)
    nisa.range_select(empty(2, 3), filled(2, 3), nl.greater, nl.less, low, high, reduce_op=nl.add)  # breaks


@breaks("select_reduce: reduce_op", "nl.add", "nl.maximum")
def select_reduce_sums() -> None:
    keep = filled(2, 3, dtype=nl.uint8)
    nisa.select_reduce(empty(2, 3), keep, filled(2, 3), 0.0, reduce_op=nl.add)  # breaks


@breaks("select_reduce: reduce_res dtype", "int32", "a float dtype")
def select_reduce_into_integers() -> None:
    keep, total = filled(2, 3, dtype=nl.uint8), empty(2, 1, dtype=nl.int32)
    nisa.select_reduce(empty(2, 3), keep, filled(2, 3), 0.0, total)  # breaks


@breaks("start of a PSUM access", "byte 2", "a multiple of 4 bytes")
def an_odd_start_in_psum() -> None:
    nisa.tensor_copy(empty(2, 2, dtype=nl.bfloat16), filled(2, 4, dtype=nl.bfloat16, buffer=PSUM)[:, 1:3])  # breaks


@breaks("exponential: dst dtype", "uint32", "bfloat16")
def an_exponential_into_uint32() -> None:
    nisa.exponential(empty(2, 3, dtype=nl.uint32), filled(2, 3))  # breaks


@breaks("exponential: src dtype", "tfloat32", "bfloat16")
def an_exponential_of_tf32() -> None:
    nisa.exponential(empty(2, 3), filled(2, 3, dtype=nl.tfloat32))  # breaks


@breaks("iota: offset", "2147483648", "int32")
def an_iota_past_int32() -> None:
    nisa.iota(empty(2, 3, dtype=nl.int32), [[1, 3]], offset=1 << 31)  # breaks


@breaks("affine_select: channel_multiplier", "1.5", "an integer known at build time", UsageError)
def a_fractional_multiplier() -> None:
    nisa.affine_select(empty(2, 3), [[1, 3]], 1.5, filled(2, 3), 0.0)  # type: ignore[arg-type]  # breaks


@breaks("nonzero_with_count: padding_val", "-2147483649", "int32")
def a_padding_past_int32() -> None:
    target = empty(16, 5, dtype=nl.int32)
    nisa.nonzero_with_count(target, filled(16, 4), padding_val=-(1 << 31) - 1)  # breaks


# Movement -------------------------------------------------------------------------------------------------------------


@breaks("nc_stream_shuffle: elements per partition", "src 3, dst 4", "equal")
def a_shuffle_that_widens() -> None:
    nisa.nc_stream_shuffle(empty(32, 4), filled(32, 3), [0] * 32)  # breaks


@breaks("read of never-written bytes", "96 of 96", "write before read", PoisonError, True)
def a_shuffle_of_a_fresh_tile() -> None:
    nisa.nc_stream_shuffle(empty(32, 3), empty(32, 3), [0] * 32)  # breaks


@breaks("nc_n_gather: partitions", "data 3, dst 2", "equal")
def a_gather_of_other_partitions() -> None:
    nisa.nc_n_gather(empty(2, 3), filled(3, 5), filled(2, 3, dtype=nl.uint32))  # breaks


@breaks("nc_n_gather: dtypes", "bfloat16 to float32", "equal dtypes")
def a_gather_that_casts() -> None:
    nisa.nc_n_gather(empty(2, 3), filled(2, 5, dtype=nl.bfloat16), filled(2, 3, dtype=nl.uint32))  # breaks


@breaks("nc_n_gather: index", "5", "0 to 4", BoundsError, True)
def a_gather_past_the_row() -> None:
    nisa.nc_n_gather(empty(2, 3), filled(2, 5), filled(2, 3, dtype=nl.uint32, value=5))  # breaks


@breaks("local_gather: dtypes", "float32 to bfloat16", "equal dtypes")
def a_local_gather_that_casts() -> None:
    index = filled(16, 1, dtype=nl.uint16)
    nisa.local_gather(empty(16, 16, dtype=nl.bfloat16), filled(16, 4), index)  # breaks


@breaks("local_gather: indices per core", "17", "1 to 16")
def a_local_gather_of_too_many_indices() -> None:
    index = filled(16, 1, dtype=nl.uint16)
    nisa.local_gather(empty(16, 17), filled(16, 4), index, num_valid_indices=17)  # breaks


@breaks("local_gather: dst shape", "(16, 8)", "(16, 16)")
def a_local_gather_into_too_little() -> None:
    nisa.local_gather(empty(16, 8), filled(16, 4), filled(16, 1, dtype=nl.uint16))  # breaks


@breaks("local_gather: index", "4", "0 to 3", BoundsError, True)
def a_local_gather_past_the_row() -> None:
    nisa.local_gather(filled(16, 16), filled(16, 4), filled(16, 1, dtype=nl.uint16, value=4))  # breaks


@breaks("tensor_partition_reduce: dst shape", "(2, 3)", "(1, 3)")
def a_partition_reduce_that_keeps_rows() -> None:
    nisa.tensor_partition_reduce(empty(2, 3), nl.add, filled(2, 3))  # breaks


@breaks("read of never-written bytes", "4 of 64", "write before read", PoisonError, True)
def a_nonzero_search_of_a_fresh_row() -> None:
    nisa.nonzero_with_count(empty(16, 5, dtype=nl.int32), empty(16, 4))  # breaks


@breaks("topk: k", "17", "1 to 16")
def topk_of_more_than_there_is() -> None:
    values, places = empty(16, 17, dtype=nl.bfloat16), empty(16, 17, dtype=nl.uint32)
    nisa.topk(values, places, filled(16, 1, dtype=nl.bfloat16), 16)  # breaks


@breaks("topk: partitions", "src 8, dst 8", "equal multiples of 16")
def topk_of_eight_partitions() -> None:
    values, places = empty(8, 2, dtype=nl.bfloat16), empty(8, 2, dtype=nl.uint32)
    nisa.topk(values, places, filled(8, 1, dtype=nl.bfloat16), 16)  # breaks


@breaks("bn_stats: dst shape", "(2, 5)", "(2, 6)")
def bn_stats_into_five() -> None:
    nisa.bn_stats(empty(2, 5), filled(2, 4))  # breaks


@breaks("bn_aggr: dst shape", "(2, 3)", "(2, 2)")
def bn_aggr_into_three() -> None:
    nisa.bn_aggr(empty(2, 3), filled(2, 6))  # breaks


@breaks("rand_get_state", "a read of the generator state", "not simulated")
def read_the_generator() -> None:
    nisa.rand_get_state(empty(2, 3))  # breaks


# Matmul and MX --------------------------------------------------------------------------------------------------------


@breaks("nc_matmul: input start partitions", "0 and 32", "two SBUF inputs start on the same partition")
def a_matmul_of_two_places() -> None:
    tile = filled(64, 4)
    nisa.nc_matmul(psum(4, 4), tile[0:32], tile[32:64])  # breaks


@breaks(
    "nc_matmul: accumulate=None", "set by another instruction", "undefined before trn3", needs_data=True, target="trn2"
)
def accumulate_onto_a_copy_on_trn2() -> None:
    target = psum(16, 4)
    nisa.nc_matmul(target, filled(64, 16), filled(64, 4))
    nisa.tensor_copy(target, filled(16, 4))
    nisa.nc_matmul(target, filled(64, 16), filled(64, 4))  # breaks


@breaks("nc_matmul: moving dtype", "uint8", "bfloat16")
def a_moving_of_integers() -> None:
    nisa.nc_matmul(psum(4, 4), filled(64, 4, dtype=nl.bfloat16), filled(64, 4, dtype=nl.uint8))  # breaks


@breaks("nc_matmul: column tiling with double_row", "(64, 64)", "128 columns")
def double_row_with_column_tiles() -> None:
    a = filled(64, 2, 16, dtype=nl.float8_e4m3)
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(psum(16, 16), a, a, tile_position=(0, 0), tile_size=(64, 64), perf_mode=mode)  # breaks


@breaks("nc_matmul: is_transpose with double_row", "True", "False")
def a_transpose_with_double_row() -> None:
    a, mode = filled(64, 2, 16, dtype=nl.float8_e4m3), nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(psum(16, 16), a, a, is_transpose=True, perf_mode=mode)  # breaks


@breaks("dma_copy: dge_mode of a dynamic address", "none", "unknown, swdge or hwdge")
def a_static_descriptor_for_a_dynamic_row() -> None:
    table, _ = table_and_index()
    row = table.select(0, filled(1, 1, dtype=nl.int32))
    nisa.dma_copy(empty(1, 2), row, dge_mode=nisa.dge_mode.none)  # breaks


@breaks("nc_transpose: dst shape of a transpose", "(64, 16)", "(16, 64)")
def a_transpose_into_its_own_shape() -> None:
    nisa.nc_transpose(psum(64, 16), filled(64, 16))  # breaks


@breaks("nc_transpose: dst dtype", "float32", "bfloat16, the dtype of the input")
def a_vector_transpose_that_casts() -> None:
    nisa.nc_transpose(empty(8, 16), filled(16, 8, dtype=nl.bfloat16), engine=nisa.engine.vector)  # breaks


@breaks("nc_transpose: dst shape", "(16, 8)", "(8, 16)")
def a_vector_transpose_into_its_own_shape() -> None:
    nisa.nc_transpose(empty(16, 8), filled(16, 8), engine=nisa.engine.vector)  # breaks


@breaks("nc_matmul_mx: contraction", "32 and 64 partitions", "equal partitions")
def an_mx_contraction_of_two_sizes() -> None:
    a, b = (filled(p, 4, dtype=nl.float8_e4m3fn_x4) for p in (32, 64))
    s, t = filled(4, 4, dtype=nl.uint8), filled(64, 4, dtype=nl.uint8)
    nisa.nc_matmul_mx(psum(4, 4), a, b, s, t)  # breaks


@breaks("nc_matmul_mx: input start partitions", "0 and 32", "two SBUF inputs start on the same partition")
def an_mx_matmul_of_two_places() -> None:
    tile, scale = filled(64, 4, dtype=nl.float8_e4m3fn_x4), filled(64, 4, dtype=nl.uint8)
    nisa.nc_matmul_mx(psum(4, 4), tile[0:32], tile[32:64], scale[0:4], scale[32:36])  # breaks


# DMA ------------------------------------------------------------------------------------------------------------------


@breaks("dma_copy: dynamic sides", "both", "one indirect side")
def a_dma_from_index_to_index() -> None:
    table, index = table_and_index()
    tile = empty(3, 4).select(1, filled(1, 1, dtype=nl.int32))
    nisa.dma_copy(tile, table[:, 0:1].vector_select(0, index))  # breaks


@breaks("read of never-written bytes", "6 of 6", "write before read", PoisonError, True)
def a_gather_from_fresh_rows() -> None:
    _, index = table_and_index()
    nisa.dma_copy(empty(3, 2), empty(5, 2, buffer=HBM).vector_select(0, index))  # breaks


@breaks("dma_copy: skipped rows", "dst (1, 6)", "3 rows in dst", needs_data=True)
def skip_into_a_reshaped_tile() -> None:
    table, index = table_and_index()
    nisa.dma_copy(index[0:1], filled(1, 1, dtype=nl.int32, value=-1))
    nisa.dma_copy(empty(1, 6), table.vector_select(0, index), oob_mode=nisa.oob_mode.skip)  # breaks


@breaks("dma_copy: dge_mode", "7", "a member of nisa.dge_mode", UsageError)
def an_unknown_dge_mode() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=HBM), dge_mode=7)  # type: ignore[arg-type]  # breaks


@breaks("dma_copy: engine", "'sync'", "a member of nisa.engine", UsageError)
def a_dma_engine_as_a_string() -> None:
    nisa.dma_copy(empty(2, 3), filled(2, 3, buffer=HBM), engine="sync")  # type: ignore[arg-type]  # breaks


@breaks("dma_transpose: dge_mode", "swdge", "unknown or hwdge")
def a_software_transpose_without_indices() -> None:
    nisa.dma_transpose(empty(3, 2), filled(2, 3, buffer=HBM), dge_mode=nisa.dge_mode.swdge)  # breaks


@breaks("dma_transpose with hwdge: src.shape", "(3, 4, 5)", "shape[0] in 1, 2, 4, 8, 16")
def a_hardware_transpose_of_three_rows() -> None:
    source = filled(3, 4, 5, dtype=nl.bfloat16, buffer=HBM)
    nisa.dma_transpose(empty(5, 4, 3, dtype=nl.bfloat16), source, dge_mode=nisa.dge_mode.hwdge)  # breaks


def indirect_transpose(
    shape: tuple[int, ...], index: tuple[int, int], dtype: Any = nl.bfloat16, mode: Any = nisa.dge_mode.unknown
) -> tuple[Any, Any, Any]:
    """Destination, indirect source and mode of a gather-transpose."""
    table = filled(40, *shape[1:], dtype=dtype, buffer=HBM)
    rows = table.ap(
        [[1, shape[0]], *[list(p) for p in table.get_pattern()[1:]]],
        vector_offset=filled(*index, dtype=nl.uint32),
    )
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    return empty(*(shape[a] for a in order), dtype=dtype), rows, mode


@breaks("dma_transpose: dge_mode of an indirect transpose", "hwdge", "unknown or swdge")
def an_indirect_hardware_transpose() -> None:
    dst, src, mode = indirect_transpose((16, 4), (16, 1), mode=nisa.dge_mode.hwdge)
    nisa.dma_transpose(dst, src, dge_mode=mode)  # breaks


@breaks("dma_transpose: src dtype of an indirect transpose", "float32", "2 bytes")
def an_indirect_transpose_of_fp32() -> None:
    dst, src, _ = indirect_transpose((16, 4), (16, 1), nl.float32)
    nisa.dma_transpose(dst, src)  # breaks


@breaks("dma_transpose: src shape of an indirect transpose", "(16, 2, 3, 4)", "shape[1] or shape[2] is 1")
def an_indirect_transpose_of_four_full_dimensions() -> None:
    dst, src, _ = indirect_transpose((16, 2, 3, 4), (16, 1))
    nisa.dma_transpose(dst, src)  # breaks


@breaks("dma_transpose: indices shape", "(64, 2)", "exactly 128 if shape[1] > 1")
def an_indirect_transpose_by_two_short_columns() -> None:
    dst, src, _ = indirect_transpose((32, 4), (64, 2))
    nisa.dma_transpose(dst, src)  # breaks


@breaks("dma_transpose: dynamic index out of bounds", "index 40 in row 0", "0 to 39", BoundsError, True)
def an_indirect_transpose_past_the_table() -> None:
    table, index = filled(40, 4, dtype=nl.bfloat16, buffer=HBM), filled(16, 1, dtype=nl.uint32, value=40)
    nisa.dma_transpose(empty(4, 16, dtype=nl.bfloat16), table.vector_select(0, index))  # breaks


@breaks("read of never-written bytes", "64 of", "write before read", PoisonError, True)
def an_indirect_transpose_of_fresh_rows() -> None:
    table, index = empty(40, 4, dtype=nl.bfloat16, buffer=HBM), filled(16, 1, dtype=nl.uint32)
    nisa.dma_transpose(empty(4, 16, dtype=nl.bfloat16), table.vector_select(0, index))  # breaks


@breaks("dma_compute: element count", "src (2, 4), dst (2, 3)", "equal element counts")
def dma_compute_of_two_sizes() -> None:
    nisa.dma_compute(empty(2, 3), [filled(2, 4)], nl.add)  # breaks


@breaks("dma_compute: unique_indices", "False", "True with vector_offset")
def dma_compute_with_repeats() -> None:
    table, index = table_and_index()
    rows = table.vector_select(0, index)
    nisa.dma_compute(rows, [rows, filled(3, 2)], nl.add, unique_indices=False)  # breaks


@breaks("dma_compute: dynamic index", "scalar_offset", "vector_offset")
def dma_compute_by_a_scalar() -> None:
    table, _ = table_and_index()
    row = table.select(0, filled(1, 1, dtype=nl.int32))
    nisa.dma_compute(empty(1, 2), [filled(1, 2), row], nl.add)  # breaks


@breaks("dma_compute: scatter sources", "no plain source", "the indexed dst and one SBUF tensor", needs_data=True)
def dma_compute_scatters_two_tables() -> None:
    table, index = table_and_index()
    rows = table.vector_select(0, index)
    nisa.dma_compute(rows, [rows, rows], nl.add)  # breaks


@breaks("read of never-written bytes", "6 of 6", "write before read", PoisonError, True)
def dma_compute_gathers_fresh_rows() -> None:
    _, index = table_and_index()
    rows = empty(5, 2, buffer=HBM).vector_select(0, index)
    nisa.dma_compute(empty(3, 2), [filled(3, 2), rows], nl.add)  # breaks


# Allocation, views, language ------------------------------------------------------------------------------------------


@breaks("ndarray: shape", "()", "at least one dimension", UsageError)
def a_tensor_of_no_dimensions() -> None:
    nl.ndarray((), nl.float32, HBM)  # breaks


@breaks("ndarray: name", "'partial'", "a name of its own", UsageError, lnc=2)
def a_shared_name_taken_twice() -> None:
    nl.ndarray((2, 3), nl.float32, nl.shared_hbm, name="partial")
    nl.ndarray((2, 3), nl.float32, nl.shared_hbm, name="partial")  # breaks


@breaks("ndarray: address", "(0, 0)", "none for HBM tensors", UsageError)
def an_address_in_hbm() -> None:
    nl.ndarray((2, 3), nl.float32, HBM, address=(0, 0))  # breaks


@breaks("nl.while_loop body", "None", "returns the next condition register", UsageError, True)
def a_loop_body_that_returns_nothing() -> None:
    nl.while_loop(nisa.register_alloc(1), lambda r: None)  # type: ignore[arg-type, return-value]  # breaks


@breaks("nl.add", "1, 2", "at least one tile", UsageError)
def add_two_numbers() -> None:
    nl.add(1, 2)  # breaks


@breaks("tensor_scalar: op", "print", "an operator of nki.language", UsageError)
def an_operator_that_is_a_function() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), print, 1.0)  # breaks


@breaks("one dynamic index", "a dynamic slice", "before the dynamic index", UsageError)
def two_dynamic_slices() -> None:
    r = nisa.register_alloc(0)
    empty(4, 6, buffer=HBM)[nl.ds(r, 1), nl.ds(r, 1)]  # breaks


@breaks("one dynamic index", "a second dynamic index", "before the dynamic index", UsageError)
def two_register_indices() -> None:
    r = nisa.register_alloc(0)
    empty(4, 6, buffer=HBM)[r, r]  # breaks


@breaks("one dynamic index", "a slice of the indexed dimension", "before the dynamic index", UsageError)
def a_static_ds_of_a_gathered_dimension() -> None:
    empty(4, 6, buffer=HBM).vector_select(0, empty(3, 1, dtype=nl.int32))[nl.ds(0, 2)]  # breaks


@breaks("one dynamic index", "a index of the indexed dimension", "before the dynamic index", UsageError)
def an_index_of_a_gathered_dimension() -> None:
    empty(4, 6, buffer=HBM).vector_select(0, empty(3, 1, dtype=nl.int32))[1]  # breaks


@breaks("slice", "dimension 2", "0 to 1", UsageError)
def a_slice_of_a_missing_dimension() -> None:
    empty(4, 6).slice(2, 0, 1)  # breaks


@breaks("dynamic select on chip", "dimension 0", "a free dimension", UsageError)
def a_dynamic_partition() -> None:
    empty(4, 6).select(0, nisa.register_alloc(0))  # breaks


@breaks("squeeze_dim", "a 2-dimensional tensor", "2 dimensions remain on chip", UsageError)
def squeeze_the_last_free_dimension() -> None:
    empty(4, 1).squeeze_dim(1)  # breaks


@breaks("squeeze_dim", "dimension 0", "the partition dimension stays first", UsageError)
def squeeze_the_gathered_dimension() -> None:
    empty(4, 6, buffer=HBM).vector_select(0, empty(1, 1, dtype=nl.int32)).squeeze_dim(0)  # breaks


@breaks("one dynamic index", "a reshape of the indexed dimension", "before the dynamic index", UsageError)
def reshape_a_dynamic_slice() -> None:
    empty(4, 6, buffer=HBM)[:, nl.ds(nisa.register_alloc(0), 6)].reshape((24,))  # breaks


@breaks("one dynamic index", "a reshape of the indexed dimension", "before the dynamic index", UsageError)
def split_a_dynamic_slice() -> None:
    empty(4, 6, buffer=HBM)[:, nl.ds(nisa.register_alloc(0), 2)].reshape_dim(1, (2, 1))  # breaks


@breaks("one dynamic index", "a dtype view", "before the dynamic index", UsageError)
def reinterpret_a_gathered_tensor() -> None:
    empty(4, 6, buffer=HBM).vector_select(0, empty(3, 1, dtype=nl.int32)).view(nl.bfloat16)  # breaks


@breaks("rearrange", "('a',)", "2 entries", UsageError)
def rearrange_one_of_two_dimensions() -> None:
    empty(4, 6).rearrange(("a",), ("a",))  # breaks


@breaks("rearrange", "b = 5", "6", UsageError)
def rearrange_with_a_wrong_size() -> None:
    empty(4, 6).rearrange(("a", "b"), ("a", "b"), {"b": 5})  # breaks


@breaks("rearrange", "('a', 'c')", "the same names on both sides", UsageError)
def rearrange_to_other_names() -> None:
    empty(4, 6).rearrange(("a", "b"), ("a", "c"))  # breaks


@breaks("ap pattern", "(1, 0)", "1 to 5 pairs, counts of at least 1")
def an_empty_access_pattern() -> None:
    empty(4, 6, buffer=HBM).ap([[6, 4], [1, 0]])  # breaks


@breaks("ap offset", "-1", "at least 0", BoundsError)
def a_negative_access_offset() -> None:
    empty(4, 6, buffer=HBM).ap([[6, 4], [1, 2]], offset=-1)  # breaks


@breaks("one dynamic index", "a second dynamic index", "before the dynamic index", UsageError)
def ap_on_an_indirect_view() -> None:
    index = empty(1, 1, dtype=nl.int32)
    empty(4, 6, buffer=HBM).select(0, index).ap([[1, 2]], scalar_offset=index)  # breaks


@breaks("scalar_offset", "3", "a 1x1 SBUF tensor or a register", UsageError)
def a_scalar_offset_that_is_a_number() -> None:
    empty(4, 6, buffer=HBM).ap([[6, 1], [1, 6]], scalar_offset=3)  # breaks


@pytest.mark.parametrize("case", breaks.cases, ids=breaks.ids)
def test_a_broken_rule_is_refused_with_its_numbers_and_line(case: Broken) -> None:
    """Message: rule, got, limit; site: the line that breaks it."""
    check_refusal(case)


@pytest.mark.parametrize("case", [c for c in breaks.cases if not c.needs_data], ids=lambda c: c.kernel.__name__)
def test_a_trace_refuses_the_same(case: Broken) -> None:
    """Checks need no data."""
    check_refusal(case, trace=True)
