"""Output projection: the heads' outputs, still turned, times W_out; a partial sum where TP ranks share the heads."""

from __future__ import annotations

import nki.language as nl

from gk_kernels.giga_decode.tiles import Constants, linear


def project_out(
    heads: nl.NkiTensor, weight: nl.NkiTensor, bias: nl.NkiTensor, constants: Constants, name: str
) -> nl.NkiTensor:
    """float32 [R, Hp] of heads [d, q, R]: one contraction of d per head, so nothing is transposed.

    weight: [q * d, Hp]; bias: [1, Hp], this rank's share of it, since every rank adds its own.
    """
    return linear(heads, weight, bias, constants.ones, name)
