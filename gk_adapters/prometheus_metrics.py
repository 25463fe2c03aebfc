"""Metrics over prometheus_client: every counter and histogram of `gk_core.metrics`, and a page to scrape them from.

Names and help texts are the core's. Each object has a registry of its own, so two engines in one process do not add
their numbers up, and a name that the core does not know is refused instead of being invented.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

from gk_core.errors import LayoutError, MissingDependencyError, TransferError
from gk_core.metrics import COUNTERS, DECODE_ROWS, HISTOGRAMS, PULL_READS, PULL_SECONDS
from gk_core.ports import Endpoint, Metrics

__all__ = ["BUCKETS", "PrometheusMetrics"]

BUCKETS: dict[str, tuple[float, ...]] = {
    PULL_SECONDS: (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
    PULL_READS: (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    DECODE_ROWS: (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
}
"""Upper bounds of a histogram's buckets, in the unit of its name."""


class PrometheusMetrics(Metrics):
    """Counts in a registry of its own.

    Args:
        labels: the same on every sample, for example engine and role.

    Raises:
        MissingDependencyError: prometheus_client is not installed.
    """

    def __init__(self, *, labels: dict[str, str] | None = None) -> None:
        client = _client()
        self._client = client
        self._registry: Any = client.CollectorRegistry()
        names = tuple(labels or ())

        def labelled(metric: Any) -> Any:
            return metric.labels(**labels) if labels else metric

        self._counters = {
            name: labelled(client.Counter(name, text, names, registry=self._registry))
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: labelled(client.Histogram(name, text, names, buckets=BUCKETS[name], registry=self._registry))
            for name, text in HISTOGRAMS.items()
        }
        self._lock = threading.Lock()
        self._page: tuple[Any, threading.Thread] | None = None

    def count(self, *, name: str, value: float = 1.0) -> None:
        """See `Metrics.count`.

        Raises:
            LayoutError: not a counter of the core, or a negative value.
        """
        counter = self._counters.get(name)
        if counter is None or value < 0:
            raise LayoutError(f"a count is >= 0 of one of {', '.join(COUNTERS)}; got {value} of {name!r}")
        counter.inc(value)

    def observe(self, *, name: str, value: float) -> None:
        """See `Metrics.observe`.

        Raises:
            LayoutError: not a histogram of the core.
        """
        histogram = self._histograms.get(name)
        if histogram is None:
            raise LayoutError(f"a distribution is one of {', '.join(HISTOGRAMS)}; got {name!r}")
        histogram.observe(value)

    def text(self) -> bytes:
        """What a scrape gets."""
        page: bytes = self._client.generate_latest(self._registry)
        return page

    def serve(self, *, host: str = "127.0.0.1", port: int = 0) -> Endpoint:
        """Answer scrapes in the background and return where; port 0 takes a free one.

        Raises:
            TransferError: the address cannot be bound, or is served already.
        """
        with self._lock:
            if self._page is not None:
                raise TransferError("these metrics are served already")
            try:
                server, thread = self._client.start_http_server(port, addr=host, registry=self._registry)
            except OSError as error:
                raise TransferError(f"cannot serve metrics on {host}:{port}: {error}") from error
            self._page = server, thread
            return Endpoint(host=host, port=server.server_port)

    def close(self) -> None:
        """Stop answering scrapes; harmless twice."""
        with self._lock:
            page, self._page = self._page, None
        if page is not None:
            page[0].shutdown()
            page[0].server_close()
            page[1].join()


def _client() -> Any:
    try:
        return import_module("prometheus_client")
    except ImportError as error:
        raise MissingDependencyError("prometheus_client is not installed: pip install 'gk-decode[metrics]'") from error
