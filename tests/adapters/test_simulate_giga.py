"""`gk simulate giga`: the cost of one rank's step, from shapes alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from gk_adapters.cli.simulate_giga import giga


def _cost(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(giga, ["--model", "gpt-oss-120b", "--json", *arguments], catch_exceptions=False)
    answer: dict[str, Any] = json.loads(result.output)
    return answer


@pytest.fixture(scope="module")
def cost() -> dict[str, Any]:
    """120B, TP8 x DP16, 8 rows per replica at 8192 tokens, FP8 cache, trn3."""
    return _cost()


def test_hbm_bytes_are_within_five_percent_of_the_ideal(cost: dict[str, Any]) -> None:
    """Weights once, keys once, new tokens once: the ideal worked out by hand."""
    # Per layer: MXFP4 expert 13,369,344 + 835,584 scales (53 / 16 of bytes); the rest is bfloat16 and float16.
    gate_up, down = 128 * 2 * 6 * 3072 * 2, 128 * 6 * 3072 * 2
    scales = 16 * 2 * 6 * 3072 + 16 * 6 * 3072
    attention = (3072 * 640 + 640 + 512 * 3072 + 3072 + 3072) * 2 + 8 * 4
    router = (3072 * 128 + 128) * 2 + 3072 * 4
    biases = (128 * 2 * 6 * 4 + 3072) * 2
    weights = 36 * (gate_up + down + scales + attention + router + biases)
    token = 2 * 64
    keys = 8 * token * 18 * (8192 + 128)
    assert cost["ideal_hbm_bytes"] == weights + keys + 8 * token * 36 + 2 * 3072 * 2
    assert cost["ideal_hbm_bytes"] <= cost["hbm_bytes"] <= 1.05 * cost["ideal_hbm_bytes"]


def test_a_layer_has_three_all_gathers_and_two_reduce_scatters(cost: dict[str, Any]) -> None:
    """Rows over TP; tokens and affinities over EP; both sums back. Bytes are what the rank sends."""
    row = 3072 * 2
    assert cost["collectives"] == {
        "all_gather": {"count": 36 * 3, "bytes": 36 * (2 * row + 128 * 4)},
        "reduce_scatter": {"count": 36 * 2, "bytes": 36 * (8 * row + 128 * row)},
    }


def test_it_fits_the_device_and_says_where_it_ran(cost: dict[str, Any]) -> None:
    """SBUF, PSUM, two blocks per row for sliding layers, all engines counted."""
    assert cost["where"] == "simulator, not device"
    assert cost["sbuf_peak_bytes_per_partition"] <= 245_760
    assert cost["psum_peak_banks"] <= 8
    assert cost["kv_blocks_read_per_row"] == {"sliding": 2, "full": 64}
    assert cost["engine_cycles"]["tensor"] > 0
    assert cost["warnings"] == 0


def test_rows_that_do_not_divide_over_tp_are_refused() -> None:
    """One line that says what to do."""
    with pytest.raises(ValueError, match="multiple of --tp 8, got 7; pad the batch"):
        _cost("--rows", "7")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_64_rows_at_long_context_fit_too(target: str) -> None:
    """1024 tokens for every expert: rows then go through private HBM between ranks."""
    cost = _cost("--rows", "64", "--context", "16384", "--target", target)
    assert cost["sbuf_peak_bytes_per_partition"] <= cost["sbuf_usable_bytes_per_partition"]
