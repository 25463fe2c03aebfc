"""gk's connector over vLLM's own cache: stock producers' offers, pairs by position, real servers of both kinds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from gk_adapters.random_checkpoint import write_random_checkpoint
from gk_adapters.vllm.boundary_sweep import SweepReport, SweepSettings, Targets, lengths_with_neighbours, sweep
from gk_adapters.vllm.served import free_ports, started_servers
from gk_adapters.vllm.server_command import Connector, ServerKind, ServerSettings
from gk_adapters.vllm.stock_offer import StockOffer, is_notice, pair_blocks, parse_stock_offer
from gk_core.disaggregation import stock_rule_loses_a_block
from gk_core.errors import RequestError
from tests.vllm.deployment import QUIET

pytestmark = pytest.mark.vllm

SIZES, WINDOWS = (128, 128), (128, None)


def params(**changed: Any) -> dict[str, Any]:
    """What vLLM 0.28 hands out for 255 tokens: the last two sliding blocks, the first of them given up."""
    return {
        "remote_engine_id": "P", "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600,
        "tp_size": 1, "remote_num_tokens": 255, "remote_block_ids": [[0, 4], [5, 6]], **changed,
    }  # fmt: skip


def test_a_stock_list_ends_with_what_was_computed() -> None:
    """640 tokens are five blocks: two sliding ids begin at logical block 3, five full ones at 0."""
    offer = parse_stock_offer(params(remote_num_tokens=640, remote_block_ids=[[7, 8], [1, 2, 3, 4, 5]]), SIZES)
    assert (offer.num_tokens, offer.firsts) == (640, (3, 0))


def test_a_producer_of_ours_says_where_its_lists_begin() -> None:
    """And is believed."""
    assert parse_stock_offer(params(remote_first_blocks=[1, 0]), SIZES).firsts == (1, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_engine_id": None}, {"remote_host": 5}, {"remote_request_id": ""}, {"remote_port": "abc"},
        {"remote_port": True}, {"remote_port": 0}, {"tp_size": -1}, {"remote_num_tokens": 2**40},
        {"remote_block_ids": None}, {"remote_block_ids": [[1]]}, {"remote_block_ids": [[1], "2"]},
        {"remote_block_ids": [[1], [True]]}, {"remote_block_ids": [[-1], [2]]}, {"remote_block_ids": [[2**40], [2]]},
        {"remote_first_blocks": [0]}, {"remote_first_blocks": [0, -1]}, {"remote_first_blocks": [0, "1"]},
        {"remote_blocks_expiry_time": "late"}, {"remote_blocks_expiry_time": float("inf")},
    ],
)  # fmt: skip
def test_parameters_that_are_none_are_refused(changed: dict[str, Any]) -> None:
    """Types, ranges and counts, before a block is paired."""
    with pytest.raises(RequestError):
        parse_stock_offer(params(**changed), SIZES)


def test_a_list_of_more_blocks_than_the_tokens_have_is_refused() -> None:
    """Three full blocks for 255 tokens: the producer has begun the next, and its sliding list is one block later."""
    with pytest.raises(RequestError, match=r"lists \[2, 3\] blocks, 255 tokens have \[2, 2\]"):
        parse_stock_offer(params(remote_block_ids=[[4, 9], [5, 6, 7]]), SIZES)


def test_the_block_that_a_stock_producer_gave_up_is_noticed() -> None:
    """254 tokens of 255 are pulled; the query at 254 reads sliding block 0, which is null over there."""
    with pytest.raises(RequestError, match=r"logical blocks 0\.\.1 of group 0"):
        pair_blocks(
            parse_stock_offer(params(), SIZES), [[21, 22], [31, 32]], num_tokens=254, num_cached_tokens=0,
            block_sizes=SIZES, windows=WINDOWS,
        )  # fmt: skip


def test_blocks_pair_by_position_and_not_from_an_end() -> None:
    """255 tokens, 128 of them cached: one block of each group, whatever else either side lists."""
    offer = StockOffer(num_tokens=256, groups=((3, 4), (5, 6)), firsts=(0, 0))
    ours, theirs = pair_blocks(
        offer, [[0, 22, 23], [31, 32, 33]], num_tokens=255, num_cached_tokens=128, block_sizes=SIZES, windows=WINDOWS
    )
    assert (ours, theirs) == (((22,), (32,)), ((4,), (6,)))


def test_a_hit_of_everything_reads_nothing() -> None:
    """No pair in any group, where counting from the end would take the whole list."""
    offer = StockOffer(num_tokens=256, groups=((4,), (5, 6)), firsts=(1, 0))
    ours, theirs = pair_blocks(
        offer, [[0, 22, 23], [31, 32, 33]], num_tokens=256, num_cached_tokens=256, block_sizes=SIZES, windows=WINDOWS
    )
    assert (ours, theirs) == (((), ()), ((), ()))


def test_more_tokens_than_are_on_offer_are_refused() -> None:
    """A short offer is no offer for the rest."""
    with pytest.raises(RequestError, match="256 tokens are wanted, 255 are on offer"):
        pair_blocks(
            parse_stock_offer(params(), SIZES), [[], []], num_tokens=256, num_cached_tokens=0, block_sizes=SIZES,
            windows=WINDOWS,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("notice", "known"),
    [(b"HB:a,b", True), (b"a:b:2", True), (b"a:0", False), (b"a:x", False), (b":1", False), (b"\xff:1", False)],
)
def test_only_notices_that_vllm_can_read_reach_it(notice: bytes, known: bool) -> None:
    """The others would end the engine."""
    assert is_notice(notice, 1) is known


def test_a_notice_of_readers_that_do_not_divide_the_ranks_does_not_reach_vllm() -> None:
    """Three readers of two ranks, or a number beyond every deployment."""
    assert [is_notice(n, 2) for n in (b"r:1", b"r:2", b"r:4", b"r:3", b"r:10000")] == [True, True, True, False, False]


RULE = tuple(n for n in range(1, 641) if stock_rule_loses_a_block(n, 128, 128))
LENGTHS = (1, 2, 3, 126, 127, 128, 129, *lengths_with_neighbours(RULE))


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, in whose log-probabilities every lost block shows."""
    directory = tmp_path_factory.mktemp("random") / "model"
    write_random_checkpoint(directory)
    return directory


def swept(
    checkpoint: Path, logs: Path, prefill: ServerSettings, decode: ServerSettings
) -> tuple[SweepReport, int, list[int]]:
    """The rule's lengths and their neighbours through two servers; the prefill server is the single engine too.

    Returns:
        The report, how many transfers the decode server counted, and how many tokens were wanted where it read nothing.
    """
    with started_servers([prefill, decode], logs=logs, env=QUIET) as servers:
        targets = Targets(prefill=servers[0].url, decode=servers[1].url, single=servers[0].url, model=str(checkpoint))
        report = sweep(targets, SweepSettings(lengths=LENGTHS, tolerance=1e-3, confirm=4))
        counted = re.findall(r"^vllm:nixl_xfer_time_seconds_count\S* (\S+)$", servers[1].text("/metrics"), re.MULTILINE)
        not_read = re.findall(
            r"gk: the KV of the first (\d+) tokens of request \S+ is not read", servers[1].log.read_text()
        )
        return report, int(sum(map(float, counted))), sorted(map(int, not_read))


def prompts_of(report: SweepReport) -> int:
    """Prompts that were sent: one per length, and four more where it differed."""
    return len(LENGTHS) + 4 * len(report.differing_lengths + report.rounding_lengths)


def both(checkpoint: Path, producer: Connector, consumer: Connector) -> tuple[ServerSettings, ServerSettings]:
    """Two native bfloat16 servers over vLLM's own cache: its CPU attention has no float32 with sinks."""
    ports = free_ports(4)
    cores = sorted(os.sched_getaffinity(0))
    base = ServerSettings(
        kind=ServerKind.PREFILL, model=str(checkpoint), port=ports[0], side_channel_port=ports[1], dtype="bfloat16",
        max_model_len=700, max_num_seqs=8, cpu_cache_gib=1, cpu_cores=str(cores[0]), prefix_caching=False,
        gk_attention=False, gk_decode=False, connector=producer, extra=("--skip-tokenizer-init",),
    )  # fmt: skip
    decode = evolve(
        base, kind=ServerKind.DECODE, port=ports[2], side_channel_port=ports[3], cpu_cores=str(cores[-1]),
        connector=consumer,
    )  # fmt: skip
    return base, decode


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.nixl
def test_the_stock_connector_is_wrong_only_at_the_rules_lengths(random_checkpoint: Path, tmp_path: Path) -> None:
    """Its neighbours are exact: the same sums in the same order. How far off is a matter of model and prompt."""
    report, transfers, _ = swept(
        random_checkpoint, tmp_path, *both(random_checkpoint, Connector.STOCK, Connector.STOCK)
    )
    assert transfers == prompts_of(report)
    assert report.as_json()["errors"] == {}
    assert report.connector == "stock"
    assert report.differing_lengths == RULE
    assert report.max_logprob_difference > 1e-2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.nixl
@pytest.mark.parametrize("producer", [Connector.GK, Connector.STOCK])
def test_our_connector_is_exact_over_vllms_own_cache(
    random_checkpoint: Path, tmp_path: Path, producer: Connector
) -> None:
    """Also behind a stock producer, whose lost blocks are noticed and computed here."""
    report, transfers, not_read = swept(random_checkpoint, tmp_path, *both(random_checkpoint, producer, Connector.GK))
    assert report.as_json()["errors"] == {}
    assert report.differing_lengths == ()
    given_up = [n - 1 for n in RULE] if producer is Connector.STOCK else []
    assert sorted(set(not_read)) == given_up
    assert transfers == prompts_of(report) - len(not_read)
