"""The shipped checkpoint on the torch engines against transformers: logits in float32, greedy tokens in every cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gk_adapters.torch_model import load_torch_model
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from tests.torch_engines import evict, make_engines, make_tables
from tools.recall_checkpoint import load_model
from tools.recall_prompts import make_prompt

FOLDER = Path(__file__).parents[2] / "models" / "tiny-recall"


@pytest.fixture(scope="module")
def hf() -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(FOLDER, torch.float32)
    torch.set_num_threads(before)


def _run(
    hf: Any, length: int, *, model_dtype: str, resident: bool, kv: KVDtype, order: KByteOrder
) -> tuple[float, int, int]:
    """Largest logit difference of the answer's steps, how many argmaxes agree, and of how many."""
    prompt = make_prompt(1, length)
    ids = [*prompt.token_ids, *prompt.answer_ids]
    with torch.no_grad():
        wanted = hf(torch.tensor([ids])).logits[0]
    engines = make_engines(
        load_torch_model(FOLDER, model_dtype=model_dtype, resident=resident), dtype=kv, k_byte_order=order
    )
    tables = make_tables(engines, 1, 800)[0]
    engines.prefill.prefill(token_ids=ids[: length - 1], start_position=0, tables=tables)
    worst, same, steps = 0.0, 0, range(length - 1, len(ids) - 1)
    for position in steps:
        row = (ids[position], position, evict(tables, position, 128))
        got = engines.step_logits([None, row])[1]
        worst = max(worst, float((got - wanted[position]).abs().max()))
        same += int(got.argmax() == wanted[position].argmax())
    return worst, same, len(steps)


@pytest.mark.parametrize(("length", "resident"), [(100, True), (255, True), (256, False), (600, True)])
def test_every_step_of_the_answer_agrees_in_float32(hf: Any, length: int, resident: bool) -> None:
    """MXFP4 experts dequantised once, or at each use."""
    worst, same, steps = _run(
        hf, length, model_dtype="float32", resident=resident, kv=KVDtype.FP32, order=KByteOrder.TOKEN_MAJOR
    )
    assert worst <= 2e-4
    assert same == steps >= 16


@pytest.mark.parametrize(
    ("kv", "order"), [(KVDtype.BF16, KByteOrder.TOKEN_MAJOR), (KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED)]
)
@pytest.mark.parametrize("length", [255, 256])
def test_smaller_caches_give_the_same_tokens(hf: Any, length: int, kv: KVDtype, order: KByteOrder) -> None:
    """bfloat16, and packed FP8: the logits move, the greedy choice does not."""
    worst, same, steps = _run(hf, length, model_dtype="float32", resident=True, kv=kv, order=order)
    assert 1e-5 < worst < 0.5
    assert same == steps
