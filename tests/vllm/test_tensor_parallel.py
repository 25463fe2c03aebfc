"""Real vLLM servers of one and of two tensor-parallel ranks: KV heads split, matched and merged on the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve

from gk_adapters.random_checkpoint import SMALL, write_random_checkpoint
from gk_adapters.vllm.boundary_sweep import SweepSettings, Targets, parse_lengths, sweep
from gk_adapters.vllm.served import Server, free_ports, post_json, started_servers
from gk_adapters.vllm.server_command import ServerKind
from tests.vllm.deployment import QUIET, completion_body, eventually, metric_of, server_settings, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = parse_lengths("1,2,127-129,255-257,383,384,511,640")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads, so one per rank of two; experts wide enough for vLLM to halve them."""
    directory = tmp_path_factory.mktemp("random") / "model"
    write_random_checkpoint(directory, evolve(SMALL, intermediate_size=128))
    return directory


def decoded_alone(server: Server, checkpoint: Path) -> bool:
    """One step of a server, whatever comes of it."""
    body = completion_body(str(checkpoint), [3, 4, 5], max_tokens=2)
    return bool(tokens_of(post_json(f"{server.url}/v1/completions", body)))


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "block_bytes"),
    [
        pytest.param(2, 1, (32_768, 65_536), id="merged-for-the-giga-kernel"),
        pytest.param(1, 2, (65_536, 32_768), id="split"),
        pytest.param(2, 2, (32_768, 32_768), id="matched"),
    ],
)
def test_every_boundary_length_is_what_one_engine_answers(
    checkpoint: Path, tmp_path: Path, prefill_ranks: int, decode_ranks: int, block_bytes: tuple[int, int]
) -> None:
    """A half block has 128 tokens of 64 numbers of 4 bytes for each head that its rank keeps.

    The giga kernel has one rank on a CPU; two ranks decode with the native model.
    """
    ports = free_ports(4)
    prefill, decode = (
        server_settings(
            checkpoint, kind, (ports[i], ports[i + 1]), gk_decode=ranks == 1,
            extra=("--skip-tokenizer-init", "--tensor-parallel-size", str(ranks)),
        )
        for kind, i, ranks in ((ServerKind.PREFILL, 0, prefill_ranks), (ServerKind.DECODE, 2, decode_ranks))
    )  # fmt: skip
    with started_servers([prefill, decode], logs=tmp_path, env=QUIET) as servers:
        targets = Targets(prefill=servers[0].url, decode=servers[1].url, single=servers[0].url, model=str(checkpoint))
        report = sweep(targets, SweepSettings(lengths=LENGTHS, num_tokens=4, workers=2))
        # A worker's counts come with the steps that follow.
        eventually(
            lambda: (
                decoded_alone(servers[1], checkpoint)
                and metric_of(servers[1], "gk_pulls_done_total") >= len(LENGTHS) - 1
            ),
            30,
        )
        registered = [re.findall(r"(\d+) bytes each: K and V of 2 group buffers", s.log.read_text()) for s in servers]
    assert report.as_json()["errors"] == {}
    assert report.differing_lengths == ()
    assert registered == [[str(block_bytes[0])] * prefill_ranks, [str(block_bytes[1])] * decode_ranks]
