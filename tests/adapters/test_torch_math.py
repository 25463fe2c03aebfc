"""Layer arithmetic in torch: sinks, rotary embedding, norm and projections, with hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.torch_math import MASKED, add_product, apply_rope, attend, project, rms_norm, rope_factors, rope_tables
from gk_core.model_geometry import GPT_OSS_120B, YarnRope


def test_a_sink_is_a_raw_logit() -> None:
    """q.k = 8 with d = 64 scores 1; a sink of 1 leaves half the weight. Scaled too, it would leave 0.706."""
    one = torch.ones(1, 1, 1, 64)
    out = attend(one / 8, one, one, mask=torch.zeros(1, 1, 1, 1), sink=torch.tensor(1.0), softmax_scale=64**-0.5)
    assert torch.allclose(out, torch.full_like(out, 0.5), atol=1e-6)
    wrong = math.exp(1) / (math.exp(1) + math.exp(1 / 8))
    assert round(wrong, 3) == 0.706


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), queries=st.integers(1, 5), keys=st.integers(1, 40),
    seed=st.integers(0, 9999), dead=st.integers(0, 39),
)  # fmt: skip
def test_attention_is_softmax_over_keys_and_sink_with_the_sink_dropped(
    batch: int, heads: int, queries: int, keys: int, seed: int, dead: int
) -> None:
    """Against the definition in float64, sinks per head, some keys masked."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, 8, generator=generator) for n in (queries, keys, keys))
    sink = 3 * torch.randn(1, heads, queries, 1, generator=generator)
    mask = torch.zeros(batch, 1, 1, keys)
    mask[..., : min(dead, keys - 1)] = MASKED
    got = attend(q, k, v, mask=mask, sink=sink, softmax_scale=0.3)
    scores = (q.double() @ k.double().transpose(-1, -2)) * 0.3 + mask.double()
    joined = torch.cat((scores, sink.double().expand(batch, -1, -1, 1)), dim=-1)
    wanted = torch.softmax(joined, dim=-1)[..., :-1] @ v.double()
    assert torch.allclose(got.double(), wanted, atol=2e-6)


def test_a_masked_key_has_no_weight_at_all_even_in_whole_blocks() -> None:
    """1000 masked keys with huge values before one that counts."""
    k = torch.cat((torch.full((1, 1, 1000, 8), 1e4), torch.zeros(1, 1, 1, 8)), dim=2)
    v = torch.cat((torch.full((1, 1, 1000, 8), 1e30), torch.ones(1, 1, 1, 8)), dim=2)
    mask = torch.full((1, 1, 1, 1001), MASKED)
    mask[..., -1] = 0
    for dtype in (torch.float32, torch.bfloat16):
        out = attend(
            torch.ones(1, 1, 1, 8, dtype=dtype), k.to(dtype), v.to(dtype), mask=mask.to(dtype),
            sink=torch.tensor(-50.0), softmax_scale=1.0,
        )  # fmt: skip
        assert out.flatten().tolist() == [1.0] * 8


def test_rope_tables_are_cos_and_sin_times_the_concentration() -> None:
    """Position 0: 1.346574 and 0. Position 3, fastest pair: cos 3 and sin 3 times that."""
    cos, sin = rope_tables(GPT_OSS_120B.rope, 64, torch.tensor([0, 3]), torch.float32)
    assert cos.shape == sin.shape == (32, 2, 1)
    assert torch.allclose(cos[:, 0, 0], torch.full((32,), 1.346574))
    assert sin[:, 0, 0].abs().max() == 0
    assert abs(cos[0, 1, 0].item() - 1.3465736 * math.cos(3)) < 1e-6
    assert abs(sin[0, 1, 0].item() - 1.3465736 * math.sin(3)) < 1e-6


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
@pytest.mark.parametrize("truncate", [True, False])
def test_float32_frequencies_are_the_cores_to_rounding(factor: float, truncate: bool) -> None:
    """The core has the formula; torch evaluates it in float32 as every published implementation does."""
    rope = YarnRope(theta=150000.0, factor=factor, original_max_position=4096, truncate=truncate)
    _, sin = rope_tables(rope, 64, torch.tensor([1e-3]), torch.float32)
    wanted = torch.tensor(rope.inverse_frequencies(64)) * 1e-3
    got = torch.asin(sin[:, 0, 0].double() / rope.concentration)
    assert torch.allclose(got, wanted.double(), rtol=1e-5, atol=0)


def test_rotation_is_half_split() -> None:
    """(1, 2, 3, 4) by a quarter turn and by nothing: first * cos - second * sin, second * cos + first * sin."""
    cos, sin = torch.tensor([[0.0], [1.0]])[..., None], torch.tensor([[1.0], [0.0]])[..., None]
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert apply_rope(x, rope_factors(cos, sin)).flatten().tolist() == [-3.0, 2.0, 1.0, 4.0]


def test_norm_divides_by_the_root_mean_square_and_then_weighs() -> None:
    """(3, 4, 0, 0) has mean square 6.25; eps 2.75 makes the root 3."""
    got = rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.tensor([1.0, 2.0, 5.0, 7.0]), 2.75)
    assert torch.allclose(got, torch.tensor([[1.0, 8 / 3, 0.0, 0.0]]))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("in_out_memory", [True, False])
def test_projections_agree_for_both_memory_orders(tokens: int, in_out_memory: bool) -> None:
    """x @ W + b; one token takes the matrix-vector way when weights lie [out, in]."""
    x, w, b = torch.randn(tokens, 5), torch.randn(5, 7), torch.randn(7)
    weight = w if in_out_memory else w.t().contiguous().t()
    assert torch.allclose(project(x, weight, b), x @ w + b, atol=1e-5)
    target = torch.randn(tokens, 14)
    before = target.clone()
    add_product(target[:, 3:10], x, weight)
    assert torch.allclose(target[:, 3:10], before[:, 3:10] + x @ w, atol=1e-5)
    assert torch.equal(target[:, :3], before[:, :3])
    assert torch.equal(target[:, 10:], before[:, 10:])
