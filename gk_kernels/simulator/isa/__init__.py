"""nki.isa: one function per instruction, with NKI 0.6 parameter names, order and defaults.

Each instruction checks its operands, counts itself, and, unless the run is a trace, computes in fp32 (or bits) and
writes the destination in its own dtype. The file of an instruction is named after what it does.
"""

from __future__ import annotations

from gk_kernels.simulator.errors import SimulationError as NkiValidationError
from gk_kernels.simulator.isa import constants
from gk_kernels.simulator.isa.activations import (
    activate2,
    activation,
    activation_reduce,
    exponential,
    reciprocal,
)
from gk_kernels.simulator.isa.constants import (
    NkiInstruction,
    dge_mode,
    dma_engine,
    engine,
    get_nc_sub_version,
    get_nc_version,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from gk_kernels.simulator.isa.dma import dma_compute, dma_copy
from gk_kernels.simulator.isa.dma_transpose import dma_transpose
from gk_kernels.simulator.isa.elementwise import memset, scalar_tensor_tensor, tensor_copy, tensor_scalar, tensor_tensor
from gk_kernels.simulator.isa.gather import (
    local_gather,
    nc_n_gather,
    nc_stream_shuffle,
    nonzero_with_count,
    tensor_partition_reduce,
    topk,
)
from gk_kernels.simulator.isa.matmul import nc_matmul, nc_transpose
from gk_kernels.simulator.isa.mx import nc_matmul_mx, quantize_mx
from gk_kernels.simulator.isa.patterns import iota
from gk_kernels.simulator.isa.reductions import (
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from gk_kernels.simulator.isa.select import (
    affine_select,
    max8,
    nc_find_index8,
    nc_match_replace8,
    range_select,
    select_reduce,
    sequence_bounds,
    tensor_copy_predicated,
)
from gk_kernels.simulator.isa.statistics import (
    bn_aggr,
    bn_stats,
    dropout,
    rand2,
    rand_get_state,
    rand_set_state,
    rng,
    set_rng_seed,
)
from gk_kernels.simulator.isa.sync import (
    core_barrier,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)
from gk_kernels.simulator.tensor import VirtualRegister

__all__ = [
    "NkiInstruction", "NkiValidationError", "VirtualRegister", "activate2", "activation", "activation_reduce",
    "affine_select", "bn_aggr", "bn_stats", "constants", "core_barrier", "dge_mode", "dma_compute", "dma_copy",
    "dma_engine", "dma_transpose", "dropout", "engine", "exponential", "get_nc_sub_version", "get_nc_version",
    "gpsimd_engine", "iota", "local_gather", "matmul_perf_mode", "max8", "memset", "nc_find_index8",
    "nc_match_replace8", "nc_matmul", "nc_matmul_mx", "nc_n_gather", "nc_stream_shuffle", "nc_transpose",
    "nc_version", "nonzero_with_count", "oob_mode", "quantize_mx", "rand2", "rand_get_state", "rand_set_state",
    "range_select", "reciprocal", "reduce_cmd", "register_alloc", "register_load", "register_move",
    "register_store", "rng", "scalar_engine", "scalar_tensor_tensor", "select_reduce", "sendrecv",
    "sequence_bounds", "set_rng_seed", "tensor_copy", "tensor_copy_predicated", "tensor_engine",
    "tensor_partition_reduce", "tensor_reduce", "tensor_scalar", "tensor_scalar_cumulative",
    "tensor_scalar_reduce", "tensor_tensor", "tensor_tensor_scan", "topk", "unknown_engine", "vector_engine",
]  # fmt: skip
