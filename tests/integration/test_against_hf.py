"""Torch engines against transformers' own GptOssForCausalLM, float32: an oracle that nobody here wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gk_adapters.torch_model import TorchModel, load_torch_model
from tests.hf_models import make_hf_checkpoint
from tests.torch_engines import TorchEngines, evict, make_engines, make_tables

TOLERANCE = 2e-4
LENGTHS = (1, 2, 3, 17, 64, 126, 127, 128, 129, 130, 191, 255, 256, 257, 300, 383, 511, 512, 513, 640, 699, 700)
STEP_POSITIONS = (0, 1, 63, 125, 126, 127, 128, 129, 130, 253, 254, 255, 256, 257, 258, 382, 383, 384)
SIZES: dict[str, dict[str, Any]] = {
    "window_128": {},
    # A narrow window, one KV head per three query heads, three KV heads, an odd number of layers, tied embeddings.
    "window_40": {
        "sliding_window": 40, "num_hidden_layers": 5, "num_attention_heads": 9, "num_key_value_heads": 3,
        "hidden_size": 160, "intermediate_size": 224, "num_local_experts": 7, "tie_word_embeddings": True,
        "initializer_range": 0.1,  # larger ones make float32 itself, transformers included, drift past 2e-4
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """A random model here and there, a prompt, and transformers' logits of every prefix."""

    def __init__(self, directory: Path, *, mxfp4: bool, resident: bool, **changes: Any) -> None:
        self.hf: Any = make_hf_checkpoint(directory, mxfp4=mxfp4, **changes)
        self.model: TorchModel = load_torch_model(directory, resident=resident)
        generator = torch.Generator().manual_seed(3)
        self.ids: list[int] = torch.randint(0, 199, (700,), generator=generator).tolist()
        with torch.no_grad():
            self.logits: torch.Tensor = self.hf(torch.tensor([self.ids])).logits[0]


@pytest.fixture(scope="module", params=["window_128-bf16-resident", "window_128-mxfp4", "window_40-mxfp4-resident"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    size, *options = request.param.split("-")
    return Case(
        tmp_path_factory.mktemp("model"), mxfp4="mxfp4" in options, resident="resident" in options, **SIZES[size]
    )


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def test_logits_of_the_reference_are_large_enough_to_compare(case: Case) -> None:
    """2e-4 is small beside the logits, so agreement means something."""
    assert case.logits.abs().max() > 3.0


@pytest.mark.parametrize("chunk", [512, 100])
def test_prefill_logits_agree_at_every_position_of_700(case: Case, chunk: int) -> None:
    """Every prefix of one prompt, cut into chunks that do not divide blocks or window."""
    engines = make_engines(case.model, max_chunk_tokens=chunk)
    tables = make_tables(engines, 1, 700)[0]
    assert _largest_difference(engines.prefill_logits(case.ids, 0, tables), case.logits) <= TOLERANCE


def _prompt_lengths(lengths: tuple[int, ...], case: Case) -> None:
    for length in lengths:
        engines = make_engines(case.model)
        tables = make_tables(engines, 1, 701)[0]
        ours = engines.prefill_logits(case.ids[:length], 0, tables)
        assert _largest_difference(ours, case.logits[:length]) <= TOLERANCE, length
        # The giga kernel recomputes the last prompt token, as a decode engine does after a transfer.
        step = engines.step_logits([None, (case.ids[length - 1], length - 1, tables)])
        assert _largest_difference(step[1], case.logits[length - 1]) <= TOLERANCE, length


def test_prompts_of_many_lengths_agree_in_prefill_and_in_the_first_decode_step(case: Case) -> None:
    """Lengths around window, block and chunk edges."""
    _prompt_lengths(LENGTHS, case)


@pytest.mark.slow
def test_prompts_of_every_length_to_700_agree(case: Case) -> None:
    """The full sweep."""
    _prompt_lengths(tuple(range(1, 701)), case)


def _decode_run(engines: TorchEngines, case: Case, start: int, steps: int) -> None:
    """Prefill `start` tokens, then decode the rest of the prompt token by token, evicting as a block pool does."""
    window = case.model.config.geometry.sliding_window
    tables = make_tables(engines, 1, start + steps)[0]
    if start:
        engines.prefill.prefill(token_ids=case.ids[:start], start_position=0, tables=tables)
    for position in range(start, start + steps):
        held = evict(tables, position, window)
        step = engines.step_logits([(case.ids[position], position, held)])
        assert _largest_difference(step[0], case.logits[position]) <= TOLERANCE, position


@pytest.mark.parametrize("block_size", [16, 128, 256])
def test_each_decode_step_agrees_where_the_window_fills_and_blocks_turn_over(case: Case, block_size: int) -> None:
    """Lengths 120..134 and 250..262, with blocks that are smaller than, equal to and larger than the window."""
    engines = make_engines(case.model, block_size=block_size, num_blocks=80)
    _decode_run(engines, case, 120, 14)
    _decode_run(engines, case, 250, 12)


def test_a_request_decodes_from_its_first_token(case: Case) -> None:
    """No prefill at all: positions 0.. one by one."""
    _decode_run(make_engines(case.model, block_size=16, num_blocks=40), case, 0, 20)


def test_rows_at_different_positions_agree_in_one_step(case: Case) -> None:
    """A batch of rows, one of them inactive, each at another length; every row is its own request."""
    engines = make_engines(case.model, num_rows=6, num_blocks=60)
    tables = make_tables(engines, 5, 512)
    positions = (1, 127, 128, 300, 511)
    for t, position in zip(tables, positions, strict=True):
        engines.prefill.prefill(token_ids=case.ids[:position], start_position=0, tables=t)
    rows: list[Any] = [(case.ids[p], p, t) for p, t in zip(positions, tables, strict=True)]
    step = engines.step_logits([*rows[:2], None, *rows[2:]])
    for row, position in zip((0, 1, 3, 4, 5), positions, strict=True):
        assert _largest_difference(step[row], case.logits[position]) <= TOLERANCE, position


def test_prefill_continues_after_sliding_blocks_were_evicted(case: Case) -> None:
    """Chunked prefill over tables whose old sliding blocks are already the null block, filled with NaN."""
    window = case.model.config.geometry.sliding_window
    engines = make_engines(case.model, num_blocks=60)
    for buffer in engines.buffers:
        buffer[:, 0] = float("nan")
    tables = make_tables(engines, 1, 700)[0]
    at = 0
    for end in (130, 300, 513, 700):
        held = evict(tables, at, window)
        ours = engines.prefill_logits(case.ids[at:end], at, held)
        assert _largest_difference(ours, case.logits[at:end]) <= TOLERANCE, end
        at = end
