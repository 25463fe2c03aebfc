"""Train the tiny-recall checkpoint: a GPT-OSS of 4 layers on the task of `recall_prompts.py`.

    python -m tools.train_tiny_recall [--out models/tiny-recall] [--seed 1]

Strategy: an own batched forward with the parameters of a GPT-OSS layer, in float32: all experts are
computed as two matrix products and weighted (zero where not chosen), and the sink is one more key.
The prompt grows from some 60 to 700 tokens in training. In most sequences each layer is blind to
the words that belong to another layer (`OWNERS`), so that every layer's KV cache is needed. In the
last part experts are rounded to MXFP4 in the forward, so that nothing is lost when they are stored.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools import recall_prompts as task
from tools.mxfp4 import fake_quantize
from tools.recall_checkpoint import CONFIG, Config, measure_recall, write_checkpoint

ANSWER = 64


class Stage(NamedTuple):
    """Prompts of a range of lengths over the first `slots` slots, for at most `steps` steps."""

    slots: int
    shortest: int
    longest: int
    tokens: int  # in a batch
    steps: int
    until: float = 1.1  # ends earlier where the mean recall of 10 steps reaches this


LEARNING = (  # at the full learning rate
    Stage(4, 12, 16, 1600, 250, until=0.9),
    Stage(8, 18, 24, 1600, 150, until=0.93),
    Stage(16, 30, 40, 2048, 150, until=0.93),
    Stage(32, 40, 72, 2560, 300, until=0.93),
)
SETTLING = (  # while it falls
    Stage(32, 40, 160, 3072, 90),
    Stage(32, 40, 330, 4096, 90),
    Stage(32, 40, 700, 5120, 70),
)
QUANTIZED_STEPS = 160
SHORT_SHARE = 0.15
"""Of the steps of SETTLING: prompts of 1 to 40 tokens."""
BLIND_SHARE = 0.85
_IDS = torch.arange(CONFIG.vocab_size)
_RECORD = (_IDS >= task.RECORD) & (_IDS < task.FILLER)
_ODD = ((_IDS - task.RECORD) // task.NUM_VALUES) % 2 == 1
OWNERS = torch.stack(  # [layer, word]: the layer alone reads these words
    [
        (_IDS == task.UP) | (_IDS == task.DOWN),
        _RECORD & ~_ODD,
        (_IDS == task.QUIET) | (_IDS == task.LOUD),
        _RECORD & _ODD,
    ]
)


def make_batch(rng: random.Random, size: int, length: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """Tokens [size, length + 63] and targets [size, 64] (-100: not judged) after the prompt."""
    tokens, targets = [], []
    for _ in range(size):
        distance = rng.choice((0, 130, rng.randrange(max(1, length))))
        prompt = task.make_prompt(rng.getrandbits(60), length, distance, 1, num_slots)
        answer, judged = list(prompt.answer_ids), list(prompt.answer_ids)
        while len(answer) < ANSWER:  # the same records asked again, from another slot
            more = _ask_again(rng, prompt, num_slots)
            answer += more
            judged += [-100, -100, *more[2:]]
        tokens.append([*prompt.token_ids, *answer][: length + ANSWER - 1])
        targets.append(judged[:ANSWER])
    return torch.tensor(tokens), torch.tensor(targets)


def _ask_again(rng: random.Random, prompt: task.RecallPrompt, num_slots: int) -> list[int]:
    ids = prompt.token_ids
    values = {
        (i - task.RECORD) // task.NUM_VALUES: (i - task.RECORD) % task.NUM_VALUES
        for i in ids
        if task.RECORD <= i < task.FILLER
    }
    slot = rng.randrange(num_slots)
    rest = task.continuation(slot, task.DOWN in ids, task.LOUD in ids, values, num_slots)
    return [task.RECALL, task.SLOT + slot, *rest]


def init_params(config: Config, seed: int) -> dict[str, Tensor]:
    """Float32 parameters under their checkpoint names; expert matrices as [E, out, in]."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen) / math.sqrt(shape[-1])

    c, q, kv = config, config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    embedding = torch.randn(c.vocab_size, c.hidden, generator=gen) * 0.5
    quiet, slots = embedding[task.VALUE_QUIET : task.VALUE_LOUD], embedding[task.SLOT : task.RECORD]
    # What a record says need not be found out, only how to look it up.
    embedding[task.RECORD : task.FILLER] = (slots[:, None] + quiet).flatten(0, 1) / math.sqrt(2)
    params = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(c.hidden),
        "lm_head.weight": normal(c.vocab_size, c.hidden),
    }
    for i in range(c.layers):
        layer = {
            "input_layernorm.weight": torch.ones(c.hidden),
            "post_attention_layernorm.weight": torch.ones(c.hidden),
            "self_attn.q_proj.weight": normal(q, c.hidden),
            "self_attn.k_proj.weight": normal(kv, c.hidden),
            "self_attn.v_proj.weight": normal(kv, c.hidden),
            "self_attn.o_proj.weight": normal(c.hidden, q) * 0.5,
            "self_attn.sinks": torch.zeros(c.q_heads),
            "mlp.experts.gate_up_proj_bias": torch.zeros(c.experts, 2 * c.intermediate),
            "mlp.experts.down_proj_bias": torch.zeros(c.experts, c.hidden),
            "mlp.router.weight": normal(c.experts, c.hidden),
            "mlp.experts.gate_up_proj": normal(c.experts, 2 * c.intermediate, c.hidden),
            "mlp.experts.down_proj": normal(c.experts, c.hidden, c.intermediate) * 0.5,
        }
        biases = {
            "self_attn.q_proj.bias": q,
            "self_attn.k_proj.bias": kv,
            "self_attn.v_proj.bias": kv,
            "self_attn.o_proj.bias": c.hidden,
            "mlp.router.bias": c.experts,
        }
        layer |= {name: torch.zeros(size) for name, size in biases.items()}
        params |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    return {name: value.requires_grad_() for name, value in params.items()}


def rope_tables(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] of YaRN: factor 32 over 4096, beta 32 and 1, theta 150000."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** -(torch.arange(half) / half)

    def ramp_end(rotations: float) -> float:
        ratio = config.rope_original / (rotations * 2 * math.pi)
        return half * math.log(ratio) / math.log(config.rope_theta)

    low, high = ramp_end(config.rope_beta_fast), ramp_end(config.rope_beta_slow)
    stretched = ((torch.arange(half) - low) / (high - low)).clamp(0, 1)
    frequency = frequency * (1 - stretched + stretched / config.rope_factor)
    angle = torch.arange(length)[:, None] * frequency
    gain = 0.1 * math.log(config.rope_factor) + 1
    return angle.cos() * gain, angle.sin() * gain


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def forward(params: dict[str, Tensor], config: Config, tokens: Tensor, first: int, blind: Tensor) -> Tensor:
    """Logits [batch, T - first, vocab] of the tokens from `first` on.

    `blind` [batch] tells in which sequences each layer reads its own words only.
    """
    length = tokens.shape[1]
    cos, sin = rope_tables(config, length)
    age = torch.arange(length)[:, None] - torch.arange(length)
    causal = age >= 0
    others = OWNERS.any(0) & ~OWNERS
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(config.layers):
        start = first if i == config.layers - 1 else 0  # the last layer: only what is judged
        mask = causal & (age < config.window) if i % 2 == 0 else causal
        visible = mask & ~(others[i][tokens] & blind[:, None])[:, None]
        layer = {
            name.removeprefix(f"model.layers.{i}."): value
            for name, value in params.items()
            if name.startswith(f"model.layers.{i}.")
        }
        h = _norm(x, layer["input_layernorm.weight"], config.eps)
        h = _attention(layer, config, h, visible[:, start:], (cos, sin))
        x = x[:, start:] + h
        h = _norm(x, layer["post_attention_layernorm.weight"], config.eps)
        x = x + _experts(layer, config, h)
    x = _norm(x, params["model.norm.weight"], config.eps)
    return x @ params["lm_head.weight"].T


def _attention(
    layer: dict[str, Tensor], config: Config, h: Tensor, visible: Tensor, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """The sink becomes key 0 with value 0, its logit carried by an extra dimension of the heads."""
    d, queries = config.head_dim, visible.shape[1]
    start = h.shape[1] - queries

    def heads(name: str, x: Tensor) -> Tensor:
        y = F.linear(x, layer[f"self_attn.{name}.weight"], layer[f"self_attn.{name}.bias"])
        return y.view(*y.shape[:-1], -1, d).transpose(1, 2)

    q = _rotate(heads("q_proj", h[:, start:]), rope[0][start:], rope[1][start:])
    k = _rotate(heads("k_proj", h), *rope)
    v = heads("v_proj", h)
    group = config.q_heads // config.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    batch, padded = h.shape[0], d + 8
    one = torch.zeros(batch, config.q_heads, queries, 8)
    one[..., 0] = 1
    sink = (layer["self_attn.sinks"] * d**0.5).view(1, -1, 1, 1).expand(batch, -1, 1, 1)
    k = torch.cat((F.pad(sink, (d, 7)), F.pad(k, (0, padded - d))), dim=2)
    v = F.pad(v, (0, padded - d, 1, 0))
    mask = F.pad(visible, (1, 0), value=True)[:, None]
    out = F.scaled_dot_product_attention(torch.cat((q, one), dim=-1), k, v, attn_mask=mask, scale=d**-0.5)[..., :d]
    out = out.transpose(1, 2).flatten(-2)
    return F.linear(out, layer["self_attn.o_proj.weight"], layer["self_attn.o_proj.bias"])


def _experts(layer: dict[str, Tensor], config: Config, h: Tensor) -> Tensor:
    shape, e = h.shape, config.experts
    h = h.flatten(0, 1)
    logits = F.linear(h, layer["mlp.router.weight"], layer["mlp.router.bias"])
    top, index = logits.topk(config.experts_per_token, dim=-1)
    share = torch.zeros_like(logits).scatter(1, index, top.softmax(-1))
    gate_up = layer["mlp.experts.gate_up_proj"].flatten(0, 1)
    y = F.linear(h, gate_up, layer["mlp.experts.gate_up_proj_bias"].flatten())
    gate = y[:, 0::2].clamp(max=config.swiglu_limit)
    up = y[:, 1::2].clamp(-config.swiglu_limit, config.swiglu_limit)
    act = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
    act = (act.view(-1, e, config.intermediate) * share[..., None]).flatten(1)
    down = layer["mlp.experts.down_proj"].permute(0, 2, 1).flatten(0, 1)
    return (act @ down + share @ layer["mlp.experts.down_proj_bias"]).view(shape)


@dataclass
class Progress:
    """Where training stands; the same in a state file."""

    step: int = 0  # of all
    stage: int = 0
    stage_step: int = 0
    settled: int = 0  # steps in stages of SETTLING
    recent: list[float] = field(default_factory=list)  # recall of the last steps of this stage

    def learning_rate(self) -> float:
        """3e-3 after 50 steps; then half a cosine down to 3 % of it over the stages of SETTLING."""
        part = self.settled / sum(stage.steps for stage in SETTLING)
        return 3e-3 * min(1.0, (self.step + 1) / 50) * (0.03 + 0.97 * math.cos(part * math.pi / 2) ** 2)

    def advance(self, recall: float) -> None:
        """Count one step, and go to the next stage where this one is over."""
        stage = (*LEARNING, *SETTLING)[self.stage]
        self.step, self.stage_step = self.step + 1, self.stage_step + 1
        self.settled += self.stage >= len(LEARNING)
        self.recent = [*self.recent, recall][-10:]
        learnt = len(self.recent) == 10 and sum(self.recent) >= 10 * stage.until
        if learnt or self.stage_step == stage.steps:
            self.stage, self.stage_step, self.recent = self.stage + 1, 0, []


def train(seed: int, report: Callable[[str], None], state_file: Path | None = None) -> dict[str, Tensor]:
    """Parameters after all stages; with a `state_file`, an interrupted training goes on from there."""
    rng = random.Random(seed)
    params = init_params(CONFIG, seed)
    optimizer = _make_optimizer(params)
    progress, stages = Progress(), (*LEARNING, *SETTLING)
    if state_file and state_file.exists():
        state = torch.load(state_file, weights_only=False)
        progress = Progress(**state["progress"])
        rng.setstate(state["rng"])
        optimizer.load_state_dict(state["optimizer"])
        for name, value in state["params"].items():
            params[name].data.copy_(value)
    quantized_from = sum(stage.steps for stage in SETTLING) - QUANTIZED_STEPS
    while progress.stage < len(stages):
        for group in optimizer.param_groups:
            group["lr"] = progress.learning_rate()
        stage = stages[progress.stage]
        recall, line = _train_step(params, optimizer, rng, stage, progress.settled >= quantized_from)
        progress.advance(recall)
        if progress.step % 25 == 0:
            report(f"step {progress.step:4d}  {time.process_time():5.0f} CPU s  {stage.slots:2d} slots  {line}")
            if state_file:
                kept = {name: p.detach() for name, p in params.items()}
                state = {"progress": asdict(progress), "rng": rng.getstate(), "params": kept}
                torch.save(state | {"optimizer": optimizer.state_dict()}, state_file)
    return {name: p.detach() for name, p in params.items()}


def _make_optimizer(params: dict[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    vectors = [p for name, p in params.items() if name.endswith(("bias", "norm.weight", "sinks"))]
    rest = {id(p) for p in vectors}
    matrices = [p for p in params.values() if id(p) not in rest]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def _train_step(
    params: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    rng: random.Random,
    stage: Stage,
    quantized: bool,
) -> tuple[float, str]:
    """Recall in the batch, and a line about it."""
    length = rng.randint(stage.shortest, stage.longest)
    if stage in SETTLING and rng.random() < SHORT_SHARE:
        length = rng.randint(1, 40)
    size = max(4, stage.tokens // (length + ANSWER))
    tokens, targets = make_batch(rng, size, length, stage.slots)
    used = params
    if quantized:
        used = {n: fake_quantize(p) if n.endswith(("gate_up_proj", "down_proj")) else p for n, p in params.items()}
    blind = torch.tensor([rng.random() < BLIND_SHARE for _ in range(size)])
    logits = forward(used, CONFIG, tokens, length - 1, blind)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0)
    optimizer.step()
    values = (targets >= task.NONE_QUIET) & (targets < task.SLOT)
    right = logits.argmax(-1) == targets
    recall, order = right[values].float().mean().item(), right[(targets >= 0) & ~values].float().mean().item()
    numbers = f"loss {loss.item():.4f}  gradient {norm.item():.2f}  values {recall:.3f}  order {order:.3f}"
    return recall, f"length {length:3d}  {numbers}"


def main() -> None:
    """Train, write the folder, and measure recall of what was written."""
    parser = argparse.ArgumentParser(description="Train the tiny-recall checkpoint.")
    parser.add_argument("--out", type=Path, default=Path("models/tiny-recall"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="file to save progress to, and to go on from")
    args = parser.parse_args()
    params = train(args.seed, lambda line: print(line, flush=True), args.state)
    write_checkpoint(params, CONFIG, args.out)
    for length in (100, 255, 256, 600):
        print(f"prompts of {length} tokens: {measure_recall(args.out, length)}", flush=True)


if __name__ == "__main__":
    main()
