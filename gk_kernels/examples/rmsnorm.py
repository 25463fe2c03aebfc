"""RMSNorm with a gain, rows on partitions."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def rmsnorm(x: nl.NkiTensor, gain: nl.NkiTensor, epsilon: float = 1e-5) -> nl.NkiTensor:
    """x / sqrt(mean(x^2) + epsilon) * gain for `x` [tokens, hidden], `gain` [1, hidden].

    tokens at most 128. The squares are summed by the instruction that makes them; the squares
    themselves are never used again.
    """
    tokens, hidden = x.shape
    out = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.sbuf, name="tile")
    nisa.dma_copy(dst=tile, src=x)
    gains = nl.ndarray((tokens, hidden), dtype=gain.dtype, buffer=nl.sbuf, name="gains")
    nisa.dma_copy(dst=gains, src=gain.ap(pattern=[[0, tokens], [1, hidden]]))

    squares = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.sbuf, name="squares")
    sums = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf, name="sums")
    nisa.activation(
        dst=squares,
        op=nl.square,
        data=tile,
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    scale = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf, name="scale")
    nisa.activation(dst=scale, op=nl.rsqrt, data=sums, scale=1.0 / hidden, bias=epsilon)
    result = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.sbuf, name="result")
    nisa.scalar_tensor_tensor(dst=result, data=tile, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=gains)
    nisa.dma_copy(dst=out, src=result)
    return out
