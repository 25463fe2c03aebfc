"""Model geometry: the numbers of a GPT-OSS model that decide where its KV cache and weights live.

Dims: L layers, H hidden, E experts, I intermediate, d head size.

Even layers slide, odd layers are full; layers 2j and 2j+1 share group buffer j. That parity is what the giga kernel
bakes in, so it has one home: here.
"""

from __future__ import annotations

import math
from enum import Enum

from attrs import frozen

from gk_core.errors import LayoutError, UnsupportedError

__all__ = [
    "GPT_OSS_20B",
    "GPT_OSS_120B",
    "AttentionKind",
    "LayerParity",
    "ModelGeometry",
    "YarnRope",
    "alternating_kinds",
    "buffer_of_layer",
    "kind_of_layer",
    "layers_of_buffer",
    "require_gk_geometry",
]


class AttentionKind(Enum):
    """What a layer attends to: the last `sliding_window` tokens, or all of them."""

    SLIDING = "sliding_attention"
    FULL = "full_attention"


class LayerParity(Enum):
    """layer_id % 2, the only thing by which the giga kernel picks table, positions and update index."""

    EVEN = 0
    ODD = 1

    @property
    def kind(self) -> AttentionKind:
        """The attention kind that the kernel gives this parity."""
        return AttentionKind.SLIDING if self is LayerParity.EVEN else AttentionKind.FULL


def kind_of_layer(layer_id: int) -> AttentionKind:
    """Attention kind that the giga kernel gives a layer.

    >>> kind_of_layer(0), kind_of_layer(35)
    (<AttentionKind.SLIDING: 'sliding_attention'>, <AttentionKind.FULL: 'full_attention'>)
    """
    return LayerParity(layer_id % 2).kind


def buffer_of_layer(layer_id: int) -> int:
    """Group buffer that holds a layer's KV: layer_id // 2.

    >>> [buffer_of_layer(i) for i in (0, 1, 2, 35)]
    [0, 0, 1, 17]

    Raises:
        LayoutError: the layer id is negative.
    """
    if layer_id < 0:
        raise LayoutError(f"layer_id must be >= 0, got {layer_id}")
    return layer_id // 2


def layers_of_buffer(buffer_index: int, num_layers: int) -> tuple[int, ...]:
    """Layers that share one group buffer, sliding first.

    >>> layers_of_buffer(17, 36)
    (34, 35)

    Raises:
        LayoutError: no layer uses that buffer.
    """
    layers = tuple(i for i in (2 * buffer_index, 2 * buffer_index + 1) if 0 <= i < num_layers)
    if not layers:
        limit = (num_layers + 1) // 2
        raise LayoutError(f"buffer {buffer_index} is outside the model's {limit} group buffers")
    return layers


def alternating_kinds(num_layers: int) -> tuple[AttentionKind, ...]:
    """GPT-OSS's own layer types: even sliding, odd full."""
    return tuple(kind_of_layer(i) for i in range(num_layers))


@frozen(kw_only=True)
class YarnRope:
    """Rotary embedding as GPT-OSS has it: YaRN without truncated ramp ends.

    Attributes:
        theta: base of the frequencies.
        factor: context extension factor; 1.0 means plain RoPE.
        original_max_position: tokens, context before extension.
        beta_fast, beta_slow: rotations at which the ramp starts and ends.
        truncate: whether ramp ends are rounded outwards to whole dimensions (false for GPT-OSS).

    Source: openai/gpt-oss gpt_oss/torch/model.py, RotaryEmbedding.
    """

    theta: float
    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False

    def __attrs_post_init__(self) -> None:
        if not self.theta > 1.0:
            raise LayoutError(f"rope theta must be > 1, got {self.theta}")
        if not self.factor >= 1.0:
            raise LayoutError(f"rope factor must be >= 1, got {self.factor}")
        if self.original_max_position < 1:
            raise LayoutError(f"original_max_position must be >= 1, got {self.original_max_position}")
        if not self.beta_fast > self.beta_slow > 0:
            raise LayoutError(f"beta_fast must exceed beta_slow > 0, got {self.beta_fast} and {self.beta_slow}")

    @property
    def concentration(self) -> float:
        """Factor on cos and sin: 0.1 ln(factor) + 1.

        >>> round(YarnRope(theta=150000, factor=32, original_max_position=4096).concentration, 6)
        1.346574
        """
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    def ramp_ends(self, head_size: int) -> tuple[float, float]:
        """Dimensions (of head_size / 2) between which frequencies go from unscaled to interpolated.

        >>> low, high = YarnRope(theta=150000, factor=32, original_max_position=4096).ramp_ends(64)
        >>> round(low, 4), round(high, 4)
        (8.0928, 17.398)
        """
        half = head_size / 2

        def dim_of(rotations: float) -> float:
            wavelengths = self.original_max_position / (rotations * 2 * math.pi)
            return half * math.log(wavelengths) / math.log(self.theta)

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0.0), min(high, head_size - 1.0)

    def inverse_frequencies(self, head_size: int) -> tuple[float, ...]:
        """Radians per token for each of the head_size / 2 rotated pairs."""
        half = head_size // 2
        plain = [self.theta ** (-i / half) for i in range(half)]
        if self.factor == 1.0:
            return tuple(plain)
        low, high = self.ramp_ends(head_size)
        width = high - low if high > low else 0.001
        keep = [1.0 - min(max((i - low) / width, 0.0), 1.0) for i in range(half)]
        return tuple(f * k + f / self.factor * (1.0 - k) for f, k in zip(plain, keep, strict=True))


@frozen(kw_only=True)
class ModelGeometry:
    """The shape of one GPT-OSS model.

    Attributes:
        num_layers: decoder layers, L.
        hidden_size, intermediate_size: H and I, elements.
        num_q_heads, num_kv_heads, head_size: attention shape; head_size in elements.
        num_experts, experts_per_token: E and top-k of the router.
        sliding_window: tokens that a sliding layer attends to, itself included.
        vocab_size: tokens.
        max_position: tokens, longest context the model claims.
        rope: rotary embedding.
        rms_norm_eps: added to the mean square.
        swiglu_alpha, swiglu_limit: the experts' activation and its clamps.
        attention_kinds: one per layer.
        tie_embeddings: lm_head shares the embedding matrix.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    num_experts: int
    experts_per_token: int
    sliding_window: int
    vocab_size: int
    max_position: int
    rope: YarnRope
    attention_kinds: tuple[AttentionKind, ...]
    rms_norm_eps: float = 1e-5
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    tie_embeddings: bool = False

    def __attrs_post_init__(self) -> None:
        for name in (
            "num_layers", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads", "head_size",
            "num_experts", "experts_per_token", "sliding_window", "vocab_size", "max_position",
        ):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                raise LayoutError(f"{name} must be >= 1, got {value}")
        if len(self.attention_kinds) != self.num_layers:
            raise LayoutError(
                f"attention_kinds must have one entry per layer: got {len(self.attention_kinds)} "
                f"for {self.num_layers} layers"
            )
        if self.num_q_heads % self.num_kv_heads:
            raise LayoutError(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise LayoutError(f"head_size must be even for rotary embedding, got {self.head_size}")
        if self.experts_per_token > self.num_experts:
            raise LayoutError(
                f"experts_per_token must be <= num_experts, got {self.experts_per_token} of {self.num_experts}"
            )

    @property
    def num_group_buffers(self) -> int:
        """Shared KV buffers: one per pair of layers."""
        return (self.num_layers + 1) // 2

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that read one KV head."""
        return self.num_q_heads // self.num_kv_heads


def require_gk_geometry(geometry: ModelGeometry) -> None:
    """Refuse a model whose layers do not alternate as the giga kernel assumes.

    Raises:
        UnsupportedError: a layer's attention kind differs from its parity's.
    """
    for layer_id, kind in enumerate(geometry.attention_kinds):
        wanted = kind_of_layer(layer_id)
        if kind is not wanted:
            raise UnsupportedError(
                f"the giga kernel needs even layers sliding and odd layers full: layer {layer_id} is "
                f"{kind.value}, must be {wanted.value}; serve this model with a native per-layer engine"
            )


_GPT_OSS_ROPE = YarnRope(theta=150_000.0, factor=32.0, original_max_position=4096)

GPT_OSS_120B = ModelGeometry(
    num_layers=36, hidden_size=2880, intermediate_size=2880, num_q_heads=64, num_kv_heads=8, head_size=64,
    num_experts=128, experts_per_token=4, sliding_window=128, vocab_size=201_088, max_position=131_072,
    rope=_GPT_OSS_ROPE, attention_kinds=alternating_kinds(36),
)  # fmt: skip
GPT_OSS_20B = ModelGeometry(
    num_layers=24, hidden_size=2880, intermediate_size=2880, num_q_heads=64, num_kv_heads=8, head_size=64,
    num_experts=32, experts_per_token=4, sliding_window=128, vocab_size=201_088, max_position=131_072,
    rope=_GPT_OSS_ROPE, attention_kinds=alternating_kinds(24),
)  # fmt: skip
