"""The cache that the giga kernel is made for, between two real servers: FP8, K with two tokens side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gk_adapters.vllm.boundary_sweep import SweepSettings, Targets, parse_lengths, sweep
from gk_adapters.vllm.served import Server, free_ports, post_json, started_servers
from gk_adapters.vllm.server_command import ServerKind
from tests.vllm.deployment import QUIET, completion_body, server_settings, tokens_of
from tests.vllm.test_deployment import make_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl]

LENGTHS = parse_lengths("1,2,3,127-130,254-257,383,384,511-513,639,640")


@pytest.fixture(scope="module")
def packed(bf16_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A native prefill server and a giga-kernel decode server, both with packed FP8 caches."""
    ports = free_ports(4)
    prefill, decode = (
        server_settings(bf16_checkpoint, kind, (ports[i], ports[i + 1]), kv_cache_dtype="fp8", packed_k=True)
        for kind, i in ((ServerKind.PREFILL, 0), (ServerKind.DECODE, 2))
    )
    with started_servers([prefill, decode], logs=tmp_path_factory.mktemp("packed"), env=QUIET) as servers:
        yield servers[0], servers[1]


def test_every_boundary_length_is_what_one_engine_answers(packed: tuple[Server, Server], bf16_checkpoint: Path) -> None:
    """The producer writes K in pairs, the kernel reads it so, and the last prompt token's row joins its neighbour's.

    Sums in another order now and then round a K or V to the next of FP8's values. One engine that computes a prompt in
    other chunks is up to 2.4e-2 from itself so, with few prompts of a length; a lost block shows with every prompt.
    """
    prefill, decode = packed
    targets = Targets(prefill=prefill.url, decode=decode.url, single=prefill.url, model=str(bf16_checkpoint))
    report = sweep(targets, SweepSettings(lengths=LENGTHS, workers=2, tolerance=1e-3, confirm=4))
    assert report.as_json()["errors"] == {}
    assert all(result.tokens_equal for result in report.results)
    assert report.differing_lengths == ()
    assert report.connector == "gk"
    assert [r.length for r in report.results if not r.transferred] == [1]


def test_what_the_kernel_writes_alone_is_what_prefill_writes(
    packed: tuple[Server, Server], bf16_checkpoint: Path
) -> None:
    """A prompt without a hand-off, replayed token by token: every pair is written one half after the other."""
    wanted, replayed = (
        post_json(
            f"{server.url}/v1/completions",
            {**completion_body(str(bf16_checkpoint), make_prompt(200, seed=4), max_tokens=12), "cache_salt": "alone"},
        )
        for server in packed
    )
    assert tokens_of(replayed) == tokens_of(wanted)
    assert len(tokens_of(wanted)) == 12
