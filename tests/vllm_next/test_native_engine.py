"""vLLM 0.32's own GPT-OSS over gk's attention backend and cache layout, against Hugging Face in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

LENGTHS = (1, 2, 127, 128, 129, 255, 256, 257, 300, 383, 511)
_RUN = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    prompts = json.load(sys.stdin)
    engine = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=128,
        max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=256, disable_hybrid_kv_cache_manager=False,
        additional_config={"neuron_config": {"gk_attention": True}},
    )
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, detokenize=False)
    answers = [a.outputs[0] for a in engine.generate([{"prompt_token_ids": p} for p in prompts], greedy)]
    rows = [(list(a.token_ids), [d[t].logprob for t, d in zip(a.token_ids, a.logprobs)]) for a in answers]
    with open(sys.argv[2], "w") as out:
        json.dump(rows, out)
"""


@pytest.mark.timeout(1800)
def test_greedy_tokens_are_hugging_faces_at_every_boundary(bf16_checkpoint: Path, tmp_path: Path) -> None:
    """Chunked prefill, prefix caching and batches of four; log-probabilities within 1e-4."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bf16_checkpoint, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(5, model.config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts.append(prompts[7])
    script, out = tmp_path / "run.py", tmp_path / "answers.json"
    script.write_text(_RUN, encoding="utf-8")
    env = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), str(bf16_checkpoint), str(out)],
        input=json.dumps(prompts), capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert out.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    assert "LHBNC KV cache layout" in done.stdout + done.stderr
    for prompt, (tokens, logprobs) in zip(prompts, json.loads(out.read_text()), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == logits.argmax(-1).tolist(), len(prompt)
        assert logprobs == pytest.approx([logits[k, t].item() for k, t in enumerate(tokens)], abs=1e-4), len(prompt)
