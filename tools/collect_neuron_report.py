"""Runs what only a Neuron machine can run and writes one report file: python -m tools.collect_neuron_report.

Steps run one after another, each in a process of its own with a time limit; a step that fails or hangs is noted and the
next one starts. Of the environment only the variables that concern Neuron are written down.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["STEPS", "Step", "collect", "environment", "main", "run_step"]

_PREFIXES = ("NEURON_", "NKI_", "FI_", "GK_NEURON_")
_TAIL = 20_000
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-rs")


class Step(NamedTuple):
    """One thing to run.

    Attributes:
        name: in the report.
        command: argv.
        seconds: time limit.
        expected: what a good outcome looks like, for whoever reads the report.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    expected: str


def _gk(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "from gk_adapters.cli.main import run; run()", *args)


STEPS = (
    Step(
        "doctor", _gk("doctor", "--json"), 60, "exit code 0; nki, torch-neuronx and neuronx-cc installed; devices > 0"
    ),
    Step("devices", ("neuron-ls", "--json-output"), 60, "exit code 0; one entry per device"),
    Step("compiler", ("neuronx-cc", "--version"), 120, "exit code 0; 2.20 or newer"),
    Step("host_halves", (*_PYTEST, "tests/neuron", "-m", "not neuron"), 900, "all passed"),
    Step("launch_on_device", (*_PYTEST, "tests/neuron/test_device.py"), 3600, "2 passed, none skipped"),
)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that concern Neuron, and no others."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES)}


def run_step(step: Step) -> dict[str, Any]:
    """Run one step; never raises for what the step does. Output is cut to its last 20,000 characters."""
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        outcome: dict[str, Any] = {"outcome": "not started", "exit_code": None, "output": str(error)}
    else:
        try:
            output, _ = process.communicate(timeout=step.seconds)
            outcome = {"outcome": "ok" if process.returncode == 0 else "failed"}
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            outcome = {"outcome": "timed out"}
        outcome |= {"exit_code": process.returncode, "output": output[-_TAIL:]}
    return {
        "step": step.name,
        "command": [Path(word).name if word == sys.executable else word for word in step.command],
        "seconds": round(time.monotonic() - start, 1),
        "expected": step.expected,
        **outcome,
    }


def collect(steps: Sequence[Step], out: Path) -> dict[str, Any]:
    """Run steps; the file is whole after each, so an interrupted run still leaves a report."""
    report: dict[str, Any] = {"report": 1, "environment": environment(os.environ), "steps": []}
    for step in steps:
        print(f"{step.name} (up to {step.seconds:.0f} s) ...", flush=True)
        report["steps"].append(run_step(step))
        print(f"  {report['steps'][-1]['outcome']}", flush=True)
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(report, indent=2) + "\n")
        part.replace(out)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every step was ok, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("neuron-report.json"))
    parser.add_argument("--only", action="append", choices=[s.name for s in STEPS], help="run these steps only")
    args = parser.parse_args(argv)
    report = collect([s for s in STEPS if not args.only or s.name in args.only], args.out)
    print(f"wrote {args.out}")
    return 0 if all(s["outcome"] == "ok" for s in report["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
