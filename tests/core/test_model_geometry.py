"""Model geometry, parity and YaRN."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from gk_core.errors import LayoutError, UnsupportedError
from gk_core.model_geometry import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    AttentionKind,
    LayerParity,
    YarnRope,
    alternating_kinds,
    buffer_of_layer,
    kind_of_layer,
    layers_of_buffer,
    require_gk_geometry,
)

from .layout_builders import make_geometry

ROPE = YarnRope(theta=150_000.0, factor=32.0, original_max_position=4096)


def test_gpt_oss_120b_has_its_published_numbers() -> None:
    """36 layers, 128 experts top-4, 64 query and 8 KV heads of 64."""
    g = GPT_OSS_120B
    assert (g.num_layers, g.hidden_size, g.intermediate_size, g.vocab_size) == (36, 2880, 2880, 201_088)
    assert (g.num_q_heads, g.num_kv_heads, g.head_size, g.queries_per_kv_head) == (64, 8, 64, 8)
    assert (g.num_experts, g.experts_per_token, g.sliding_window, g.max_position) == (128, 4, 128, 131_072)
    assert (g.swiglu_alpha, g.swiglu_limit, g.rms_norm_eps) == (1.702, 7.0, 1e-5)
    assert (g.rope.theta, g.rope.factor, g.rope.original_max_position) == (150_000.0, 32.0, 4096)
    assert g.num_group_buffers == 18


def test_gpt_oss_20b_differs_in_layers_and_experts_only() -> None:
    """24 layers, 32 experts, 12 buffers, same head shape."""
    g = GPT_OSS_20B
    assert (g.num_layers, g.num_experts, g.num_group_buffers) == (24, 32, 12)
    same = attrs.evolve(GPT_OSS_120B, num_layers=24, num_experts=32, attention_kinds=alternating_kinds(24))
    assert g == same


def test_even_layers_slide_and_odd_layers_are_full() -> None:
    """Numbering starts at 0; layer 0 slides."""
    kinds = [kind_of_layer(i) for i in range(4)]
    assert kinds == [AttentionKind.SLIDING, AttentionKind.FULL, AttentionKind.SLIDING, AttentionKind.FULL]
    assert LayerParity.EVEN.kind is AttentionKind.SLIDING
    assert LayerParity.ODD.kind is AttentionKind.FULL
    assert alternating_kinds(3) == (AttentionKind.SLIDING, AttentionKind.FULL, AttentionKind.SLIDING)


@pytest.mark.parametrize(("layer", "buffer"), [(0, 0), (1, 0), (2, 1), (3, 1), (34, 17), (35, 17)])
def test_layers_2j_and_2j_plus_1_share_buffer_j(layer: int, buffer: int) -> None:
    """The pair (2j, 2j+1) is one allocation."""
    assert buffer_of_layer(layer) == buffer
    assert layer in layers_of_buffer(buffer, 36)


def test_the_last_buffer_of_an_odd_model_holds_one_layer() -> None:
    """Five layers: the third buffer holds layer 4 alone."""
    assert layers_of_buffer(2, 5) == (4,)
    assert make_geometry(5).num_group_buffers == 3


def test_layers_and_buffers_outside_the_model_are_refused() -> None:
    """Just inside passes, just outside does not."""
    assert layers_of_buffer(17, 36) == (34, 35)
    for buffer in (18, -1):
        with pytest.raises(LayoutError, match=f"buffer {buffer} is outside the model's 18 group buffers"):
            layers_of_buffer(buffer, 36)
    with pytest.raises(LayoutError, match="layer_id must be >= 0, got -1"):
        buffer_of_layer(-1)


def test_a_model_that_alternates_is_served_even_with_one_layer() -> None:
    """A one-layer slice is a sliding layer."""
    require_gk_geometry(GPT_OSS_120B)
    require_gk_geometry(make_geometry(1))


def test_inverted_parity_is_refused_by_layer() -> None:
    """Full attention on layer 0 is another kernel's model."""
    inverted = tuple(reversed(alternating_kinds(4)))
    with pytest.raises(UnsupportedError, match="layer 0 is full_attention, must be sliding_attention"):
        require_gk_geometry(attrs.evolve(make_geometry(4), attention_kinds=inverted))


def test_irregular_parity_is_refused_at_the_first_wrong_layer() -> None:
    """Two sliding layers in a row."""
    kinds = (AttentionKind.SLIDING, AttentionKind.FULL, AttentionKind.SLIDING, AttentionKind.SLIDING)
    with pytest.raises(UnsupportedError, match="layer 3 is sliding_attention, must be full_attention"):
        require_gk_geometry(attrs.evolve(make_geometry(4), attention_kinds=kinds))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_kinds": alternating_kinds(35)}, "one entry per layer: got 35 for 36 layers"),
        ({"num_q_heads": 60}, "num_q_heads must be a multiple of num_kv_heads, got 60 and 8"),
        ({"head_size": 45}, "head_size must be even for rotary embedding, got 45"),
        ({"experts_per_token": 129}, "experts_per_token must be <= num_experts, got 129 of 128"),
        ({"num_layers": 0}, "num_layers must be >= 1, got 0"),
        ({"sliding_window": 0}, "sliding_window must be >= 1, got 0"),
        ({"vocab_size": -1}, "vocab_size must be >= 1, got -1"),
    ],
)
def test_contradictory_geometry_is_refused(change: dict[str, Any], message: str) -> None:
    """Each refusal names the field and what was got."""
    with pytest.raises(LayoutError, match=message):
        attrs.evolve(GPT_OSS_120B, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"theta": 1.0}, "theta must be > 1, got 1.0"),
        ({"theta": math.nan}, "theta must be > 1, got nan"),
        ({"factor": 0.5}, "factor must be >= 1, got 0.5"),
        ({"original_max_position": 0}, "original_max_position must be >= 1, got 0"),
        ({"beta_fast": 1.0}, "beta_fast must exceed beta_slow > 0, got 1.0 and 1.0"),
        ({"beta_slow": 0.0}, "beta_fast must exceed beta_slow > 0, got 32.0 and 0.0"),
    ],
)
def test_impossible_rope_is_refused(change: dict[str, Any], message: str) -> None:
    """Each refusal names the field and what was got."""
    with pytest.raises(LayoutError, match=message):
        attrs.evolve(ROPE, **change)


def test_yarn_ramp_ends_are_not_rounded_for_gpt_oss() -> None:
    """8.0928 and 17.3980 for head size 64; rounding would give 8 and 18."""
    low, high = ROPE.ramp_ends(64)
    assert (round(low, 4), round(high, 4)) == (8.0928, 17.3980)
    assert attrs.evolve(ROPE, truncate=True).ramp_ends(64) == (8, 18)


def test_yarn_concentration_is_a_tenth_of_the_log_of_the_factor_plus_one() -> None:
    """1.346574 for factor 32, exactly 1 without extension."""
    assert round(ROPE.concentration, 6) == 1.346574
    assert attrs.evolve(ROPE, factor=1.0).concentration == 1.0


def test_yarn_frequencies_are_plain_below_the_ramp_and_divided_above_it() -> None:
    """Pair 8 is below 8.09, pair 18 is above 17.40, pair 12 is between: 1 - (12 - low) / (high - low) of it kept."""
    freqs = ROPE.inverse_frequencies(64)
    plain = [150_000.0 ** (-i / 32) for i in range(32)]
    assert len(freqs) == 32
    assert freqs[:9] == pytest.approx(plain[:9], rel=1e-12)
    assert freqs[18:] == pytest.approx([f / 32 for f in plain[18:]], rel=1e-12)
    low, high = 8.092779, 17.398016
    keep = 1 - (12 - low) / (high - low)
    assert freqs[12] == pytest.approx(plain[12] * keep + plain[12] / 32 * (1 - keep), rel=1e-5)
    assert freqs[12] == pytest.approx(0.006795, rel=1e-4)


def test_rope_without_extension_is_plain() -> None:
    """Factor 1 leaves every frequency alone."""
    freqs = attrs.evolve(ROPE, factor=1.0).inverse_frequencies(10)
    assert freqs == pytest.approx([150_000.0 ** (-i / 5) for i in range(5)])


def test_a_ramp_of_no_width_is_a_step() -> None:
    """With both ends clamped to the same dimension the frequencies stay finite."""
    rope = YarnRope(theta=2.0, factor=4.0, original_max_position=1_000_000)
    low, high = rope.ramp_ends(4)
    assert low >= high
    assert all(math.isfinite(f) for f in rope.inverse_frequencies(4))
