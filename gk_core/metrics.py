"""Names of what gk counts and measures, with their help texts; an adapter exposes them, this module stores nothing.

Units are in the names: `_bytes`, `_seconds`, `_tokens`. Counters end in `_total`.
"""

from __future__ import annotations

from gk_core.ports import Metrics

__all__ = [
    "COUNTERS",
    "DECODE_ROWS",
    "DECODE_STEPS",
    "DECODE_TOKENS",
    "HISTOGRAMS",
    "LEASES_ENDED",
    "LEASES_EXPIRED",
    "LEASES_GRANTED",
    "NOTICES_BAD",
    "NOTICES_IGNORED",
    "NOTICES_LOST",
    "PEERS_LOST",
    "PREFILL_TOKENS",
    "PULLS_ABORTED",
    "PULLS_DONE",
    "PULLS_FAILED",
    "PULL_BYTES",
    "PULL_READS",
    "PULL_RETRIES",
    "PULL_SECONDS",
    "RECOMPUTED_TOKENS",
    "REQUESTS_FAILED",
    "REQUESTS_FINISHED",
    "REQUESTS_REFUSED",
    "TRANSFERRED_TOKENS",
    "NullMetrics",
]

PULL_BYTES = "gk_pull_bytes_total"
PULL_SECONDS = "gk_pull_seconds"
PULL_READS = "gk_pull_reads"
PULLS_DONE = "gk_pulls_done_total"
PULLS_FAILED = "gk_pulls_failed_total"
PULLS_ABORTED = "gk_pulls_aborted_total"
PULL_RETRIES = "gk_pull_retries_total"
TRANSFERRED_TOKENS = "gk_transferred_tokens_total"
RECOMPUTED_TOKENS = "gk_recomputed_tokens_total"
PREFILL_TOKENS = "gk_prefill_tokens_total"
DECODE_TOKENS = "gk_decode_tokens_total"
DECODE_STEPS = "gk_decode_steps_total"
DECODE_ROWS = "gk_decode_rows"
LEASES_GRANTED = "gk_leases_granted_total"
LEASES_ENDED = "gk_leases_ended_total"
LEASES_EXPIRED = "gk_leases_expired_total"
NOTICES_IGNORED = "gk_notices_ignored_total"
NOTICES_BAD = "gk_notices_bad_total"
NOTICES_LOST = "gk_notices_lost_total"
PEERS_LOST = "gk_peers_lost_total"
REQUESTS_REFUSED = "gk_requests_refused_total"
REQUESTS_FAILED = "gk_requests_failed_total"
REQUESTS_FINISHED = "gk_requests_finished_total"

COUNTERS: dict[str, str] = {
    PULL_BYTES: "bytes that pulls moved and that were used",
    PULLS_DONE: "pulls whose bytes were used",
    PULLS_FAILED: "pulls that failed; none of their bytes was used",
    PULLS_ABORTED: "pulls that the request's owner gave up",
    PULL_RETRIES: "reads that were posted again",
    TRANSFERRED_TOKENS: "prompt tokens whose KV came by transfer",
    RECOMPUTED_TOKENS: "prompt tokens that the decode side computed itself, the last token of each prompt not counted",
    PREFILL_TOKENS: "prompt tokens computed by prefill",
    DECODE_TOKENS: "tokens generated",
    DECODE_STEPS: "decode kernel calls",
    LEASES_GRANTED: "leases granted",
    LEASES_ENDED: "leases that ended, for whatever reason",
    LEASES_EXPIRED: "leases that no reader let go in time",
    NOTICES_IGNORED: "notices that did not fit any lease or pull: late, doubled, unknown or of an old generation",
    NOTICES_BAD: "notices that could not be decoded",
    NOTICES_LOST: "notices that could not be sent because the peer had gone",
    PEERS_LOST: "peers that were forgotten because they could not be reached",
    REQUESTS_REFUSED: "requests refused before anything was allocated",
    REQUESTS_FAILED: "requests that ended in an error after they were accepted",
    REQUESTS_FINISHED: "requests that ended with all their tokens",
}
"""Counter name -> help text."""

HISTOGRAMS: dict[str, str] = {
    PULL_SECONDS: "seconds from the first post of a pull to its proof",
    PULL_READS: "block runs of a pull, each one read per region",
    DECODE_ROWS: "active rows of a decode step",
}
"""Histogram name -> help text."""


class NullMetrics(Metrics):
    """Counts nothing."""

    def count(self, *, name: str, value: float = 1.0) -> None:
        """See `Metrics.count`."""

    def observe(self, *, name: str, value: float) -> None:
        """See `Metrics.observe`."""
