"""Softmax of each row: one exponential pass that also sums, on the Scalar engine."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def row_softmax(x: nl.NkiTensor) -> nl.NkiTensor:
    """Softmax over the last axis of `x` [rows, cols] float32; rows at most 128.

    exp(x - max) / sum: the maximum comes negated out of the reduction so that it is the
    activation's bias, and the sum comes out of the same instruction.
    """
    rows, cols = x.shape
    out = nl.ndarray((rows, cols), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray((rows, cols), dtype=x.dtype, buffer=nl.sbuf, name="tile")
    nisa.dma_copy(dst=tile, src=x)

    minus_max = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf, name="minus_max")
    nisa.tensor_reduce(minus_max, nl.maximum, tile, axis=1, negate=True, keepdims=True)
    powers = nl.ndarray((rows, cols), dtype=nl.float32, buffer=nl.sbuf, name="powers")
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf, name="total")
    nisa.activation(
        dst=powers,
        op=nl.exp,
        data=tile,
        bias=minus_max,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    share = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf, name="share")
    nisa.reciprocal(dst=share, data=total)
    result = nl.ndarray((rows, cols), dtype=x.dtype, buffer=nl.sbuf, name="result")
    nisa.tensor_scalar(dst=result, data=powers, op0=nl.multiply, operand0=share)
    nisa.dma_copy(dst=out, src=result)
    return out
