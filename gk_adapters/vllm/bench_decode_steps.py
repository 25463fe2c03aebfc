"""Stock vLLM's decode step, for `gk bench decode`: a process that prints milliseconds per step by batch size."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from gk_adapters.bench_decode import made_up_prompts

__all__ = ["measure"]

_BATCHES = (1, 8)


def measure(directory: str, num_steps: int) -> dict[int, float]:
    """Median of three of (T(1 + n) - T(1)) / n, prefix caching off.

    Raises:
        ImportError: vLLM is not installed.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR"
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine: Any = LLM(
        directory,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=128,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_batched_tokens=8192,
        disable_hybrid_kv_cache_manager=False,
    )

    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        settings = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
        return time.perf_counter() - start

    found = {}
    for batch in _BATCHES:
        prompts = made_up_prompts(batch)
        seconds(prompts, 2)
        spans = [seconds(prompts, 1 + num_steps) - seconds(prompts, 1) for _ in range(3)]
        found[batch] = statistics.median(spans) / num_steps * 1e3
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
