"""`gk bench`: figures against a peer that is measured in the same run. It prints ratios and judges nothing."""

from __future__ import annotations

import importlib
import os
from typing import Any

import click
from rich.table import Table

from gk_adapters.cli.common import console, emit_json, json_option
from gk_core.errors import GkError

__all__ = ["BENCHES", "bench"]

BENCHES = {
    "registration": ("gk_adapters.bench.registration", "bench_registration", "Describe a full-size cache to NIXL."),
    "plan": ("gk_adapters.bench.plan", "bench_plan", "Plan and prepare the pull of 10,240 tokens."),
    "pull": ("gk_adapters.bench.pull", "bench_pull", "Pull 10,240 tokens from another process."),
    "churn": ("gk_adapters.bench.churn", "bench_churn", "Reads per pull after an hour of simulated churn."),
    "control": ("gk_adapters.vllm.bench_control", "bench_control", "Control tensors of one decode step."),
    "decode": ("gk_adapters.bench_decode", "bench_decode", "Decode steps against Hugging Face and vLLM."),
    "stacking": ("gk_adapters.bench_stacking", "bench_stacking", "Stack one 120B rank's weights."),
}
"""Name -> module, function, help; a module is imported when its benchmark runs."""


class _Benches(click.Group):
    """One subcommand per entry of BENCHES, and `all`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*BENCHES, "all"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "all":
            return _all
        return _command(cmd_name) if cmd_name in BENCHES else None


@click.group(cls=_Benches)
def bench() -> None:
    """Measure against peers in the same run; ratio = ours / peer, so below 1 is ahead."""


def _run(name: str) -> dict[str, Any]:
    module_name, function, _ = BENCHES[name]
    # vLLM logs to standard output, which is our report's.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    module = importlib.import_module(module_name)
    answer: dict[str, Any] = getattr(module, function)()
    return answer


def _command(name: str) -> click.Command:
    @click.command(name, help=BENCHES[name][2])
    @json_option
    def command(as_json: bool) -> None:
        answer = _run(name)
        if as_json:
            emit_json(answer)
        else:
            _print(answer)

    return command


@click.command("all")
@json_option
def _all(as_json: bool) -> int:
    """Every benchmark that can run here; exit code 1 when one could not."""
    answers: list[dict[str, Any]] = []
    for name in BENCHES:
        try:
            answers.append(_run(name))
        except (GkError, ModuleNotFoundError) as error:
            answers.append({"name": name, "error": str(error)})
        if not as_json:
            _print(answers[-1])
    if as_json:
        emit_json(answers)
    return 1 if any("error" in answer for answer in answers) else 0


def _print(answer: dict[str, Any]) -> None:
    out = console()
    if "error" in answer:
        out.print(f"{answer['name']}: could not run: {answer['error']}")
        return
    out.print(f"{answer['name']} on {answer['machine']}")
    drawn = Table(box=None)
    for heading in ("case", "unit", "ours", "peer", "ratio", "peer is"):
        drawn.add_column(heading, justify="left" if heading in ("case", "peer is") else "right")
    for case in answer["cases"]:
        drawn.add_row(
            case["case"],
            case["unit"],
            *(f"{_short(s['median'])} [{_short(s['min'])}-{_short(s['max'])}]" for s in (case["ours"], case["peer"])),
            f"{case['ratio']:.4g}",
            case["peer"]["name"],
        )
    out.print(drawn)


def _short(value: float) -> str:
    return f"{value:.4g}"
