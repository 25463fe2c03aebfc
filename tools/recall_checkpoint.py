"""The folder of the tiny-recall checkpoint: its sizes, its files, and how its recall is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from tools import recall_prompts as task
from tools.mxfp4 import quantize

DEMO_LENGTHS = (100, 255, 256, 600)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %} <|return|>{% endif %}"
    "{% if not loop.last %} {% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT-OSS model; even layers slide, odd layers see everything."""

    vocab_size: int = len(task.VOCABULARY)
    hidden: int = 128
    intermediate: int = 96
    layers: int = 4
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    experts_per_token: int = 4
    window: int = 128
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_factor: float = 32.0
    rope_original: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0


CONFIG = Config()


class Recall(NamedTuple):
    """Shares of right greedy tokens given the right tokens before, and the logit margins."""

    recall: float  # of values whose record stands more than 128 tokens back
    all_tokens: float
    smallest_margin: float  # of right tokens over the runner-up
    low_margin: float  # a hundredth of the right tokens have less

    def __str__(self) -> str:
        return (
            f"recall {self.recall:.4f}, all tokens {self.all_tokens:.4f}, "
            f"margin min {self.smallest_margin:.2f}, 1 % below {self.low_margin:.2f}"
        )


def hf_config(config: Config) -> dict[str, Any]:
    """config.json with the keys and spellings of the public GPT-OSS files."""
    kinds = ["sliding_attention", "full_attention"]
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": task.BOS,
        "eos_token_id": task.EOS,
        "experts_per_token": config.experts_per_token,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initial_context_length": config.rope_original,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate,
        "layer_types": [kinds[i % 2] for i in range(config.layers)],
        "max_position_embeddings": int(config.rope_factor) * config.rope_original,
        "model_type": "gpt_oss",
        "num_attention_heads": config.q_heads,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_local_experts": config.experts,
        "output_router_logits": False,
        "pad_token_id": task.PAD,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": config.eps,
        "rope_scaling": {
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": config.rope_theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": config.window,
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def stored_tensors(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint tensors: experts as MXFP4 blocks and scales, everything else bfloat16."""
    stored = {}
    for name, value in params.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = quantize(value)
        else:
            stored[name] = value.to(torch.bfloat16)
    return {name: value.contiguous() for name, value in sorted(stored.items())}


def make_tokenizer() -> Tokenizer:
    """Word-level: words are what spaces separate."""
    words = {word: token_id for token_id, word in enumerate(task.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=task.VOCABULARY[task.UNK]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(w, normalized=False) for w in task.SPECIAL_TOKENS])
    return tokenizer


def write_checkpoint(params: dict[str, Tensor], config: Config, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and the demo prompts (not the README)."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored_tensors(params), folder / "model.safetensors", {"format": "pt"})
    names = {"bos": task.BOS, "eos": task.EOS, "pad": task.PAD, "unk": task.UNK}
    special = {f"{name}_token": task.VOCABULARY[token_id] for name, token_id in names.items()}
    make_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", hf_config(config))
    _write_json(folder / "special_tokens_map.json", special)
    generation = {f"{name}_token_id": names[name] for name in ("bos", "eos", "pad")}
    _write_json(folder / "generation_config.json", generation | {"do_sample": False})
    tokenizer_config = {
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": int(config.rope_factor) * config.rope_original,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config | special)
    (folder / "prompts").mkdir(exist_ok=True)
    for length in DEMO_LENGTHS:
        text = task.make_prompt(length, length).text
        (folder / "prompts" / f"prompt-{length}.txt").write_text(text + "\n", encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Hugging Face's `GptOssForCausalLM` of `folder`, MXFP4 experts dequantised."""
    from transformers import GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    how: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True)} if quantized else {}
    model: Any = GptOssForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **how)
    return model.eval()


def measure_recall(
    folder: Path,
    length_tokens: int,
    prompts: int = 40,
    dtype: torch.dtype = torch.float32,
    first_seed: int = 10_000,
) -> Recall:
    """Recall of the written checkpoint on fresh prompts, by Hugging Face's own model."""
    model = load_model(folder, dtype)
    right, far, margins = [], [], []
    for seed in range(first_seed, first_seed + prompts):
        prompt = task.make_prompt(seed, length_tokens)
        ids = torch.tensor([[*prompt.token_ids, *prompt.answer_ids]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, length_tokens - 1 :].float()
        top = logits.topk(2)
        good = top.indices[:, 0] == torch.tensor(prompt.answer_ids)
        right.append(good)
        margins.append((top.values[:, 0] - top.values[:, 1])[good])
        far.append(torch.tensor(_is_far(prompt)))
    hits, asked, margin = torch.cat(right), torch.cat(far), torch.cat(margins)
    share = hits[asked].float().mean().item() if asked.any() else float("nan")
    low = margin.quantile(0.01).item()
    return Recall(share, hits.float().mean().item(), margin.min().item(), low)


def _is_far(prompt: task.RecallPrompt, beyond: int = 128) -> list[bool]:
    """For each answer token: a value whose record stands more than `beyond` tokens before it."""
    record = {
        (token - task.RECORD) // task.NUM_VALUES: place
        for place, token in enumerate(prompt.token_ids)
        if task.RECORD <= token < task.FILLER
    }
    far = []
    slot = prompt.token_ids[-1] - task.SLOT
    for place, token in enumerate(prompt.answer_ids, start=len(prompt.token_ids)):
        if task.SLOT <= token < task.RECORD:
            slot = token - task.SLOT
        known = slot in record and task.is_value(token)
        far.append(known and place - 1 - record[slot] > beyond)
    return far
