"""Router and experts in torch: activation, clamps, biases, shares and ranks, with hand-worked numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.torch_moe import Experts, experts_forward, route, swiglu

ALPHA, LIMIT = 1.702, 7.0


@pytest.mark.parametrize(
    ("gate", "up", "wanted"),
    [
        (10.0, 10.0, 55.9996),
        # No lower clamp on the gate: a symmetric one would give -4.687e-5.
        (-10.0, 0.0, -4.058e-7),
        (7.0, -10.0, -41.9997),
        (1.0, 1.0, 1.69159),
        (1.0, -1.0, 0.0),
    ],
)
def test_the_activation_clamps_the_gate_from_above_only_and_adds_one_to_up(
    gate: float, up: float, wanted: float
) -> None:
    """The +1 is folded into the up bias, so the function is fed up + 1."""
    got = swiglu(torch.tensor([[gate, up + 1.0]]), ALPHA, LIMIT).item()
    assert got == pytest.approx(wanted, rel=2e-4, abs=1e-12)


def make_experts(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor, down_bias: torch.Tensor,
    *, first: int = 0, num_experts: int | None = None, joined: bool = False,
) -> Experts:  # fmt: skip
    """Experts from [X, H, I] gate and up, [X, I, H] down, biases as a checkpoint has them: up without its +1."""
    pair = torch.cat((gate, up), dim=2) if joined else torch.stack((gate, up), dim=1)
    bias = gate_up_bias.clone()
    bias[:, bias.shape[1] // 2 :] += 1.0
    return Experts(
        gate_up=pair.unbind(0),
        gate_up_scale=None,
        gate_up_bias=bias,
        down=down.unbind(0),
        down_scale=None,
        down_bias=down_bias,
        first=first,
        num_experts=num_experts or len(gate),
    )


def test_the_down_bias_is_weighted_by_the_routing_share() -> None:
    """Shares .25 and .75, biases 4 and 8, zero matrices: 7. Unweighted 12."""
    zeros = torch.zeros(2, 3, 2)
    experts = make_experts(
        zeros, zeros, torch.zeros(2, 2, 3), torch.zeros(2, 4), torch.tensor([[4.0] * 3, [8.0] * 3])
    )  # fmt: skip
    ids, shares = torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]])
    out = experts_forward(torch.randn(1, 3), ids, shares, experts, alpha=ALPHA, limit=LIMIT)
    assert out.tolist() == [[7.0, 7.0, 7.0]]


def test_ranks_that_share_the_experts_add_each_down_bias_once() -> None:
    """Two ranks, one expert each: their sums make 7, not 14."""
    zeros = torch.zeros(1, 3, 2)
    ids, shares, x = torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]]), torch.randn(1, 3)
    parts = [
        experts_forward(
            x, ids, shares,
            make_experts(zeros, zeros, torch.zeros(1, 2, 3), torch.zeros(1, 4), torch.tensor([[bias] * 3]),
                         first=first, num_experts=2),
            alpha=ALPHA, limit=LIMIT,
        )
        for first, bias in ((0, 4.0), (1, 8.0))
    ]  # fmt: skip
    assert [p.tolist() for p in parts] == [[[1.0] * 3], [[6.0] * 3]]
    assert sum(parts).tolist() == [[7.0, 7.0, 7.0]]  # type: ignore[union-attr]


def test_a_rank_that_no_token_was_routed_to_gives_zeros() -> None:
    """Not an error, and nothing of its experts."""
    experts = make_experts(
        torch.randn(1, 3, 2), torch.randn(1, 3, 2), torch.randn(1, 2, 3), torch.randn(1, 4), torch.randn(1, 3), first=5,
        num_experts=9,
    )  # fmt: skip
    out = experts_forward(
        torch.randn(2, 3), torch.tensor([[0, 4], [6, 8]]), torch.rand(2, 2), experts, alpha=1, limit=7
    )
    assert out.tolist() == [[0.0] * 3] * 2


def test_routing_is_softmax_over_the_winners_only() -> None:
    """Logits 0, ln 3, -9, 0 with a tie-free top 2: shares .25 and .75 whatever the others are."""
    bias = torch.tensor([0.0, 1.0986123, -9.0, -0.5])
    ids, shares = route(torch.zeros(1, 2), torch.zeros(2, 4), bias, 2)
    assert ids.tolist() == [[1, 0]]
    assert torch.allclose(shares, torch.tensor([[0.75, 0.25]]))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9), num_experts=st.integers(2, 7), top_k=st.integers(1, 2), seed=st.integers(0, 999),
    cut=st.integers(1, 6), joined=st.booleans(),
)  # fmt: skip
def test_routed_experts_equal_the_dense_sum_and_ranks_add_up(
    tokens: int, num_experts: int, top_k: int, seed: int, cut: int, joined: bool
) -> None:
    """Every token through its experts, one by one in float64; then the same dealt over two ranks."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inter = 5, 3

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    parts = (
        random(num_experts, hidden, inter) * 3, random(num_experts, hidden, inter) * 3,
        random(num_experts, inter, hidden), random(num_experts, 2 * inter), random(num_experts, hidden),
    )  # fmt: skip
    x = random(tokens, hidden)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)])
    shares = torch.softmax(random(tokens, top_k), dim=-1)
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    gate_w, up_w, down_w, bias, down_bias = (p.double() for p in parts)
    for t in range(tokens):
        for e, share in zip(ids[t].tolist(), shares[t].double(), strict=True):
            gate = (x[t].double() @ gate_w[e] + bias[e, :inter]).clamp(max=LIMIT)
            up = (x[t].double() @ up_w[e] + bias[e, inter:]).clamp(-LIMIT, LIMIT)
            y = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
            wanted[t] += share * (y @ down_w[e] + down_bias[e])
    got = experts_forward(x, ids, shares, make_experts(*parts, joined=joined), alpha=ALPHA, limit=LIMIT)
    assert torch.allclose(got.double(), wanted, atol=1e-4, rtol=1e-4)
    cut = min(cut, num_experts - 1)
    ranks = [
        make_experts(*(p[low:high] for p in parts), first=low, num_experts=num_experts)
        for low, high in ((0, cut), (cut, num_experts))
    ]
    summed = sum(experts_forward(x, ids, shares, rank, alpha=ALPHA, limit=LIMIT).double() for rank in ranks)
    assert torch.allclose(torch.as_tensor(summed), wanted, atol=1e-4, rtol=1e-4)
