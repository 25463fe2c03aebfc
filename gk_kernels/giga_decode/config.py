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
        fp8_reduce_scatter: send the experts' sums as FP8, at a loss of precision.
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
    fp8_reduce_scatter: bool = False

    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    def tp_size(self) -> int:
        """Ranks of a replica."""
        return len(self.tp_groups[0])

    def ep_size(self) -> int:
        """Ranks that the experts are dealt to."""
        return len(self.ep_groups[0])
