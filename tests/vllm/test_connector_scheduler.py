"""The connector's scheduler half on vLLM's own requests and KV-cache manager: one token short on both sides."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gk_adapters.vllm.connector_scheduler import GkSchedulerHalf
from gk_adapters.vllm.connector_settings import ConnectorSettings, connector_settings
from gk_adapters.vllm.engine_facts import EngineFacts
from gk_adapters.vllm.settings import GkSettings, MissingKVPolicy
from gk_adapters.vllm.transfer_orders import TransferOrders
from gk_core.disaggregation import TRUNCATION_MARKER, Role, needed_blocks
from gk_core.errors import RequestError
from gk_core.hand_off import parse_kv_transfer_params
from gk_core.integrity import offer_digest
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from gk_core.metrics import RECOMPUTED_TOKENS, REQUESTS_REFUSED
from gk_core.model_geometry import GPT_OSS_20B, AttentionKind
from gk_core.ports import Endpoint

pytestmark = pytest.mark.vllm

KINDS = (AttentionKind.SLIDING, AttentionKind.FULL)


def make_facts(role: Role, *, policy: MissingKVPolicy = MissingKVPolicy.REPLAY, gk: bool = False) -> EngineFacts:
    return EngineFacts(
        directory=Path("."), geometry=GPT_OSS_20B, settings=GkSettings(gk_decode=gk, missing_kv=policy), role=role,
        block_size=128, kv_dtype=KVDtype.FP8_E4M3FN, k_byte_order=KByteOrder.TOKEN_MAJOR, tp_size=1, dcp_size=1,
    )  # fmt: skip


def make_half(role: Role, *, recompute: bool = True, **facts: Any) -> GkSchedulerHalf:
    return GkSchedulerHalf(
        facts=make_facts(role, **facts), settings=ConnectorSettings(),
        engine_id="P1" if role is Role.PREFILL else "D1",
        endpoint=Endpoint(host="10.0.0.1", port=5600), group_kinds=KINDS, recompute=recompute,
    )  # fmt: skip


@functools.cache
def block_hasher() -> Any:
    """As an engine with blocks of 128 tokens has it; its seed is drawn once."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(128, sha256)


def make_request(tokens: list[int], params: Any, *, request_id: str = "r1", max_tokens: int = 16) -> Any:
    """A real vLLM request, with block hashes as the engine makes them."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params}),
        pooling_params=None,
        block_hasher=block_hasher(),
    )


def make_manager(num_blocks: int = 200, *, caching: bool = True) -> Any:
    """vLLM's KV-cache manager over two groups of one block size."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape: dict[str, Any] = {"block_size": 128, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(["layers.0"], SlidingWindowSpec(**shape, sliding_window=128)),
            KVCacheGroupSpec(["layers.1"], FullAttentionSpec(**shape)),
        ],
    )
    return KVCacheManager(
        config, max_model_len=4096, scheduler_block_size=128, hash_block_size=128, enable_caching=caching
    )


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilled(
    half: GkSchedulerHalf, tokens: list[int], manager: Any, *, request_id: str = "p"
) -> dict[str, Any] | None:
    """Run a prefill request through half and manager to its end; what the client gets."""
    from vllm.v1.request import RequestStatus

    request = make_request(tokens, dict(PREFILL), request_id=request_id)
    half.on_new_request(request)
    computed, hit, *_ = manager.get_computed_blocks(request)
    count, wait = half.get_num_new_matched_tokens(request, hit)
    assert (count, wait) == (0, False)
    new = request.num_tokens - hit
    assert new >= 1, "a prefill without a token to run ends the engine"
    manager.allocate_slots(request, new, num_new_computed_tokens=hit, new_computed_blocks=computed)
    half.update_state_after_alloc(request, manager.get_blocks(request_id), 0)
    request.num_computed_tokens = request.num_tokens
    request.append_output_token_ids([7])
    manager.remove_skipped_blocks(request_id, request.num_computed_tokens)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    kept, params = half.request_finished(request, manager.get_block_ids(request_id))
    assert kept is (params is not None)
    return params


@pytest.mark.parametrize("length", [2, 127, 128, 129, 130, 254, 255, 256, 257, 383, 384, 511, 512, 640])
def test_a_producer_offers_what_the_last_tokens_query_reads(length: int) -> None:
    """N - 1 tokens, the blocks of `needed_blocks` by logical position, and no null block among them."""
    params = prefilled(make_half(Role.PREFILL), list(range(length)), make_manager())
    hand_off = parse_kv_transfer_params(params)
    needed = needed_blocks(length, 128, 128)
    assert hand_off.num_tokens == length - 1
    assert [(g.kind, g.first_logical, len(g.block_ids)) for g in hand_off.groups] == [
        (AttentionKind.SLIDING, needed.sliding.start, len(needed.sliding)),
        (AttentionKind.FULL, 0, len(needed.full)),
    ]
    assert all(b > 0 for g in hand_off.groups for b in g.block_ids)
    assert (hand_off.engine_id, hand_off.host, hand_off.port, hand_off.block_size) == ("P1", "10.0.0.1", 5600, 128)


def test_255_tokens_offer_both_sliding_blocks() -> None:
    """The block that the stock rule loses."""
    params = prefilled(make_half(Role.PREFILL), list(range(255)), make_manager())
    assert params is not None
    assert params["remote_first_blocks"] == [0, 0]
    assert [len(ids) for ids in params["remote_block_ids"]] == [2, 2]


@pytest.mark.parametrize("length", [128, 129, 130, 257, 385])
def test_the_same_prompt_twice_leaves_a_token_to_run(length: int) -> None:
    """With the prefix cache on, N - 1 = a whole number of blocks included; what is offered stays right."""
    half, manager = make_half(Role.PREFILL), make_manager()
    first = parse_kv_transfer_params(prefilled(half, list(range(length)), manager, request_id="p1"))
    again = parse_kv_transfer_params(prefilled(half, list(range(length)), manager, request_id="p2"))
    assert again.num_tokens == first.num_tokens == length - 1
    assert again.generation == first.generation + 1
    assert [g.first_logical for g in again.groups] == [g.first_logical for g in first.groups]


def test_cutting_cuts_the_hashes_too() -> None:
    """128 tokens have one full block, 127 none: a hash that stayed would name a token that is not there."""
    half = make_half(Role.PREFILL)
    request = make_request(list(range(128)), dict(PREFILL))
    assert len(request.block_hashes) == 1
    half.on_new_request(request)
    assert (request.num_prompt_tokens, request.num_tokens, len(request.block_hashes)) == (127, 127, 0)
    assert (request.max_tokens, request.kv_transfer_params[TRUNCATION_MARKER]) == (1, True)
    request.append_output_token_ids([500])
    other = make_request([*range(127), 500], None)
    assert request.block_hashes == other.block_hashes


def test_a_request_that_comes_again_is_not_cut_twice() -> None:
    """The marker travels in its parameters."""
    half = make_half(Role.PREFILL)
    request = make_request(list(range(200)), dict(PREFILL))
    half.on_new_request(request)
    half.on_new_request(request)
    assert request.num_prompt_tokens == 199


def test_one_token_is_neither_cut_nor_offered() -> None:
    """There is nothing to move."""
    assert prefilled(make_half(Role.PREFILL), [5], make_manager()) is None


def test_a_prefill_that_was_aborted_offers_nothing() -> None:
    """Its blocks are freed at once."""
    from vllm.v1.request import RequestStatus

    half = make_half(Role.PREFILL)
    request = make_request(list(range(200)), dict(PREFILL))
    half.on_new_request(request)
    request.num_computed_tokens = 128
    request.status = RequestStatus.FINISHED_ABORTED
    assert half.request_finished(request, ([1], [2])) == (False, None)
    assert half.build_orders().leases == ()


def test_a_missing_block_is_not_offered() -> None:
    """A null where the window still reads: nothing is better than something wrong."""
    from vllm.v1.request import RequestStatus

    half = make_half(Role.PREFILL)
    request = make_request(list(range(255)), dict(PREFILL))
    half.on_new_request(request)
    request.num_computed_tokens = 254
    request.status = RequestStatus.FINISHED_STOPPED
    assert half.request_finished(request, ([0, 4], [5, 6])) == (False, None)


def test_an_engine_keeps_to_its_role_whatever_a_client_asks() -> None:
    """A producer pulls nothing, a consumer shortens and offers nothing."""
    from vllm.v1.request import RequestStatus

    producer = make_half(Role.PREFILL)
    request = make_request(list(range(200)), offered_params(200), request_id="p")
    producer.on_new_request(request)
    assert producer.get_num_new_matched_tokens(request, 0) == (0, False)
    assert producer.build_orders() == TransferOrders()
    consumer, manager = make_half(Role.DECODE), make_manager()
    request = make_request(list(range(200)), dict(PREFILL), request_id="d")
    consumer.on_new_request(request)
    assert request.num_prompt_tokens == 200
    manager.allocate_slots(request, 200)
    request.num_computed_tokens, request.status = 200, RequestStatus.FINISHED_LENGTH_CAPPED
    assert consumer.request_finished(request, manager.get_block_ids("d")) == (False, None)
    assert consumer.build_orders() == TransferOrders()


def test_an_ordinary_request_is_left_alone() -> None:
    """No parameters, or parameters of another kind."""
    half = make_half(Role.PREFILL)
    for params in (None, {}, {"do_remote_decode": False}):
        request = make_request(list(range(200)), params)
        half.on_new_request(request)
        assert request.num_prompt_tokens == 200


def offered_params(length: int) -> dict[str, Any]:
    params = prefilled(make_half(Role.PREFILL), list(range(length)), make_manager())
    assert params is not None
    return params


@pytest.mark.parametrize("length", [2, 128, 129, 255, 256, 257, 383])
def test_a_consumer_pulls_all_but_the_last_token(length: int) -> None:
    """And gives vLLM's own tables on by logical position, nulls and all."""
    half, manager = make_half(Role.DECODE), make_manager()
    request = make_request(list(range(length)), offered_params(length), request_id="d")
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (length - 1, True)
    manager.allocate_slots(request, 0, num_external_computed_tokens=length - 1, delay_cache_blocks=True)
    half.update_state_after_alloc(request, manager.get_blocks("d"), length - 1)
    (order,) = half.build_orders().pulls
    assert (order.num_tokens, order.num_cached_tokens) == (length - 1, 0)
    assert [g.block_ids for g in order.local] == [tuple(ids) for ids in manager.get_block_ids("d")]
    needed = needed_blocks(length, 128, 128)
    for group, wanted in zip(order.local, (needed.sliding, needed.full), strict=True):
        assert 0 not in group.block_ids[wanted.start : wanted.stop]
    assert order.offered.digest == offer_digest(range(length - 1), order.offered.hand_off.groups)
    assert half.build_orders().pulls == ()
    assert half.get_num_new_matched_tokens(request, 0) == (0, False), "an offer is good once"


def test_a_local_hit_shortens_the_pull_and_never_takes_the_last_token() -> None:
    """256 of 257 tokens are cached: nothing is pulled, the producer is told, one token is left to run."""
    half, manager = make_half(Role.DECODE), make_manager()
    request = make_request(list(range(257)), offered_params(257), request_id="d")
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 128) == (128, True)
    assert half.get_num_new_matched_tokens(request, 256) == (0, False)
    half.update_state_after_alloc(request, manager.get_blocks("d"), 0)
    orders = half.build_orders()
    assert (len(orders.declined), orders.pulls) == (1, ())
    assert half.stays_awake()


def test_parameters_that_are_none_are_computed_here_or_refused() -> None:
    """As kv_load_failure_policy says; the request is not scheduled once it is refused."""
    params = {**offered_params(200), "remote_port": "abc"}
    lenient, strict = make_half(Role.DECODE), make_half(Role.DECODE, recompute=False)
    for half in (lenient, strict):
        half.on_new_request(make_request(list(range(200)), params, request_id="d"))
    request = make_request(list(range(200)), params, request_id="d")
    assert lenient.get_num_new_matched_tokens(request, 0) == (0, False)
    assert lenient.take_refused() == {}
    assert strict.get_num_new_matched_tokens(request, 0) == (None, False)
    assert "remote_port must be an int" in strict.take_refused()["d"]
    request.status = finished_error()
    strict.request_finished(request, ([], []))
    assert strict.take_refused() == {}


def finished_error() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ERROR


def test_missing_kv_is_refused_where_the_engine_says_so() -> None:
    """A giga-kernel engine with gk_missing_kv refuse: a prompt without hand-off, and a short offer."""
    half = make_half(Role.DECODE, gk=True, policy=MissingKVPolicy.REFUSE)
    plain = make_request(list(range(200)), None, request_id="plain")
    half.on_new_request(plain)
    assert half.get_num_new_matched_tokens(plain, 128) == (None, False)
    assert half.get_num_new_matched_tokens(plain, 128) == (None, False)
    assert "KV of 71 tokens is missing" in half.take_refused()["plain"]
    stats = half.take_stats()
    assert stats is not None
    assert stats.data["counts"] == {REQUESTS_REFUSED: 1}
    whole = make_request(list(range(200)), offered_params(200), request_id="whole")
    half.on_new_request(whole)
    assert half.get_num_new_matched_tokens(whole, 0) == (199, True)
    one = make_request([5], None, request_id="one")
    assert half.get_num_new_matched_tokens(one, 0) == (0, False)


def test_replayed_tokens_are_counted() -> None:
    """All but the last of a prompt without hand-off; not those that were cached."""
    half, manager = make_half(Role.DECODE, gk=True), make_manager()
    request = make_request(list(range(200)), None, request_id="d")
    half.on_new_request(request)
    half.get_num_new_matched_tokens(request, 128)
    half.update_state_after_alloc(request, manager.get_blocks("d"), 0)
    stats = half.take_stats()
    assert stats is not None
    assert stats.data["counts"] == {RECOMPUTED_TOKENS: 71}


def test_an_abort_declines_what_waits_and_aborts_what_is_pulled() -> None:
    """And a pull that was reported is neither."""
    from vllm.v1.request import RequestStatus

    half, manager = make_half(Role.DECODE), make_manager()
    waiting = make_request(list(range(200)), offered_params(200), request_id="waiting")
    pulling = make_request(list(range(200)), offered_params(200), request_id="pulling")
    done = make_request(list(range(200)), offered_params(200), request_id="done")
    for request in (waiting, pulling, done):
        half.on_new_request(request)
    for request in (pulling, done):
        half.get_num_new_matched_tokens(request, 0)
        manager.allocate_slots(request, 0, num_external_computed_tokens=199, delay_cache_blocks=True)
        half.update_state_after_alloc(request, manager.get_blocks(request.request_id), 199)
    half.update_connector_output(SimpleNamespace(finished_recving={"done"}))
    half.build_orders()
    for request in (waiting, pulling, done):
        request.status = RequestStatus.FINISHED_ABORTED
        assert half.request_finished(request, ([1], [2])) == (False, None)
    orders = half.build_orders()
    assert [o.request_id for o in orders.declined] == ["waiting"]
    assert orders.aborted == ("pulling",)


def test_pull_ids_of_two_engines_and_two_requests_differ() -> None:
    """A restarted engine under the same name must not be taken for the first."""
    ids = set()
    for half in (make_half(Role.DECODE), make_half(Role.DECODE)):
        for name in ("a", "b"):
            half.on_new_request(make_request(list(range(200)), offered_params(200), request_id=name))
        ids |= {o.pull_id for o in half.build_orders().waiting}
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kv_lease_duration": 0}, "kv_lease_duration must be seconds"),
        ({"kv_lease_duration": "30"}, "kv_lease_duration must be seconds"),
        ({"kv_lease_duration": True}, "kv_lease_duration must be seconds"),
        ({"kv_lease_duration": 900, "gk_max_lease_seconds": 600}, "at least kv_lease_duration 900"),
        ({"gk_pull_deadline_seconds": float("nan")}, "gk_pull_deadline_seconds must be seconds"),
        ({"backends": "UCX"}, "backends must be a list of one"),
        ({"backends": ["UCX", "GDS"]}, "backends must be a list of one"),
        ({"gk_progress_thread": 1}, "gk_progress_thread must be true or false"),
        ({"gk_allowed_producers": "host:1"}, "must be a list of"),
        ({"gk_allowed_producers": ["host"]}, "must be a list of"),
        ({"gk_allowed_producers": ["host:0"]}, "must be a list of"),
        ({"gk_weights_id": 7}, "gk_weights_id must be a string"),
    ],
)
def test_wrong_connector_settings_are_refused_by_key(extra: dict[str, Any], said: str) -> None:
    """With what it must be and what it was."""
    with pytest.raises(RequestError, match=said):
        connector_settings(SimpleNamespace(kv_connector_extra_config=extra))


def test_connector_settings_are_read() -> None:
    """Defaults, and each key."""
    assert connector_settings(SimpleNamespace(kv_connector_extra_config={})) == ConnectorSettings()
    extra = {
        "kv_lease_duration": 12,
        "gk_max_lease_seconds": 700,
        "gk_pull_deadline_seconds": 5.5,
        "backends": ["LIBFABRIC"],
        "gk_progress_thread": True,
        "gk_allowed_producers": ["h1:5600", "[::1]:5601"],
        "gk_weights_id": "w",
    }
    read = connector_settings(SimpleNamespace(kv_connector_extra_config=extra))
    assert read == ConnectorSettings(
        lease_seconds=12.0, max_lease_seconds=700.0, pull_deadline_seconds=5.5, backend="LIBFABRIC",
        progress_thread=True, weights_id="w",
        allowed_producers=frozenset({Endpoint(host="h1", port=5600), Endpoint(host="::1", port=5601)}),
    )  # fmt: skip
    assert read.pull_settings(max_attempts=4).claim_interval_seconds == 2.0
