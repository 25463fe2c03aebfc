"""Two real vLLM servers and the proxy: exact at every boundary, and unharmed by what clients, peers and chance do."""

from __future__ import annotations

import contextlib
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq
from click.testing import CliRunner

from gk_adapters.cli.plan import plan
from gk_adapters.vllm.boundary_sweep import SweepSettings, parse_lengths, sweep
from gk_adapters.vllm.served import post_json
from gk_core.errors import TransferError
from tests.vllm.conftest import SHIPPED
from tests.vllm.deployment import DECODE_BLOCKS, MAX_BATCHED, MAX_LEN, Deployment, eventually, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.nixl]

BOUNDARIES = parse_lengths("1,2,127-130,254-258,382-386,511-513,639,640")


def make_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 7919 + length)
    return [rng.randrange(3, 500) for _ in range(length)]


def test_every_boundary_length_is_what_one_engine_answers(deployment: Deployment) -> None:
    """Tokens equal, log-probabilities within 1e-4 in float32; every offer was one of ours and was used."""
    before = deployment.metric(deployment.decode, "gk_pulls_done_total")
    report = sweep(deployment.targets, SweepSettings(lengths=BOUNDARIES, workers=4))
    assert report.as_json()["errors"] == {}
    assert report.differing_lengths == ()
    assert report.max_logprob_difference < 1e-4
    assert report.connector == "gk"
    assert [r.length for r in report.results if not r.transferred] == [1]
    assert deployment.metric(deployment.decode, "gk_pulls_done_total") - before == len(BOUNDARIES) - 1


def test_prompts_that_begin_alike_and_come_twice_are_exact(deployment: Deployment) -> None:
    """Prefix caches on both sides hit at every boundary; a hit of all but the last token leaves one to run."""
    settings = SweepSettings(lengths=BOUNDARIES, shared_prefix=True, repeats=2, workers=3, seed=5)
    report = sweep(deployment.targets, settings)
    assert report.as_json()["errors"] == {}
    assert report.differing_lengths == ()
    assert deployment.metric(deployment.prefill, "vllm:prefix_cache_hits_total") > 0
    assert deployment.metric(deployment.decode, "vllm:prefix_cache_hits_total") > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_length_up_to_700_is_exact(deployment: Deployment) -> None:
    """The whole sweep."""
    report = sweep(deployment.targets, SweepSettings(lengths=parse_lengths("1-700"), num_tokens=4, workers=4))
    assert report.as_json()["errors"] == {}
    assert report.differing_lengths == ()


def test_vllms_own_log_says_what_gk_plan_predicts(deployment: Deployment) -> None:
    """1 GiB on the prefill server and 48 blocks on the decode server, counted by vLLM and by `gk plan`.

    Literal: two groups share 4096 blocks, of which a request of 1,024 tokens takes 8 full and 6 sliding ones.
    """
    shape = ["--block-size", "128", "--kv-dtype", "fp32", "--max-model-len", str(MAX_LEN)]
    shape += ["--max-num-batched-tokens", str(MAX_BATCHED), "--model", str(SHIPPED), "--json"]
    for server, size, blocks, requests, tokens in (
        (deployment.prefill, ["--kv-memory-bytes", str(2**30)], 4096, 292.57, 299_593),
        (deployment.decode, ["--num-blocks", str(DECODE_BLOCKS)], 48, 3.43, 3_510),
    ):
        told = json.loads(CliRunner().invoke(plan, [*size, *shape]).output)
        assert (told["num_groups"], told["group_buffers"]) == (2, 2)
        assert (told["num_blocks"], told["max_requests"], told["token_capacity"]) == (blocks, requests, tokens)
        log = server.log.read_text()
        said = re.search(
            r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", log
        )
        assert said is not None
        assert said.groups() == (f"{tokens:,}", f"{MAX_LEN:,}", f"{requests:.2f}")
        assert f'num_gpu_blocks="{blocks}"' in server.text("/metrics")
        assert f"gk: registered 4 regions of {blocks} blocks, 65536 bytes each: K and V of 2 group buffers" in log


def test_native_and_giga_kernel_decode_agree_under_preemption(deployment: Deployment) -> None:
    """40 prompts at once without hand-off, half of them alike, on 48 blocks: replayed, preempted, and all equal."""
    assert_agreement(deployment, 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_native_and_giga_kernel_decode_agree_on_200_requests(deployment: Deployment) -> None:
    """The same with 200."""
    assert_agreement(deployment, 200)


def test_a_prompt_that_comes_twice_in_one_step_is_right_both_times(deployment: Deployment) -> None:
    """The second finds the first's blocks in the prefix cache before anything has been written to them.

    Both come while the engine is busy with another prompt, so that the next step begins them together.
    """
    for seed in range(30, 36):
        prompts = [make_prompt(200, seed=seed + 100), *[make_prompt(255, seed=seed)] * 2]
        wanted = [deployment.alone(prompt) for prompt in prompts]
        asked = {**deployment.body(prompts[0]), "prompt": prompts}
        answer = post_json(f"{deployment.decode.url}/v1/completions", asked)
        assert [choice["token_ids"] for choice in answer["choices"]] == wanted


def assert_agreement(deployment: Deployment, count: int) -> None:
    """Both servers' tokens for the same prompts; the decode server must have preempted some."""
    rng = random.Random(count)
    prompts = [
        make_prompt(n, seed=1 if i % 2 else i)
        for i, n in enumerate(rng.choice([3, 20, 100, 127, 128, 129, 200, 255, 256, 300]) for _ in range(count))
    ]
    before = deployment.metric(deployment.decode, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(16) as threads:
        alone = threads.map(lambda p: deployment.alone(p, max_tokens=40), prompts)
        replayed = threads.map(lambda p: deployment.decoded(p, None, max_tokens=40), prompts)
        assert list(alone) == list(replayed)
    assert deployment.metric(deployment.decode, "vllm:num_preemptions_total") > before
    assert deployment.metric(deployment.decode, "gk_recomputed_tokens_total") > 0
    deployment.wait_until_idle()


def test_a_hand_off_is_good_once(deployment: Deployment) -> None:
    """The second request with the same parameters computes its prompt itself, and is right."""
    prompt = make_prompt(200, seed=2)
    params = deployment.offer(prompt)
    wanted = deployment.alone(prompt)
    failed = deployment.metric(deployment.decode, "gk_pulls_failed_total")
    assert deployment.decoded(prompt, params) == wanted
    # Another cached prefix would leave nothing to pull; so ask with a salt of its own.
    asked = {**deployment.body(prompt), "kv_transfer_params": params, "cache_salt": "second"}
    assert tokens_of(post_json(f"{deployment.decode.url}/v1/completions", asked)) == wanted
    assert deployment.metric(deployment.decode, "gk_pulls_failed_total") == failed + 1


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[1], [2]]},
        {"remote_block_ids": "all of them"},
        {"remote_block_ids": [[10**9, 3], [4, 5]]},
        {"remote_first_blocks": [1, 0]},
        {"remote_generation": 1},
        {"remote_engine_id": "somebody else"},
        {"remote_engine_id": None},
        {"remote_request_id": "another request"},
        {"remote_port": "abc"},
        {"remote_port": 9},
        {"remote_num_tokens": 10**12},
        {"remote_num_tokens": 100},
        {"remote_group_kinds": ["full_attention", "sliding_attention"]},
        {"tp_size": 4},
        {"remote_block_size": 64},
    ],
    ids=lambda change: f"{next(iter(change))}={str(next(iter(change.values())))[:18]}",
)
def test_parameters_that_a_client_changed_never_change_an_answer(
    deployment: Deployment, change: dict[str, Any]
) -> None:
    """Refused or not, the tokens are those of the prompt; and the next request is served as ever."""
    prompt = make_prompt(140, seed=3)
    wanted = deployment.alone(prompt, max_tokens=2)
    params = {**deployment.offer(prompt), **change}
    asked = {**deployment.body(prompt, max_tokens=2), "kv_transfer_params": params, "cache_salt": str(change)}
    assert tokens_of(post_json(f"{deployment.decode.url}/v1/completions", asked)) == wanted
    assert deployment.decoded(prompt, deployment.offer(prompt), max_tokens=2) == wanted


@pytest.mark.parametrize("asked_of", ["prefill", "decode"])
def test_a_server_that_is_asked_for_the_other_role_answers_as_ever(deployment: Deployment, asked_of: str) -> None:
    """A producer that is told to pull computes, a consumer that is told to offer decodes, and no block is kept."""
    prompt = make_prompt(145, seed=13)
    wanted = deployment.alone(prompt)
    if asked_of == "prefill":
        server, params = deployment.prefill, {**deployment.offer(prompt), "remote_engine_id": "nobody"}
    else:
        server, params = deployment.decode, {"do_remote_decode": True, "do_remote_prefill": False}
    asked = {**deployment.body(prompt), "kv_transfer_params": params, "cache_salt": "other role"}
    answer = post_json(f"{server.url}/v1/completions", asked)
    assert tokens_of(answer) == wanted
    assert answer.get("kv_transfer_params") is None
    assert deployment.decoded(prompt, deployment.offer(prompt)) == wanted


def test_another_prompt_with_somebodys_hand_off_gets_its_own_answer(deployment: Deployment) -> None:
    """The producer refuses a claim for tokens that it did not prefill."""
    mine, theirs = make_prompt(150, seed=4), make_prompt(150, seed=5)
    assert deployment.decoded(mine, deployment.offer(theirs)) == deployment.alone(mine)


def test_the_handshake_listener_survives_any_message(deployment: Deployment) -> None:
    """Empty frames, one byte, the wrong types, megabytes: after all of them a handshake is answered."""
    port = deployment.prefill.settings.side_channel_port
    bad = [
        [b""], [b"\x01"], [b"", b""], [b"", b"\xc1"], [b"", msgspec.msgpack.encode((b"get_meta_msg", "a", {}))],
        [b"", msgspec.msgpack.encode((b"other", 0, 0))], [b"", msgspec.msgpack.encode(7)], [b"", b"\x93" * 4000],
        [b"x" * 5_000_000], [b"", b"", b"", b""], [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0, 0))],
        [b"", msgspec.msgpack.encode((b"get_meta_msg", -(2**40), 2**40))],
    ]  # fmt: skip
    context = zmq.Context()
    try:
        for frames in bad:
            with contextlib.closing(context.socket(zmq.DEALER)) as socket:
                socket.setsockopt(zmq.LINGER, 200)
                socket.connect(f"tcp://127.0.0.1:{port}")
                socket.send_multipart(frames)
        with contextlib.closing(context.socket(zmq.REQ)) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            reply = msgspec.msgpack.decode(socket.recv_multipart()[0])
    finally:
        context.destroy(linger=0)
    assert reply["gk_hello"]


def test_a_lease_that_nobody_reads_is_given_back(deployment: Deployment) -> None:
    """The prefill server's pool is empty again once the lease of 20 seconds is over, and a late read is refused."""
    prompt = make_prompt(140, seed=6)
    wanted = deployment.alone(prompt)
    expired = deployment.metric(deployment.prefill, "gk_leases_expired_total")
    params = deployment.offer(prompt)
    eventually(lambda: deployment.metric(deployment.prefill, "gk_leases_expired_total") == expired + 1, 60)
    deployment.wait_until_idle()
    failed = deployment.metric(deployment.decode, "gk_pulls_failed_total")
    assert deployment.decoded(prompt, params) == wanted
    assert deployment.metric(deployment.decode, "gk_pulls_failed_total") == failed + 1


def test_a_killed_prefill_server_costs_only_what_was_in_flight(deployment: Deployment) -> None:
    """Every answer is right or an error, decode serves on, the restarted server is found, no block leaks."""
    prompts = [make_prompt(n, seed=8) for n in (20, 130, 255, 300, 383, 400, 500, 600) * 4]
    wanted = {len(p): deployment.alone(p) for p in prompts}
    lonely = make_prompt(60, seed=8)
    wanted_alone = deployment.alone(lonely)

    def through_the_proxy(prompt: list[int]) -> list[int] | None:
        try:
            return tokens_of(post_json(f"{deployment.proxy_url}/v1/completions", deployment.body(prompt)))
        except TransferError:
            return None

    done = deployment.metric(deployment.decode, "gk_pulls_done_total")
    with ThreadPoolExecutor(8) as threads:
        answers = [(len(p), threads.submit(through_the_proxy, p)) for p in prompts]
        eventually(lambda: deployment.metric(deployment.decode, "gk_pulls_done_total") >= done + 4, 120)
        deployment.prefill.stop(kill=True)
        got = [(n, a.result()) for n, a in answers]
    assert [n for n, tokens in got if tokens is not None and tokens != wanted[n]] == []
    assert sum(tokens is not None for _, tokens in got) >= 4
    assert any(tokens is None for _, tokens in got), "everything was answered before the server was killed"
    # Nothing of the dead server is needed for a prompt that comes without a hand-off.
    assert deployment.decoded(lonely, None) == wanted_alone
    deployment.restart_prefill()
    report = sweep(deployment.targets, SweepSettings(lengths=(2, 255, 256, 383, 640), workers=2, seed=9))
    assert report.as_json()["errors"] == {}
    assert report.differing_lengths == ()
    assert report.connector == "gk"
    deployment.wait_until_idle()
    granted = deployment.metric(deployment.prefill, "gk_leases_granted_total")
    assert granted == deployment.metric(deployment.prefill, "gk_leases_ended_total") >= 5
