"""The openai Python client against the proxy in front of real servers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.vllm.deployment import Deployment

pytestmark = [pytest.mark.vllm, pytest.mark.nixl]


def test_a_completion_is_the_same_streamed_and_whole(deployment: Deployment) -> None:
    """Text in, text out, chunk by chunk or at once."""
    client = OpenAI(base_url=f"{deployment.proxy_url}/v1", api_key="none")
    prompt = [random.Random(1).randrange(3, 500) for _ in range(260)]
    whole = client.completions.create(model=deployment.model, prompt=prompt, max_tokens=12, temperature=0)
    chunks = client.completions.create(model=deployment.model, prompt=prompt, max_tokens=12, temperature=0, stream=True)
    assert whole.choices[0].text
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


def test_32_clients_at_once_some_of_whom_leave(deployment: Deployment) -> None:
    """Every answer that is waited for is right, those that leave cost nobody anything, no block stays."""
    rng = random.Random(7)
    lengths = [rng.choice([2, 60, 127, 128, 129, 255, 256, 383, 500]) for _ in range(32)]
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in lengths]
    leaving = set(rng.sample(range(32), 8))

    async def ask(client: AsyncOpenAI, index: int) -> list[int] | None:
        request: dict[str, Any] = {
            "model": deployment.model, "prompt": prompts[index], "temperature": 0, "stream": True,
            "max_tokens": 300 if index in leaving else 8,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
        }  # fmt: skip
        tokens: list[int] = []
        stream = await client.completions.create(**request)
        async for chunk in stream:
            tokens += chunk.choices[0].model_extra["token_ids"] or []
            if index in leaving and len(tokens) >= 2:
                await stream.close()
                return None
        return tokens

    async def everybody() -> list[list[int] | None]:
        async with AsyncOpenAI(
            base_url=f"{deployment.proxy_url}/v1", api_key="none", timeout=300, max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    answers = asyncio.run(everybody())
    for index, tokens in enumerate(answers):
        if index not in leaving:
            assert tokens == deployment.alone(prompts[index]), f"prompt of {lengths[index]} tokens"
    deployment.wait_until_idle()
