"""What the kernel knows when it is compiled: numbers of the model and the mesh, as plain values."""

from __future__ import annotations

from typing import NamedTuple


class DecodeConfig(NamedTuple):
    """Compile-time values of one build of the kernel.

    Attributes:
        num_layers: decoder layers; even ones slide, odd ones are full.
        hidden_size: H without padding; the norms divide by it.
        num_q_heads, num_kv_heads, head_size: of this rank.
        experts_per_token: winners of the router.
        swiglu_alpha, swiglu_limit, rms_norm_eps: constants of the model.
        k_scale, v_scale: FP8 scales of the cache: stored = x / scale.
        tp_groups, ep_groups: replica groups of the collectives, tuples of tuples; groups of one rank need none.
        mx_matmul: MXFP4 experts by MX matmuls (trn3, bfloat16 models); else their weights are widened on chip.
        mx_terms: MXFP8 terms of each activation in MX matmuls: 1, rounded to 4 significant bits, or 2, all 8 of them.
        fp8_reduce_scatter: send the experts' sums as FP8, at a loss of precision.
        scratch_slot: first of at least 2 R slots at the cache's end that no table names, where rows that write nothing
            write; 0: there are none, and such rows put back the null block's bytes.
    """

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    experts_per_token: int
    swiglu_alpha: float
    swiglu_limit: float
    rms_norm_eps: float
    k_scale: float
    v_scale: float
    tp_groups: tuple[tuple[int, ...], ...]
    ep_groups: tuple[tuple[int, ...], ...]
    mx_matmul: bool = False
    mx_terms: int = 2
    fp8_reduce_scatter: bool = False
    scratch_slot: int = 0

    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    def tp_size(self) -> int:
        """Ranks of a replica."""
        return len(self.tp_groups[0])

    def ep_size(self) -> int:
        """Ranks that the experts are dealt to."""
        return len(self.ep_groups[0])
