"""The report of a Neuron machine: every step's outcome in one file, whatever the step does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tools.collect_neuron_report import STEPS, Step, collect, environment, main, run_step

ROOT = Path(__file__).parents[2]


def python(code: str, seconds: float = 60) -> Step:
    return Step("probe", (sys.executable, "-c", code), seconds, "good")


@pytest.mark.parametrize(
    ("step", "outcome", "exit_code"),
    [
        (python("print('fine')"), "ok", 0),
        (python("raise SystemExit(3)"), "failed", 3),
        (python("import signal; signal.pause()", 0.3), "timed out", -9),
        (Step("probe", ("no-such-program-here",), 1, "good"), "not started", None),
    ],
)
def test_a_steps_outcome_is_noted_whatever_it_does(step: Step, outcome: str, exit_code: int | None) -> None:
    """Good, bad, hanging, absent."""
    found = run_step(step)
    assert (found["outcome"], found["exit_code"], found["expected"]) == (outcome, exit_code, "good")


def test_output_is_cut_and_need_not_be_text() -> None:
    """The last 20,000 characters."""
    found = run_step(python("import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * 30000 + b'end')"))
    assert (len(found["output"]), found["output"][-3:]) == (20000, "end")


def test_the_file_is_whole_after_each_step(tmp_path: Path) -> None:
    """The second step reads what the first left."""
    out = tmp_path / "report.json"
    reads = python(f"import json; print(len(json.load(open({str(out)!r}))['steps']))")
    report = collect([python("pass"), reads], out)
    assert report["steps"][1]["output"].strip() == "1"
    assert json.loads(out.read_text()) == report
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_only_neuron_variables_are_written_down() -> None:
    """No secrets, no paths of a home directory."""
    found = environment({"NEURON_CC_FLAGS": "-O1", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/h", "NKI_SIMULATOR": "1"})
    assert found == {"NEURON_CC_FLAGS": "-O1", "NKI_SIMULATOR": "1"}


def test_the_page_names_every_step_and_its_expected_outcome() -> None:
    """docs/on-neuron.md and the script say the same."""
    page = (ROOT / "docs" / "on-neuron.md").read_text()
    for step in STEPS:
        assert f"| `{step.name}` |" in page
        assert re.sub(r"\s+", " ", step.expected) in page, step.expected


def test_one_step_can_be_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here `gk doctor` answers, in JSON."""
    monkeypatch.chdir(ROOT)
    out = tmp_path / "report.json"
    main(["--only", "doctor", "--out", str(out)])
    (step,) = json.loads(out.read_text())["steps"]
    assert "neuron_devices" in json.loads(step["output"])
