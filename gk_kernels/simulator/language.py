"""nki.language: dtypes, buffers, allocation, loops, operators, and the small wrappers over nki.isa."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gk_kernels.simulator import context as cx
from gk_kernels.simulator.allocate import ndarray
from gk_kernels.simulator.dtypes import (
    DType,
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.memory import MemoryRegion
from gk_kernels.simulator.ops import OPS
from gk_kernels.simulator.targets import PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS
from gk_kernels.simulator.tensor import DynamicSlice, NKIObject, NkiTensor, VirtualRegister
from gk_kernels.simulator.tiles import (
    all,
    broadcast_to,
    empty_like,
    expand_dims,
    full,
    load,
    load_transpose2d,
    matmul,
    max,
    mean,
    min,
    ones,
    prod,
    shared_constant,
    shared_identity_matrix,
    softmax,
    store,
    sum,
    transpose,
    where,
    zeros,
    zeros_like,
)

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
dtype = DType
bool = bool_
_HBM = (private_hbm, shared_hbm)


def is_hbm(buffer: object) -> builtins.bool:
    """Whether a buffer is any HBM."""
    return buffer in _HBM


def is_on_chip(buffer: object) -> builtins.bool:
    """Whether a buffer is SBUF or PSUM."""
    return buffer in (sbuf, psum)


def is_psum(buffer: object) -> builtins.bool:
    """Whether a buffer is PSUM."""
    return buffer is psum


def is_sbuf(buffer: object) -> builtins.bool:
    """Whether a buffer is SBUF."""
    return buffer is sbuf


class _TileSize(NKIObject):
    """Hardware tile sizes; those of SBUF depend on the device."""

    pmax = PARTITIONS
    psum_fmax = psum_bank_fmax = PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = PSUM_BANK_BYTES
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1
    psum_num_banks = PSUM_BANKS

    @property
    def sbuf_size_bytes(self) -> int:
        """All partitions together, physical."""
        return cx.current("nl.tile_size").target.sbuf_bytes * PARTITIONS

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Usable bytes per partition."""
        return cx.current("nl.tile_size").target.sbuf_usable_bytes

    @property
    def sbuf_fmax(self) -> int:
        """Usable fp32 elements per partition."""
        return self.sbuf_fmax_bytes // 4

    @property
    def total_available_sbuf_size(self) -> int:
        """Deprecated name of sbuf_fmax_bytes."""
        return self.sbuf_fmax_bytes


tile_size = _TileSize()


def ds(start: Any, size: int) -> DynamicSlice:
    """`start : start + size`; start may be a register."""
    return DynamicSlice(start, size)


def _range(start: int, stop: int | None = None, step: int = 1) -> Any:
    for value in (start, stop, step):
        if isinstance(value, (VirtualRegister, NkiTensor)):
            refuse("a static loop bound", "a register or tensor", "nl.fori_loop or nl.dynamic_range", UsageError)
    return builtins.range(0, start, step) if stop is None else builtins.range(start, stop, step)


affine_range = sequential_range = static_range = range = _range


def _bound(value: Any) -> int:
    return value.read() if isinstance(value, VirtualRegister) else int(value)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A device loop whose bounds may be registers (deprecated in 0.6); yields a register."""
    core = cx.current("nl.dynamic_range")
    first, last = (0, _bound(start)) if stop is None else (_bound(start), _bound(stop))
    _check_step(step)
    core.in_loop += 1
    try:
        for value in builtins.range(first, last, step):
            yield VirtualRegister(value, frozen=True)
    finally:
        core.in_loop -= 1


def _check_step(step: Any) -> None:
    if not isinstance(step, int) or step < 1:
        refuse("device loop step", repr(step), "a positive integer known at build time", UsageError)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """for i in lower..upper: body_fun(i), with i a register."""
    for register in dynamic_range(lower, upper, step):
        body_fun(register)


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """while r != 0: r = body_fun(r)."""
    core = cx.current("nl.while_loop")
    if core.trace:
        refuse("nl.while_loop while tracing", "a condition that depends on data", "a run with data", UsageError)
    core.in_loop += 1
    try:
        register = init
        while register.read() != 0:
            register = body_fun(VirtualRegister(register.read()))
            if not isinstance(register, VirtualRegister):
                refuse("nl.while_loop body", repr(register), "returns the next condition register", UsageError)
    finally:
        core.in_loop -= 1


@contextmanager
def no_reorder() -> Iterator[None]:
    """Program order inside; the simulator always keeps it."""
    yield


def program_id(axis: int = 0) -> int:
    """Which physical core of the rank this is."""
    return cx.current("nl.program_id").core_id


def num_programs(axes: Any = 0) -> int:
    """Physical cores of the rank: the logical core size."""
    return cx.current("nl.num_programs").lnc


def program_ndim() -> int:
    """Dimensions of the launch grid: 1 under lnc 2, else 0."""
    return 1 if cx.current("nl.program_ndim").lnc > 1 else 0


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor now."""
    if not cx.current("nl.device_print").trace:
        print(print_prefix, tensor.read())


add, subtract, multiply, divide = OPS["add"], OPS["subtract"], OPS["multiply"], OPS["divide"]
maximum, minimum, abs_max, abs_min = OPS["maximum"], OPS["minimum"], OPS["abs_max"], OPS["abs_min"]
power = OPS["power"]
equal, not_equal, less, less_equal = OPS["equal"], OPS["not_equal"], OPS["less"], OPS["less_equal"]
greater, greater_equal = OPS["greater"], OPS["greater_equal"]
logical_and, logical_or, logical_xor = OPS["logical_and"], OPS["logical_or"], OPS["logical_xor"]
logical_not = OPS["logical_not"]
bitwise_and, bitwise_or, bitwise_xor = OPS["bitwise_and"], OPS["bitwise_or"], OPS["bitwise_xor"]
invert, left_shift, right_shift = OPS["invert"], OPS["left_shift"], OPS["right_shift"]
abs, square, relu, rsqrt, reciprocal = OPS["abs"], OPS["square"], OPS["relu"], OPS["rsqrt"], OPS["reciprocal"]
bypass, copy, sqrt, exp, log, sin = OPS["bypass"], OPS["copy"], OPS["sqrt"], OPS["exp"], OPS["log"], OPS["sin"]
arctan, tanh, sigmoid, sign, negative = OPS["arctan"], OPS["tanh"], OPS["sigmoid"], OPS["sign"], OPS["negative"]
erf, erf_dx, gelu, gelu_dx = OPS["erf"], OPS["erf_dx"], OPS["gelu"], OPS["gelu_dx"]
gelu_apprx_tanh, gelu_apprx_sigmoid = OPS["gelu_apprx_tanh"], OPS["gelu_apprx_sigmoid"]
gelu_apprx_sigmoid_dx, silu, silu_dx = OPS["gelu_apprx_sigmoid_dx"], OPS["silu"], OPS["silu_dx"]
softplus, mish, prelu, average = OPS["softplus"], OPS["mish"], OPS["prelu"], OPS["average"]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"nki.language has no {name!r} in this simulator")


__all__ = [
    "DType",
    "DynamicSlice",
    "MemoryRegion",
    "NKIObject",
    "NkiTensor",
    "VirtualRegister",
    "abs",
    "abs_max",
    "abs_min",
    "add",
    "affine_range",
    "all",
    "arctan",
    "average",
    "bfloat16",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bool",
    "bool_",
    "broadcast_to",
    "bypass",
    "copy",
    "device_print",
    "divide",
    "ds",
    "dtype",
    "dynamic_range",
    "empty_like",
    "equal",
    "erf",
    "erf_dx",
    "exp",
    "expand_dims",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "fori_loop",
    "full",
    "gelu",
    "gelu_apprx_sigmoid",
    "gelu_apprx_sigmoid_dx",
    "gelu_apprx_tanh",
    "gelu_dx",
    "greater",
    "greater_equal",
    "hbm",
    "int8",
    "int16",
    "int32",
    "invert",
    "is_hbm",
    "is_on_chip",
    "is_psum",
    "is_sbuf",
    "left_shift",
    "less",
    "less_equal",
    "load",
    "load_transpose2d",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mish",
    "multiply",
    "ndarray",
    "negative",
    "no_reorder",
    "not_equal",
    "num_programs",
    "ones",
    "power",
    "prelu",
    "private_hbm",
    "prod",
    "program_id",
    "program_ndim",
    "psum",
    "range",
    "reciprocal",
    "relu",
    "right_shift",
    "rsqrt",
    "sbuf",
    "sequential_range",
    "shared_constant",
    "shared_hbm",
    "shared_identity_matrix",
    "sigmoid",
    "sign",
    "silu",
    "silu_dx",
    "sin",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "static_range",
    "store",
    "subtract",
    "sum",
    "tanh",
    "tfloat32",
    "tile_size",
    "transpose",
    "uint8",
    "uint16",
    "uint32",
    "where",
    "while_loop",
    "zeros",
    "zeros_like",
]
