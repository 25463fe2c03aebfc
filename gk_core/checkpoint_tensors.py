"""What a GPT-OSS checkpoint must hold: every tensor's name, shape and permitted dtypes.

Dims: H hidden, I intermediate, E experts, V vocabulary, q/k heads of the whole model, d head size.

Names and shapes are those of the Hugging Face form. BF16 expert matrices are [E, in, out]; MXFP4 ones are [E, out, in]
in blocks of 32 values along the input axis: 16 bytes and one scale byte. Gate and up alternate along 2I: even gate, odd
up.
"""

from __future__ import annotations

from attrs import frozen

from gk_core.errors import LayoutError
from gk_core.model_geometry import ModelGeometry
from gk_core.weight_layouts import FP4_PER_BLOCK, ExpertFormat

__all__ = ["FLOAT_DTYPES", "CheckpointTensor", "checkpoint_tensors", "layer_tensors", "model_tensors"]

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
_BYTES = ("uint8",)


@frozen(kw_only=True)
class CheckpointTensor:
    """One tensor as a checkpoint must hold it.

    Attributes:
        name: with `{layer}` where the layer id goes.
        shape: as stored.
        dtypes: any one of these.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def layer_tensors(geometry: ModelGeometry, expert_format: ExpertFormat) -> dict[str, CheckpointTensor]:
    """Tensors of each layer, by the part of their name after `model.layers.N.`.

    >>> from gk_core.model_geometry import GPT_OSS_120B
    >>> layer_tensors(GPT_OSS_120B, ExpertFormat.MXFP4)["mlp.experts.gate_up_proj_blocks"].shape
    (128, 5760, 90, 16)

    Raises:
        LayoutError: MXFP4 with feature axes that are not whole blocks of 32.
    """
    g = geometry
    h, e, d = g.hidden_size, g.num_experts, g.head_size
    floats: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (g.num_q_heads * d, h),
        "self_attn.q_proj.bias": (g.num_q_heads * d,),
        "self_attn.k_proj.weight": (g.num_kv_heads * d, h),
        "self_attn.k_proj.bias": (g.num_kv_heads * d,),
        "self_attn.v_proj.weight": (g.num_kv_heads * d, h),
        "self_attn.v_proj.bias": (g.num_kv_heads * d,),
        "self_attn.o_proj.weight": (h, g.num_q_heads * d),
        "self_attn.o_proj.bias": (h,),
        "self_attn.sinks": (g.num_q_heads,),
        "post_attention_layernorm.weight": (h,),
        "mlp.router.weight": (e, h),
        "mlp.router.bias": (e,),
        "mlp.experts.gate_up_proj_bias": (e, 2 * g.intermediate_size),
        "mlp.experts.down_proj_bias": (e, h),
    }
    quantised: dict[str, tuple[int, ...]] = {}
    if expert_format is ExpertFormat.BF16:
        floats["mlp.experts.gate_up_proj"] = (e, h, 2 * g.intermediate_size)
        floats["mlp.experts.down_proj"] = (e, g.intermediate_size, h)
    else:
        h_blocks, i_blocks = _blocks("hidden_size", h), _blocks("intermediate_size", g.intermediate_size)
        quantised = {
            "mlp.experts.gate_up_proj_blocks": (e, 2 * g.intermediate_size, h_blocks, FP4_PER_BLOCK // 2),
            "mlp.experts.gate_up_proj_scales": (e, 2 * g.intermediate_size, h_blocks),
            "mlp.experts.down_proj_blocks": (e, h, i_blocks, FP4_PER_BLOCK // 2),
            "mlp.experts.down_proj_scales": (e, h, i_blocks),
        }
    return {
        key: CheckpointTensor(name=f"model.layers.{{layer}}.{key}", shape=shape, dtypes=dtypes)
        for shapes, dtypes in ((floats, FLOAT_DTYPES), (quantised, _BYTES))
        for key, shape in shapes.items()
    }


def _blocks(name: str, n: int) -> int:
    if n % FP4_PER_BLOCK:
        raise LayoutError(f"MXFP4 experts need {name} in whole blocks of {FP4_PER_BLOCK}, got {n}")
    return n // FP4_PER_BLOCK


def model_tensors(geometry: ModelGeometry) -> dict[str, CheckpointTensor]:
    """Tensors that no layer owns; with tied embeddings there is no `lm_head.weight`."""
    vocab = (geometry.vocab_size, geometry.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab, "model.norm.weight": vocab[1:]}
    if not geometry.tie_embeddings:
        shapes["lm_head.weight"] = vocab
    return {name: CheckpointTensor(name=name, shape=shape, dtypes=FLOAT_DTYPES) for name, shape in shapes.items()}


def checkpoint_tensors(geometry: ModelGeometry, expert_format: ExpertFormat) -> dict[str, CheckpointTensor]:
    """Every tensor of a checkpoint, by full name; optional KV scales aside.

    >>> from gk_core.model_geometry import GPT_OSS_120B
    >>> len(checkpoint_tensors(GPT_OSS_120B, ExpertFormat.MXFP4))
    687
    """
    layered = layer_tensors(geometry, expert_format).values()
    names = (
        CheckpointTensor(name=t.name.format(layer=layer), shape=t.shape, dtypes=t.dtypes)
        for layer in range(geometry.num_layers)
        for t in layered
    )
    return {**model_tensors(geometry), **{t.name: t for t in names}}
