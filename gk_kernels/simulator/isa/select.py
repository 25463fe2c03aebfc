"""Masks, selections and searches: affine_select, range_select, select_reduce, tensor_copy_predicated, max8 and kin."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa import accumulators
from gk_kernels.simulator.isa.check import (
    DONE,
    PSUM,
    SBUF,
    Scalar,
    buffer,
    column,
    column_values,
    core_of,
    cycles,
    dtype_in,
    put,
    put_raw,
    read_f32,
    same,
    tensor,
    tensors,
    writable,
)
from gk_kernels.simulator.isa.constants import NkiInstruction, reduce_cmd
from gk_kernels.simulator.isa.patterns import affine_values, check_pattern
from gk_kernels.simulator.ops import COMPARISONS, OPS, Op, as_op
from gk_kernels.simulator.tensor import NkiTensor

_MAX = OPS["maximum"]
_EQUAL = OPS["equal"]
FP32_MIN = -3.4028234663852886e38
_UNSIGNED = frozenset({"uint8", "uint16", "uint32"})
_INDEX = frozenset({"uint16", "uint32"})


def _comparison(rule: str, op: Any) -> Op:
    found = as_op(op, rule)
    if found.name not in COMPARISONS:
        refuse(f"{rule}: comparison", repr(found), ", ".join(sorted(COMPARISONS)))
    return found


def affine_select(
    dst: NkiTensor,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = _EQUAL,
    offset: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true where cmp_op(affine value, 0), else on_false_value. GpSimd, SBUF."""
    rule = "affine_select"
    core = core_of(rule)
    buffer(rule, "dst", dst, SBUF)
    buffer(rule, "on_true_tile", on_true_tile, SBUF)
    tile = same(rule, dst, on_true_tile)
    check_pattern(rule, tile, pattern, offset, channel_multiplier)
    found = _comparison(rule, cmp_op)
    if not isinstance(on_false_value, (int, float, np.floating)):
        refuse(f"{rule}: on_false_value", repr(on_false_value), "a float32 constant", UsageError)
    core.retire(rule, "gpsimd", cycles(tile.free), tile.free, dst, on_true_tile)
    if core.trace:
        return DONE
    assert found.alu is not None
    keep = found.alu(affine_values(rule, tile, pattern, offset, channel_multiplier), 0) != 0
    values = read_f32(on_true_tile)
    put(dst, np.where(keep.reshape(values.shape), values, np.float32(on_false_value)))
    return DONE


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = _MAX,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true where both comparisons of the free index with a bound hold, else FP32_MIN. Vector Engine."""
    rule = "range_select"
    core = core_of(rule)
    tile = same(rule, dst, on_true_tile)
    ops = [_comparison(rule, op) for op in (comp_op0, comp_op1)]
    if any(op.name == "not_equal" for op in ops):
        refuse(f"{rule}: comparison", "not_equal", "equal, less, less_equal, greater or greater_equal")
    if on_true_tile.dtype.kind != "f":
        refuse(f"{rule}: on_true_tile dtype", on_true_tile.dtype, "a float dtype")
    for label, bound in (("bound0", bound0), ("bound1", bound1)):
        column(rule, label, tensor(rule, label, bound), tile, ("float32",))
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        refuse(f"{rule}: on_false_value", on_false_value, FP32_MIN)
    if range_start + tile.free > 2**24:
        refuse(f"{rule}: largest index", range_start + tile.free, "2^24 (compared in fp32)")
    if as_op(reduce_op, rule) is not _MAX:
        refuse(f"{rule}: reduce_op", repr(reduce_op), "nl.maximum")
    accumulators.check(rule, "vector", tile, reduce_cmd, reduce_res, None)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, on_true_tile, bound0, bound1, *tensors(reduce_res))
    if core.trace:
        return DONE
    index = np.arange(range_start, range_start + tile.free, dtype=np.float32)[None, :]
    keep = np.ones((tile.partitions, tile.free), bool)
    for op, bound in zip(ops, (bound0, bound1), strict=True):
        assert op.alu is not None
        keep &= op.alu(index, column_values(bound, 2)) != 0
    values = read_f32(on_true_tile).reshape(keep.shape)
    values = np.where(keep, values, np.float32(FP32_MIN))
    put(dst, values)
    accumulators.run(core, "vector", tile, _MAX, values, reduce_cmd, reduce_res)
    return DONE


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Scalar,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Any = _MAX,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true where predicate, else on_false; optionally the running row maximum. Vector Engine."""
    rule = "select_reduce"
    core = core_of(rule)
    tile = same(rule, dst, predicate, on_true)
    _one_in_psum(rule, "on_true", on_true, predicate)
    if on_true.dtype in ("tfloat32", "int32", "uint32"):
        refuse(f"{rule}: on_true dtype", on_true.dtype, "no tfloat32 and no 32-bit integers")
    dtype_in(rule, "predicate", predicate, ("int8", "uint8", "int16", "uint16"))
    other = column(rule, "on_false", on_false, tile)
    if as_op(reduce_op, rule) is not _MAX:
        refuse(f"{rule}: reduce_op", repr(reduce_op), "nl.maximum")
    if reduce_res is not None and reduce_res.dtype.kind != "f":
        refuse(f"{rule}: reduce_res dtype", reduce_res.dtype, "a float dtype")
    accumulators.check(rule, "vector", tile, reduce_cmd, reduce_res, None)
    core.retire(rule, "vector", cycles(2 * tile.free), tile.free, dst, predicate, on_true, *tensors(other, reduce_res))
    if core.trace:
        return DONE
    values = read_f32(on_true)
    keep = (predicate.read().reshape(values.shape) != 0) ^ bool(reverse_pred)
    values = np.where(keep, values, column_values(other, values.ndim))
    put(dst, values)
    if reduce_res is not None or reduce_cmd is not reduce_cmd.idle:
        accumulators.run(core, "vector", tile, _MAX, values, reduce_cmd, reduce_res)
    return DONE


def _one_in_psum(rule: str, label: str, value: NkiTensor, predicate: NkiTensor) -> None:
    if value.buffer is PSUM and predicate.buffer is PSUM:
        refuse(f"{rule}: input buffers", f"{label} and predicate in PSUM", "at most one of them in PSUM")


def tensor_copy_predicated(
    dst: NkiTensor,
    src: Scalar,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src where predicate; elsewhere dst stays as it was. Vector Engine."""
    rule = "tensor_copy_predicated"
    core = core_of(rule)
    writable(rule, tensor(rule, "dst", dst))
    dtype_in(rule, "predicate", tensor(rule, "predicate", predicate), _UNSIGNED)
    if isinstance(src, NkiTensor):
        tile = same(rule, dst, src, predicate)
        _one_in_psum(rule, "src", src, predicate)
        if src.dtype != dst.dtype:
            refuse(f"{rule}: dtypes", f"src {src.dtype}, dst {dst.dtype}", "equal dtypes")
    else:
        tile = same(rule, dst, predicate)
        column(rule, "src", src, tile)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, predicate, *tensors(src))
    if core.trace:
        return DONE
    out = dst.write_target()
    keep = (predicate.read().reshape(out.shape) != 0) ^ bool(reverse_pred)
    if isinstance(src, NkiTensor):
        values = src.read()
        np.copyto(out, values if values.shape == out.shape else values.reshape(out.shape), where=keep)
    else:
        np.copyto(out, dst.dtype.from_f32(np.full(1, src, np.float32)), where=keep)
    if dst.storage.unwritten is not None:
        dst.marks()[keep] = 0
        dst.storage.settle()
    return DONE


def _check_search(rule: str, label: str, value: NkiTensor) -> None:
    tile = value.tile()
    if len(value.shape) > 3:
        refuse(f"{rule}: {label} dimensions", len(value.shape), "at most 3")
    if not 8 <= tile.free <= 16384:
        refuse(f"{rule}: {label} elements per partition", tile.free, "8 to 16384")


def _check_eight(rule: str, label: str, value: NkiTensor, partitions: int) -> None:
    tile = value.tile()
    if tile.partitions != partitions or tile.free != 8:
        refuse(f"{rule}: {label} shape", value.shape, f"({partitions}, 8)")


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[P, 8] = the eight largest values of each partition, descending. Vector Engine."""
    rule = "max8"
    core = core_of(rule)
    _check_search(rule, "src", tensor(rule, "src", src))
    tile = src.tile()
    _check_eight(rule, "dst", tensor(rule, "dst", dst), tile.partitions)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, src)
    if not core.trace:
        values = read_f32(src).reshape(tile.partitions, -1)
        put(dst, -np.sort(-values, axis=1)[:, :8])
    return DONE


_BEFORE = np.tril(np.ones((8, 8), bool), -1)
_AFTER = _BEFORE.T


def _matches(data: Array, vals: Array, *, from_last: bool = False) -> Array:
    """Index in `data` of each of the 8 values, -1 when absent; repeats take successive occurrences, the first
    occurrence going to the first of them (or to the last)."""
    same = vals[:, :, None] == vals[:, None, :]
    turn = (same & (_AFTER if from_last else _BEFORE)).sum(axis=2)
    hit = data[:, None, :] == vals[:, :, None]
    if turn.any():
        hit &= np.cumsum(hit, axis=2, dtype=np.int16) == (turn + 1)[:, :, None]
    return np.where(hit.any(axis=2), hit.argmax(axis=2), -1)


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[P, 8] = index of each value in its partition; repeats take the next occurrence; all ones when absent."""
    rule = "nc_find_index8"
    core = core_of(rule)
    _check_search(rule, "data", tensor(rule, "data", data))
    tile = data.tile()
    _check_eight(rule, "vals", tensor(rule, "vals", vals), tile.partitions)
    _check_eight(rule, "dst", tensor(rule, "dst", dst), tile.partitions)
    dtype_in(rule, "dst", dst, _INDEX)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data, vals)
    if not core.trace:
        found = _matches(read_f32(data).reshape(tile.partitions, -1), read_f32(vals).reshape(-1, 8))
        put_raw(dst, found.astype(np.int64).astype(dst.dtype.np))
    return DONE


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data with the first occurrence of each value replaced by imm; repeats are matched from value 7 down."""
    rule = "nc_match_replace8"
    core = core_of(rule)
    tile = same(rule, dst, data)
    _check_search(rule, "data", data)
    _check_eight(rule, "vals", tensor(rule, "vals", vals), tile.partitions)
    if dst_idx is not None:
        _check_eight(rule, "dst_idx", tensor(rule, "dst_idx", dst_idx), tile.partitions)
        dtype_in(rule, "dst_idx", dst_idx, _INDEX)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data, vals, *tensors(dst_idx))
    if core.trace:
        return DONE
    values = read_f32(data).reshape(tile.partitions, -1).copy()
    found = _matches(values, read_f32(vals).reshape(-1, 8), from_last=True)
    rows, columns = np.nonzero(found >= 0)
    values[rows, found[rows, columns]] = np.float32(imm)
    put(dst, values)
    if dst_idx is not None:
        put_raw(dst_idx, found.astype(dst_idx.dtype.np))
    return DONE


def sequence_bounds(dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[1, 2, n] = first index and one past the last index of each element's segment; padding gets (n, -1)."""
    rule = "sequence_bounds"
    core = core_of(rule)
    tile = tensor(rule, "segment_ids", segment_ids).tile()
    out = tensor(rule, "dst", dst).tile()
    for label, value in (("dst", dst), ("segment_ids", segment_ids)):
        dtype_in(rule, label, value, ("float32", "int32"))
        buffer(rule, label, value, SBUF)
    if tile.partitions != 1 or (out.partitions, out.free) != (1, 2 * tile.free):
        refuse(f"{rule}: shapes", f"segment_ids {segment_ids.shape}, dst {dst.shape}", "(1, n) and (1, 2, n)")
    core.retire(rule, "gpsimd", cycles(tile.free), tile.free, dst, segment_ids)
    if core.trace:
        return DONE
    ids = read_f32(segment_ids).ravel()
    n = len(ids)
    starts, ends = np.empty(n), np.empty(n)
    for value in np.unique(ids):
        where = np.flatnonzero(ids == value)
        starts[where], ends[where] = (n, -1) if value == 0 else (where[0], where[-1] + 1)
    put(dst, np.stack([starts, ends])[None].astype(np.float32))
    return DONE
