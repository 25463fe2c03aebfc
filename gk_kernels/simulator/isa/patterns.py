"""Values made from an affine pattern: iota, and what affine_select compares."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import refuse
from gk_kernels.simulator.isa.check import (
    DONE,
    SBUF,
    buffer,
    core_of,
    cycles,
    int32,
    put,
    put_raw,
)
from gk_kernels.simulator.isa.constants import NkiInstruction
from gk_kernels.simulator.tensor import NkiTensor, Tile

_INT32 = ("int32", "uint32")


def affine_values(rule: str, tile: Tile, pattern: Any, offset: int, channel_multiplier: int) -> Array:
    """offset + partition * channel_multiplier + sum(step * i), as int64 [P, F]."""
    values = np.zeros(1, np.int64)
    for step, count in pattern:
        values = (values[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    rows = np.arange(tile.partitions, dtype=np.int64) * channel_multiplier + offset
    return rows[:, None] + values


def check_pattern(rule: str, tile: Tile, pattern: Any, offset: Any, channel_multiplier: Any) -> None:
    """A generated pattern covers the tile's free elements in at most 4 dimensions."""
    int32(rule, "offset", offset)
    int32(rule, "channel_multiplier", channel_multiplier)
    count = 1
    for _, n in pattern:
        count *= n
    if len(pattern) > 4 or count != tile.free:
        refuse(
            f"{rule}: pattern",
            [list(p) for p in pattern],
            f"up to 4 pairs that make {tile.free} elements per partition",
        )


def iota(
    dst: NkiTensor, pattern: Any, offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> NkiInstruction:
    """dst[p, ...] = offset + p * channel_multiplier + sum(step * i), in 32-bit integers. GpSimd, SBUF."""
    rule = "iota"
    core = core_of(rule)
    buffer(rule, "dst", dst, SBUF)
    tile = dst.tile()
    check_pattern(rule, tile, pattern, offset, channel_multiplier)
    core.retire(rule, "gpsimd", cycles(tile.free), tile.free, dst)
    if core.trace:
        return DONE
    values = affine_values(rule, tile, pattern, offset, channel_multiplier).astype(np.int32)
    if dst.dtype in _INT32:
        put_raw(dst, values.astype(dst.dtype.np))
    else:
        put(dst, values.astype(np.float32))
    return DONE
