"""Every weight that one rank's kernel reads: name, shape, dtype, and the checkpoint element behind each of its places.

Dims: L layers, H hidden, I intermediate, Hp/Ip the same padded to multiples of 512, q/k heads of the rank, d head size,
E experts, X experts of the rank, V vocabulary, n vocabulary shards.

Stacks per layout (leading L everywhere; MXFP4 bytes hold two values, uint16 four):

    name                            PLAIN                               NKI
    input_layernorm_weight          [H]                                 [1, Hp]
    W_qkv                           [H, (q+2k)d]                        [Hp, (q+2k)d]
    bias_qkv                        [(q+2k)d]                           [1, (q+2k)d]
    W_out                           [qd, H]                             [qd, Hp]
    bias_out (o bias / TP)          [H]                                 [1, Hp]
    sink                            [q] float32                         [q, 1] float32
    post_attn_layernorm_weight      [H]                                 [1, Hp] float32
    router_weights                  [H, E]                              [Hp, E] float16
    router_bias                     [E]                                 [1, E] float16
    expert_gate_up_weights  MXFP4   [X, 2, I, H/2] uint8                [X, 128, 2, Hp/512, Ip] uint16: p, gate/up, t, j
    expert_gate_up_weights_scale    [X, 2, I, H/32] uint8               [X, 16, 2, Hp/512, Ip] uint8: B, gate/up, t, j
    expert_gate_up_bias (up + 1)    [X, 2, I]                           [X, 128, 2, Ip/512, 4]: p, gate/up, T, w
    expert_down_weights     MXFP4   [X, H, I/2] uint8                   [X, 128, Ip/512, Hp] uint16: p, T, s
    expert_down_weights_scale       [X, H, I/32] uint8                  [X, 16, Ip/512, Hp] uint8: B, T, s
    expert_down_bias                [X, H]                              [X, Hp]
    expert_gate_up_weights  BF16    [X, 2, H, I]                        [X, Hp, 2, Ip]
    expert_gate_up_bias     BF16    [X, 2, I]                           [X, 128, 2, Ip/128]: [p, g, c] is 128 c + p
    expert_down_weights     BF16    [X, I, H]                           [X, Ip, Hp]

In the NKI layout every hidden axis is in `hidden_order`, also where it is an output; column j of MXFP4 gate and up is
in `intermediate_order`; the BF16 experts' intermediate axes are in checkpoint order, padded. Padding is zero, also in
scale bytes (2 ** -127, finite) and in the up bias (its + 1 falls on real entries only). With BF16 experts in the NKI
layout a chunk of 128 rows is one contiguous read. W_out is as the checkpoint has it: the kernel multiplies V by its KV
scale itself. With dtype float32 nothing is narrowed: router tensors are float32 too.
"""

from __future__ import annotations

from collections.abc import Sequence

from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import LayoutError
from gk_core.greedy import vocab_shard
from gk_core.model_geometry import ModelGeometry
from gk_core.stack_builder import StackBuilder, one_axis, span_words
from gk_core.stacked_experts import nki_bf16, nki_mxfp4, plain_bf16, plain_mxfp4
from gk_core.weight_layouts import PADDING, ExpertFormat, WeightLayout
from gk_core.weight_parts import Indices, StackedWeightSpec, ValueRule, WeightPart

__all__ = ["build_stacked_weight_specs", "build_unstacked_weight_specs", "total_bytes"]


def build_stacked_weight_specs(
    geometry: ModelGeometry,
    mesh: DecodeMesh,
    rank: int,
    layout: WeightLayout,
    expert_format: ExpertFormat,
    dtype: str = "bfloat16",
) -> tuple[StackedWeightSpec, ...]:
    """Stacks of one rank, in the order of the table above.

    Args:
        dtype: of every weight that is neither quantised nor fixed by the table.

    Raises:
        LayoutError: a rank outside the mesh; heads that do not divide; feature axes that are not whole blocks; a dtype
            that is not a float's.
        UnsupportedError: more ranks than experts.
    """
    b = StackBuilder.of(geometry, mesh, rank, layout, expert_format, dtype)
    experts = {
        (WeightLayout.PLAIN, ExpertFormat.MXFP4): plain_mxfp4,
        (WeightLayout.PLAIN, ExpertFormat.BF16): plain_bf16,
        (WeightLayout.NKI, ExpertFormat.MXFP4): nki_mxfp4,
        (WeightLayout.NKI, ExpertFormat.BF16): nki_bf16,
    }[layout, expert_format]
    return (*_attention(b), *_router(b), *experts(b))


def build_unstacked_weight_specs(
    geometry: ModelGeometry,
    mesh: DecodeMesh,
    rank: int,
    layout: WeightLayout,
    dtype: str = "bfloat16",
    vocab_dp_size: int = 1,
) -> tuple[StackedWeightSpec, ...]:
    """Weights outside the layers: `embed_tokens` and `lm_head` [ceil(V / n), H or Hp], `final_norm` [H] or [1, Hp].

    The vocabulary is cut over the TP ranks of `vocab_dp_size` neighbouring replicas, n = tp_size * vocab_dp_size, in
    rows of `greedy.vocab_shard`; rows past the vocabulary are zero. Tied models read lm_head from the embedding.

    Raises:
        LayoutError: vocab_dp_size does not divide dp_size; a rank outside the mesh.
    """
    b = StackBuilder.of(geometry, mesh, rank, layout, None, dtype)
    if vocab_dp_size < 1 or mesh.dp_size % vocab_dp_size:
        raise LayoutError(f"vocab_dp_size must divide dp_size {mesh.dp_size}, got {vocab_dp_size}")
    shards = mesh.tp_size * vocab_dp_size
    index = mesh.dp_rank(rank) % vocab_dp_size * mesh.tp_size + mesh.tp_rank(rank)
    ids = vocab_shard(geometry.vocab_size, shards, index)
    rows = len(vocab_shard(geometry.vocab_size, shards, 0))
    vocab: Indices = ids if len(ids) == rows else (*ids, *([PADDING] * (rows - len(ids))))
    words = span_words("token", ids) if ids else "no tokens left"
    embed = b.model["model.embed_tokens.weight"]
    head = embed if geometry.tie_embeddings else b.model["lm_head.weight"]
    return (
        *(
            b.spec(name, [b.part(source, [one_axis(vocab, 0, words), b.hidden(1)], 2)], num_layers=None)
            for name, source in (("embed_tokens", embed), ("lm_head", head))
        ),
        b.spec("final_norm", [b.row(b.model["model.norm.weight"], b.hidden_indices, b.hidden_words)], num_layers=None),
    )


def total_bytes(specs: Sequence[StackedWeightSpec]) -> int:
    """Bytes of all stacks together."""
    return sum(spec.num_bytes for spec in specs)


def _attention(b: StackBuilder) -> list[StackedWeightSpec]:
    g, d = b.geometry, b.geometry.head_size
    q, kv = b.mesh.q_heads(b.rank, g.num_q_heads), b.mesh.kv_heads(b.rank, g.num_kv_heads)
    weights, biases, start = [], [], 0
    for letter, heads in (("q", q), ("k", kv), ("v", kv)):
        columns = range(heads.start * d, heads.stop * d)
        words = span_words(f"{letter} head", heads)
        source = f"self_attn.{letter}_proj"
        weights.append(b.part(b.layer[f"{source}.weight"], [one_axis(columns, 1, words), b.hidden(0)], 2, {1: start}))
        biases.append(b.row(b.layer[f"{source}.bias"], columns, words, start))
        start += len(columns)
    q_words = span_words("q head", q)
    q_columns = one_axis(range(q.start * d, q.stop * d), 0, q_words)
    sinks = b.part(b.layer["self_attn.sinks"], [one_axis(q, 0, q_words)], 2 if b.is_nki else 1)
    return [
        b.spec("input_layernorm_weight", [_hidden_row(b, "input_layernorm.weight")]),
        b.spec("W_qkv", weights),
        b.spec("bias_qkv", biases),
        b.spec("W_out", [b.part(b.layer["self_attn.o_proj.weight"], [b.hidden(1), q_columns], 2)]),
        b.spec("bias_out", [_hidden_row(b, "self_attn.o_proj.bias", ValueRule(divide_by=b.mesh.tp_size))]),
        b.spec("sink", [sinks], "float32"),
        b.spec(
            "post_attn_layernorm_weight",
            [_hidden_row(b, "post_attention_layernorm.weight")],
            "float32" if b.is_nki else None,
        ),
    ]


def _hidden_row(b: StackBuilder, key: str, rule: ValueRule | None = None) -> WeightPart:
    return b.row(b.layer[key], b.hidden_indices, b.hidden_words, rule=rule or ValueRule())


def _router(b: StackBuilder) -> list[StackedWeightSpec]:
    experts = range(b.geometry.num_experts)
    dtype = "float16" if b.is_nki and b.dtype != "float32" else None
    weight = b.part(b.layer["mlp.router.weight"], [one_axis(experts, 1, "all experts"), b.hidden(0)], 2)
    return [
        b.spec("router_weights", [weight], dtype),
        b.spec("router_bias", [b.row(b.layer["mlp.router.bias"], experts, "all experts")], dtype),
    ]
