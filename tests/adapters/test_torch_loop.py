"""The bare decode loop: the same greedy tokens as transformers' own generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gk_adapters.torch_loop import TorchDecodeLoop, time_steps
from gk_adapters.torch_model import load_torch_model
from gk_core.errors import LayoutError
from gk_core.kv_spec import KVDtype
from tests.hf_models import make_hf_checkpoint


def test_rows_of_several_lengths_decode_as_transformers_generates_them(tmp_path: Path) -> None:
    """One token, and prompts that end around a block; 12 new tokens each."""
    hf = make_hf_checkpoint(tmp_path)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(8, 199, (n,), generator=generator).tolist() for n in (1, 127, 130)]
    loop = TorchDecodeLoop(model=load_torch_model(tmp_path), prompts=prompts, max_new_tokens=12, kv_dtype=KVDtype.FP32)
    got = list(zip(*(loop.step() for _ in range(12)), strict=True))
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        wanted = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert list(tokens) == wanted[0, len(prompt) :].tolist()


def test_timing_takes_as_many_steps_as_it_reports(tmp_path: Path) -> None:
    """Five counted after two that are not; two more reach the end of the room."""
    make_hf_checkpoint(tmp_path)
    loop = TorchDecodeLoop(model=load_torch_model(tmp_path), prompts=[[5, 6], [7]], max_new_tokens=8)
    seconds = time_steps(loop, num_steps=5, warmup_steps=2)
    assert len(seconds) == 5
    assert min(seconds) > 0
    loop.step()
    loop.step()
    with pytest.raises(LayoutError, match="max_model_len 10"):
        loop.step()


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [([], 4, "at least one prompt"), ([[3], []], 4, "a token in each"), ([[3] * 1000], 30, "1030 tokens are more")],
)
def test_prompts_that_cannot_be_decoded_are_refused(
    tmp_path: Path, prompts: list[list[int]], new: int, message: str
) -> None:
    """None, an empty one, one too long."""
    make_hf_checkpoint(tmp_path)
    with pytest.raises(LayoutError, match=message):
        TorchDecodeLoop(model=load_torch_model(tmp_path), prompts=prompts, max_new_tokens=new)
