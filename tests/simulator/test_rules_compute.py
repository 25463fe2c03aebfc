"""Every documented rule of the compute engines has a kernel that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from gk_kernels.simulator import UsageError
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import Broken, RuleBook, check_refusal, empty, filled, psum

breaks = RuleBook()
SBUF, PSUM, HBM = nl.sbuf, nl.psum, nl.private_hbm


# Access ---------------------------------------------------------------------------------------------------------------


@breaks("start partition", "33 partitions from partition 32", "0 or 64 for 33 to 64")
def thirty_three_partitions_start_at_32() -> None:
    tile = filled(128, 4)
    nisa.tensor_copy(tile[32:65], tile[0:33])  # breaks


@breaks("start partition", "65 partitions from partition 32", "0 above 64 partitions")
def sixty_five_partitions_start_at_32() -> None:
    nisa.memset(empty(128, 4)[32:97], 0.0)  # breaks


@breaks("start partition", "8 partitions from partition 16", "0, 32, 64 or 96 up to 32")
def eight_partitions_start_at_16() -> None:
    nisa.memset(empty(128, 4)[16:24], 0.0)  # breaks


@breaks("compute engines read and write on-chip memory", "private_hbm", "SBUF or PSUM")
def compute_reads_hbm() -> None:
    nisa.tensor_copy(empty(2, 3), filled(2, 3, buffer=HBM))  # breaks


@breaks("access pattern stride", "32768 elements", "int16, at most 32767")
def a_free_stride_does_not_fit_int16() -> None:
    wide = filled(1, 2, 32768, dtype=nl.uint8)
    nisa.tensor_copy(empty(1, 2, dtype=nl.uint8), wide[:, :, 0])  # breaks


@breaks("access pattern count", "65537", "uint16, at most 65535")
def a_free_count_does_not_fit_uint16() -> None:
    nisa.memset(empty(1, 65537, dtype=nl.uint8), 0)  # breaks


@breaks("access pattern dimensions", "6", "at most 5")
def six_dimensions() -> None:
    nisa.memset(empty(2, 3, 2, 2, 2, 2), 0.0)  # breaks


@breaks("operand shapes", "(2, 4) against dst (2, 3)", "equal elements per partition")
def elements_per_partition_differ() -> None:
    nisa.tensor_copy(empty(2, 3), filled(2, 4))  # breaks


@breaks("operand shapes", "(3, 4) against dst (2, 4)", "equal partitions")
def partitions_differ() -> None:
    nisa.tensor_tensor(empty(2, 4), filled(2, 4), filled(3, 4), nl.add)  # breaks


@breaks("tensor_copy: dst", "stride 0 over 3 elements", "each element is written once")
def a_broadcast_destination() -> None:
    nisa.tensor_copy(empty(2, 1).broadcast(1, 3), filled(2, 3))  # breaks


@breaks("dst", "None", "an NkiTensor", UsageError)
def a_destination_that_is_no_tensor() -> None:
    nisa.tensor_copy(None, filled(2, 3))  # type: ignore[arg-type]  # breaks


# Engines and buffers --------------------------------------------------------------------------------------------------


@breaks("tensor_copy: GpSimd operand", "a tensor in PSUM", "GpSimd reaches SBUF only")
def gpsimd_reads_psum() -> None:
    nisa.tensor_copy(empty(2, 3), filled(2, 3, buffer=PSUM), engine=nisa.engine.gpsimd)  # breaks


@breaks("tensor_copy: engine", "tensor", "vector or scalar or gpsimd")
def tensor_copy_on_the_tensor_engine() -> None:
    nisa.tensor_copy(empty(2, 3), filled(2, 3), engine=nisa.engine.tensor)  # breaks


@breaks("tensor_copy: engine", "'vector'", "a member of nisa.engine", UsageError)
def an_engine_as_a_string() -> None:
    nisa.tensor_copy(empty(2, 3), filled(2, 3), engine="vector")  # type: ignore[arg-type]  # breaks


@breaks("memset: engine", "scalar", "vector or gpsimd")
def memset_on_the_scalar_engine() -> None:
    nisa.memset(empty(2, 3), 0.0, engine=nisa.engine.scalar)  # breaks


@breaks("memset: value of uint8", "256", "a value that the dtype can hold")
def memset_past_uint8() -> None:
    nisa.memset(empty(2, 3, dtype=nl.uint8), 256)  # breaks


@breaks("memset: value of int32", "0.5", "a value that the dtype can hold")
def memset_a_fraction_into_integers() -> None:
    nisa.memset(empty(2, 3, dtype=nl.int32), 0.5)  # breaks


@breaks("memset: value of float8_e4m3", "1000", "a value that the dtype can hold")
def memset_past_fp8() -> None:
    nisa.memset(empty(2, 3, dtype=nl.float8_e4m3), 1000.0)  # breaks


@breaks("memset: value of an x4 type", "1", "0")
def memset_x4_to_one() -> None:
    nisa.memset(empty(2, 3, dtype=nl.float8_e4m3fn_x4), 1)  # breaks


@breaks("memset: value", "'zero'", "a number known at build time", UsageError)
def memset_a_string() -> None:
    nisa.memset(empty(2, 3), "zero")  # type: ignore[arg-type]  # breaks


@breaks("tensor_tensor: input buffers", "two inputs in PSUM", "at most one input in PSUM")
def both_inputs_in_psum() -> None:
    a, b = filled(2, 3, buffer=PSUM), filled(2, 3, buffer=PSUM)
    nisa.tensor_tensor(empty(2, 3), a, b, nl.add)  # breaks


@breaks("tensor_tensor: input start partitions", "0 and 32", "two SBUF inputs start on the same partition")
def two_inputs_start_on_different_partitions() -> None:
    tile = filled(64, 3)
    nisa.tensor_tensor(empty(32, 3), tile[0:32], tile[32:64], nl.add)  # breaks


@breaks("tensor_tensor: bitwise operand dtype", "float32", "an integer dtype")
def bitwise_on_floats() -> None:
    nisa.tensor_tensor(empty(2, 3), filled(2, 3), filled(2, 3), nl.bitwise_and)  # breaks


@breaks("tensor_tensor: bitwise operand sizes", "uint8 and uint32", "equal sizes")
def bitwise_on_different_sizes() -> None:
    a, b = filled(2, 3, dtype=nl.uint32), filled(2, 3, dtype=nl.uint8)
    nisa.tensor_tensor(empty(2, 3, dtype=nl.uint32), a, b, nl.bitwise_or)  # breaks


@breaks("tensor_tensor with power: GpSimd operand", "a tensor in PSUM", "GpSimd reaches SBUF only")
def power_in_psum() -> None:
    nisa.tensor_tensor(psum(2, 3), filled(2, 3), filled(2, 3), nl.power)  # breaks


@breaks("tensor_tensor: engine of power", "vector", "gpsimd")
def power_on_the_vector_engine() -> None:
    nisa.tensor_tensor(empty(2, 3), filled(2, 3), filled(2, 3), nl.power, engine=nisa.engine.vector)  # breaks


@breaks("tensor_tensor: op", "nl.exp", "a binary operator")
def a_unary_operator_on_two_tensors() -> None:
    nisa.tensor_tensor(empty(2, 3), filled(2, 3), filled(2, 3), nl.exp)  # breaks


@breaks("tensor_tensor: op", "nl.divide", "a binary operator")
def divide_is_no_engine_operator() -> None:
    nisa.tensor_tensor(empty(2, 3), filled(2, 3), filled(2, 3), nl.divide)  # breaks


@breaks("tensor_tensor: op", "'add'", "an operator of nki.language", UsageError)
def an_operator_as_a_string() -> None:
    nisa.tensor_tensor(empty(2, 3), filled(2, 3), filled(2, 3), "add")  # breaks


# tensor_scalar and kin ------------------------------------------------------------------------------------------------


@breaks("tensor_scalar: operand0 shape", "(2, 3)", "(2, 1)")
def a_column_that_is_a_tile() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.add, filled(2, 3))  # breaks


@breaks("tensor_scalar: operand0 dtype", "bfloat16", "float32")
def a_column_that_is_not_fp32() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.add, filled(2, 1, dtype=nl.bfloat16))  # breaks


@breaks("tensor_scalar: operators", "nl.add and nl.bitwise_and", "both bitwise or both arithmetic")
def arithmetic_then_bitwise() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.add, 1.0, op1=nl.bitwise_and, operand1=1)  # breaks


@breaks("tensor_scalar: operand1", "1.0", "None without op1", UsageError)
def an_operand_without_operator() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.add, 1.0, operand1=1.0)  # breaks


@breaks("tensor_scalar: operand of unary nl.abs", "2.0", "None or 0")
def an_operand_of_a_unary_operator() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.abs, 2.0)  # breaks


@breaks("tensor_scalar: rsqrt on the Vector Engine", "engine.vector", "gpsimd")
def rsqrt_on_the_vector_engine() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.rsqrt, None, engine=nisa.engine.vector)  # breaks


@breaks("tensor_scalar: engine of nl.add", "gpsimd", "GpSimd runs rsqrt only")
def tensor_scalar_add_on_gpsimd() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.add, 1.0, engine=nisa.engine.gpsimd)  # breaks


@breaks("tensor_scalar: engine of a bitwise operator", "scalar", "vector")
def bitwise_on_the_scalar_engine() -> None:
    tile = filled(2, 3, dtype=nl.uint8)
    nisa.tensor_scalar(empty(2, 3, dtype=nl.uint8), tile, nl.bitwise_and, 1, engine=nisa.engine.scalar)  # breaks


@breaks("tensor_scalar: operators on trn2's Scalar Engine", "('add', 'multiply')", "multiply then add", target="trn2")
def add_then_multiply_on_trn2_scalar() -> None:
    nisa.tensor_scalar(  # breaks
        empty(2, 3), filled(2, 3), nl.add, 1.0, op1=nl.multiply, operand1=2.0, engine=nisa.engine.scalar
    )


@breaks("tensor_scalar: operand0", "True", "a number or a (P, 1) tensor", UsageError)
def a_boolean_operand() -> None:
    nisa.tensor_scalar(empty(2, 3), filled(2, 3), nl.add, True)  # breaks


@breaks("scalar_tensor_tensor: operators", "nl.bitwise_and and nl.add", "arithmetic operators")
def scalar_tensor_tensor_bitwise() -> None:
    tile = filled(2, 3, dtype=nl.uint8)
    nisa.scalar_tensor_tensor(empty(2, 3), tile, nl.bitwise_and, 1, nl.add, tile)  # breaks


@breaks("scalar_tensor_tensor: input buffers", "two inputs in PSUM", "at most one input in PSUM")
def scalar_tensor_tensor_two_psum() -> None:
    a, b = filled(2, 3, buffer=PSUM), filled(2, 3, buffer=PSUM)
    nisa.scalar_tensor_tensor(empty(2, 3), a, nl.add, 1.0, nl.add, b)  # breaks


@breaks("tensor_reduce: axis", "0", "the partition axis cannot be reduced")
def reduce_the_partition_axis() -> None:
    nisa.tensor_reduce(empty(1, 3), nl.add, filled(2, 3), axis=0)  # breaks


@breaks("tensor_reduce: axis", "1", "the last contiguous free axes")
def reduce_an_inner_axis() -> None:
    nisa.tensor_reduce(empty(2, 5), nl.add, filled(2, 3, 5), axis=1)  # breaks


@breaks("tensor_reduce: dst shape", "(2, 3)", "1 elements per partition")
def reduce_into_the_wrong_shape() -> None:
    nisa.tensor_reduce(empty(2, 3), nl.add, filled(2, 3), axis=1)  # breaks


@breaks("tensor_reduce: reduction op", "nl.equal", "add, subtract, multiply, maximum")
def reduce_by_a_comparison() -> None:
    nisa.tensor_reduce(empty(2, 1), nl.equal, filled(2, 3), axis=1)  # breaks


@breaks("tensor_reduce: negate", "with nl.bitwise_or", "arithmetic operators")
def negate_a_bitwise_reduction() -> None:
    out = empty(2, 1, dtype=nl.uint8)
    nisa.tensor_reduce(out, nl.bitwise_or, filled(2, 3, dtype=nl.uint8), axis=1, negate=True)  # breaks


@breaks("tensor_scalar_reduce: reduction op", "nl.subtract", "add, maximum, minimum, multiply")
def tensor_scalar_reduce_by_subtract() -> None:
    nisa.tensor_scalar_reduce(empty(2, 3), filled(2, 3), nl.add, 1.0, nl.subtract, empty(2, 1))  # breaks


@breaks("tensor_scalar_reduce: initial value", "2.0", "none unless reduce_cmd is load_reduce", UsageError)
def an_initial_value_without_load_reduce() -> None:
    nisa.tensor_scalar_reduce(  # breaks
        empty(2, 3), filled(2, 3), nl.add, 1.0, nl.add, empty(2, 1), reduce_init=2.0
    )


@breaks("tensor_scalar_reduce: reverse0", "True", "not supported yet")
def tensor_scalar_reduce_reversed() -> None:
    nisa.tensor_scalar_reduce(empty(2, 3), filled(2, 3), nl.add, 1.0, nl.add, empty(2, 1), reverse0=True)  # breaks


@breaks("tensor_scalar_cumulative: dtype", "int32", "no 32-bit integers")
def a_cumulative_int32() -> None:
    tile = filled(2, 3, dtype=nl.int32)
    nisa.tensor_scalar_cumulative(empty(2, 3, dtype=nl.int32), tile, nl.add, nl.add, 0.0)  # breaks


@breaks("tensor_tensor_scan: input buffers", "two inputs in PSUM", "at most one input in PSUM")
def scan_two_psum_inputs() -> None:
    a, b = filled(2, 3, buffer=PSUM), filled(2, 3, buffer=PSUM)
    nisa.tensor_tensor_scan(empty(2, 3), a, b, 0.0, nl.multiply, nl.add)  # breaks


@breaks("iota: dst buffer", "psum", "sbuf")
def iota_into_psum() -> None:
    nisa.iota(psum(2, 3), [[1, 3]])  # breaks


@breaks("iota: pattern", "[[1, 4]]", "3 elements per partition")
def an_iota_pattern_of_another_size() -> None:
    nisa.iota(empty(2, 3, dtype=nl.int32), [[1, 4]])  # breaks


# Activations ----------------------------------------------------------------------------------------------------------


@breaks("activation: op", "nl.add", "an activation function")
def activate_by_add() -> None:
    nisa.activation(empty(2, 3), nl.add, filled(2, 3))  # breaks


@breaks("activation: scale dtype", "bfloat16", "float32")
def a_bf16_scale() -> None:
    nisa.activation(empty(2, 3), nl.exp, filled(2, 3), scale=filled(2, 1, dtype=nl.bfloat16))  # breaks


@breaks("activation: bias dtype", "tfloat32", "any dtype but tfloat32")
def a_tf32_bias() -> None:
    nisa.activation(empty(2, 3), nl.exp, filled(2, 3), bias=filled(2, 1, dtype=nl.tfloat32))  # breaks


@breaks("activation: bias shape", "(2, 3)", "(2, 1)")
def a_bias_tile() -> None:
    nisa.activation(empty(2, 3), nl.exp, filled(2, 3), bias=filled(2, 3))  # breaks


@breaks("activation: reduce_op", "nl.maximum", "nl.add")
def activation_reduces_by_maximum() -> None:
    nisa.activation(  # breaks
        empty(2, 3),
        nl.exp,
        filled(2, 3),
        reduce_op=nl.maximum,
        reduce_res=empty(2, 1),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


@breaks("activation: reduce_cmd", "load_reduce", "idle, reset, reduce or reset_reduce", UsageError)
def activation_loads_its_registers() -> None:
    command = nisa.reduce_cmd.load_reduce
    nisa.activation(empty(2, 3), nl.exp, filled(2, 3), reduce_op=nl.add, reduce_cmd=command)  # breaks


DOMAINS: list[tuple[Any, float, str]] = [
    (nl.rsqrt, 0.0, "6.46235e-27 to 1.58456e+29"),
    (nl.sqrt, -1.0, "1.20371e-35 to 3.32307e+35"),
    (nl.log, 2.0**70, "5.42101e-20 to 1.84467e+19"),
    (nl.reciprocal, 0.0, "magnitude 2.27374e-13 to 4.39805e+12"),
    (nl.sin, 4.0, "-3.14159 to 3.14159"),
    (nl.arctan, 2.0, "-1.5708 to 1.5708"),
]
for _op, _value, _limit in DOMAINS:

    def _outside(op: Any = _op, value: float = _value) -> None:
        tile = filled(2, 3, value=value)
        nisa.activation(empty(2, 3), op, tile)  # breaks

    _outside.__name__ = f"{_op.name}_outside_its_range"
    breaks(f"activation: input range of nl.{_op.name}", repr(float(_value)), _limit, needs_data=True)(_outside)


@breaks("activate2", "trn2", "trn3 or newer", target="trn2")
def activate2_on_trn2() -> None:
    nisa.activate2(empty(2, 3), nl.exp, filled(2, 3), 1.0, 0.0, nl.multiply, nl.add)  # breaks


@breaks("activate2: op0, op1", "nl.add, nl.multiply", "pairs of the document")
def activate2_with_another_pair() -> None:
    nisa.activate2(empty(2, 3), nl.exp, filled(2, 3), 1.0, 0.0, nl.add, nl.multiply)  # breaks


@breaks("exponential", "trn2", "trn3 or newer", target="trn2")
def exponential_on_trn2() -> None:
    nisa.exponential(empty(2, 3), filled(2, 3))  # breaks


# Selections and searches ----------------------------------------------------------------------------------------------


@breaks("affine_select: on_true_tile buffer", "psum", "sbuf")
def affine_select_from_psum() -> None:
    nisa.affine_select(empty(2, 3), [[1, 3]], 0, filled(2, 3, buffer=PSUM), 0.0)  # breaks


@breaks("affine_select: comparison", "nl.add", "equal, greater")
def affine_select_by_add() -> None:
    nisa.affine_select(empty(2, 3), [[1, 3]], 0, filled(2, 3), 0.0, cmp_op=nl.add)  # breaks


@breaks("range_select: on_false_value", "0.0", "-3.40282")
def range_select_fills_zero() -> None:
    low, high = filled(2, 1), filled(2, 1)
    nisa.range_select(  # breaks
        empty(2, 3), filled(2, 3), nl.greater_equal, nl.less, low, high, on_false_value=0.0
    )


@breaks("range_select: bound0 dtype", "int32", "float32")
def range_select_with_integer_bounds() -> None:
    low, high = filled(2, 1, dtype=nl.int32), filled(2, 1)
    nisa.range_select(empty(2, 3), filled(2, 3), nl.greater_equal, nl.less, low, high)  # breaks


@breaks("select_reduce: predicate dtype", "float32", "int16, int8, uint16, uint8")
def select_by_floats() -> None:
    nisa.select_reduce(empty(2, 3), filled(2, 3), filled(2, 3), 0.0)  # breaks


@breaks("select_reduce: on_true dtype", "int32", "no tfloat32 and no 32-bit integers")
def select_from_int32() -> None:
    keep = filled(2, 3, dtype=nl.uint8)
    nisa.select_reduce(empty(2, 3), keep, filled(2, 3, dtype=nl.int32), 0.0)  # breaks


@breaks("tensor_copy_predicated: predicate dtype", "int32", "uint16, uint32, uint8")
def a_signed_predicate() -> None:
    nisa.tensor_copy_predicated(filled(2, 3), filled(2, 3), filled(2, 3, dtype=nl.int32))  # breaks


@breaks("tensor_copy_predicated: dtypes", "src bfloat16, dst float32", "equal dtypes")
def a_predicated_cast() -> None:
    source, keep = filled(2, 3, dtype=nl.bfloat16), filled(2, 3, dtype=nl.uint8)
    nisa.tensor_copy_predicated(filled(2, 3), source, keep)  # breaks


@breaks("tensor_copy_predicated: input buffers", "src and predicate in PSUM", "at most one of them in PSUM")
def predicate_and_source_in_psum() -> None:
    source, keep = filled(2, 3, buffer=PSUM), filled(2, 3, dtype=nl.uint8, buffer=PSUM)
    nisa.tensor_copy_predicated(filled(2, 3), source, keep)  # breaks


@breaks("max8: src elements per partition", "7", "8 to 16384")
def max8_of_seven() -> None:
    nisa.max8(empty(2, 8), filled(2, 7))  # breaks


@breaks("max8: src elements per partition", "16385", "8 to 16384")
def max8_of_too_many() -> None:
    nisa.max8(empty(2, 8), filled(2, 16385))  # breaks


@breaks("max8: dst shape", "(2, 4)", "(2, 8)")
def max8_into_four() -> None:
    nisa.max8(empty(2, 4), filled(2, 9))  # breaks


@breaks("max8: src dimensions", "4", "at most 3")
def max8_of_four_dimensions() -> None:
    nisa.max8(empty(2, 8), filled(2, 2, 2, 4))  # breaks


@breaks("nc_find_index8: dst dtype", "int32", "uint16, uint32")
def find_index_into_int32() -> None:
    nisa.nc_find_index8(empty(2, 8, dtype=nl.int32), filled(2, 9), filled(2, 8))  # breaks


@breaks("nc_match_replace8: vals shape", "(2, 4)", "(2, 8)")
def replace_four_values() -> None:
    nisa.nc_match_replace8(empty(2, 9), filled(2, 9), filled(2, 4), 0.0)  # breaks


@breaks("sequence_bounds: shapes", "(2, 3)", "(1, n) and (1, 2, n)")
def sequence_bounds_of_two_partitions() -> None:
    nisa.sequence_bounds(empty(2, 2, 3), filled(2, 3))  # breaks


# Movement -------------------------------------------------------------------------------------------------------------


@breaks("nc_stream_shuffle: shuffle_mask", "[0, 1]", "32 entries")
def a_short_shuffle_mask() -> None:
    nisa.nc_stream_shuffle(empty(32, 3), filled(32, 3), [0, 1])  # breaks


@breaks("nc_stream_shuffle: dtypes", "float32 to bfloat16", "equal dtypes")
def a_shuffle_that_casts() -> None:
    nisa.nc_stream_shuffle(empty(32, 3, dtype=nl.bfloat16), filled(32, 3), [0] * 32)  # breaks


@breaks("nc_stream_shuffle: dst start partition", "32 with 64 active partitions", "0 or 64 for 64")
def a_shuffle_that_starts_off_its_place() -> None:
    source, target = filled(64, 3), filled(96, 3)
    nisa.nc_stream_shuffle(target[32:64], source, [0] * 32)  # breaks


@breaks("nc_n_gather: indices dtype", "int32", "uint32")
def gather_by_signed_indices() -> None:
    nisa.nc_n_gather(empty(2, 3), filled(2, 5), filled(2, 3, dtype=nl.int32))  # breaks


@breaks("nc_n_gather: data buffer", "psum", "sbuf")
def gather_from_psum() -> None:
    nisa.nc_n_gather(empty(2, 3), filled(2, 5, buffer=PSUM), filled(2, 3, dtype=nl.uint32))  # breaks


@breaks("local_gather: partitions", "src_buffer 8, index 8", "equal multiples of 16")
def local_gather_of_eight_partitions() -> None:
    nisa.local_gather(empty(8, 16), filled(8, 4), filled(8, 1, dtype=nl.uint16))  # breaks


@breaks("local_gather: num_elem_per_idx", "3", "1, 2, 4, 8, 16 or 32")
def local_gather_of_three_elements() -> None:
    nisa.local_gather(empty(16, 48), filled(16, 4), filled(16, 1, dtype=nl.uint16), num_elem_per_idx=3)  # breaks


@breaks("tensor_partition_reduce: op", "nl.subtract", "add, average, maximum")
def partition_reduce_by_subtract() -> None:
    nisa.tensor_partition_reduce(empty(1, 3), nl.subtract, filled(2, 3))  # breaks


@breaks("nonzero_with_count: dst shape", "(16, 4)", "(16, 5)")
def nonzero_without_room_for_the_count() -> None:
    nisa.nonzero_with_count(empty(16, 4, dtype=nl.int32), filled(16, 4))  # breaks


@breaks("topk: n", "7", "8 to 65535")
def topk_of_seven() -> None:
    nisa.topk(  # breaks
        empty(16, 2, dtype=nl.bfloat16), empty(16, 2, dtype=nl.uint32), filled(16, 1, dtype=nl.bfloat16), 7
    )


@breaks("bn_stats: elements per partition", "513", "512")
def bn_stats_of_513() -> None:
    nisa.bn_stats(empty(2, 6), filled(2, 513))  # breaks


@breaks("bn_aggr: elements per partition", "4", "a multiple of 3")
def bn_aggr_of_four() -> None:
    nisa.bn_aggr(empty(2, 2), filled(2, 4))  # breaks


@breaks("rng: dst dtype", "float32", "an integer dtype")
def random_floats() -> None:
    nisa.rng(empty(2, 3))  # breaks


# Matmul ---------------------------------------------------------------------------------------------------------------


@breaks("nc_matmul: stationary free size", "129", "128")
def a_stationary_of_129_columns() -> None:
    nisa.nc_matmul(psum(128, 4), filled(64, 129), filled(64, 4))  # breaks


@breaks("nc_matmul: contraction", "64 and 32 partitions", "equal partitions")
def a_contraction_of_two_sizes() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16), filled(32, 4))  # breaks


@breaks("nc_matmul: moving free size on trn2", "513", "512", target="trn2")
def a_moving_of_513_on_trn2() -> None:
    nisa.nc_matmul(psum(16, 513), filled(64, 16), filled(64, 513))  # breaks


@breaks("nc_matmul: moving free size on trn3", "4097", "4096")
def a_moving_of_4097_on_trn3() -> None:
    target = psum(16, 4096)[:, 0:1].broadcast(1, 4097)
    nisa.nc_matmul(target, filled(64, 16), filled(64, 4097))  # breaks


@breaks("nc_matmul: dst buffer", "sbuf", "psum")
def a_matmul_into_sbuf() -> None:
    nisa.nc_matmul(empty(16, 4), filled(64, 16), filled(64, 4))  # breaks


@breaks("nc_matmul: moving buffer", "psum", "sbuf")
def a_matmul_from_psum() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16), filled(64, 4, buffer=PSUM))  # breaks


@breaks("nc_matmul: dst dtype on trn2", "bfloat16", "float32", target="trn2")
def a_bf16_result_on_trn2() -> None:
    nisa.nc_matmul(psum(16, 4, dtype=nl.bfloat16), filled(64, 16), filled(64, 4))  # breaks


@breaks("nc_matmul: dst shape", "(4, 16)", "(16, 4)")
def a_transposed_result_shape() -> None:
    nisa.nc_matmul(psum(4, 16), filled(64, 16), filled(64, 4))  # breaks


@breaks("nc_matmul: dtype pair", "float32 and bfloat16", "fp32 or tfloat32 pairs only with the same kind")
def fp32_with_bf16() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16), filled(64, 4, dtype=nl.bfloat16))  # breaks


@breaks("nc_matmul: dtype pair", "float8_e4m3 and float8_e4m3fn", "the two e4m3 dialects do not mix")
def two_fp8_dialects() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16, dtype=nl.float8_e4m3), filled(64, 4, dtype=nl.float8_e4m3fn))  # breaks


@breaks("nc_matmul: dtype on trn2", "float8_e4m3fn", "e4m3fn needs trn3", target="trn2")
def ocp_fp8_on_trn2() -> None:
    tile = filled(64, 16, dtype=nl.float8_e4m3fn)
    nisa.nc_matmul(psum(16, 16), tile, tile)  # breaks


@breaks("nc_matmul: stationary dtype", "int32", "bfloat16")
def an_integer_matmul() -> None:
    tile = filled(64, 16, dtype=nl.int32)
    nisa.nc_matmul(psum(16, 16), tile, tile)  # breaks


@breaks("nc_matmul: PSUM banks of one result", "banks 0 to 1", "one bank of 2048 bytes", target="trn2")
def a_result_across_two_banks_on_trn2() -> None:
    nisa.nc_matmul(psum(16, 600)[:, 400:600], filled(64, 16), filled(64, 200))  # breaks


@breaks("nc_matmul: accumulate=True", "a PSUM region that no matmul wrote", "accumulate=False first", needs_data=True)
def accumulate_into_nothing() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16), filled(64, 4), accumulate=True)  # breaks


@breaks(
    "nc_matmul: accumulate=True", "a PSUM region set by another instruction", "accumulate=False first",
    needs_data=True, target="trn2",
)  # fmt: skip
def accumulate_onto_a_memset_on_trn2() -> None:
    target = filled(16, 4, buffer=PSUM, value=3.0)
    nisa.nc_matmul(target[:, 0:2], filled(64, 16), filled(64, 2), accumulate=False)
    nisa.memset(target, 0.0)
    nisa.nc_matmul(target, filled(64, 16), filled(64, 4), accumulate=True)  # breaks


@breaks("nc_matmul: accumulate=None", "only a part was written by a matmul", "pass accumulate", needs_data=True)
def accumulate_half_a_region() -> None:
    target = psum(16, 4)
    nisa.nc_matmul(target[:, 0:2], filled(64, 16), filled(64, 2))
    nisa.nc_matmul(target, filled(64, 16), filled(64, 4))  # breaks


@breaks("nc_matmul: accumulate", "1", "True, False or None", UsageError)
def accumulate_as_a_number() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16), filled(64, 4), accumulate=1)  # type: ignore[arg-type]  # breaks


@breaks("nc_matmul: tiling", "tile_position (0, 0)", "both or neither", UsageError)
def a_tile_position_without_size() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16), filled(64, 4), tile_position=(0, 0))  # breaks


@breaks("nc_matmul: tile_size", "(48, 128)", "32, 64 or 128 rows and columns")
def a_tile_of_48_rows() -> None:
    nisa.nc_matmul(psum(16, 4), filled(32, 16), filled(32, 4), tile_position=(0, 0), tile_size=(48, 128))  # breaks


@breaks("nc_matmul: tile_position", "(16, 0)", "multiples of (32, 128)")
def a_tile_off_its_grid() -> None:
    nisa.nc_matmul(psum(16, 4), filled(32, 16), filled(32, 4), tile_position=(16, 0), tile_size=(32, 128))  # breaks


@breaks("nc_matmul: operand in a tile", "K 64, M 16", "at most 32 rows")
def an_operand_larger_than_its_tile() -> None:
    nisa.nc_matmul(psum(16, 4), filled(64, 16), filled(64, 4), tile_position=(0, 0), tile_size=(32, 128))  # breaks


@breaks("nc_matmul: stationary dtype with double_row", "bfloat16", "float8_e4m3")
def double_row_of_bf16() -> None:
    a = filled(64, 2, 16, dtype=nl.bfloat16)
    nisa.nc_matmul(psum(16, 16), a, a, perf_mode=nisa.matmul_perf_mode.double_row)  # breaks


@breaks("nc_matmul: stationary shape with double_row", "(64, 16)", "[K, 2, free]")
def double_row_of_two_dimensions() -> None:
    a = filled(64, 16, dtype=nl.float8_e4m3)
    nisa.nc_matmul(psum(8, 8), a, a, perf_mode=nisa.matmul_perf_mode.double_row)  # breaks


@breaks("nc_matmul: moving with is_transpose", "(16, 16) matrix", "the 16 x 16 identity", needs_data=True)
def a_matmul_transpose_by_ones() -> None:
    nisa.nc_matmul(psum(4, 16), filled(16, 4), filled(16, 16), is_transpose=True)  # breaks


@breaks("nc_transpose: transpose size on the Tensor Engine", "64 x 129", "128 x 128")
def a_transpose_of_129_columns() -> None:
    nisa.nc_transpose(psum(128, 64), filled(64, 129))  # breaks


@breaks("nc_transpose: size on the Vector Engine", "33 x 32", "32 x 32")
def a_vector_transpose_of_33_partitions() -> None:
    nisa.nc_transpose(empty(32, 33), filled(33, 32), engine=nisa.engine.vector)  # breaks


@breaks("nc_transpose: dst dtype of a transpose", "float32", "bfloat16, the dtype of the input")
def a_transpose_that_casts() -> None:
    nisa.nc_transpose(psum(16, 64), filled(64, 16, dtype=nl.bfloat16))  # breaks


@breaks("nc_transpose: dtype of a Tensor Engine transpose", "int32", "view integers as floats")
def a_transpose_of_integers() -> None:
    nisa.nc_transpose(psum(16, 64, dtype=nl.int32), filled(64, 16, dtype=nl.int32))  # breaks


@breaks("nc_transpose: dst stride of an fp8 transpose", "1", "2 (each value lands on two bytes)")
def a_dense_fp8_transpose() -> None:
    nisa.nc_transpose(psum(16, 64, dtype=nl.float8_e4m3), filled(64, 16, dtype=nl.float8_e4m3))  # breaks


# MX -------------------------------------------------------------------------------------------------------------------


def _quantised(partitions: int, free: int, scales: int | None = None) -> tuple[Any, Any]:
    data = filled(partitions, free, dtype=nl.float8_e4m3fn_x4)
    rows = (partitions if partitions > 32 else partitions // 8) if scales is None else scales
    return data, filled(rows, free, dtype=nl.uint8, value=127)


@breaks("nc_matmul_mx", "trn2", "trn3 or newer", target="trn2")
def mx_on_trn2() -> None:
    a, s = filled(32, 4, dtype=nl.float8_e4m3fn_x4), filled(4, 4, dtype=nl.uint8)
    nisa.nc_matmul_mx(psum(4, 4), a, a, s, s)  # breaks


@breaks("quantize_mx", "trn2", "trn3 or newer", target="trn2")
def quantise_on_trn2() -> None:
    out, scale = empty(32, 2, dtype=nl.float8_e4m3fn_x4), empty(4, 2, dtype=nl.uint8)
    nisa.quantize_mx(out, filled(32, 8, dtype=nl.bfloat16), scale)  # breaks


@breaks("nc_matmul_mx: partitions", "16", "a multiple of 32")
def mx_of_16_partitions() -> None:
    a, s = _quantised(16, 4)
    nisa.nc_matmul_mx(psum(4, 4), a, a, s, s)  # breaks


@breaks("nc_matmul_mx: stationary free size", "3", "even, at most 128")
def mx_of_an_odd_stationary() -> None:
    (a, s), (b, t) = _quantised(32, 3), _quantised(32, 4)
    nisa.nc_matmul_mx(psum(3, 4), a, b, s, t)  # breaks


@breaks("nc_matmul_mx: moving dtype", "bfloat16", "float4_e2m1fn_x4, float8_e4m3fn_x4, float8_e5m2_x4")
def mx_of_bf16() -> None:
    a, s = _quantised(32, 4)
    nisa.nc_matmul_mx(psum(4, 4), a, filled(32, 4, dtype=nl.bfloat16), s, s)  # breaks


@breaks("nc_matmul_mx: stationary_scale free size", "5", "4, one scale per x4 element")
def mx_with_too_many_scales() -> None:
    a, s = _quantised(32, 4)
    nisa.nc_matmul_mx(psum(4, 4), a, a, filled(4, 5, dtype=nl.uint8), s)  # breaks


@breaks("nc_matmul_mx: moving_scale dtype", "float32", "float8_e8m0fnu, uint8")
def mx_with_fp32_scales() -> None:
    a, s = _quantised(32, 4)
    nisa.nc_matmul_mx(psum(4, 4), a, a, s, filled(4, 4))  # breaks


@breaks("nc_matmul_mx: moving_scale partitions", "8", "up to row 35 of each quadrant")
def mx_with_dense_scales_over_two_quadrants() -> None:
    (a, s), (b, t) = _quantised(64, 4), _quantised(64, 4, scales=8)
    nisa.nc_matmul_mx(psum(4, 4), a, b, s, t)  # breaks


@breaks("nc_matmul_mx: moving_scale start partition", "2", "0, 4, 8 or 12")
def mx_with_scales_off_their_rows() -> None:
    a, s = _quantised(32, 4)
    other = filled(32, 4, dtype=nl.uint8, value=127)
    nisa.nc_matmul_mx(psum(4, 4), a, a, s, other[2:6])  # breaks


@breaks("nc_matmul_mx: moving_scale quadrant", "partition 32 for data at partition 0", "quadrant of their data")
def mx_with_scales_in_another_quadrant() -> None:
    a, s = _quantised(32, 4)
    other = filled(64, 4, dtype=nl.uint8, value=127)
    nisa.nc_matmul_mx(psum(4, 4), a, a, s, other[32:36])  # breaks


@breaks("nc_matmul_mx: tile_size", "(32, 64)", "128 columns")
def mx_with_column_tiles() -> None:
    a, s = _quantised(32, 4)
    nisa.nc_matmul_mx(psum(4, 4), a, a, s, s, tile_position=(0, 0), tile_size=(32, 64))  # breaks


@breaks("quantize_mx: src dtype", "float32", "bfloat16, float16")
def quantise_fp32() -> None:
    out, scale = empty(32, 2, dtype=nl.float8_e4m3fn_x4), empty(4, 2, dtype=nl.uint8)
    nisa.quantize_mx(out, filled(32, 8), scale)  # breaks


@breaks("quantize_mx: dst dtype", "float4_e2m1fn_x4", "float8_e4m3fn_x4, float8_e5m2_x4")
def quantise_to_fp4() -> None:
    out, scale = empty(32, 2, dtype=nl.float4_e2m1fn_x4), empty(4, 2, dtype=nl.uint8)
    nisa.quantize_mx(out, filled(32, 8, dtype=nl.bfloat16), scale)  # breaks


@breaks("quantize_mx: src free size", "6", "a multiple of 4")
def quantise_six_columns() -> None:
    out, scale = empty(32, 1, dtype=nl.float8_e4m3fn_x4), empty(4, 1, dtype=nl.uint8)
    nisa.quantize_mx(out, filled(32, 6, dtype=nl.bfloat16), scale)  # breaks


@breaks("quantize_mx: dst shape", "(32, 8)", "(32, 2)")
def quantise_without_packing() -> None:
    out, scale = empty(32, 8, dtype=nl.float8_e4m3fn_x4), empty(4, 8, dtype=nl.uint8)
    nisa.quantize_mx(out, filled(32, 8, dtype=nl.bfloat16), scale)  # breaks


@pytest.mark.parametrize("case", breaks.cases, ids=breaks.ids)
def test_a_broken_rule_is_refused_with_its_numbers_and_line(case: Broken) -> None:
    """Message: rule, got, limit; site: the line that breaks it."""
    check_refusal(case)


@pytest.mark.parametrize("case", [c for c in breaks.cases if not c.needs_data], ids=lambda c: c.kernel.__name__)
def test_a_trace_refuses_the_same(case: Broken) -> None:
    """Checks need no data."""
    check_refusal(case, trace=True)
