"""Attention of one token per row over its gathered keys, with a sink per head and the row's own token.

Strategy: keys stay on partitions, where the gather put them, and the few query heads lie on the free axis. So scores
[128 keys, run, heads] use every partition, softmax passes are short, and the probabilities are already turned for the
product with V; only K is transposed. What crosses partitions (the maximum, the sums) goes through the Tensor Engine: a
contraction with ones leaves its result on every partition.

Columns of small tiles are (head, row of the group). Masked scores are overwritten and masked values zeroed, not
multiplied by 0: a NaN in a block that nobody reads must not spread.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.giga_decode.gather import Gather, gather_runs
from gk_kernels.giga_decode.projection import heads_per_column
from gk_kernels.giga_decode.qkv import NewTokens
from gk_kernels.giga_decode.tiles import BANK_BYTES, PARTITIONS, Constants, bytes_of

MASKED = -1.0e30


class RowGroup(NamedTuple):
    """Which part of the batch a tile holds, and the small facts about it.

    Attributes:
        head: KV head.
        group: row group; `first` and `rows` say which rows.
        queries: [d, g, rows] of this KV head's g query heads.
        key, value: [d, 1, rows] of the rows' own tokens.
    """

    head: int
    group: int
    first: int
    rows: int
    queries: nl.NkiTensor
    key: nl.NkiTensor
    value: nl.NkiTensor


def attend(
    new: NewTokens, k_cache: nl.NkiTensor, v_cache: nl.NkiTensor, sink: nl.NkiTensor, gather: Gather,
    config: DecodeConfig, constants: Constants, name: str,
) -> nl.NkiTensor:  # fmt: skip
    """Attention of all rows and heads in the model's dtype, as the output projection takes it: [s d, q / s, R].

    sink: [q, 1] float32 in HBM.
    """
    d = config.head_size
    g = config.q_per_kv()
    share = heads_per_column(d, g)
    plan = gather.plan
    dtype = new.queries.dtype
    columns = config.num_q_heads // share
    out = nl.ndarray((share * d, columns, plan.rows), dtype=dtype, buffer=nl.sbuf, name=f"{name}_out")
    sinks = nl.ndarray((PARTITIONS, config.num_q_heads), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_sinks")
    nisa.dma_copy(dst=sinks, src=sink.ap(pattern=[[0, PARTITIONS], [1, config.num_q_heads]]))
    for head in range(config.num_kv_heads):
        for group in range(plan.row_groups):
            first = group * plan.rows_per_tile
            last = first + plan.rows_per_tile
            part = RowGroup(
                head=head, group=group, first=first, rows=plan.rows_per_tile,
                queries=new.queries[:, head * g : (head + 1) * g, first:last],
                key=new.keys[:, head : head + 1, first:last],
                value=new.values[:, head : head + 1, first:last],
            )  # fmt: skip
            heads = g // share
            attend_group(
                part, k_cache, v_cache, sinks[:, head * g : (head + 1) * g], gather, config.v_scale, constants,
                out[:, head * heads : (head + 1) * heads, first:last], f"{name}_h{head}g{group}",
            )  # fmt: skip
    return out


def attend_group(
    part: RowGroup, k_cache: nl.NkiTensor, v_cache: nl.NkiTensor, sinks: nl.NkiTensor, gather: Gather, v_scale: float,
    constants: Constants, out: nl.NkiTensor, name: str,
) -> None:  # fmt: skip
    """One KV head of one row group into `out` [s d, g / s, rows]. sinks: [128, g]."""
    d, g, rows = part.queries.shape
    own = own_scores(part, constants, f"{name}_own")
    scores = key_scores(part, k_cache, gather, f"{name}_scores")
    largest = spread_maximum(part, scores, own, sinks, gather, constants, f"{name}_max")

    keys = gather.plan.keys()
    shifted = nl.ndarray((PARTITIONS, keys, g), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_shifted")
    for row in range(rows):
        at = row_partitions(gather, row)
        nisa.tensor_tensor(
            dst=shifted[at[0] : at[1]], data1=scores[at[0] : at[1]],
            data2=largest[at[0] : at[1], :, row].expand_dim(1).broadcast(1, keys), op=nl.subtract,
        )  # fmt: skip
    used = rows * gather.plan.stride
    weights = nl.ndarray((PARTITIONS, keys, g), dtype=part.queries.dtype, buffer=nl.sbuf, name=f"{name}_weights")
    nisa.activation(dst=weights[0:used], op=nl.exp, data=shifted[0:used])
    sums = nl.ndarray((PARTITIONS, g), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_sums")
    nisa.tensor_reduce(dst=sums[0:used], op=nl.add, data=weights[0:used].permute((0, 2, 1)), axis=2)

    total = nl.ndarray((d, g, rows), dtype=nl.float32, buffer=nl.psum, name=f"{name}_total")
    for row in range(rows):
        at = row_partitions(gather, row)
        nisa.nc_matmul(
            dst=total[:, :, row], stationary=constants.ones_f32[at[0] : at[1], 0:d], moving=sums[at[0] : at[1]],
            accumulate=False,
        )  # fmt: skip
    values = weighted_values(part, v_cache, weights, gather, f"{name}_values")
    finish(part, values, total, own, sinks, largest, v_scale, out, f"{name}_finish")


def row_partitions(gather: Gather, row: int) -> tuple[int, int]:
    """First and end partition of a row of a group."""
    return (row * gather.plan.stride, (row + 1) * gather.plan.stride)


def own_scores(part: RowGroup, constants: Constants, name: str) -> nl.NkiTensor:
    """Score of each row's own key, on every partition: [128, g, rows]."""
    d, g, rows = part.queries.shape
    products = nl.ndarray((d, g, rows), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_products")
    nisa.tensor_tensor(dst=products, data1=part.queries, data2=part.key.broadcast(1, g), op=nl.multiply)
    sums = nl.ndarray((PARTITIONS, g, rows), dtype=nl.float32, buffer=nl.psum, name=f"{name}_sums")
    nisa.nc_matmul(dst=sums, stationary=constants.ones_f32[0:d, :], moving=products, accumulate=False)
    out = nl.ndarray((PARTITIONS, g, rows), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_out")
    nisa.tensor_copy(dst=out, src=sums)
    return out


def key_scores(part: RowGroup, cache: nl.NkiTensor, gather: Gather, name: str) -> nl.NkiTensor:
    """Scores of the cached keys, hidden ones at MASKED: [128, keys, g].

    The runs of all rows of the group are turned together and meet every row's queries in one matmul; of its
    [128, g, rows] results a partition keeps the column of its own row.
    """
    d, g, rows = part.queries.shape
    plan = gather.plan
    dtype = part.queries.dtype
    used = rows * plan.stride
    scores = nl.ndarray((PARTITIONS, plan.keys(), g), dtype=nl.float32, buffer=nl.sbuf, name=name)
    per_bank = min(BANK_BYTES // (PARTITIONS * bytes_of(dtype)), BANK_BYTES // (g * rows * 4))
    for tile in range(plan.block_tiles):
        keys = gather_runs(cache, gather, part.head, part.group, tile, dtype, f"{name}_k{tile}")
        for first in range(0, plan.run, per_bank):
            here = min(per_bank, plan.run - first)
            where = f"{name}_{tile}_{first}"
            turned = nl.ndarray((d, here, PARTITIONS), dtype=dtype, buffer=nl.psum, name=f"{where}_turned")
            for i in range(here):
                nisa.nc_transpose(dst=turned[:, i, :], data=keys[:, first + i, :])
            columns = nl.ndarray((d, here, PARTITIONS), dtype=dtype, buffer=nl.sbuf, name=f"{where}_columns")
            nisa.tensor_copy(dst=columns, src=turned, engine=nisa.engine.scalar)
            found = nl.ndarray((PARTITIONS, here, g, rows), dtype=nl.float32, buffer=nl.psum, name=f"{where}_found")
            for i in range(here):
                nisa.nc_matmul(
                    dst=found[:, i, :, :], stationary=columns[:, i, :], moving=part.queries, accumulate=False
                )
            start = tile * plan.run + first
            for row in range(rows):
                at = row_partitions(gather, row)
                nisa.tensor_copy(
                    dst=scores[at[0] : at[1], start : start + here, :], src=found[at[0] : at[1], :, :, row]
                )
    hidden = gather.hidden[0:used, part.group, :].expand_dim(2).broadcast(2, g)
    nisa.tensor_copy_predicated(dst=scores[0:used], src=MASKED, predicate=hidden)
    return scores


def spread_maximum(
    part: RowGroup, scores: nl.NkiTensor, own: nl.NkiTensor, sinks: nl.NkiTensor, gather: Gather, constants: Constants,
    name: str,
) -> nl.NkiTensor:  # fmt: skip
    """Largest of cached scores, own score and sink, for each (head, row), on every partition: [128, g, rows]."""
    g = part.queries.shape[1]
    rows = part.rows
    stride = gather.plan.stride
    used = rows * stride
    of_partition = nl.ndarray((PARTITIONS, g), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_partition")
    nisa.tensor_reduce(dst=of_partition[0:used], op=nl.maximum, data=scores[0:used].permute((0, 2, 1)), axis=2)
    turned = nl.ndarray((g, used), dtype=nl.float32, buffer=nl.psum, name=f"{name}_turned")
    nisa.nc_transpose(dst=turned, data=of_partition[0:used])
    of_row = nl.ndarray((g, 1, rows), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_row")
    nisa.tensor_reduce(dst=of_row, op=nl.maximum, data=turned.reshape((g, 1, rows, stride)), axis=3)
    # Row h of the diagonal holds head h's maxima in head h's columns, so a sum over h puts all on each partition.
    diagonal = nl.ndarray((g, g, rows), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_diagonal")
    nisa.tensor_tensor(
        dst=diagonal, data1=constants.identity[0:g, 0:g].expand_dim(2).broadcast(2, rows), data2=of_row.broadcast(1, g),
        op=nl.multiply,
    )  # fmt: skip
    spread = nl.ndarray((PARTITIONS, g, rows), dtype=nl.float32, buffer=nl.psum, name=f"{name}_spread")
    nisa.nc_matmul(dst=spread, stationary=constants.ones_f32[0:g, :], moving=diagonal, accumulate=False)
    out = nl.ndarray((PARTITIONS, g, rows), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_out")
    nisa.tensor_tensor(dst=out, data1=spread, data2=own, op=nl.maximum)
    nisa.tensor_tensor(dst=out, data1=out, data2=sinks.expand_dim(2).broadcast(2, rows), op=nl.maximum)
    return out


def weighted_values(
    part: RowGroup, cache: nl.NkiTensor, weights: nl.NkiTensor, gather: Gather, name: str
) -> nl.NkiTensor:
    """Sum of weight times value over the cached keys, PSUM [d, g, rows]."""
    d, g, rows = part.queries.shape
    plan = gather.plan
    used = rows * plan.stride
    out = nl.ndarray((d, g, rows), dtype=nl.float32, buffer=nl.psum, name=name)
    for tile in range(plan.block_tiles):
        values = gather_runs(cache, gather, part.head, part.group, tile, part.queries.dtype, f"{name}_v{tile}")
        start = tile * plan.run
        hidden = gather.hidden[0:used, part.group, start : start + plan.run].expand_dim(2).broadcast(2, d)
        nisa.tensor_copy_predicated(dst=values[0:used], src=0.0, predicate=hidden)
        for row in range(rows):
            at = row_partitions(gather, row)
            for i in range(plan.run):
                nisa.nc_matmul(
                    dst=out[:, :, row], stationary=values[at[0] : at[1], i, :],
                    moving=weights[at[0] : at[1], start + i, :], accumulate=tile + i > 0,
                )  # fmt: skip
    return out


def finish(
    part: RowGroup, values: nl.NkiTensor, total: nl.NkiTensor, own: nl.NkiTensor, sinks: nl.NkiTensor,
    largest: nl.NkiTensor, v_scale: float, out: nl.NkiTensor, name: str,
) -> None:  # fmt: skip
    """Own token and sink join; divide: (values + w v) / (total + w + sink), into `out` [s d, g / s, rows].

    The sink is one more logit that has no value.
    """
    d, g, rows = part.queries.shape
    shape = (d, g, rows)
    weight = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_weight")
    nisa.tensor_tensor(dst=weight, data1=own[0:d], data2=largest[0:d], op=nl.subtract)
    nisa.activation(dst=weight, op=nl.exp, data=weight)
    rest = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_rest")
    nisa.tensor_tensor(dst=rest, data1=sinks[0:d].expand_dim(2).broadcast(2, rows), data2=largest[0:d], op=nl.subtract)
    nisa.activation(dst=rest, op=nl.exp, data=rest)
    nisa.tensor_tensor(dst=rest, data1=rest, data2=weight, op=nl.add)
    nisa.tensor_tensor(dst=rest, data1=rest, data2=total, op=nl.add)
    share = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_share")
    nisa.reciprocal(dst=share, data=rest)
    nisa.tensor_tensor(dst=weight, data1=weight, data2=part.value.broadcast(1, g), op=nl.multiply)
    nisa.tensor_tensor(dst=weight, data1=weight, data2=values, op=nl.add)
    columns = out.shape[1]
    of_head = weight.reshape((d, columns, g // columns, rows))
    of_share = share.reshape((d, columns, g // columns, rows))
    for i in range(g // columns):
        nisa.scalar_tensor_tensor(
            dst=out[i * d : (i + 1) * d], data=of_head[:, :, i, :], op0=nl.multiply, operand0=v_scale,
            op1=nl.multiply, operand1=of_share[:, :, i, :],
        )  # fmt: skip
