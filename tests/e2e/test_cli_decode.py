"""`gk decode` over the in-memory transport: the same tokens as Hugging Face, as JSON, or refused by one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gk_adapters.cli import main as cli_main
from gk_adapters.cli.decode import decode
from tools.recall_prompts import make_prompt

MODEL = Path(__file__).parents[2] / "models" / "tiny-recall"
LENGTHS = (1, 2, 100, 127, 128, 129, 255, 256, 383, 600)


def run(*args: str) -> Result:
    flags = ["--checkpoint", str(MODEL), "--transport", "memory", *args]
    return CliRunner().invoke(decode, flags, standalone_mode=False, catch_exceptions=False)


def run_json(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def prompt_flags(lengths: tuple[int, ...]) -> list[str]:
    flags = []
    for length in lengths:
        ids = make_prompt(seed=length, length_tokens=length, distance=min(200, length)).token_ids
        flags += ["--prompt-ids", ",".join(map(str, ids))]
    return flags


def test_greedy_tokens_are_hugging_faces_own() -> None:
    """Lengths around every block and window boundary, more prompts than rows, bf16 KV: identical."""
    answer = run_json(*prompt_flags(LENGTHS), "--max-new-tokens", "6", "--ignore-eos", "--compare-hf")
    assert answer["identical_to_hf"] is True
    assert [o["prompt_len"] for o in answer["outputs"]] == list(LENGTHS)
    assert all(len(o["token_ids"]) == 6 and o["identical_to_hf"] for o in answer["outputs"])
    assert [o["transferred_tokens"] for o in answer["outputs"]] == [n - 1 for n in LENGTHS]
    assert set(answer["outputs"][0]["timings"]) == {"prefill_seconds", "first_token_seconds", "decode_seconds"}


@pytest.mark.parametrize("block_size", ["16", "64", "256"])
def test_other_block_sizes_give_the_same_tokens(block_size: str) -> None:
    """Layout changes no token."""
    lengths = (191, 255, 383)
    usual = run_json(*prompt_flags(lengths), "--max-new-tokens", "4", "--ignore-eos")
    other = run_json(*prompt_flags(lengths), "--max-new-tokens", "4", "--ignore-eos", "--block-size", block_size)
    assert [o["token_ids"] for o in other["outputs"]] == [o["token_ids"] for o in usual["outputs"]]


def test_packed_fp8_is_reported_beside_the_chosen_cache() -> None:
    """The FP8 answers come with the others and are compared too."""
    answer = run_json(*prompt_flags((255,)), "--max-new-tokens", "3", "--compare-fp8", "--compare-hf", "--checksums")
    assert answer["kv_dtype"] == "bfloat16"
    assert len(answer["fp8"]["outputs"]) == 1
    assert "identical_to_hf" in answer["fp8"]


def test_text_prompts_go_through_the_checkpoints_tokenizer() -> None:
    """A prompt file of 255 tokens is a prompt of 255 tokens, and the answer comes back as text."""
    path = MODEL / "prompts" / "prompt-255.txt"
    answer = run_json("--prompt-file", str(path), "--max-new-tokens", "2")
    assert answer["outputs"][0]["prompt_len"] == 255
    assert answer["outputs"][0]["text"]


def test_people_get_a_table() -> None:
    """Without --json the summary names prompt, transfer and the comparison."""
    result = run(*prompt_flags((130,)), "--max-new-tokens", "2", "--compare-hf")
    assert "all identical to Hugging Face" in result.output
    assert "129 tokens" in result.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "at least one --prompt"),
        (["--prompt-ids", "1,x"], "--prompt-ids must be integers"),
        (["--prompt-ids", "9999999"], "9999999"),
        (["--prompt-ids", "1", "--prefill", "127.0.0.1:9"], "go together"),
        (["--prompt-ids", "1", "--block-size", "48"], "48"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_two(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the value."""
    monkeypatch.setattr("sys.argv", ["gk", "decode", "--checkpoint", str(MODEL), "--transport", "memory", *flags])
    with pytest.raises(SystemExit) as stop:
        cli_main.run()
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in message
    assert message.strip().count("\n") == 0
