"""The group-buffer attention backend: byte order of writes, window, sinks, and bad settings."""

from __future__ import annotations

import pytest
import torch

from gk_adapters.vllm.attention import gather_tokens, write_tokens
from gk_adapters.vllm.settings import GkSettings, MissingKVPolicy, parse_settings
from gk_core.errors import RequestError

pytestmark = pytest.mark.vllm


def test_packed_k_puts_two_tokens_side_by_side() -> None:
    """Block of 4 tokens, 2 dims: token 2 dim 1 is byte 6, token 1 dim 0 is byte 1."""
    half = torch.zeros(3, 1, 4, 2, dtype=torch.uint8)
    tokens = torch.arange(1, 9, dtype=torch.uint8).view(4, 1, 2)
    write_tokens(half, tokens, torch.tensor([4, 5, 6, 7]), packed=True)
    assert half[1].flatten().tolist() == [1, 3, 2, 4, 5, 7, 6, 8]
    assert half[0].abs().sum() == half[2].abs().sum() == 0


def test_a_packed_write_keeps_the_other_lane() -> None:
    """Writing token 1 of a pair leaves token 0 as it was."""
    half = torch.full((1, 1, 2, 2), 9, dtype=torch.uint8)
    write_tokens(half, torch.tensor([[[5, 6]]], dtype=torch.uint8), torch.tensor([1]), packed=True)
    assert half.flatten().tolist() == [9, 5, 9, 6]


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_written_is_what_is_gathered(packed: bool) -> None:
    """Tokens come back in order from scattered blocks, in either order of bytes."""
    half = torch.zeros(7, 3, 4, 2, dtype=torch.uint8)
    tokens = torch.randint(0, 255, (10, 3, 2), dtype=torch.uint8)
    blocks = torch.tensor([5, 2, 6])
    slots = (blocks[:, None] * 4 + torch.arange(4)).flatten()[:10]
    write_tokens(half, tokens, slots, packed=packed)
    assert torch.equal(gather_tokens(half, blocks, 10, packed=packed), tokens.transpose(0, 1))


def test_negative_slots_write_nothing() -> None:
    """Padding changes no block."""
    half = torch.zeros(2, 1, 4, 2)
    write_tokens(half, torch.ones(2, 1, 2), torch.tensor([-1, 5]), packed=False)
    assert half.sum() == 2
    assert half[1, 0, 1].tolist() == [1, 1]


def test_settings_are_read_from_neuron_config() -> None:
    """Defaults are a stock engine; each key is read."""
    assert parse_settings({}) == GkSettings()
    assert parse_settings({"neuron_config": {"gk_decode": True, "fp8_packed_kv": True, "gk_missing_kv": "refuse"}}) == (
        GkSettings(gk_decode=True, fp8_packed_kv=True, missing_kv=MissingKVPolicy.REFUSE)
    )
    assert parse_settings({"neuron_config": {"ep_degree": 128}}) == GkSettings()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"neuron_config": 3}, "must be an object"),
        ({"neuron_config": {"gk_decode": "yes"}}, "gk_decode must be true or false"),
        ({"neuron_config": {"gk_decod": True}}, "gk_decod"),
        ({"neuron_config": {"gk_missing_kv": "maybe"}}, "maybe"),
    ],
)
def test_wrong_settings_are_refused_by_key(config: object, said: str) -> None:
    """The message names the key or the value."""
    with pytest.raises(RequestError, match=said):
        parse_settings(config)
