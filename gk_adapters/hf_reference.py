"""Hugging Face's own GPT-OSS as the reference that `--compare-hf` runs: nobody here wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gk_core.errors import MissingDependencyError

__all__ = ["HFReference"]


class HFReference:
    """`GptOssForCausalLM` in float32, greedy.

    Raises:
        MissingDependencyError: transformers is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            transformers: Any = import_module("transformers")
        except ModuleNotFoundError as error:
            raise MissingDependencyError("transformers is not installed: pip install transformers") from error
        # Its own notes about kernels and deprecated names say nothing about the comparison.
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
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
