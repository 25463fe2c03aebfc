"""Experts on devices with MX matmuls: MXFP4 weights as they are stored, activations quantised to MXFP8 on the way.

FP8 (e4m3) has 4 significant bits, bfloat16 has 8. So an activation is the sum of two terms, its upper and its lower
four bits, and each of them is quantised exactly as long as it is not 2 ** 13 times smaller than the largest of its
group. Both terms meet the same weight tile in SBUF: twice the matmuls, no byte more from HBM. With one term the
activation is rounded to 4 bits, which is the larger error of the whole step by far.

A contraction tile is 512 features, four per partition. A group of 8 partitions by 4 lanes is 32 consecutive features,
one scale block of the checkpoint, so weights and scales go in as they are. Scales of a quadrant's 32 partitions lie
on its first four partitions.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.giga_decode.experts import TOKENS, add_share, swiglu
from gk_kernels.giga_decode.tiles import COLUMNS, PARTITIONS, Constants, load

LANES = 4
QUADRANTS = 4
UPPER_BITS = 0xFFF0  # of a bfloat16: sign, exponent and 3 of 7 stored mantissa bits


class Quantised(NamedTuple):
    """MX operand: `values` [128, tiles, n] of x4 elements, `scales` uint8 of the same shape, four rows per quadrant."""

    values: nl.NkiTensor
    scales: nl.NkiTensor


def quantise(lanes: nl.NkiTensor, terms: int, name: str) -> list[Quantised]:
    """Tokens [128, tiles, n, 4] in bfloat16 as a sum of 1 or 2 MXFP8 terms, one scale for 8 partitions by 4 lanes."""
    if terms == 1:
        return [quantise_term(lanes, f"{name}_term")]
    upper = nl.ndarray(lanes.shape, dtype=nl.bfloat16, buffer=nl.sbuf, name=f"{name}_upper")
    nisa.tensor_scalar(
        dst=upper.view(nl.uint16), data=lanes.view(nl.uint16), op0=nl.bitwise_and, operand0=UPPER_BITS
    )  # fmt: skip
    lower = nl.ndarray(lanes.shape, dtype=nl.bfloat16, buffer=nl.sbuf, name=f"{name}_lower")
    nisa.tensor_tensor(dst=lower, data1=lanes, data2=upper, op=nl.subtract, engine=nisa.engine.gpsimd)
    return [quantise_term(upper, f"{name}_high"), quantise_term(lower, f"{name}_low")]


def quantise_term(lanes: nl.NkiTensor, name: str) -> Quantised:
    """One MXFP8 term of [128, tiles, n, 4] in bfloat16."""
    _, tiles, count, _ = lanes.shape
    shape = (PARTITIONS, tiles, count)
    values = nl.ndarray(shape, dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf, name=f"{name}_values")
    scales = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf, name=f"{name}_scales")
    nisa.quantize_mx(dst=values, src=lanes, dst_scale=scales)
    return Quantised(values=values, scales=scales)


def hidden_lanes(turned: nl.NkiTensor, name: str) -> nl.NkiTensor:
    """Tokens [128, 4 * tiles, N], chunk q * tiles + t, as [128, tiles, N, 4]: feature 512 t + 4 p + q in lane q."""
    _, chunks, count = turned.shape
    tiles = chunks // LANES
    out = nl.ndarray((PARTITIONS, tiles, count, LANES), dtype=nl.bfloat16, buffer=nl.sbuf, name=name)
    for lane in range(LANES):
        nisa.tensor_copy(
            dst=out[:, :, :, lane], src=turned[:, lane * tiles : (lane + 1) * tiles, :], engine=nisa.engine.scalar
        )
    return out


def load_mx(weight: nl.NkiTensor, scale: nl.NkiTensor, first: int, name: str) -> Quantised:
    """512 columns of an MXFP4 matrix [128, tiles, n] uint16 with scale [16, tiles, n], both in HBM."""
    shape = (PARTITIONS, weight.shape[1], COLUMNS)
    values = nl.ndarray(shape, dtype=nl.float4_e2m1fn_x4, buffer=nl.sbuf, name=f"{name}_values")
    nisa.dma_copy(dst=values, src=weight[:, :, first : first + COLUMNS].view(nl.float4_e2m1fn_x4))
    scales = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf, name=f"{name}_scales")
    for quadrant in range(QUADRANTS):
        at = 32 * quadrant
        row = 4 * quadrant
        nisa.dma_copy(dst=scales[at : at + 4], src=scale[row : row + 4, :, first : first + COLUMNS])
    return Quantised(values=values, scales=scales)


def contract_mx(
    sums: nl.NkiTensor, left: list[Quantised], s0: int, m: int, right: list[Quantised], m0: int, n: int
) -> None:
    """PSUM `sums` [m, n]: the sum of `left`'s terms, columns s0.., times that of `right`'s, columns m0.., all tiles."""
    started = False
    for stationary in left:
        for moving in right:
            for t in range(stationary.values.shape[1]):
                nisa.nc_matmul_mx(
                    dst=sums, stationary=stationary.values[:, t, s0 : s0 + m], moving=moving.values[:, t, m0 : m0 + n],
                    stationary_scale=stationary.scales[:, t, s0 : s0 + m],
                    moving_scale=moving.scales[:, t, m0 : m0 + n], accumulate=started,
                )  # fmt: skip
                started = True


def activate_mx(
    tokens: list[Quantised], weight: nl.NkiTensor, scale: nl.NkiTensor, bias: nl.NkiTensor, config: DecodeConfig,
    name: str,
) -> list[Quantised]:  # fmt: skip
    """Activated features of tokens [128, Hp / 512, N], quantised to as many terms: [128, Ip / 512, N or N + 1].

    weight: [128, 2, Hp / 512, Ip] uint16; scale: [16, 2, Hp / 512, Ip]; bias: [128, 2, Ip / 512, 4]. Columns
    512 t + 128 w + p are features 512 t + 4 p + w, so 128 of them fill one lane of the next contraction's tile.
    """
    count = tokens[0].values.shape[2]
    features = weight.shape[3]
    tiles = features // COLUMNS
    # The tokens are the next matmul's stationary operand, whose free size must be even.
    even = count + count % 2
    biases = load(bias, nl.float32, f"{name}_bias")
    act = nl.ndarray((PARTITIONS, tiles, even, LANES), dtype=nl.bfloat16, buffer=nl.sbuf, name=f"{name}_act")
    if even > count:
        nisa.memset(dst=act, value=0.0)
    for t in range(tiles):
        gate = load_mx(weight[:, 0], scale[:, 0], t * COLUMNS, f"{name}_gate{t}")
        up = load_mx(weight[:, 1], scale[:, 1], t * COLUMNS, f"{name}_up{t}")
        for lane in range(LANES):
            for first in range(0, count, TOKENS):
                here = min(TOKENS, count - first)
                where = f"{name}_{t}_{lane}_{first}"
                gate_sums = nl.ndarray((PARTITIONS, here), dtype=nl.float32, buffer=nl.psum, name=f"{where}_gate_sums")
                contract_mx(gate_sums, [gate], lane * PARTITIONS, PARTITIONS, tokens, first, here)
                up_sums = nl.ndarray((PARTITIONS, here), dtype=nl.float32, buffer=nl.psum, name=f"{where}_up_sums")
                contract_mx(up_sums, [up], lane * PARTITIONS, PARTITIONS, tokens, first, here)
                swiglu(
                    gate_sums, up_sums, biases[:, 0, t, lane : lane + 1], biases[:, 1, t, lane : lane + 1], config,
                    act[:, t, first : first + here, lane], where,
                )  # fmt: skip
    return quantise(act, len(tokens), f"{name}_quantised")


def add_down_mx(
    activated: list[Quantised], weight: nl.NkiTensor, scale: nl.NkiTensor, bias: nl.NkiTensor,
    affinities: list[nl.NkiTensor], expert: int, totals: list[nl.NkiTensor], constants: Constants, name: str,
) -> None:  # fmt: skip
    """totals += affinity * (activated @ weight + bias), as `experts.add_down`.

    weight: [128, Ip / 512, Hp] uint16; scale: [16, Ip / 512, Hp]; bias: [1, Hp].
    """
    bias_tile = load(bias, constants.ones.dtype, f"{name}_bias")
    for first in range(0, bias.shape[1], COLUMNS):
        tile = load_mx(weight, scale, first, f"{name}_w{first}")
        start = 0
        for i in range(len(totals)):
            rows = totals[i].shape[0]
            even = rows + rows % 2
            sums = nl.ndarray((even, COLUMNS), dtype=nl.float32, buffer=nl.psum, name=f"{name}_{first}_{i}")
            contract_mx(sums, activated, start, even, [tile], 0, COLUMNS)
            nisa.nc_matmul(
                dst=sums, stationary=constants.ones[0:1, 0:even], moving=bias_tile[:, first : first + COLUMNS],
                accumulate=True,
            )  # fmt: skip
            add_share(
                totals[i][:, first : first + COLUMNS], sums[0:rows], affinities[i][:, expert : expert + 1], expert
            )
            start += rows
