"""gk's connector over vLLM's own cache layouts: vLLM's pull connector with the faults that lose or invent KV closed.

For any model, and for GPT-OSS where `gk_attention` is false. What differs from the stock connector:

- hybrid sliding-window models work one token short on both sides, cut when the request is added;
- blocks are paired by logical position, in the scheduler half; a block that the producer does not have (a stock
  producer's, at a window boundary) makes the request be computed here;
- a receive that failed, or that ended after the producer may have let go, counts as not received, for all groups;
- leases end in any order; malformed notices and handshakes harm nobody; a producer that a read failed at is asked anew;
- on a CPU, NIXL's progress thread is off and the process keeps its cores.

A stock consumer cannot read a producer of this kind of a sliding-window model, which has one token less than it asks
for: it is refused by hash.

What the stock protocol cannot tell: whether a producer still held the blocks when a read ended. A producer of this kind
says when its lease ends, and a read that ends later is not used. A stock producer does not say; there the lease is
counted from the moment at which the request arrived here. Block ids are the client's word, as in vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Mapping
from typing import Any

from gk_adapters.vllm import seams
from gk_adapters.vllm.connector_scheduler import shorten_prompt
from gk_adapters.vllm.connector_settings import connector_settings
from gk_adapters.vllm.handshake_channel import HandshakeListener, encode_payload
from gk_adapters.vllm.stock_offer import is_notice, pair_blocks, parse_stock_offer
from gk_core.block_table import NULL_BLOCK_ID
from gk_core.disaggregation import needed_range
from gk_core.errors import RequestError
from gk_core.ports import Endpoint

__all__ = ["GuardedConnector"]

_log = logging.getLogger("vllm.gk")
_HASH_PREFIX = "gk-one-token-short-"
_MARGIN_SECONDS = 2.0
"""Between a producer's clock and what we know of it: the way of the answer through the client."""
_CLOCK_MARGIN_SECONDS = 0.5
"""For the offset between two clocks, which a handshake's round trip measures."""


class _GuardedScheduler(seams.PullScheduler):  # type: ignore[misc]
    """vLLM's scheduler half, one token short."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._block_sizes = [spec.block_size for spec in specs]
        self._windows: list[int | None] = [getattr(spec, "sliding_window", None) for spec in specs]
        self._slides = any(window is not None for window in self._windows)
        self._gk_hits: dict[str, int] = {}
        self._gk_seen: dict[str, float] = {}
        self._gk_missing: dict[str, set[int]] = {}
        self._gk_listener: HandshakeListener | None = None
        self._gk_allowed = connector_settings(vllm_config.kv_transfer_config).allowed_producers

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return
        # A client may ask anything of any server. Told to fetch, a producer would wait for ever, or pull under a
        # scheduler that a failed pull stops.
        self._keep_to_role(params)
        if params.get("do_remote_decode"):
            shorten_prompt(request, has_sliding_group=self._slides)
        elif params.get("do_remote_prefill"):
            try:
                parse_stock_offer(params, self._block_sizes)
                self._require_producer(params)
            except RequestError as error:
                _log.warning("gk: request %s is computed here: %s", request.request_id, error)
                params["do_remote_prefill"] = False
                return
            self._gk_seen[request.request_id] = time.perf_counter()
        super().on_new_request(request)

    def _keep_to_role(self, params: dict[str, Any]) -> None:
        role = self.vllm_config.kv_transfer_config.kv_role
        if role == "kv_producer":
            params["do_remote_prefill"] = False
        if role == "kv_consumer":
            params["do_remote_decode"] = False
        if params.get("do_remote_decode"):
            params["do_remote_prefill"] = False
            params["remote_block_ids"] = None

    def _require_producer(self, params: Mapping[str, Any]) -> None:
        """A client may not send us to ourselves, nor anywhere that the settings do not name."""
        where = Endpoint(host=params["remote_host"], port=params["remote_port"])
        if params["remote_engine_id"] == self.engine_id or where == seams.side_channel_endpoint(self.vllm_config):
            raise RequestError("the producer that is named is this engine")
        if self._gk_allowed is not None and where not in self._gk_allowed:
            raise RequestError(f"{where.host}:{where.port} is not among gk_allowed_producers")

    def _get_remote_prefill_token_count(self, num_prompt_tokens: int) -> int:
        if self._slides and num_prompt_tokens > 1:
            return num_prompt_tokens - 1
        return int(super()._get_remote_prefill_token_count(num_prompt_tokens))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count, wait = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._gk_hits[request.request_id] = num_computed_tokens
        return count, wait

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params, hit = request.kv_transfer_params, self._gk_hits.pop(request.request_id, 0)
        if not (isinstance(params, dict) and params.get("do_remote_prefill") and num_external_tokens):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        tables = blocks.get_block_ids()
        try:
            local, remote = pair_blocks(
                parse_stock_offer(params, self._block_sizes),
                tables,
                num_tokens=hit + num_external_tokens,
                num_cached_tokens=hit,
                block_sizes=self._block_sizes,
                windows=self._windows,
            )
        except RequestError as error:
            _log.warning(
                "gk: the KV of the first %d tokens of request %s is not read: %s",
                hit + num_external_tokens, request.request_id, error,
            )  # fmt: skip
            # Without blocks of ours, vLLM's worker only tells the producer that it may let go.
            local, remote = (), ()
            self._gk_missing[request.request_id] = {
                block
                for table, size in zip(tables, self._block_sizes, strict=True)
                for block in table[hit // size :]
                if block != NULL_BLOCK_ID
            }
        params["remote_block_ids"] = remote
        self._reqs_need_recv[request.request_id] = (request, local)
        params["do_remote_prefill"] = False
        params["_remote_blocks_processed"] = True

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        now = time.perf_counter()
        meta.gk_missing, self._gk_missing = self._gk_missing, {}
        meta.gk_age = {name: now - self._gk_seen.pop(name, now) for name in meta.reqs_to_recv}
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        for known in (self._gk_hits, self._gk_seen):
            known.pop(request.request_id, None)
        kept, params = super().request_finished(request, block_ids)
        if not kept or params is None:
            return kept, params
        num_tokens = params["remote_num_tokens"]
        lists, firsts = [], []
        for ids, size, window in zip(block_ids, self._block_sizes, self._windows, strict=True):
            needed = needed_range(num_tokens, window, size)
            lists.append(list(ids[needed.start : needed.stop]))
            firsts.append(needed.start)
        return kept, {
            **params,
            "remote_block_ids": lists,
            "remote_first_blocks": firsts,
            "remote_blocks_expiry_time": self._reqs_need_send[request.request_id],
        }

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        if self._gk_listener is None:
            answers = {ranks: encode_payload(payload) for ranks, payload in metadata.items()}
            self._gk_listener = HandshakeListener(
                endpoint=seams.side_channel_endpoint(self.vllm_config), answers=answers
            )

    def shutdown(self) -> None:
        if self._gk_listener is not None:
            self._gk_listener.close()
            self._gk_listener = None
        super().shutdown()


class _GuardedWorker(seams.PullWorker):  # type: ignore[misc]
    """vLLM's worker half, failing closed."""

    compat_hash: Any
    nixl_wrapper: Any
    _reqs_to_send: dict[str, float]

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        with seams.without_progress_thread():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._gk_lease_seconds = connector_settings(vllm_config.kv_transfer_config).lease_seconds
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        slides = any(getattr(spec, "sliding_window", None) is not None for spec in specs)
        self._gk_prefix = _HASH_PREFIX if slides else ""
        self._gk_deadlines: dict[str, float] = {}
        self._gk_failed: set[str] = set()
        self._gk_held: list[str] = []
        self._gk_doubted: set[str] = set()

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.xfer_handshake_metadata.compatibility_hash = self._gk_prefix + self.compat_hash

    def _nixl_handshake(self, *args: Any, **kwargs: Any) -> Any:
        """A producer of ours, or else a stock one."""
        stock = self.compat_hash
        try:
            self.compat_hash = self._gk_prefix + stock
            return super()._nixl_handshake(*args, **kwargs)
        except RuntimeError as error:
            if "hash mismatch" not in str(error):
                raise
            self.compat_hash = stock
            return super()._nixl_handshake(*args, **kwargs)
        finally:
            self.compat_hash = stock

    def start_load_kv(self, metadata: Any) -> None:
        now = time.perf_counter()
        for request_id in metadata.reqs_to_recv:
            left = self._gk_lease_seconds - metadata.gk_age.get(request_id, 0.0) - _MARGIN_SECONDS
            self._gk_deadlines[request_id] = now + left
        super().start_load_kv(metadata)
        for request_id, missing in metadata.gk_missing.items():
            self._invalid_block_ids.put(missing)
            self._fail(request_id)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        """As vLLM's; ids that the producer does not have, or peers that do not fit, fail their request only."""
        try:
            self._require_blocks(meta)
            super()._read_blocks_for_req(req_id, meta)
        except Exception as error:
            _log.warning("gk: the KV of request %s cannot be read: %s: %s", req_id, type(error).__name__, error)
            self._handle_failed_transfer(req_id, None)

    def _require_blocks(self, meta: Any) -> None:
        engine_id = meta.remote.engine_id
        there = self.dst_num_blocks[engine_id]
        there //= self.transfer_topo.get_engine_info(engine_id).remote_physical_blocks_per_logical
        most = max((block for group in meta.remote.block_ids for block in group), default=0)
        if most >= there:
            raise RequestError(f"block {most} is named, its producer has {there}")

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        """Every block of every group counts as not received."""
        meta = self._recving_metadata.get(req_id)
        if handle is not None:
            self.nixl_wrapper.release_xfer_handle(handle)
        if meta is not None:
            self._invalid_block_ids.put({b for group in meta.local_block_ids for b in group})
            if handle is not None:
                self._gk_doubted.add(meta.remote.engine_id)
            self._fail(req_id)
        self.xfer_stats.record_failed_transfer()

    def _fail(self, request_id: str) -> None:
        if request_id in self._recving_metadata:
            self._gk_failed.add(request_id)
            self._failed_recv_reqs.put(request_id)

    def get_finished(self) -> tuple[set[str], set[str]]:
        # vLLM's reaper stops at the first lease that has not expired, so the order has to be that of expiry.
        self._reqs_to_send = dict(sorted(self._reqs_to_send.items(), key=lambda item: item[1]))
        metas = dict(self._recving_metadata)
        sent, received = super().get_finished()
        for request_id in self._gk_held:
            self._failed_recv_reqs.put(request_id)
        self._gk_held = []
        for request_id in received:
            meta, deadline = metas.get(request_id), self._gk_deadlines.pop(request_id, math.inf)
            if meta is not None and request_id not in self._gk_failed and time.perf_counter() > min(
                deadline, self._lease_end(meta)
            ):  # fmt: skip
                _log.warning("gk: the KV of request %s came after its lease may have ended; not used", request_id)
                self._invalid_block_ids.put({b for group in meta.local_block_ids for b in group})
            self._gk_failed.discard(request_id)
        self._forget_doubted()
        return sent, received

    def _lease_end(self, meta: Any) -> float:
        """When the producer lets go, on our clock, as far as it said so."""
        told = meta.remote.blocks_expiry_time
        offset = self._engine_clock_offset.get(meta.remote.engine_id)
        return math.inf if told is None or offset is None else told - offset - _CLOCK_MARGIN_SECONDS

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        """As vLLM's; failed requests of which other reads are still under way wait, for their blocks are written."""
        done: set[str] = super()._pop_done_transfers(transfers)
        failed = []
        with contextlib.suppress(queue.Empty):
            while True:
                failed.append(self._failed_recv_reqs.get_nowait())
        for name in failed:
            if transfers.get(name):
                self._gk_held.append(name)
            else:
                self._failed_recv_reqs.put(name)
        return done

    def _forget_doubted(self) -> None:
        """A producer that a read failed at may have been started again under its name: shake hands anew."""
        if self._gk_doubted:
            busy = {m.remote.engine_id for m in self._recving_metadata.values()}
            for engine_id in self._gk_doubted - busy:
                if engine_id in self._remote_agents:
                    self._cleanup_remote_engine(engine_id)
            self._gk_doubted &= busy

    def _get_new_notifs(self) -> set[str]:
        """As vLLM's, but a notice that is none is dropped instead of ending the engine."""
        wrapper, taken = self.nixl_wrapper, self.nixl_wrapper.get_new_notifs()
        size = self.world_size
        good = {sender: [n for n in notices if is_notice(n, size)] for sender, notices in taken.items()}
        self.nixl_wrapper = _Notices(good)
        try:
            done: set[str] = super()._get_new_notifs()
        finally:
            self.nixl_wrapper = wrapper
        return done


class _Notices:
    """Stands in for the agent while vLLM's own code reads notices that were looked at already."""

    def __init__(self, notices: dict[str, list[bytes]]) -> None:
        self._notices = notices

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return self._notices


class GuardedConnector(seams.PullConnector):  # type: ignore[misc]
    """What GkNixlConnector is over a cache that is not gk's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        seams.init_facade(self, vllm_config, role, kv_cache_config)
        half: Any = _GuardedScheduler if seams.is_scheduler_role(role) else _GuardedWorker
        made = half(vllm_config, self.engine_id, kv_cache_config)
        self.connector_scheduler = made if seams.is_scheduler_role(role) else None
        self.connector_worker = None if seams.is_scheduler_role(role) else made
