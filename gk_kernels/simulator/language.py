"""nki.language: dtypes, buffers, allocation, loops, operators, and the small wrappers over nki.isa."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gk_kernels.simulator import context as cx
from gk_kernels.simulator import isa
from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import (
    DType,
    as_dtype,
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
    from_numpy,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from gk_kernels.simulator.errors import CapacityError, Site, UsageError, kernel_frame, refuse
from gk_kernels.simulator.memory import Life, MemoryRegion, Storage
from gk_kernels.simulator.ops import OPS, Op
from gk_kernels.simulator.targets import PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS
from gk_kernels.simulator.tensor import DynamicSlice, NKIObject, NkiTensor, VirtualRegister, check_start

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


def _site() -> Site | None:
    frame = kernel_frame(2)
    return None if frame is None else (frame.f_code, frame.f_lineno)


def _check_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (int, np.integer)):
        shape = (shape,)
    result = []
    for size in shape:
        if isinstance(size, float) or int(size) < 1:
            refuse("ndarray: shape", tuple(shape), "positive integers", UsageError)
        result.append(int(size))
    if not result:
        refuse("ndarray: shape", tuple(shape), "at least one dimension", UsageError)
    return tuple(result)


def ndarray(
    shape: Sequence[int],
    dtype: Any,
    buffer: MemoryRegion = sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """Allocate a tensor; its contents are undefined until written.

    Raises:
        UsageError: not an nl dtype or buffer, a bad shape, or a name that is taken.
        ConstraintError: more than 128 partitions, or an HBM tensor at or above the size limit.
        CapacityError: larger than a whole partition.
    """
    core = cx.current("nl.ndarray")
    kind = as_dtype(dtype)
    size = _check_shape(shape)
    if not isinstance(buffer, MemoryRegion):
        refuse("ndarray: buffer", repr(buffer), "nl.sbuf, psum, hbm, private_hbm or shared_hbm", UsageError)
    site = _site()
    if buffer is shared_hbm and core.lnc == 2:
        return _shared(core, size, kind, name, site)
    return _allocate(core, size, kind, buffer, name, address, site)


def _shared(core: Core, shape: tuple[int, ...], kind: DType, name: str, site: Site | None) -> NkiTensor:
    """The one shared_hbm tensor that both cores of a rank allocate, matched by name or by line and turn."""
    if name:
        key: object = name
        if name in core.names:
            _taken(name, core)
        core.names[name] = ""
    else:
        turn = core.site_counts.get(site, 0)
        core.site_counts[site] = turn + 1
        key = (site, turn)
    found = core.shared.get(key)
    if found is None:
        found = core.shared[key] = _allocate(core, shape, kind, shared_hbm, name and f"{name}", None, site, shared=True)
    elif found.shape != shape or found.dtype != kind:
        refuse(
            "ndarray: shared_hbm on two cores",
            f"{kind} {shape} and {found.dtype} {found.shape}",
            "the same shape and dtype on both cores",
            UsageError,
        )
    return found


def _taken(name: str, core: Core) -> None:
    refuse(
        "ndarray: name", f"{name!r} is taken by {core.names[name]}", "a name of its own for every tensor", UsageError
    )


def _allocate(
    core: Core,
    shape: tuple[int, ...],
    kind: DType,
    buffer: MemoryRegion,
    name: str,
    address: tuple[int, int] | None,
    site: Site | None,
    *,
    shared: builtins.bool = False,
) -> NkiTensor:
    if name and not shared:
        if name in core.names:
            _taken(name, core)
        core.names[name] = f"{buffer.value} {shape}"
    nbytes = math.prod(shape) * kind.itemsize
    if buffer is sbuf or buffer is psum:
        if len(shape) < 2:
            refuse("ndarray: on-chip dimensions", shape, "2 or more, the partition first", UsageError)
        if shape[0] > PARTITIONS:
            refuse("ndarray: partitions", shape[0], PARTITIONS)
        row_bytes = nbytes // shape[0]
        whole = core.target.sbuf_bytes if buffer is sbuf else PSUM_BANK_BYTES * PSUM_BANKS
        if row_bytes > whole:
            refuse(f"ndarray: {buffer.value} bytes per partition", row_bytes, whole, CapacityError)
        life = Life(buffer, name, site, shape[0], row_bytes)
        if address is not None:
            _place(life, address, whole)
        core.lives.append(life)
    else:
        row_bytes = nbytes
        limit = core.options.hbm_tensor_limit_bytes
        if limit is not None and nbytes >= limit:
            refuse("HBM tensor size", f"{nbytes} bytes ({kind} {shape})", f"below {limit} bytes")
        if address is not None:
            refuse("ndarray: address", address, "none for HBM tensors", UsageError)
        life = Life(buffer, name, site, 1, nbytes)
    data = None
    if not core.trace:
        data = np.empty(nbytes, np.uint8)
        if core.options.poison != "error":
            data.fill(0xFF)
    storage = Storage(buffer, nbytes, row_bytes, life, data, written=False)
    return NkiTensor(shape, kind, storage, buffer, name)


def _place(life: Life, address: tuple[int, int], whole: int) -> None:
    partition, free = int(address[0]), int(address[1])
    align = 4 if life.buffer is psum else 1
    if free % align or free < 0 or free + life.row_bytes > whole:
        refuse(
            "ndarray: address",
            address,
            f"a free offset that is a multiple of {align} and ends by byte {whole}",
            CapacityError,
        )
    check_start(life.partitions, partition)
    life.partition_start, life.free_start = partition, free


def wrap_array(
    core: Core, array: Any, kind: DType, *, frozen: builtins.bool, name: str, shape: tuple[int, ...]
) -> NkiTensor:
    """An HBM input over a caller's bytes (`array` None: shape only, for a trace)."""
    nbytes = math.prod(shape) * kind.itemsize
    limit = core.options.hbm_tensor_limit_bytes
    if limit is not None and nbytes >= limit:
        raise_size(nbytes, kind, shape, limit)
    buffer = shared_hbm if core.lnc == 2 else private_hbm
    life = Life(buffer, name, None, 1, nbytes)
    storage = Storage(buffer, nbytes, nbytes, life, array, written=True, frozen=frozen)
    return NkiTensor(shape, kind, storage, buffer, name)


def raise_size(nbytes: int, kind: DType, shape: tuple[int, ...], limit: int) -> None:
    """Refuse an input that is too large for one HBM tensor."""
    refuse("HBM tensor size", f"{nbytes} bytes ({kind} {shape})", f"below {limit} bytes")


def zeros(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def full(shape: Sequence[int], fill_value: float, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A tensor of one value; HBM is filled from an SBUF tile."""
    result = ndarray(shape, dtype, buffer, name)
    if not result.on_chip:
        flat = result.reshape((result.size,))
        chunk = ndarray((1, builtins.min(result.size, 4096)), dtype)
        isa.memset(chunk, fill_value)
        for start in builtins.range(0, result.size, 4096):
            count = builtins.min(4096, result.size - start)
            isa.dma_copy(flat[start : start + count], chunk[:, :count])
        return result
    isa.memset(result, fill_value)
    return result


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """Zeros in the shape of x."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """An undefined tensor in the shape of x."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """A shared_hbm tensor with the contents of a NumPy array or a .npy file."""
    core = cx.current("nl.shared_constant")
    array = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    kind = from_numpy(array.dtype)
    data = None if core.trace else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    life = Life(shared_hbm, "", _site(), 1, array.nbytes)
    storage = Storage(shared_hbm, array.nbytes, array.nbytes, life, data, written=True, frozen=True)
    return NkiTensor(array.shape, kind, storage, shared_hbm)


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """An n x n identity matrix in SBUF; one per size and dtype is kept."""
    core = cx.current("nl.shared_identity_matrix")
    kind = as_dtype(dtype)
    key = f"identity {n} {kind}"
    if dst is None:
        found = core.registers.get(key)
        if found is not None:
            return found  # type: ignore[no-any-return]
        dst = core.registers[key] = ndarray((n, n), kind, sbuf)
    core.retire("shared_identity_matrix", "dma", 0, n, dst)
    if not core.trace:
        dst.write_target()[...] = np.eye(n, dtype=np.float32).astype(kind.np)
        dst.wrote()
    return dst


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


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor."""
    shape = src.shape if len(src.shape) > 1 else (1, *src.shape)
    result = ndarray(shape, dtype or src.dtype)
    isa.dma_copy(result, src)
    return result


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write an SBUF tile to HBM."""
    isa.dma_copy(dst, value)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with an HBM matrix transposed."""
    result = ndarray((src.shape[1], src.shape[0]), dtype or src.dtype)
    isa.dma_copy(result, src.permute((1, 0)))
    return result


def _result(x: NkiTensor, dtype: Any, shape: tuple[int, ...] | None = None) -> NkiTensor:
    return ndarray(shape or x.shape, dtype or x.dtype)


def _binary_tile(op: Op, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        result = _result(x, dtype)
        isa.tensor_tensor(result, x, y, op)
        return result
    if isinstance(x, NkiTensor):
        result = _result(x, dtype)
        isa.tensor_scalar(result, x, op, y)
        return result
    if not isinstance(y, NkiTensor):
        refuse(f"nl.{op.name}", f"{x!r}, {y!r}", "at least one tile", UsageError)
    result = _result(y, dtype)
    isa.tensor_scalar(result, y, op, x, reverse0=True)
    return result


def _unary_tile(op: Op, x: NkiTensor, dtype: Any = None) -> NkiTensor:
    result = _result(x, dtype)
    if op.act is not None:
        isa.activation(result, op, x)
    else:
        isa.tensor_scalar(result, x, op, None)
    return result


def _divide(_: Op, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    if not isinstance(y, NkiTensor):
        return _binary_tile(OPS["multiply"], x, 1.0 / y, dtype)
    inverse = ndarray(y.shape, float32)
    isa.reciprocal(inverse, y)
    return _binary_tile(OPS["multiply"], x, inverse, dtype or (x.dtype if isinstance(x, NkiTensor) else y.dtype))


for _op in OPS.values():
    _op.tile = _unary_tile if _op.alu is None else _binary_tile
OPS["divide"].tile = _divide
OPS["negative"].tile = lambda _, x, dtype=None: _binary_tile(OPS["multiply"], x, -1.0, dtype)
OPS["logical_not"].tile = lambda _, x, dtype=None: _binary_tile(OPS["equal"], x, 0.0, dtype)

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


def _reduction(name: str, alu_op: Op) -> Any:
    def reduce(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: builtins.bool = False) -> NkiTensor:
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        axes = tuple(a + x.ndim if a < 0 else a for a in axes)
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        if not keepdims:
            shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
        if len(shape) < 2:
            shape = (*shape, 1)
        result = ndarray(shape, dtype or x.dtype)
        isa.tensor_reduce(result, alu_op, x, axes)
        return result

    reduce.__name__ = name
    reduce.alu_op = alu_op  # type: ignore[attr-defined]
    return reduce


sum = _reduction("sum", add)
max = _reduction("max", maximum)
min = _reduction("min", minimum)
prod = _reduction("prod", multiply)
_all = _reduction("all", logical_and)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """Whether every element along free axes is not 0."""
    result: NkiTensor = _all(x, axis, dtype)
    return result


all.alu_op = logical_and  # type: ignore[attr-defined]


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: builtins.bool = False) -> NkiTensor:
    """Average over free axes."""
    total = sum(x, axis, float32, keepdims)
    result = ndarray(total.shape, dtype or x.dtype)
    isa.tensor_scalar(result, total, multiply, total.size / x.size)
    return result


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A 2-D tile with partitions and free axis swapped."""
    middle = ndarray((x.shape[1], x.shape[0]), x.dtype, psum)
    isa.nc_transpose(middle, x)
    result = ndarray(middle.shape, dtype or x.dtype)
    isa.tensor_copy(result, middle)
    return result


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: builtins.bool = False) -> NkiTensor:
    """x @ y (x already transposed if `transpose_x`), in PSUM."""
    left = x if transpose_x else transpose(x)
    result = ndarray((left.shape[1], y.shape[1]), float32, psum)
    isa.nc_matmul(result, left, y)
    return result


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Softmax over the last free axis of a 2-D tile."""
    top = ndarray((x.shape[0], 1), float32)
    isa.tensor_reduce(top, maximum, x, axis, negate=True)
    total = ndarray((x.shape[0], 1), float32)
    exps = ndarray(x.shape, float32)
    isa.activation(exps, exp, x, bias=top, reduce_op=add, reduce_res=total, reduce_cmd=isa.reduce_cmd.reset_reduce)
    isa.reciprocal(total, total)
    result = ndarray(x.shape, dtype or x.dtype)
    isa.tensor_scalar(result, exps, multiply, total)
    return result


def where(condition: NkiTensor, x: NkiTensor, y: NkiTensor, dtype: Any = None) -> NkiTensor:
    """x where condition is not 0, else y."""
    result = ndarray(x.shape, dtype or x.dtype)
    isa.tensor_copy(result, y)
    keep = ndarray(x.shape, uint8)
    isa.tensor_scalar(keep, condition, not_equal, 0.0)
    chosen = ndarray(x.shape, result.dtype)
    isa.tensor_copy(chosen, x)
    isa.tensor_copy_predicated(result, chosen, keep)
    return result


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """A view with a new axis of size 1."""
    return x.expand_dim(axis if axis >= 0 else axis + x.ndim + 1)


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """A new tile with size-1 free axes repeated."""
    view = x
    for dim, size in enumerate(shape):
        if view.shape[dim] != size:
            view = view.broadcast(dim, size)
    result = ndarray(tuple(shape), dtype or x.dtype)
    isa.tensor_copy(result, view)
    return result


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
