"""`gk plan` and `gk show`: the numbers they print are the ones worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from gk_adapters.cli import main as cli_main
from gk_adapters.cli.plan import plan
from gk_adapters.cli.show import show


def run_json(command: Any, *args: str) -> dict[str, Any]:
    result = CliRunner().invoke(command, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert isinstance(answer, dict)
    return answer


TARGET = ["--model", "gpt-oss-120b", "--tp", "8", "--kv-dtype", "fp8", "--block-size", "128"]


def test_plan_gives_the_targets_numbers() -> None:
    """36175 blocks, 18 buffers, 2 groups, 247.77 requests, 2537205 tokens, offset ok."""
    answer = run_json(
        plan, *TARGET, "--kv-memory-bytes", "10668441600",
        "--max-model-len", "10240", "--max-num-batched-tokens", "8192",
    )  # fmt: skip
    wanted = {
        "num_blocks": 36175, "group_buffers": 18, "num_groups": 2, "block_bytes": 8192,
        "bytes_per_block_all_buffers": 294912, "kv_bytes": 10668441600, "max_requests": 247.77,
        "token_capacity": 2537205, "max_dma_offset": 296345600, "dma_offset_limit": 4294967296,
        "dma_offset_ok": True, "stacked_cap_blocks": 29127,
    }  # fmt: skip
    assert {key: answer[key] for key in wanted} == wanted
    assert answer["stacked_cap_blocks_by_unit"] == {"bytes": 29127, "two_bytes": 14563, "k_and_v_together": 14563}


@pytest.mark.parametrize(
    ("length", "batch", "tokens"),
    [("10240", "2048", 3779918), ("10240", "10240", 2300819), ("131072", "8192", 4350027), ("10240", "64", 4463036)],
)
def test_plan_counts_tokens_by_both_settings(length: str, batch: str, tokens: int) -> None:
    """The same memory holds another number of tokens at other lengths and batches, as vLLM counts them."""
    answer = run_json(
        plan, *TARGET, "--num-blocks", "36175", "--max-model-len", length, "--max-num-batched-tokens", batch
    )
    assert answer["token_capacity"] == tokens


def test_plan_flags_an_offset_that_wraps() -> None:
    """From 524288 blocks on, a half no longer fits a uint32 offset."""
    below = run_json(plan, *TARGET, "--num-blocks", "524287")
    at = run_json(plan, *TARGET, "--num-blocks", "524288")
    assert (below["dma_offset_ok"], at["dma_offset_ok"]) == (True, False)


def test_plan_of_the_20b_model_has_12_buffers() -> None:
    """24 layers pair into 12 buffers."""
    answer = run_json(plan, "--model", "gpt-oss-20b", "--tp", "8", "--num-blocks", "5000")
    assert (answer["group_buffers"], answer["bytes_per_block_all_buffers"]) == (12, 12 * 2 * 8192)


def test_show_address_gives_the_sum() -> None:
    """K of layer 5, block 3, token 3, dim 7, packed: 3 * 8192 + 1 * 128 + 7 * 2 + 1."""
    answer = run_json(show, "address", *["--layer", "5", "--half", "k", "--block", "3", "--token", "3", "--dim", "7"])
    assert (answer["buffer"], answer["byte_offset"]) == (2, 24719)
    assert sum(t["count"] * t["bytes"] for t in answer["sum"]) == 24719


def test_show_address_of_v_starts_at_the_second_half() -> None:
    """V is token-major and lies after 36175 blocks of K."""
    answer = run_json(show, "address", *["--layer", "5", "--half", "v", "--block", "3", "--token", "3", "--dim", "7"])
    assert answer["byte_offset"] == 296345600 + 3 * 8192 + 3 * 64 + 7


def test_show_draws_both_orders() -> None:
    """The drawing names the buffers, the halves and both byte orders of K."""
    result = CliRunner().invoke(show, [], catch_exceptions=False)
    assert "18 group buffers" in result.output
    assert "(0,0) (0,1) (0,2)" in result.output
    assert "(0,0) (1,0) (0,1)" in result.output


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan", "--model", "gpt-oss-120b"], "exactly one of"),
        (["plan", "--model", "nowhere", "--num-blocks", "9"], "nowhere"),
        (["plan", "--modl", "x"], "--modl"),
        (["plan", "--model", "gpt-oss-120b", "--num-blocks", "9"], "1090 blocks"),
        (["plan", "--model", "gpt-oss-120b", "--num-blocks", "90", "--tp", "3"], "tp_size 3"),
        (["show", "address", "--layer", "36", "--half", "k", "--block", "0", "--token", "0", "--dim", "0"], "0..35"),
    ],
)
def test_errors_are_one_line_and_exit_code_two(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the call, the user reads one line."""
    monkeypatch.setattr("sys.argv", ["gk", *argv])
    with pytest.raises(SystemExit) as stop:
        cli_main.run()
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1
    assert said in message
