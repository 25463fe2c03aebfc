"""`gk bench decode`: milliseconds of one greedy decode step on the CPU, ours against Hugging Face and vLLM.

A made-up GPT-OSS in bfloat16 (seed 0), every row at a context of 512 tokens, as many threads for each side as the
machine has cores. Each measurement is a process of its own and sides take turns. Ours is what an engine's step holds:
control tensors, embedding, the kernel with prepacked weights, the sampler. Hugging Face's is its bare loop, forward
and argmax, and its prefill is outside the clock, as ours is. vLLM's is (T(1 + n) - T(1)) / n of `LLM.generate`, its
scheduler included.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gk_adapters.bench.form import case, report
from gk_adapters.hf_reference import save_random_model, time_hf_steps
from gk_adapters.torch_loop import TorchDecodeLoop, time_steps
from gk_adapters.torch_model import load_torch_model
from gk_core.errors import MissingDependencyError

__all__ = ["bench_decode", "made_up_prompts"]

_BATCHES = (1, 8)
_CONTEXT = 512
_SIDES = {
    "ours": "gk_adapters.bench_decode",
    "hf": "gk_adapters.bench_decode",
    "vllm": "gk_adapters.vllm.bench_decode_steps",
}
_PEERS = {"hf": "transformers GptOssForCausalLM, forward and argmax", "vllm": "vLLM LLM.generate"}
_VOCABULARY = 2048
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "vocab_size": _VOCABULARY,
    "sliding_window": 128,
    "initializer_range": 0.02,
}


def bench_decode(*, repeats: int = 3, num_steps: int = 48) -> dict[str, Any]:
    """Milliseconds per step at batch 1 and 8; `ratio` = ours / peer, so below 1 is ahead.

    Raises:
        MissingDependencyError: transformers or vLLM is not installed.
    """
    took: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
    with tempfile.TemporaryDirectory(prefix="gk-bench-decode-") as directory:
        save_random_model(Path(directory), _SIZES)
        for _ in range(repeats):
            for side, values in took.items():
                values.append(_in_a_process(side, directory, num_steps))
    cases = [
        case(f"{peer}_b{batch}", "ms", _of(took["ours"], batch), _PEERS[peer], _of(took[peer], batch))
        for peer in _PEERS
        for batch in _BATCHES
    ]
    return report("decode", cases)


def made_up_prompts(batch: int) -> list[list[int]]:
    """Token ids of each row: 512 of them, no two rows alike."""
    choose = random.Random(batch)
    return [[choose.randrange(_VOCABULARY) for _ in range(_CONTEXT)] for _ in range(batch)]


def _of(values: Sequence[dict[str, float]], batch: int) -> list[float]:
    return [value[str(batch)] for value in values]


def _in_a_process(side: str, directory: str, num_steps: int) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    command = [sys.executable, "-m", _SIDES[side], side, directory, str(num_steps)]
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    if result.returncode:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MissingDependencyError(f"{side} could not be measured: {' '.join(last)}")
    answer: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return answer


def _ours(directory: Path, batch: int, num_steps: int) -> float:
    loop = TorchDecodeLoop(
        model=load_torch_model(directory), prompts=made_up_prompts(batch), max_new_tokens=num_steps + 4, prepack=True
    )
    return statistics.median(time_steps(loop, num_steps=num_steps)) * 1e3


def _hugging_face(directory: Path, batch: int, num_steps: int) -> float:
    return statistics.median(time_hf_steps(directory, made_up_prompts(batch), num_steps=num_steps)) * 1e3


if __name__ == "__main__":
    measure = _ours if sys.argv[1] == "ours" else _hugging_face
    print(json.dumps({batch: measure(Path(sys.argv[2]), batch, int(sys.argv[3])) for batch in _BATCHES}))
