"""Prometheus metrics: the core's names and helps, and a page that can be scraped."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from gk_adapters.prometheus_metrics import BUCKETS, PrometheusMetrics
from gk_core.errors import LayoutError, TransferError
from gk_core.metrics import COUNTERS, HISTOGRAMS, PULL_BYTES, PULL_READS, PULL_SECONDS
from gk_core.ports import Endpoint

pytest.importorskip("prometheus_client")


def scrape(endpoint: Endpoint) -> str:
    with urllib.request.urlopen(f"http://{endpoint.host}:{endpoint.port}/metrics", timeout=10) as page:
        text: str = page.read().decode()
    return text


def test_a_scrape_shows_what_was_counted_and_observed() -> None:
    """3 + 4 bytes; one pull of 0.03 s, which lies between 0.02 and 0.05; reads 1 and 3."""
    metrics = PrometheusMetrics()
    for value in (3, 4):
        metrics.count(name=PULL_BYTES, value=value)
    metrics.observe(name=PULL_SECONDS, value=0.03)
    for reads in (1, 3):
        metrics.observe(name=PULL_READS, value=reads)
    text = scrape(metrics.serve())
    metrics.close()
    for line in (
        "gk_pull_bytes_total 7.0",
        'gk_pull_seconds_bucket{le="0.02"} 0.0',
        'gk_pull_seconds_bucket{le="0.05"} 1.0',
        "gk_pull_seconds_sum 0.03",
        'gk_pull_reads_bucket{le="2.0"} 1.0',
        "gk_pull_reads_count 2.0",
    ):
        assert line in text.splitlines()


def test_every_name_of_the_core_is_there_before_anything_happened() -> None:
    """At zero, with its help text: a dashboard needs no first event."""
    text = PrometheusMetrics().text().decode()
    for name, says in (COUNTERS | HISTOGRAMS).items():
        assert f"# HELP {name.removesuffix('_total')}" in text
        assert says in text
    for name in COUNTERS:
        assert f"\n{name} 0.0\n" in text
    assert set(BUCKETS) == set(HISTOGRAMS)


def test_two_engines_in_one_process_do_not_share_numbers() -> None:
    """Each has its own registry, and its own labels."""
    a, b = (PrometheusMetrics(labels={"engine": name}) for name in "ab")
    a.count(name=PULL_BYTES, value=5)
    assert 'gk_pull_bytes_total{engine="a"} 5.0' in a.text().decode()
    assert 'gk_pull_bytes_total{engine="b"} 0.0' in b.text().decode()


def test_a_name_that_the_core_does_not_know_is_refused() -> None:
    """As are a count of a histogram, a distribution of a counter, and a counter that goes down."""
    metrics = PrometheusMetrics()
    for name in ("gk_typo_total", PULL_SECONDS):
        with pytest.raises(LayoutError, match=name):
            metrics.count(name=name)
    with pytest.raises(LayoutError, match="got -1"):
        metrics.count(name=PULL_BYTES, value=-1)
    for name in ("gk_typo", PULL_BYTES):
        with pytest.raises(LayoutError, match=name):
            metrics.observe(name=name, value=1)


def test_the_page_is_served_once_and_closes_twice() -> None:
    """A taken port is a typed error; after close nobody answers."""
    metrics, other = PrometheusMetrics(), PrometheusMetrics()
    endpoint = metrics.serve()
    with pytest.raises(TransferError, match="already"):
        metrics.serve()
    with pytest.raises(TransferError, match=str(endpoint.port)):
        other.serve(port=endpoint.port)
    for _ in range(2):
        metrics.close()
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint)
