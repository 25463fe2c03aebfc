"""Scheduler half of gk's connector: what is offered, what is pulled, and the one-token-short rule on both sides.

Strategy
    Producer. A prompt loses its last token when the request is added, before the prefix cache is asked: a cut after a
    hit could leave no token to run. Block hashes are cut with it. When the request finishes, exactly the blocks that
    the query at the next position reads are offered, with their logical positions, under a lease of a new generation.
    Consumer. A client's parameters are checked when the request is added. All but the last prompt token count as
    external; the pull is ordered for the blocks that vLLM then allocates, by logical position. Whatever goes wrong, the
    request is computed here, or ends in an error, as `kv_load_failure_policy` says; no other request notices.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gk_adapters.vllm.connector_settings import ConnectorSettings
from gk_adapters.vllm.engine_facts import EngineFacts
from gk_adapters.vllm.settings import MissingKVPolicy
from gk_adapters.vllm.stats import CollectedMetrics, GkConnectorStats
from gk_adapters.vllm.transfer_orders import LeaseOrder, Offered, PullOrder, TransferOrders
from gk_core.block_table import NULL_BLOCK_ID
from gk_core.disaggregation import (
    TRUNCATION_MARKER,
    Role,
    matched_tokens,
    needed_range,
    tokens_to_drop,
    transfer_tokens,
)
from gk_core.errors import RequestError
from gk_core.hand_off import HandOff, parse_kv_transfer_params, to_kv_transfer_params
from gk_core.integrity import offer_digest
from gk_core.metrics import RECOMPUTED_TOKENS, REQUESTS_REFUSED
from gk_core.model_geometry import AttentionKind
from gk_core.ports import Endpoint
from gk_core.transfer_plan import GroupBlocks

__all__ = ["GkSchedulerHalf", "shorten_prompt"]

_log = logging.getLogger("vllm.gk")
_STAY_AWAKE_SECONDS = 1.0
"""An engine without requests stops stepping; this long after a refused offer it steps on, to tell the producer."""


def shorten_prompt(request: Any, *, has_sliding_group: bool) -> None:
    """Take the last token off a new producer request, and its block hashes with it; once.

    Call it before anything is looked up for the request.
    """
    params = request.kv_transfer_params
    drop = tokens_to_drop(
        request.num_prompt_tokens,
        marked=bool(params.get(TRUNCATION_MARKER)),
        has_sliding_group=has_sliding_group,
        has_token_ids=request.prompt_token_ids is not None,
    )
    if not drop:
        return
    request.prompt_token_ids.pop()
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1
    # The token that this prompt gives is for a position that the decode side computes itself.
    request.max_tokens = 1
    request.block_hashes.clear()
    request.update_block_hashes()
    params[TRUNCATION_MARKER] = True


class GkSchedulerHalf:
    """One engine's scheduler half; the methods are those that vLLM's connector facade calls.

    Args:
        facts: of the engine.
        settings: of the connector.
        engine_id: of this start of the engine.
        endpoint: where hand-offs say that we listen.
        group_kinds: attention kind of each KV cache group, in vLLM's order.
        recompute: whether a request whose KV does not come is computed here; otherwise it ends in an error.
    """

    def __init__(
        self,
        *,
        facts: EngineFacts,
        settings: ConnectorSettings,
        engine_id: str,
        endpoint: Endpoint,
        group_kinds: tuple[AttentionKind, ...],
        recompute: bool,
    ) -> None:
        self._facts, self._settings = facts, settings
        self._engine_id, self._endpoint, self._kinds = engine_id, endpoint, group_kinds
        self._recompute = recompute
        self._refuse_missing = facts.settings.gk_decode and facts.settings.missing_kv is MissingKVPolicy.REFUSE
        self._metrics = CollectedMetrics()
        # A random start keeps the generations of two starts apart even under one engine id.
        self._next_generation = secrets.randbelow(2**61) + 1
        self._pull_prefix, self._pull_count = secrets.token_hex(6), 0
        self._offers: dict[str, Offered] = {}
        """Offers to requests that have no blocks yet."""
        self._pulling: set[str] = set()
        self._refused: dict[str, str] = {}
        self._hits: dict[str, int] = {}
        self._leases: list[LeaseOrder] = []
        self._waiting: list[Offered] = []
        self._pulls: list[PullOrder] = []
        self._declined: list[Offered] = []
        self._aborted: list[str] = []
        self._awake_until = 0.0

    # ---- requests coming in

    def on_new_request(self, request: Any) -> None:
        """A request was added; nothing was looked up for it yet."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping):
            return
        # A client may ask anything of any server. A producer that pulled would do so under vLLM's own scheduler, which
        # stops the engine when a pull fails; a consumer that offered would keep blocks that nobody was told of.
        if self._is_producer(request):
            shorten_prompt(request, has_sliding_group=AttentionKind.SLIDING in self._kinds)
        elif params.get("do_remote_prefill") and self._facts.role is Role.DECODE:
            self._take_offer(request)

    def _take_offer(self, request: Any) -> None:
        try:
            hand_off = parse_kv_transfer_params(request.kv_transfer_params)
            prompt = request.prompt_token_ids or ()
            digest = offer_digest(prompt[: hand_off.num_tokens], hand_off.groups)
        except RequestError as error:
            self._lost(request.request_id, f"its kv_transfer_params are refused: {error}")
            return
        self._pull_count += 1
        offered = Offered(
            request_id=request.request_id,
            hand_off=hand_off,
            pull_id=f"{self._pull_prefix}-{self._pull_count}",
            digest=digest,
        )
        self._offers[request.request_id] = offered
        self._waiting.append(offered)

    # ---- scheduling

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that come from the producer beyond the local hit, and whether they come while other work goes on.

        (None, False) for a request that is to end in an error: it is not scheduled any more.
        """
        request_id = request.request_id
        if request_id in self._refused:
            return None, False
        offered = self._offers.get(request_id)
        count = 0
        if offered is not None:
            count = matched_tokens(
                offered.hand_off.num_tokens - num_computed_tokens,
                num_computed_tokens=num_computed_tokens,
                prompt_len=request.num_prompt_tokens,
            )
        if self._refuse_missing and request.num_tokens - 1 > num_computed_tokens + count:
            missing = request.num_tokens - 1 - num_computed_tokens - count
            self._refused[request_id] = f"the KV of {missing} tokens is missing and gk_missing_kv is refuse"
            self._metrics.count(name=REQUESTS_REFUSED)
            return None, False
        self._hits[request_id] = num_computed_tokens
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given the request its blocks."""
        request_id = request.request_id
        hit = self._hits.pop(request_id, 0)
        offered = self._offers.pop(request_id, None)
        if num_external_tokens == 0 or offered is None:
            if offered is not None:
                self._decline(offered)
            missing = request.num_tokens - 1 - max(request.num_computed_tokens, hit)
            if missing > 0 and self._facts.role is Role.DECODE:
                self._metrics.count(name=RECOMPUTED_TOKENS, value=missing)
            return
        self._pulling.add(request_id)
        self._pulls.append(
            PullOrder(
                offered=offered,
                local=tuple(
                    GroupBlocks(kind=kind, first_logical=0, block_ids=tuple(ids))
                    for kind, ids in zip(self._kinds, blocks.get_block_ids(), strict=True)
                ),
                num_tokens=hit + num_external_tokens,
                num_cached_tokens=hit,
            )
        )

    def build_orders(self) -> TransferOrders:
        """Orders since the last step."""
        orders = TransferOrders(
            leases=tuple(self._leases),
            waiting=tuple(self._waiting),
            pulls=tuple(self._pulls),
            declined=tuple(self._declined),
            aborted=tuple(self._aborted),
        )
        for told in (self._leases, self._waiting, self._pulls, self._declined, self._aborted):
            told.clear()
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        """The worker half reports."""
        self._pulling.difference_update(connector_output.finished_recving or ())

    # ---- requests going out

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: whether its blocks are kept for a reader, and what the client is to pass on."""
        request_id = request.request_id
        self._hits.pop(request_id, None)
        self._refused.pop(request_id, None)
        offered = self._offers.pop(request_id, None)
        if offered is not None:
            self._decline(offered)
        if request_id in self._pulling:
            # Its blocks are freed when the worker says that nothing writes to them any more.
            self._aborted.append(request_id)
        if not self._is_producer(request) or not _ended_well(request):
            return False, None
        hand_off = self._offer(request, block_ids)
        if hand_off is None:
            return False, None
        return True, {**to_kv_transfer_params(hand_off), "transfer_mode": "pull"}

    def _offer(self, request: Any, block_ids: Sequence[Sequence[int]]) -> HandOff | None:
        """Lease the blocks that the reader needs; None where there is nothing to move or nothing right to offer."""
        num_tokens = request.num_computed_tokens
        marked = bool(request.kv_transfer_params.get(TRUNCATION_MARKER))
        if transfer_tokens(request.num_prompt_tokens + marked) == 0:
            return None
        groups = []
        for kind, ids in zip(self._kinds, block_ids, strict=True):
            window = self._facts.geometry.sliding_window if kind is AttentionKind.SLIDING else None
            needed = needed_range(num_tokens, window, self._facts.block_size)
            part = tuple(ids[needed.start : needed.stop])
            if len(part) != len(needed) or NULL_BLOCK_ID in part:
                _log.warning(
                    "gk: request %s is not offered: the %s group gave up a block of logical blocks %d..%d",
                    request.request_id, kind.value, needed.start, needed.stop - 1,
                )  # fmt: skip
                return None
            groups.append(GroupBlocks(kind=kind, first_logical=needed.start, block_ids=part))
        hand_off = HandOff(
            engine_id=self._engine_id,
            request_id=request.request_id,
            generation=self._next_generation,
            num_tokens=num_tokens,
            groups=tuple(groups),
            host=self._endpoint.host,
            port=self._endpoint.port,
            block_size=self._facts.block_size,
            tp_size=self._facts.tp_size,
            dcp_size=self._facts.dcp_size,
        )
        try:
            # What a reader would refuse is not offered: it would only wait for its lease to run out.
            parse_kv_transfer_params(to_kv_transfer_params(hand_off))
        except RequestError as error:
            _log.warning("gk: request %s is not offered: %s", request.request_id, error)
            return None
        self._next_generation += 1
        prompt = request.prompt_token_ids or ()
        self._leases.append(
            LeaseOrder(
                request_id=request.request_id,
                generation=hand_off.generation,
                groups=hand_off.groups,
                digest=offer_digest(prompt[:num_tokens], hand_off.groups),
                ttl_seconds=self._settings.lease_seconds,
            )
        )
        return hand_off

    # ---- what the scheduler asks

    def take_refused(self) -> dict[str, str]:
        """Requests that are to end in an error, with the reason; they stay unscheduled until they have."""
        return dict(self._refused)

    def stays_awake(self) -> bool:
        """Whether the engine has to step on although it has no requests."""
        return time.monotonic() < self._awake_until

    def take_stats(self) -> GkConnectorStats | None:
        """Counts since the last call."""
        return self._metrics.take()

    def _decline(self, offered: Offered) -> None:
        self._declined.append(offered)
        self._awake_until = time.monotonic() + _STAY_AWAKE_SECONDS

    def _lost(self, request_id: str, reason: str) -> None:
        """A request's KV will not come."""
        self._metrics.count(name=REQUESTS_REFUSED)
        if self._recompute:
            _log.warning("gk: request %s is computed here: %s", request_id, reason)
        else:
            self._refused[request_id] = reason

    def _is_producer(self, request: Any) -> bool:
        params = request.kv_transfer_params
        wanted = isinstance(params, Mapping) and bool(params.get("do_remote_decode"))
        return wanted and self._facts.role is Role.PREFILL


def _ended_well(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
