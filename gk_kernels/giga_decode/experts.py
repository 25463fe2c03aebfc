"""Experts with float weights, or MXFP4 weights widened on chip, and the activation that every form of expert shares.

Gate and up come out turned (intermediate features on partitions, tokens on the free axis), which is what the down
projection contracts. Each weight is read from HBM once, whatever the number of tokens.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.giga_decode.dequantise import dequantise_columns
from gk_kernels.giga_decode.tiles import COLUMNS, PARTITIONS, Constants, contract, load, load_columns

TOKENS = 512


def swiglu(
    gate: nl.NkiTensor, up: nl.NkiTensor, gate_bias: nl.NkiTensor, up_bias: nl.NkiTensor, config: DecodeConfig,
    out: nl.NkiTensor, name: str,
) -> None:  # fmt: skip
    """out = g * sigmoid(alpha * g) * u, for PSUM `gate` and `up` [128, tokens] and float32 biases [128, 1].

    g = min(gate + bias, limit): clamped from above only. u = clip(up + bias, 1 - limit, 1 + limit): the up bias comes
    with the activation's + 1 in it.
    """
    limit = config.swiglu_limit
    clamped = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_gate")
    nisa.tensor_scalar(dst=clamped, data=gate, op0=nl.add, operand0=gate_bias, op1=nl.minimum, operand1=limit)
    gated = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_gated")
    nisa.activation(dst=gated, op=nl.sigmoid, data=clamped, scale=config.swiglu_alpha)
    nisa.tensor_tensor(dst=gated, data1=gated, data2=clamped, op=nl.multiply)
    raised = nl.ndarray(up.shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_up")
    nisa.tensor_scalar(dst=raised, data=up, op0=nl.add, operand0=up_bias, op1=nl.minimum, operand1=1.0 + limit)
    nisa.scalar_tensor_tensor(
        dst=out, data=raised, op0=nl.maximum, operand0=1.0 - limit, op1=nl.multiply, operand1=gated
    )


def gate_up_columns(
    weight: nl.NkiTensor, scale: nl.NkiTensor | None, part: int, first: int, dtype: nl.DType, constants: Constants,
    name: str,
) -> nl.NkiTensor:  # fmt: skip
    """512 columns of gate (part 0) or up (part 1) as [128, Hp / 128, 512] in `dtype`."""
    if scale is not None:
        return dequantise_columns(weight[:, part], scale[:, part], first, dtype, constants, name)
    hidden, _, features = weight.shape
    flat = weight.reshape((hidden, 2 * features))
    return load_columns(flat, PARTITIONS, part * features + first, COLUMNS, dtype, name)


def activate(
    turned: nl.NkiTensor, weight: nl.NkiTensor, scale: nl.NkiTensor | None, bias: nl.NkiTensor, config: DecodeConfig,
    constants: Constants, name: str,
) -> nl.NkiTensor:  # fmt: skip
    """Activated features [128, Ip / 128, N] in the model's dtype of tokens `turned` [128, Hp / 128, N].

    Float experts: weight [Hp, 2, Ip], bias [128, 2, Ip / 128]; chunk c of the result is features 128 c + p.
    MXFP4 experts: weight [128, 2, Hp / 512, Ip] uint16 with scale, bias [128, 2, Ip / 512, 4]; columns 512 t + 128 w
    + p are features 512 t + 4 p + w, which go to chunk w * Ip / 512 + t, as `dequantise_columns` orders the down
    weights.
    """
    features = weight.shape[len(weight.shape) - 1]
    tokens = turned.shape[2]
    chunks = features // PARTITIONS
    biases = load(bias, nl.float32, f"{name}_bias").reshape((PARTITIONS, 2, chunks))
    out = nl.ndarray((PARTITIONS, chunks, tokens), dtype=turned.dtype, buffer=nl.sbuf, name=f"{name}_act")
    for first in range(0, features, COLUMNS):
        gate = gate_up_columns(weight, scale, 0, first, turned.dtype, constants, f"{name}_gate{first}")
        up = gate_up_columns(weight, scale, 1, first, turned.dtype, constants, f"{name}_up{first}")
        for lane in range(COLUMNS // PARTITIONS):
            chunk = first // PARTITIONS + lane
            target = chunk if scale is None else lane * (features // COLUMNS) + first // COLUMNS
            for t in range(0, tokens, TOKENS):
                here = min(TOKENS, tokens - t)
                where = f"{name}_{chunk}_{t}"
                part = turned[:, :, t : t + here]
                gate_sums = contract_columns(gate, lane, part, f"{where}_gate_sums")
                up_sums = contract_columns(up, lane, part, f"{where}_up_sums")
                swiglu(
                    gate_sums, up_sums, biases[:, 0, chunk : chunk + 1], biases[:, 1, chunk : chunk + 1], config,
                    out[:, target, t : t + here], where,
                )  # fmt: skip
    return out


def contract_columns(weight: nl.NkiTensor, lane: int, turned: nl.NkiTensor, name: str) -> nl.NkiTensor:
    """PSUM [128, N]: 128 columns of `weight` [128, chunks, 512] against tokens [128, chunks, N], columns first."""
    sums = nl.ndarray((PARTITIONS, turned.shape[2]), dtype=nl.float32, buffer=nl.psum, name=name)
    start = lane * PARTITIONS
    for c in range(turned.shape[1]):
        nisa.nc_matmul(
            dst=sums, stationary=weight[:, c, start : start + PARTITIONS], moving=turned[:, c, :], accumulate=c > 0
        )
    return sums


def add_down(
    activated: nl.NkiTensor, weight: nl.NkiTensor, scale: nl.NkiTensor | None, bias: nl.NkiTensor,
    affinities: list[nl.NkiTensor], expert: int, totals: list[nl.NkiTensor], constants: Constants, name: str,
) -> None:  # fmt: skip
    """totals += affinity * (activated @ weight + bias), tile by tile of tokens; the first expert sets them.

    activated: [128, Ip / 128, N]; weight: [Ip, Hp], or MXFP4 [128, Ip / 512, Hp] uint16 with scale; bias: [1, Hp];
        affinities: [tokens, X] per token tile.
    """
    hidden = bias.shape[1]
    bias_tile = load(bias, activated.dtype, f"{name}_bias")
    for first in range(0, hidden, COLUMNS):
        if scale is None:
            tile = load_columns(weight, PARTITIONS, first, COLUMNS, activated.dtype, f"{name}_w{first}")
        else:
            tile = dequantise_columns(weight, scale, first, activated.dtype, constants, f"{name}_w{first}")
        start = 0
        for i in range(len(totals)):
            rows = totals[i].shape[0]
            sums = contract(
                activated[:, :, start : start + rows], tile, bias_tile[:, first : first + COLUMNS], constants.ones,
                f"{name}_{first}_{i}",
            )  # fmt: skip
            add_share(totals[i][:, first : first + COLUMNS], sums, affinities[i][:, expert : expert + 1], expert)
            start += rows


def add_share(total: nl.NkiTensor, sums: nl.NkiTensor, affinity: nl.NkiTensor, expert: int) -> None:
    """total += affinity * sums; a token that was not routed here adds exactly 0."""
    if expert == 0:
        nisa.tensor_scalar(dst=total, data=sums, op0=nl.multiply, operand0=affinity)
    else:
        nisa.scalar_tensor_tensor(dst=total, data=sums, op0=nl.multiply, operand0=affinity, op1=nl.add, operand1=total)
