"""Chat through the proxy in front of real servers, with a model of GPT-OSS's whole vocabulary.

vLLM renders GPT-OSS chats with OpenAI's own vocabulary, which `openai_harmony` fetches or finds in the folder that
TIKTOKEN_ENCODINGS_BASE names. Without it these tests cannot run, and say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from openai import OpenAI

from gk_adapters.random_checkpoint import SMALL, write_random_checkpoint
from tests.vllm.deployment import Deployment, running_deployment

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(3600)]

VOCABULARY = 201_088


def require_harmony() -> None:
    """Skip where OpenAI's vocabulary is neither here nor to be had."""
    from openai_harmony import (  # type: ignore[import-untyped]
        HarmonyEncodingName,
        HarmonyError,
        load_harmony_encoding,
    )

    try:
        load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except HarmonyError as error:
        pytest.skip(f"vLLM cannot render GPT-OSS chats here: {error}")


def write_word_tokenizer(directory: Path) -> None:
    """One word per token id; vLLM wants a tokenizer, chats are written and read with OpenAI's."""
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    parts: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model, **parts}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Servers of a random model."""
    require_harmony()
    checkpoint = tmp_path_factory.mktemp("chat") / "model"
    write_random_checkpoint(checkpoint, evolve(SMALL, vocab_size=VOCABULARY))
    write_word_tokenizer(checkpoint)
    with running_deployment(checkpoint, tmp_path_factory.mktemp("chat-servers")) as running:
        yield running


def ask(url: str, model: str, question: str, **more: Any) -> Any:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=6, **more
        )
        return list(answer) if more.get("stream") else answer


@pytest.mark.parametrize("words", [1, 60, 61, 62, 63, 64, 200])
def test_a_chat_is_pulled_and_answered_as_by_one_engine(chatting: Deployment, words: int) -> None:
    """Whole answers: the same token ids and log-probabilities, and one pull each."""
    question = "hello " * words
    done = chatting.metric(chatting.decode, "gk_pulls_done_total")
    asked: dict[str, Any] = {"logprobs": True, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    got = ask(chatting.proxy_url, chatting.model, question, **asked)
    wanted = ask(chatting.prefill.url, chatting.model, question, **asked)
    assert got.choices[0].model_extra["token_ids"] == wanted.choices[0].model_extra["token_ids"]
    assert len(got.choices[0].model_extra["token_ids"]) == 6
    pairs = zip(got.choices[0].logprobs.content, wanted.choices[0].logprobs.content, strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4
    assert got.usage.prompt_tokens == wanted.usage.prompt_tokens > words
    assert chatting.metric(chatting.decode, "gk_pulls_done_total") == done + 1


def test_a_streamed_chat_has_the_tokens_of_a_whole_one(chatting: Deployment) -> None:
    """Chunk by chunk."""
    more = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = ask(chatting.proxy_url, chatting.model, "hello " * 80, **more)
    chunks = ask(chatting.proxy_url, chatting.model, "hello " * 80, stream=True, **more)
    tokens = [t for c in chunks for choice in c.choices for t in choice.model_extra.get("token_ids") or []]
    assert tokens == whole.choices[0].model_extra["token_ids"]
    chatting.wait_until_idle()
