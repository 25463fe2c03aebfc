"""Benchmarks: their common form, the cache that they measure on, and the commands that run them."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import ModuleType

import pytest
from click.testing import CliRunner

from gk_adapters.bench.cache import make_cache
from gk_adapters.bench.churn import bench_churn
from gk_adapters.bench.form import alternate, case, report
from gk_adapters.bench_decode import bench_decode
from gk_adapters.cli import bench as cli_bench
from gk_adapters.cli.main import LazyGroup
from gk_core.disaggregation import Role
from gk_core.errors import UnsupportedError

KEYS = {"case", "unit", "ours", "peer", "ratio"}


def test_a_case_holds_medians_ranges_and_their_ratio() -> None:
    """Medians 2 and 8: a quarter."""
    assert case("c", "us", [9.0, 1.0, 2.0], "them", [8.0, 7.0, 10.0]) == {
        "case": "c",
        "unit": "us",
        "ours": {"median": 2.0, "min": 1.0, "max": 9.0},
        "peer": {"name": "them", "median": 8.0, "min": 7.0, "max": 10.0},
        "ratio": 0.25,
    }
    assert set(report("r", [])) == {"name", "machine", "cases"}


def test_sides_take_turns_and_warm_up_outside_the_figures() -> None:
    """One warm-up each, then two of each, ours first."""
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert alternate(2, lambda: side("o"), lambda: side("p")) == ([3.0, 5.0], [4.0, 6.0])
    assert order == ["o", "p"] * 3


def test_the_benchmark_cache_has_the_shape_of_the_real_one() -> None:
    """36 regions of 8,192-byte blocks at 128 tokens; memory is promised, not taken."""
    cache = make_cache(engine_id="e", role=Role.DECODE, num_blocks=36_175, block_size=128)
    assert len(cache.regions) == 36
    assert {(r.num_blocks, r.block_bytes, r.block_stride_bytes) for r in cache.regions} == {(36_175, 8192, 8192)}
    assert cache.regions[0].base_address == cache.address
    assert sum(r.size_bytes for r in cache.regions) == len(cache.memory) == 10_668_441_600


def test_churn_reports_in_the_common_form() -> None:
    """A short simulation; contiguous order needs no more reads than vLLM's."""
    answer = bench_churn(seconds=120.0)
    assert [c["case"] for c in answer["cases"]] == ["pool_churn", "pool_churn_sorted"]
    for found in answer["cases"]:
        assert set(found) >= KEYS
        assert 0 < found["ratio"] <= 1


def fake_bench(monkeypatch: pytest.MonkeyPatch, **benches: object) -> None:
    table = {}
    for name, function in benches.items():
        module = ModuleType(f"bench_of_{name}")
        module.__dict__["run"] = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        table[name] = (module.__name__, "run", f"bench {name}")
    monkeypatch.setattr(cli_bench, "BENCHES", table)


def test_the_command_prints_json_or_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures."""
    answer = report("x", [case("some_case", "us", [1.0], "a peer", [4.0])])
    fake_bench(monkeypatch, x=lambda: answer)
    shown = CliRunner().invoke(cli_bench.bench, ["x", "--json"], catch_exceptions=False)
    assert json.loads(shown.stdout) == answer
    table = CliRunner().invoke(cli_bench.bench, ["x"], catch_exceptions=False).stdout
    for text in ("some_case", "0.25", "a peer"):
        assert text in table


def test_all_goes_on_after_a_benchmark_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which one and why, and the exit code is 1."""

    def cannot() -> None:
        raise UnsupportedError("no such fabric here")

    fake_bench(monkeypatch, bad=cannot, good=lambda: report("good", []))
    result = CliRunner().invoke(cli_bench.bench, ["all", "--json"], standalone_mode=False, catch_exceptions=False)
    assert [a["name"] for a in json.loads(result.stdout)] == ["bad", "good"]
    assert "no such fabric here" in result.stdout
    assert result.return_value == 1


@pytest.mark.parametrize("name", cli_bench.BENCHES)
def test_every_benchmark_that_is_listed_exists(name: str) -> None:
    """Module and function."""
    module, function, _ = cli_bench.BENCHES[name]
    assert callable(getattr(import_module(module), function))


@pytest.mark.slow
@pytest.mark.vllm
def test_decode_is_measured_against_both_peers() -> None:
    """Real processes, three steps each; batch 1 and 8."""
    answer = bench_decode(repeats=1, num_steps=3)
    assert [c["case"] for c in answer["cases"]] == ["hf_b1", "hf_b8", "vllm_b1", "vllm_b8"]
    for found in answer["cases"]:
        assert found["unit"] == "ms"
        assert min(found["ours"]["median"], found["peer"]["median"]) > 0


def test_help_imports_no_benchmark() -> None:
    """Listing is cheap."""
    assert issubclass(LazyGroup, type(cli_bench.bench).__mro__[1])
    shown = CliRunner().invoke(cli_bench.bench, ["--help"]).stdout
    for name in (*cli_bench.BENCHES, "all"):
        assert name in shown
