"""`gk bench pull` also shows what the pool's order of free blocks does to the number of reads, in a simulation."""

from __future__ import annotations

from typing import Any

from gk_adapters.bench.form import report
from gk_adapters.pool_churn import ChurnSettings, pool_churn

__all__ = ["bench_churn"]


def bench_churn(*, seconds: float = 3600.0) -> dict[str, Any]:
    """Reads per pulled request and region after an hour of simulated arrivals and departures; nothing is timed."""
    found: Any = pool_churn(ChurnSettings(seconds=seconds))
    reads = found["reads_per_pull"]
    cases = [
        {
            "case": name,
            "unit": "reads per region",
            "ours": reads["contiguous"],
            "peer": {"name": peer_name, **reads[key]},
            "ratio": reads["contiguous"]["mean"] / reads[key]["mean"],
            "of": "means",
        }
        for name, key, peer_name in (
            ("pool_churn", "vllm_as_handed_out", "vLLM's block order"),
            ("pool_churn_sorted", "vllm_sorted", "vLLM's block order, both sides sorted"),
        )
    ]
    return report("churn", cases)
