"""vLLM's scheduler with what it lacks for several KV cache groups: a failed pull ends or restarts its request only.

vLLM's own code for failed loads reads one block table per request and raises on two, which stops the engine. Here a
request whose pull failed goes back to no computed tokens: its blocks are freed, the prefix cache is asked again, and
every boundary that it then has is valid in both groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["GkScheduler"]

_log = logging.getLogger("vllm.gk")


class GkScheduler(Scheduler):
    """Pass it as --scheduler-cls gk_adapters.vllm.scheduler.GkScheduler."""

    def _update_requests_with_invalid_blocks(
        self,
        requests: Iterable[Any],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> tuple[set[str], int, set[int]]:
        """(affected request ids, tokens to compute again, blocks to take out of the prefix cache).

        Pulled blocks are nobody else's and in no cache before they are good, so no running request can hold one.
        """
        if evict_blocks:
            return set(), 0, set()
        affected: set[str] = set()
        num_tokens = 0
        for request in requests:
            tables = self.kv_cache_manager.get_block_ids(request.request_id)
            if invalid_block_ids.isdisjoint(b for table in tables for b in table):
                continue
            affected.add(request.request_id)
            num_tokens += request.num_computed_tokens
            request.num_computed_tokens = 0
        return affected, num_tokens, set()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """One step's results; requests that the connector refused end in an error with it."""
        half = getattr(self.connector, "scheduler_half", None)
        if half is not None:
            for request_id, reason in half.take_refused().items():
                if request_id in self.requests:
                    _log.error("gk: request %s fails: %s", request_id, reason)
                    # Whatever this set was made for, it ends requests in an error and tells their clients.
                    self.grammar_compile_error_reqs.add(request_id)
        return super().update_from_output(scheduler_output, model_runner_output)
