"""gk's counters in vLLM's own metrics: collected in each process, sent with its outputs, shown under /metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from gk_core.metrics import COUNTERS, HISTOGRAMS
from gk_core.ports import Metrics

__all__ = ["CollectedMetrics", "GkConnectorStats", "GkPromMetrics"]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class GkConnectorStats(KVConnectorStats):
    """Counts and observed values since the last report: {"counts": {name: float}, "values": {name: [float]}}."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        counts, values = (dict((data or {}).get(key, {})) for key in ("counts", "values"))
        super().__init__(data={"counts": counts, "values": {name: list(v) for name, v in values.items()}})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counts": {}, "values": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's."""
        for name, value in other.data.get("counts", {}).items():
            self.data["counts"][name] = self.data["counts"].get(name, 0.0) + value
        for name, values in other.data.get("values", {}).items():
            self.data["values"].setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number per name, for the log line."""
        means = {name: round(sum(v) / len(v), 4) for name, v in self.data["values"].items() if v}
        return {**self.data["counts"], **means}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.data["counts"] or self.data["values"])


class CollectedMetrics(Metrics):
    """Counts until vLLM asks; from any thread."""

    def __init__(self) -> None:
        self._stats = GkConnectorStats()
        self._lock = threading.Lock()

    def count(self, *, name: str, value: float = 1.0) -> None:
        """See `Metrics.count`."""
        with self._lock:
            counts = self._stats.data["counts"]
            counts[name] = counts.get(name, 0.0) + value

    def observe(self, *, name: str, value: float) -> None:
        """See `Metrics.observe`."""
        with self._lock:
            self._stats.data["values"].setdefault(name, []).append(value)

    def take(self) -> GkConnectorStats | None:
        """What came since the last call; None when nothing did."""
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, GkConnectorStats()
            return taken


class GkPromMetrics(KVConnectorPromMetrics):
    """The names of `gk_core.metrics` with their help texts."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = self._counter_cls
        histogram: Any = self._histogram_cls
        self._counters = {n: counter(name=n, documentation=t, labelnames=labelnames) for n, t in COUNTERS.items()}
        self._histograms = {
            n: histogram(
                name=n,
                documentation=t,
                buckets=_SECONDS if n.endswith("_seconds") else _COUNTS,
                labelnames=labelnames,
            )
            for n, t in HISTOGRAMS.items()
        }
        # What has never happened is shown as 0 and not left out.
        for metric in (*self._counters.values(), *self._histograms.values()):
            for labels in per_engine_labelvalues.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report; names that are not gk's are left out."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.get("counts", {}).items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
        for name, values in transfer_stats_data.get("values", {}).items():
            if name in self._histograms:
                for value in values:
                    self._histograms[name].labels(*labels).observe(value)
