"""RMSNorm of rows: hidden on the free axis, so the sum of squares is one activation's running sum."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from gk_kernels.giga_decode.tiles import Constants, spread_row


def rms_norm(
    x: nl.NkiTensor, gain: nl.NkiTensor, hidden_size: int, epsilon: float, constants: Constants, name: str
) -> nl.NkiTensor:
    """x / sqrt(mean(x^2) + epsilon) * gain, float32 [rows, Hp].

    Padding is zero, so it adds nothing to the sum of squares; the mean is over the `hidden_size` real features.

    x: [rows, Hp] float32 in SBUF. gain: [1, Hp] in HBM.
    """
    rows = x.shape[0]
    gains = spread_row(gain, rows, constants, f"{name}_gain")
    squares = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_squares")
    sums = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_sums")
    nisa.activation(
        dst=squares, op=nl.square, data=x, reduce_op=nl.add, reduce_res=sums, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    scale = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_scale")
    nisa.activation(dst=scale, op=nl.rsqrt, data=sums, scale=1.0 / hidden_size, bias=epsilon)
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf, name=f"{name}_out")
    nisa.scalar_tensor_tensor(dst=out, data=x, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=gains)
    return out
