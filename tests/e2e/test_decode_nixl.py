"""`gk decode --transport nixl`: a prefill and a decode process joined by real NIXL give the same tokens as one process.

Both servers of a cache dtype start once for all tests here.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from gk_adapters.cli.decode import decode
from gk_adapters.cli.servers import StartedServer, started_server
from gk_core.metrics import PULL_BYTES, PULLS_DONE, TRANSFERRED_TOKENS
from gk_core.ports import Endpoint
from tools.recall_prompts import make_prompt

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl")

MODEL = Path(__file__).parents[2] / "models" / "tiny-recall"
LENGTHS = (1, 100, 127, 128, 129, 255, 256, 383, 600)
FLAGS = ["--checkpoint", str(MODEL), "--num-blocks", "128", "--max-model-len", "700", "--num-rows", "4"]


def run_json(*flags: str) -> dict[str, Any]:
    arguments = ["--checkpoint", str(MODEL), "--max-new-tokens", "6", "--ignore-eos", "--json", *flags]
    for length in LENGTHS:
        ids = make_prompt(seed=length, length_tokens=length, distance=min(200, length)).token_ids
        arguments += ["--prompt-ids", ",".join(map(str, ids))]
    result = CliRunner().invoke(decode, arguments, standalone_mode=False, catch_exceptions=False)
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def over(servers: tuple[Endpoint, Endpoint]) -> list[str]:
    prefill, decode_at = (f"{e.host}:{e.port}" for e in servers)
    return ["--transport", "nixl", "--prefill", prefill, "--decode", decode_at]


@pytest.fixture(scope="module")
def bf16_servers() -> Iterator[tuple[StartedServer, StartedServer]]:
    flags = [*FLAGS, "--metrics-port", "0"]
    with started_server("prefill-server", flags) as prefill, started_server("decode-server", flags) as decoding:
        prefill.endpoint()
        decoding.endpoint()
        yield prefill, decoding


def scraped(server: StartedServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.facts['metrics']}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


def test_two_processes_over_nixl_give_hugging_faces_tokens(
    bf16_servers: tuple[StartedServer, StartedServer],
) -> None:
    """Lengths around every block and window boundary, BF16 KV; both servers' metrics say what moved."""
    prefill, decoding = bf16_servers
    answer = run_json(*over((prefill.endpoint(), decoding.endpoint())), "--compare-hf")
    assert answer["identical_to_hf"] is True
    assert answer["transport"] == "nixl"
    assert [o["prompt_len"] for o in answer["outputs"]] == list(LENGTHS)
    assert all(len(o["token_ids"]) == 6 for o in answer["outputs"])
    assert [o["transferred_tokens"] for o in answer["outputs"]] == [n - 1 for n in LENGTHS]
    counted = scraped(decoding)
    # The prompt of one token moves nothing; the sum of all others, one token short each, is 1970.
    assert (counted[PULLS_DONE], counted[TRANSFERRED_TOKENS]) == (8, 1970)
    assert counted[PULL_BYTES] > 0
    assert scraped(prefill)["gk_leases_granted_total"] == 8


def test_packed_fp8_over_nixl_gives_the_tokens_of_fp8_in_one_process() -> None:
    """`gk decode` starts both servers itself. The transfer changes nothing; FP8 itself may."""
    moved = run_json("--transport", "nixl", "--kv-dtype", "fp8")
    alone = run_json("--transport", "memory", "--kv-dtype", "fp8")
    assert [o["token_ids"] for o in moved["outputs"]] == [o["token_ids"] for o in alone["outputs"]]
    assert [o["prompt_len"] for o in moved["outputs"]] == list(LENGTHS)
    assert [o["transferred_tokens"] for o in moved["outputs"]] == [n - 1 for n in LENGTHS]
    assert (moved["transport"], moved["kv_dtype"]) == ("nixl", "float8_e4m3fn")


@pytest.mark.slow
@pytest.mark.parametrize("block_size", ["128", "64"])
def test_gk_decode_starts_both_servers_itself(block_size: str) -> None:
    """With checksums, and stops them when it is done."""
    children = set(psutil.Process().children(recursive=True))
    answer = run_json("--transport", "nixl", "--checksums", "--compare-hf", "--block-size", block_size)
    assert answer["identical_to_hf"] is True
    assert [o["transferred_tokens"] for o in answer["outputs"]] == [n - 1 for n in LENGTHS]
    assert set(psutil.Process().children(recursive=True)) == children
