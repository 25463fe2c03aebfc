"""Batch-norm statistics and pseudo-random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import refuse
from gk_kernels.simulator.isa.check import (
    DONE,
    Scalar,
    column,
    column_values,
    core_of,
    cycles,
    pick_engine,
    put,
    put_raw,
    read_f32,
    same,
    tensor,
    tensors,
)
from gk_kernels.simulator.isa.constants import NkiInstruction, engine
from gk_kernels.simulator.tensor import NkiTensor


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[P, 6] = count, mean, variance * count of the even elements, then of the odd ones. Vector Engine."""
    rule = "bn_stats"
    core = core_of(rule)
    tile, out = tensor(rule, "data", data).tile(), tensor(rule, "dst", dst).tile()
    if tile.free > 512:
        refuse(f"{rule}: elements per partition", tile.free, 512)
    if (out.partitions, out.free) != (tile.partitions, 6):
        refuse(f"{rule}: dst shape", dst.shape, f"({tile.partitions}, 6)")
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data)
    if core.trace:
        return DONE
    values = read_f32(data).reshape(tile.partitions, -1)
    result = np.zeros((tile.partitions, 6), np.float32)
    for i, part in enumerate((values[:, 0::2], values[:, 1::2])):
        if part.shape[1]:
            result[:, 3 * i] = part.shape[1]
            result[:, 3 * i + 1] = part.mean(axis=1)
            result[:, 3 * i + 2] = part.var(axis=1) * part.shape[1]
    put(dst, result)
    return DONE


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[P, 2] = mean and variance from (count, mean, variance * count) triples. Vector Engine."""
    rule = "bn_aggr"
    core = core_of(rule)
    tile, out = tensor(rule, "data", data).tile(), tensor(rule, "dst", dst).tile()
    if tile.free % 3:
        refuse(f"{rule}: elements per partition", tile.free, "a multiple of 3")
    if (out.partitions, out.free) != (tile.partitions, 2):
        refuse(f"{rule}: dst shape", dst.shape, f"({tile.partitions}, 2)")
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data)
    if core.trace:
        return DONE
    count, mean, spread = np.moveaxis(read_f32(data).reshape(tile.partitions, -1, 3), 2, 0)
    total = count.sum(axis=1)
    overall = (count * mean).sum(axis=1) / total
    variance = (spread + count * (mean - overall[:, None]) ** 2).sum(axis=1) / total
    put(dst, np.stack([overall, variance], axis=1))
    return DONE


def _generator(core: Any) -> np.random.Generator:
    generator = core.registers.get("rng")
    if generator is None:
        generator = core.registers["rng"] = np.random.default_rng(0)
    return generator  # type: ignore[no-any-return]


def rng(dst: NkiTensor, engine: engine = engine.vector, name: str | None = None) -> NkiInstruction:
    """dst = random bits of its integer dtype. The sequence is this simulator's own."""
    rule = "rng"
    core = core_of(rule)
    tile = tensor(rule, "dst", dst).tile()
    if dst.dtype.kind not in "iu":
        refuse(f"{rule}: dst dtype", dst.dtype, "an integer dtype")
    used = pick_engine(rule, engine, "vector", ("vector", "gpsimd"), dst)
    core.retire(rule, used, cycles(tile.free), tile.free, dst)
    if not core.trace:
        bits = _generator(core).integers(0, 1 << 32, dst.shape, np.uint32)
        put_raw(dst, bits.astype(f"u{dst.dtype.itemsize}").view(dst.dtype.np))
    return DONE


def rand2(dst: NkiTensor, min: Scalar, max: Scalar, name: str | None = None) -> NkiInstruction:
    """dst = uniform random values in [min, max]. The sequence is this simulator's own."""
    rule = "rand2"
    core = core_of(rule)
    tile = tensor(rule, "dst", dst).tile()
    low, high = column(rule, "min", min, tile), column(rule, "max", max, tile)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, *tensors(low, high))
    if not core.trace:
        ndim = len(dst.shape)
        a, b = column_values(low, ndim), column_values(high, ndim)
        put(dst, a + (b - a) * _generator(core).random(dst.shape, np.float32))
    return DONE


def dropout(dst: NkiTensor, data: NkiTensor, prob: Scalar, name: str | None = None) -> NkiInstruction:
    """dst = data with each element zeroed with probability `prob`. Vector Engine."""
    rule = "dropout"
    core = core_of(rule)
    tile = same(rule, dst, data)
    chance = column(rule, "prob", prob, tile)
    core.retire(rule, "vector", cycles(tile.free), tile.free, dst, data, *tensors(chance))
    if not core.trace:
        values = read_f32(data)
        drop = _generator(core).random(values.shape, np.float32) < column_values(chance, values.ndim)
        put(dst, np.where(drop, np.float32(0), values))
    return DONE


def _reseed(rule: str, src_seeds: NkiTensor) -> NkiInstruction:
    core = core_of(rule)
    tensor(rule, "src_seeds", src_seeds)
    core.retire(rule, "gpsimd", 64, 1, None, src_seeds)
    if not core.trace:
        seeds: Array = np.ascontiguousarray(src_seeds.read())
        core.registers["rng"] = np.random.default_rng(list(seeds.tobytes()))
    return DONE


def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Restart the random sequence from a seed tensor."""
    return _reseed("set_rng_seed", src_seeds)


def rand_set_state(src_seeds: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None) -> NkiInstruction:
    """Restart the random sequence from a state tensor."""
    return _reseed("rand_set_state", src_seeds)


def rand_get_state(dst: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None) -> NkiInstruction:
    """The hardware's generator state: not simulated."""
    refuse("rand_get_state", "a read of the generator state", "not simulated")
