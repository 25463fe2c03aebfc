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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gk_adapters.bench.form import case, report
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
        _write_model(Path(directory))
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
    generator = torch.Generator().manual_seed(batch)
    ids: list[list[int]] = torch.randint(0, _VOCABULARY, (batch, _CONTEXT), generator=generator).tolist()
    return ids


def _of(values: Sequence[dict[str, float]], batch: int) -> list[float]:
    return [value[str(batch)] for value in values]


def _write_model(directory: Path) -> None:
    transformers = _transformers()
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**_SIZES))
    model.to(torch.bfloat16).save_pretrained(directory)


def _in_a_process(side: str, directory: str, num_steps: int) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    command = [sys.executable, "-m", _SIDES[side], side, directory, str(num_steps)]
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    if result.returncode:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MissingDependencyError(f"{side} could not be measured: {' '.join(last)}")
    answer: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return answer


def _transformers() -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("transformers is not installed: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _ours(directory: Path, batch: int, num_steps: int) -> float:
    loop = TorchDecodeLoop(
        model=load_torch_model(directory), prompts=made_up_prompts(batch), max_new_tokens=num_steps + 4, prepack=True
    )
    return statistics.median(time_steps(loop, num_steps=num_steps)) * 1e3


def _hugging_face(directory: Path, batch: int, num_steps: int) -> float:
    model = _transformers().GptOssForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    took = []
    with torch.inference_mode():
        out = model(input_ids=torch.tensor(made_up_prompts(batch)), use_cache=True, logits_to_keep=1)
        for step in range(num_steps + 3):
            start = time.perf_counter()
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            if step >= 3:
                took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


if __name__ == "__main__":
    measure = _ours if sys.argv[1] == "ours" else _hugging_face
    print(json.dumps({batch: measure(Path(sys.argv[2]), batch, int(sys.argv[3])) for batch in _BATCHES}))
