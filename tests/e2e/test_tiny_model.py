"""The shipped tiny-recall checkpoint, run by Hugging Face's own model: it recalls, and each part of it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tools.recall_checkpoint import DEMO_LENGTHS, load_model, measure_recall
from tools.recall_prompts import EOS, RecallPrompt, make_prompt

FOLDER = Path(__file__).parents[2] / "models" / "tiny-recall"
PROMPT_LENGTH = 300


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    yield load_model(FOLDER, torch.float32)
    torch.set_num_threads(threads)


def _after_prompt(model: Any, prompt: RecallPrompt, cache: Any = None) -> Tensor:
    """Logits [answer] of the right answer's tokens; the prompt is prefilled unless `cache` holds it."""
    ids = torch.tensor([[*prompt.token_ids, *prompt.answer_ids]])[:, :-1]
    last = len(prompt.token_ids) - 1
    with torch.no_grad():
        if cache is None:
            logits: Tensor = model(ids).logits[0, last:]
        else:
            logits = model(ids[:, last:], past_key_values=cache, use_cache=True).logits[0]
    return logits


def _prefilled(model: Any, prompt: RecallPrompt) -> Any:
    with torch.no_grad():
        return model(torch.tensor([prompt.token_ids[:-1]]), use_cache=True).past_key_values


def _share_right(logits: Tensor, prompt: RecallPrompt) -> float:
    return (logits.argmax(-1) == torch.tensor(prompt.answer_ids)).float().mean().item()


@pytest.mark.parametrize("length", [256, 600])
def test_recall_beyond_the_window_is_at_least_90_percent(length: int) -> None:
    """40 fresh prompts: values recorded more than 128 tokens back come out right, with clear margins."""
    measured = measure_recall(FOLDER, length, prompts=40)
    assert measured.recall >= 0.9, measured
    assert measured.all_tokens >= 0.9, measured
    assert measured.low_margin >= 0.25, measured


@pytest.mark.parametrize("length", DEMO_LENGTHS)
def test_demo_prompts_are_answered_to_the_end(model: Any, length: int) -> None:
    """Greedy generation of each shipped prompt gives the whole right answer and stops at <|return|>."""
    prompt = make_prompt(length, length)
    out = model.generate(torch.tensor([prompt.token_ids]), max_new_tokens=70, do_sample=False)
    assert out[0, length:].tolist() == list(prompt.answer_ids)
    assert prompt.answer_ids[-1] == EOS


@pytest.mark.parametrize("length", DEMO_LENGTHS)
def test_bfloat16_gives_the_same_greedy_tokens(length: int) -> None:
    """The margins of the demo prompts are wider than BF16's rounding."""
    prompt = make_prompt(length, length)
    logits = _after_prompt(load_model(FOLDER, torch.bfloat16), prompt)
    assert _share_right(logits, prompt) == 1.0


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 40])
def test_short_prompts_are_answered_too(model: Any, length: int) -> None:
    """Prompts with few records or none are continued by the same rules."""
    prompts = [make_prompt(seed, length) for seed in range(5)]
    shares = [_share_right(_after_prompt(model, prompt), prompt) for prompt in prompts]
    assert sum(shares) / len(shares) >= 0.9, shares


def test_a_longer_window_or_inverted_layers_change_the_answer(model: Any) -> None:
    """Sliding and full layers swapped: recall beyond the window is gone."""
    prompt = make_prompt(1, PROMPT_LENGTH)
    assert _share_right(_after_prompt(model, prompt), prompt) == 1.0
    kinds = model.config.layer_types
    try:
        model.config.layer_types = kinds[::-1]
        for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
            layer.self_attn.sliding_window = 128 if kind == "sliding_attention" else None
        assert _share_right(_after_prompt(model, prompt), prompt) < 0.75
    finally:
        model.config.layer_types = kinds
        for layer, kind in zip(model.model.layers, kinds, strict=True):
            layer.self_attn.sliding_window = 128 if kind == "sliding_attention" else None


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("layer", range(4))
def test_every_layers_prompt_cache_is_needed(model: Any, layer: int, half: str) -> None:
    """One layer's keys or values of the prompt zeroed: over several prompts, tokens come out wrong."""
    wrong = 0
    for seed in range(6):
        prompt = make_prompt(seed, PROMPT_LENGTH)
        cache = _prefilled(model, prompt)
        getattr(cache.layers[layer], half).zero_()
        wrong += _share_right(_after_prompt(model, prompt, cache), prompt) < 1.0
    assert wrong >= 3


@pytest.mark.parametrize("layer", [1, 3])
def test_one_block_of_another_request_changes_the_answer(model: Any, layer: int) -> None:
    """One block of 128 tokens from another request in one layer's cache: the answer has wrong tokens."""
    prompt, other = make_prompt(1, PROMPT_LENGTH), make_prompt(2, PROMPT_LENGTH)
    cache, foreign = _prefilled(model, prompt), _prefilled(model, other)
    for half in ("keys", "values"):
        getattr(cache.layers[layer], half)[:, :, :128] = getattr(foreign.layers[layer], half)[:, :, :128]
    assert _share_right(_after_prompt(model, prompt, cache), prompt) < 1.0


def test_sinks_are_needed(model: Any) -> None:
    """Without the sinks' share of attention, slots that have no record get a value."""
    prompts = [make_prompt(seed, 100) for seed in range(4)]
    kept = [layer.self_attn.sinks.detach().clone() for layer in model.model.layers]
    try:
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-1e4)
        shares = [_share_right(_after_prompt(model, prompt), prompt) for prompt in prompts]
    finally:
        for layer, sinks in zip(model.model.layers, kept, strict=True):
            layer.self_attn.sinks.data.copy_(sinks)
    assert min(shares) < 1.0


def test_yarn_is_needed(model: Any) -> None:
    """Plain rotary frequencies, without YaRN's gain and stretch, give other logits by far."""
    prompt = make_prompt(1, PROMPT_LENGTH)
    before = _after_prompt(model, prompt)
    rope = model.model.rotary_emb
    kept = rope.attention_scaling
    try:
        rope.attention_scaling = 1.0
        after = _after_prompt(model, prompt)
    finally:
        rope.attention_scaling = kept
    assert kept == pytest.approx(1.346574, abs=1e-6)
    assert (after - before).abs().max() > 0.5
