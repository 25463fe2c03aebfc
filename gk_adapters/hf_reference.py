"""Hugging Face's own GPT-OSS: `--compare-hf` compares with it, `gk bench decode` times it. Nobody here wrote it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gk_core.errors import MissingDependencyError

__all__ = ["HFReference", "save_random_model", "time_hf_steps"]


class HFReference:
    """`GptOssForCausalLM` in float32, greedy.

    Raises:
        MissingDependencyError: transformers is not installed.
    """

    def __init__(self, directory: Path) -> None:
        transformers = _transformers()
        config = transformers.AutoConfig.from_pretrained(directory)
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        if getattr(config, "quantization_config", None) is not None:
            # On a CPU the four-bit experts are expanded; every value is exact in float32.
            options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        self._model: Any = transformers.GptOssForCausalLM.from_pretrained(directory, **options).float().eval()

    def greedy(self, prompt: Sequence[int], max_new_tokens: int, eos_ids: frozenset[int]) -> tuple[int, ...]:
        """Tokens that follow a prompt, the ending one included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(eos_ids) or None,
                pad_token_id=0,
            )
        return tuple(out[0, ids.shape[1] :].tolist())


def save_random_model(directory: Path, sizes: Mapping[str, Any]) -> None:
    """Write a GPT-OSS with random weights (seed 0) in bfloat16.

    Args:
        sizes: arguments of `GptOssConfig`.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    transformers = _transformers()
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    model.to(torch.bfloat16).save_pretrained(directory)


def time_hf_steps(
    directory: Path, prompts: Sequence[Sequence[int]], *, num_steps: int, warmup_steps: int = 3
) -> tuple[float, ...]:
    """Seconds of each of `num_steps` greedy steps in bfloat16: forward and argmax, with Hugging Face's own cache.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    model = _transformers().GptOssForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    seconds = []
    with torch.inference_mode():
        out = model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        for _ in range(warmup_steps + num_steps):
            start = time.perf_counter()
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - start)
    return tuple(seconds[warmup_steps:])


def _transformers() -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("transformers is not installed: pip install transformers") from error
    # Its own notes about kernels and deprecated names say nothing about a comparison.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
