"""The giga kernel against transformers' own model in float32, prompts prefilled by torch, one step in the simulator."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from gk_adapters.nki_kernel import nki_kernel_from_checkpoint
from gk_adapters.torch_model import load_torch_model
from gk_adapters.torch_sampling import logits
from tests.hf_models import make_hf_checkpoint
from tests.torch_engines import evict, make_engines, make_tables

SHIPPED = Path(__file__).parents[2] / "models" / "tiny-recall"
LENGTHS = (1, 130, 257)


def _compare(path: Path, hf: Any) -> float:
    """Largest relative error of a row's logits."""
    model = load_torch_model(path, model_dtype="float32")
    window, vocabulary = model.config.geometry.sliding_window, model.config.geometry.vocab_size
    engines = make_engines(model, max_model_len=384, num_rows=len(LENGTHS))
    ids = torch.randint(3, vocabulary, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    tables = make_tables(engines, len(LENGTHS), 384)
    for length, table in zip(LENGTHS, tables, strict=True):
        engines.prefill_logits(ids[:length], 0, table)
    rows = [(n, evict(t, n, window)) for n, t in zip(LENGTHS, tables, strict=True)]
    call = engines.builder.build(token_ids=tuple(ids[n] for n in LENGTHS), control=engines.control(rows))
    ours = logits(nki_kernel_from_checkpoint(path)(engines.kernel.contract, model).step(call=call), model)
    with torch.no_grad():
        theirs = hf(torch.tensor([ids])).logits[0, list(LENGTHS)]
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


@pytest.mark.parametrize("layers", [2, 6])
def test_logits_equal_transformers_on_random_models(tmp_path: Path, layers: int) -> None:
    """float32, relative error at most 1e-5; the second prompt is past the window, the third past two blocks."""
    hf = make_hf_checkpoint(tmp_path, num_hidden_layers=layers, initializer_range=0.08)
    assert _compare(tmp_path, hf) <= 1e-5


def test_logits_equal_transformers_on_the_shipped_model() -> None:
    """The four-bit experts widened, everything in float32."""
    transformers: Any = import_module("transformers")
    hf = transformers.GptOssForCausalLM.from_pretrained(
        SHIPPED, dtype=torch.float32, attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )  # fmt: skip
    assert _compare(SHIPPED, hf.float().eval()) <= 1e-5
