"""The cost report: figures worked by hand, and a self-contained picture."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gk_kernels.simulator.counters import Counters, Stat
from gk_kernels.simulator.report import LANES, CollectiveModel, CostReport, cost_report
from gk_kernels.simulator.targets import TRN2, TRN3, Target


def make_stat(count: int, cycles: int = 0, nbytes: int = 0, macs: int = 0) -> Stat:
    """Totals of one instruction."""
    stat = Stat()
    stat.count, stat.cycles, stat.bytes, stat.macs = count, cycles, nbytes, macs
    return stat


def make_counters() -> Counters:
    """Two sections; every number below follows from these."""
    counters = Counters()
    counters.stats = {
        ("attention", "nc_matmul", "tensor"): make_stat(3, cycles=4800, macs=700),
        ("attention", "tensor_tensor", "vector"): make_stat(2, cycles=2400),
        ("attention", "dma_copy", "dma"): make_stat(5, nbytes=1_056_000),
        ("experts", "activation", "scalar"): make_stat(1, cycles=1200),
        ("experts", "iota", "gpsimd"): make_stat(1, cycles=3600),
        ("experts", "all_gather", "collective"): make_stat(2, nbytes=1_186_000),
        ("experts", "reduce_scatter", "collective"): make_stat(1, nbytes=311_000),
    }
    counters.hbm_read_bytes = 900_000
    counters.hbm_write_bytes = 156_000
    counters.descriptors.update({256: 3, 511: 1, 512: 7})
    return counters


def make_report(target: Target = TRN3) -> CostReport:
    return cost_report(
        make_counters(),
        target,
        kernel="layer<1>",
        ideal_hbm_bytes=528_000,
        peaks={"sbuf_peak_bytes_per_partition": 4321},
    )


def test_engine_time_is_cycles_over_the_clock() -> None:
    """trn3: 4800 cycles at 2.4 GHz, 2400 at 1.2, 1200 at 1.2, 3600 at 1.2."""
    attention, experts = make_report().sections
    assert attention.busy_us["tensor"] == pytest.approx(2.0)
    assert attention.busy_us["vector"] == pytest.approx(2.0)
    assert experts.busy_us["scalar"] == pytest.approx(1.0)
    assert experts.busy_us["gpsimd"] == pytest.approx(3.0)


def test_the_vector_engine_of_trn2_is_slower() -> None:
    """2400 cycles at 0.96 GHz are 2.5 us."""
    assert make_report(TRN2).sections[0].busy_us["vector"] == pytest.approx(2.5)


def test_dma_time_is_bytes_over_the_slower_of_hbm_and_dma_engines() -> None:
    """trn3: 1,056,000 B at 528 GB/s (the engines); trn2: at 362.5 GB/s (the HBM share)."""
    assert make_report().sections[0].busy_us["dma"] == pytest.approx(2.0)
    assert make_report(TRN2).sections[0].busy_us["dma"] == pytest.approx(2.913103, abs=1e-6)


def test_a_collective_costs_a_start_and_its_bytes() -> None:
    """2 x 7.5 + 10 us of all-gather, 7.5 + 10 us of reduce-scatter."""
    assert make_report().sections[1].busy_us["collective"] == pytest.approx(42.5)
    assert CollectiveModel().time_us("all_reduce", 1, 622_000) == pytest.approx(27.5)


def test_a_section_lasts_between_its_busiest_engine_and_all_of_them() -> None:
    """Floor is the maximum of the lanes, serial their sum, slowest the lane of the maximum."""
    experts = make_report().sections[1]
    assert experts.floor_us == pytest.approx(42.5)
    assert experts.serial_us == pytest.approx(46.5)
    assert experts.slowest == "collective"


def test_the_total_adds_lanes_over_sections() -> None:
    """15 instructions, 700 MACs, 1,497,000 B in 3 collectives."""
    total = make_report().total
    assert (total.instructions, total.macs, total.dma_bytes) == (15, 700, 1_056_000)
    assert (total.collectives, total.collective_bytes) == (3, 1_497_000)
    assert tuple(total.busy_us) == LANES
    assert total.serial_us == pytest.approx(52.5)


def test_descriptors_below_512_bytes_are_counted_apart() -> None:
    """256 x 3 and 511 x 1 are small, 512 x 7 are not."""
    assert make_report().small_descriptors == (4, 11)


def test_the_table_has_a_line_per_section_and_the_facts() -> None:
    """Plain text, columns aligned."""
    lines = make_report().table().splitlines()
    assert lines[0] == "layer<1> on trn3, one core; model, not a measurement"
    assert lines[2].split() == (["attention", "10", "2.00", "2.00", "0.00", "0.00", "2.00", "0.00", "2.00", "tensor"])
    assert lines[4].split()[:3] == ["total", "15", "2.00"]
    assert len({len(line) for line in lines[1:5]}) == 1
    assert "HBM ideal: 528,000 B; moved is 2.00 times" in lines
    assert "sbuf peak bytes per partition: 4,321" in lines


def test_json_holds_plain_values() -> None:
    """It survives json.dumps and carries the section figures."""
    data = json.loads(json.dumps(make_report().to_json()))
    assert data["target"] == "trn3"
    assert data["sections"][0]["busy_us"]["tensor"] == pytest.approx(2.0)
    assert data["descriptors"] == {"count": 11, "below_512_bytes": 4}
    assert data["peaks"] == {"sbuf_peak_bytes_per_partition": 4321}


class TagCounter(HTMLParser):
    """Counts tags and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_html_is_one_file_with_two_pictures_and_no_script(tmp_path: Path) -> None:
    """No links out, no script, names escaped, tags nested."""
    path = tmp_path / "report.html"
    make_report().write_html(path)
    text = path.read_text(encoding="utf-8")
    parser = TagCounter()
    parser.feed(text)
    assert parser.open == []
    assert parser.links == []
    assert parser.seen.count("svg") == 2
    assert "script" not in parser.seen
    assert "layer&lt;1&gt;" in text
    # Four lanes busy in each section, drawn once in the timeline and once in the bars.
    assert parser.seen.count("rect") == 2 * (3 + 3)


def test_an_empty_run_gives_an_empty_report(tmp_path: Path) -> None:
    """No instruction: nothing is slowest, and the picture is still a file."""
    report = cost_report(Counters(), TRN3)
    assert (report.total.slowest, report.total.floor_us) == ("none", 0.0)
    report.write_html(tmp_path / "empty.html")
    assert "</html>" in (tmp_path / "empty.html").read_text()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(LANES), st.integers(1, 10**7)), max_size=9))
def test_floor_never_exceeds_serial_and_lanes_add_up(rows: list[tuple[str, str, int]]) -> None:
    """For any counts: floor <= serial per section, and the total's lanes are the sections' sum."""
    counters = Counters()
    for section, lane, amount in rows:
        stat = counters.stats.setdefault((section, f"op_{lane}", lane), Stat())
        stat.count, stat.cycles, stat.bytes = stat.count + 1, amount, amount
    report = cost_report(counters, TRN3)
    for section_cost in report.sections:
        assert section_cost.floor_us <= section_cost.serial_us
        assert all(busy > 0 for busy in section_cost.busy_us.values())
    assert report.total.serial_us == pytest.approx(sum(s.serial_us for s in report.sections))
    assert report.total.instructions == len(rows)
