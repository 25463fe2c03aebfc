"""Data movement between partitions and by index inside SBUF; top-k and non-zero search of the GpSimd Engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gk_kernels.simulator.errors import BoundsError, UsageError, refuse
from gk_kernels.simulator.isa.check import (
    DONE,
    SBUF,
    buffer,
    core_of,
    cycles,
    dtype_in,
    int32,
    no_psum,
    put,
    put_raw,
    read_f32,
    same,
    tensor,
    writable,
)
from gk_kernels.simulator.isa.constants import NkiInstruction
from gk_kernels.simulator.ops import as_op
from gk_kernels.simulator.tensor import NkiTensor


@lru_cache(maxsize=256)
def _shuffle_plan(mask: tuple[int, ...], count: int, sources: int) -> tuple[list[int], list[int], int | None]:
    """Target and source partitions, and the first target whose source does not exist."""
    targets = [p for p in range(count) if mask[p % 32] != 255]
    origins = [p // 32 * 32 + mask[p % 32] for p in targets]
    missing = [t for t, o in zip(targets, origins, strict=True) if o >= sources]
    return targets, origins, missing[0] if missing else None


def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Any, name: str | None = None) -> NkiInstruction:
    """Output partition i of every 32-partition quadrant = input partition mask[i] of that quadrant; 255 leaves it."""
    rule = "nc_stream_shuffle"
    core = core_of(rule)
    out, tile = tensor(rule, "dst", dst).tile(), tensor(rule, "src", src).tile()
    if dst.dtype != src.dtype:
        refuse(f"{rule}: dtypes", f"{src.dtype} to {dst.dtype}", "equal dtypes")
    if out.free != tile.free:
        refuse(f"{rule}: elements per partition", f"src {tile.free}, dst {out.free}", "equal")
    writable(rule, dst)
    mask = [int(i) for i in shuffle_mask]
    if len(mask) != 32 or any(not (0 <= i < 32 or i == 255) for i in mask):
        refuse(f"{rule}: shuffle_mask", mask, "32 entries of 0 to 31, or 255")
    active = -(-max(tile.partitions, out.partitions) // 32) * 32
    step = 32 if active == 32 else 64 if active == 64 else 128
    for label, start in (("src", tile.start), ("dst", out.start)):
        if start % step or start + active > 128:
            refuse(
                f"{rule}: {label} start partition",
                f"{start} with {active} active partitions",
                "0 above 64 active partitions; 0 or 64 for 64; a multiple of 32 for 32",
            )
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, src)
    if core.trace:
        return DONE
    targets, sources, missing = _shuffle_plan(tuple(mask), out.partitions, tile.partitions)
    if missing is not None:
        refuse(
            f"{rule}: shuffle_mask[{missing % 32}]",
            f"source partition {missing // 32 * 32 + mask[missing % 32]}",
            f"below the {tile.partitions} partitions of src",
            BoundsError,
        )
    if not targets:
        return DONE
    if src.storage.unwritten is not None:
        marks = src.marks()[sources]
        if marks.any():
            src.report_poison(marks)
    values = src.numpy_view()[sources].reshape(len(sources), *dst.shape[1:])
    dst.write_target()[targets] = values
    if dst.storage.unwritten is not None:
        dst.marks()[targets] = 0
        dst.storage.settle()
    return DONE


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[p, i] = data[p, indices[p, i]], free dimensions flattened. GpSimd, SBUF."""
    rule = "nc_n_gather"
    core = core_of(rule)
    for label, value in (("dst", dst), ("data", data), ("indices", indices)):
        buffer(rule, label, value, SBUF)
    out = same(rule, dst, indices)
    tile = data.tile()
    if tile.partitions != out.partitions:
        refuse(f"{rule}: partitions", f"data {tile.partitions}, dst {out.partitions}", "equal")
    if dst.dtype != data.dtype:
        refuse(f"{rule}: dtypes", f"{data.dtype} to {dst.dtype}", "equal dtypes")
    dtype_in(rule, "indices", indices, ("uint32",))
    core.retire(rule, "gpsimd", cycles(out.free), out.free, dst, data, indices)
    if core.trace:
        return DONE
    index = indices.read().reshape(out.partitions, -1).astype(np.int64)
    if index.max() >= tile.free:
        refuse(f"{rule}: index", int(index.max()), f"0 to {tile.free - 1}", BoundsError)
    values = data.read().reshape(tile.partitions, -1)
    put_raw(dst, np.take_along_axis(values, index, axis=1))
    return DONE


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Each 16-partition GpSimd core gathers by its own indices, taken partition first. SBUF."""
    rule = "local_gather"
    core = core_of(rule)
    for label, value in (("dst", dst), ("src_buffer", src_buffer), ("index", index)):
        buffer(rule, label, value, SBUF)
    tile, where, out = src_buffer.tile(), index.tile(), dst.tile()
    if tile.partitions != where.partitions or tile.partitions % 16:
        refuse(
            f"{rule}: partitions", f"src_buffer {tile.partitions}, index {where.partitions}", "equal multiples of 16"
        )
    if dst.dtype != src_buffer.dtype:
        refuse(f"{rule}: dtypes", f"{src_buffer.dtype} to {dst.dtype}", "equal dtypes")
    dtype_in(rule, "index", index, ("uint16",))
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        refuse(f"{rule}: num_elem_per_idx", num_elem_per_idx, "1, 2, 4, 8, 16 or 32")
    available = 16 * where.free
    count = available if num_valid_indices is None else num_valid_indices
    if not 0 < count <= min(available, 4096):
        refuse(f"{rule}: indices per core", count, f"1 to {min(available, 4096)}")
    if out.partitions != tile.partitions or out.free < count * num_elem_per_idx:
        refuse(f"{rule}: dst shape", dst.shape, f"({tile.partitions}, {count * num_elem_per_idx})")
    core.retire(rule, "gpsimd", cycles(out.free), out.free, dst, src_buffer, index)
    if core.trace:
        return DONE
    values = src_buffer.read().reshape(tile.partitions, -1)
    indices = index.read().reshape(where.partitions, -1)
    target = dst.write_target().reshape(out.partitions, -1).copy()
    used = count * num_elem_per_idx
    for first in range(0, tile.partitions, 16):
        flat = indices[first : first + 16].T.reshape(-1)[:count].astype(np.int64)
        columns = (flat[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        if columns.max() >= values.shape[1]:
            refuse(f"{rule}: index", int(columns.max()), f"0 to {values.shape[1] - 1}", BoundsError)
        target[first : first + 16, :used] = values[first : first + 16][:, columns]
    put_raw(dst, target)
    return DONE


_PARTITION_OPS = {"add": np.add, "average": np.add, "maximum": np.maximum, "bitwise_or": np.bitwise_or,
                  "bitwise_and": np.bitwise_and}  # fmt: skip


def tensor_partition_reduce(dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[1, F] = op over the partitions of data. GpSimd."""
    rule = "tensor_partition_reduce"
    core = core_of(rule)
    no_psum(rule, dst, data)
    tile, out = tensor(rule, "data", data).tile(), tensor(rule, "dst", dst).tile()
    found = as_op(op, rule)
    if found.name not in _PARTITION_OPS:
        refuse(f"{rule}: op", repr(found), ", ".join(_PARTITION_OPS))
    if (out.partitions, out.free) != (1, tile.free):
        refuse(f"{rule}: dst shape", dst.shape, f"(1, {tile.free})")
    core.retire(rule, "gpsimd", cycles(tile.free), tile.free, dst, data)
    if core.trace:
        return DONE
    if found.bitwise:
        put_raw(dst, _PARTITION_OPS[found.name].reduce(data.read(), axis=0).reshape(dst.shape))
        return DONE
    total = _PARTITION_OPS[found.name].reduce(read_f32(data), axis=0)
    put(dst, total / np.float32(tile.partitions) if found.name == "average" else total)
    return DONE


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> NkiInstruction:
    """On partitions 0, 16, 32 ...: indices of non-zero elements, padding, and their count last. GpSimd, SBUF."""
    rule = "nonzero_with_count"
    core = core_of(rule)
    buffer(rule, "dst", dst, SBUF)
    buffer(rule, "src", src, SBUF)
    dtype_in(rule, "src", src, ("float32", "int32"))
    dtype_in(rule, "dst", dst, ("int32",))
    int32(rule, "index_offset", index_offset)
    int32(rule, "padding_val", padding_val)
    tile, out = src.tile(), dst.tile()
    if out.partitions != tile.partitions or out.free != tile.free + 1:
        refuse(f"{rule}: dst shape", dst.shape, f"({tile.partitions}, {tile.free + 1})")
    core.retire(rule, "gpsimd", cycles(tile.free), tile.free, dst, src)
    if core.trace:
        return DONE
    rows = list(range(0, tile.partitions, 16))
    if src.storage.unwritten is not None and src.marks()[rows].any():
        src.report_poison(src.marks()[rows])
    values = src.numpy_view().reshape(tile.partitions, -1)
    result = np.full((len(rows), out.free), padding_val, np.int32)
    for i, row in enumerate(rows):
        found = np.flatnonzero(values[row])
        result[i, : len(found)] = found + index_offset
        result[i, -1] = len(found)
    dst.write_target()[rows] = result.reshape(len(rows), *dst.shape[1:])
    if dst.storage.unwritten is not None:
        dst.marks()[rows] = 0
        dst.storage.settle()
    return DONE


def topk(val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None) -> NkiInstruction:
    """The k largest of n bf16 values laid out as a 16-partition snake, ascending, with their indices. GpSimd, SBUF."""
    rule = "topk"
    core = core_of(rule)
    for label, value, dtype in (
        ("val_dst", val_dst, "bfloat16"),
        ("idx_dst", idx_dst, "uint32"),
        ("src", src, "bfloat16"),
    ):
        buffer(rule, label, value, SBUF)
        dtype_in(rule, label, value, (dtype,))
    tile, out = src.tile(), same(rule, val_dst, idx_dst)
    k = out.free
    if not 8 <= n < 65536 or tile.free < -(-n // 16):
        refuse(f"{rule}: n", n, f"8 to 65535, and {-(-n // 16)} columns in src")
    if not 1 <= k < 32768 or k > n:
        refuse(f"{rule}: k", k, f"1 to {min(n, 32767)}")
    if tile.partitions % 16 or out.partitions != tile.partitions:
        refuse(f"{rule}: partitions", f"src {tile.partitions}, dst {out.partitions}", "equal multiples of 16")
    core.retire(rule, "gpsimd", cycles(4 * n + k), n, val_dst, src, idx_dst)
    if core.trace:
        return DONE
    values = read_f32(src).reshape(tile.partitions, -1)
    best, where = np.empty((tile.partitions, k), np.float32), np.empty((tile.partitions, k), np.uint32)
    for first in range(0, tile.partitions, 16):
        snake = values[first : first + 16].T.reshape(-1)[:n]
        order = np.argsort(snake, kind="stable")[-k:]
        best[first : first + 16], where[first : first + 16] = snake[order], order
    put(val_dst, best)
    put_raw(idx_dst, where)
    return DONE


__all__ = ["UsageError", "local_gather", "nc_n_gather", "nc_stream_shuffle", "nonzero_with_count",
           "tensor_partition_reduce", "topk"]  # fmt: skip
