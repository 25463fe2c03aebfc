"""Router: float32 logits, the best experts of each row, softmax over these winners alone."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.tiles import Constants, linear, turn_rows

NO_EXPERT = -1.0e30


def route(
    normed: nl.NkiTensor, weight: nl.NkiTensor, bias: nl.NkiTensor, experts_per_token: int, constants: Constants,
    name: str,
) -> nl.NkiTensor:  # fmt: skip
    """Affinities float32 [T, E] of `normed` [T, Hp] float32: the winners' weights, 0 elsewhere.

    weight: [Hp, E]; bias: [1, E]; any float dtype, widened as they are loaded: a near tie must not turn on rounding.
    """
    rows = normed.shape[0]
    experts = weight.shape[1]
    turned = turn_rows(normed, 128, f"{name}_x")
    logits = linear(turned, weight, bias, constants.ones_f32, f"{name}_logits")
    # max8 wants at least 8 candidates.
    width = max(experts, 8)
    candidates = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_candidates")
    nisa.memset(dst=candidates, value=NO_EXPERT)
    nisa.tensor_copy(dst=candidates[:, 0:experts], src=logits)
    best = nl.ndarray((rows, 8), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_best")
    nisa.max8(dst=best, src=candidates)
    found = nl.ndarray((rows, 8), dtype=nl.uint32, buffer=nl.sbuf, name=f"{name}_found")
    nisa.nc_find_index8(dst=found, data=candidates, vals=best)
    ids = nl.ndarray((rows, 8), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_ids")
    nisa.tensor_copy(dst=ids, src=found)

    top = best[:, 0:experts_per_token]
    shifted = nl.ndarray((rows, experts_per_token), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_shifted")
    nisa.tensor_scalar(dst=shifted, data=top, op0=nl.subtract, operand0=best[:, 0:1])
    powers = nl.ndarray((rows, experts_per_token), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_powers")
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_total")
    nisa.activation(
        dst=powers, op=nl.exp, data=shifted, reduce_op=nl.add, reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    share = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_share")
    nisa.reciprocal(dst=share, data=total)
    nisa.tensor_scalar(dst=powers, data=powers, op0=nl.multiply, operand0=share)

    expert = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_expert")
    nisa.iota(dst=expert, pattern=[[1, experts]])
    out = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_out")
    nisa.memset(dst=out, value=0.0)
    for k in range(experts_per_token):
        mine = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_mine{k}")
        nisa.tensor_scalar(
            dst=mine, data=expert, op0=nl.equal, operand0=ids[:, k : k + 1], op1=nl.multiply,
            operand1=powers[:, k : k + 1],
        )  # fmt: skip
        nisa.tensor_tensor(dst=out, data1=out, data2=mine, op=nl.add)
    return out
