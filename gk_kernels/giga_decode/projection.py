"""Output projection: the heads' outputs, still turned, times W_out; a partial sum where TP ranks share the heads."""

from __future__ import annotations

import nki.language as nl

from gk_kernels.giga_decode.tiles import PARTITIONS, Constants, linear


def heads_per_column(head_size: int, q_per_kv: int) -> int:
    """s: how many consecutive heads lie above one another on the partitions, to be contracted at once.

    They belong to one KV head; an engine may start at multiples of 32 partitions only.
    """
    share = PARTITIONS // head_size
    if head_size % 32 != 0 or q_per_kv % share != 0:
        return 1
    return share


def project_out(
    heads: nl.NkiTensor, weight: nl.NkiTensor, bias: nl.NkiTensor, constants: Constants, name: str
) -> nl.NkiTensor:
    """float32 [R, Hp] of heads [s d, q / s, R], s of them in a column: a contraction each, so nothing is transposed.

    weight: [q * d, Hp]; bias: [1, Hp], this rank's share of it, since every rank adds its own.
    """
    return linear(heads, weight, bias, constants.ones, name)
