"""Factory gate: the model class that vLLM loads for GPT-OSS, native per layer or giga-kernel decode."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM as NativeGptOss

from gk_adapters.vllm.settings import parse_settings

__all__ = ["GptOssForCausalLM"]


class GptOssForCausalLM(NativeGptOss):
    """vLLM's own GPT-OSS, or, where `neuron_config.gk_decode` is set, the giga-kernel decode model.

    Raises:
        UnsupportedError: gk_decode on an engine that cannot run it, with every reason, before weights load.
    """

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        """Pick by the engine's settings."""
        if parse_settings(vllm_config.additional_config).gk_decode:
            from gk_adapters.vllm.decode_model import GkDecodeModel

            # Not an instance of this class, so Python does not run our __init__ on it.
            return GkDecodeModel(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls)
