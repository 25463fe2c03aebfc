"""Who may import whom: the core needs attrs and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attr
import attrs
import pytest

import gk_adapters
import gk_core
import gk_kernels

CORE, KERNELS, ADAPTERS = (Path(next(iter(p.__path__))) for p in (gk_core, gk_kernels, gk_adapters))
ROOT = CORE.parent


def imported_names(source: str) -> Iterator[str]:
    """Dotted names of everything that a source imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def third_parties(source: str) -> set[str]:
    """Top-level packages that a source imports by statement or by a literal `import_module`, ours and the library's
    own left out."""
    names = {n.partition(".")[0] for n in imported_names(source) if not n.startswith(".")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            names |= {
                a.value.partition(".")[0] for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            }
    return names - set(sys.stdlib_module_names) - {"attrs", "gk_core", "gk_kernels", "gk_adapters"}


def outside(source: str, allowed: frozenset[str]) -> set[str]:
    return {n for n in imported_names(source) if n.partition(".")[0] not in allowed}


CORE_MAY_IMPORT = frozenset(sys.stdlib_module_names | {"attrs", "gk_core"})


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda p: p.stem)
def test_the_core_imports_the_standard_library_and_attrs_only(path: Path) -> None:
    """Also inside functions and under `if TYPE_CHECKING`."""
    assert outside(path.read_text(), CORE_MAY_IMPORT) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import numpy",
        "from torch import nn",
        "def f():\n    import msgspec",
        "from . import x",
        "import gk_adapters.cli",
    ],
)
def test_the_import_check_sees_what_is_forbidden(source: str) -> None:
    """Each of these would be refused."""
    assert outside(source, CORE_MAY_IMPORT) != set()


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda p: p.stem)
def test_the_kernels_know_neither_core_nor_adapters(path: Path) -> None:
    """Plain arrays in and out."""
    names = {n.partition(".")[0] for n in imported_names(path.read_text())}
    assert names & {"gk_core", "gk_adapters"} == set()


ARRAYS = {"numpy", "ml_dtypes"}
"""Plain arrays are everybody's; every other third party has one door."""

DOORS = {
    "click": "cli",
    "httpx": "proxy",
    "huggingface_hub": "vllm",
    "msgspec": "peer_codec",
    "neuronx_distributed": "neuron",
    "nixl": "nixl_transport",
    "nki": "nki_*",
    "prometheus_client": "*metrics",
    "rich": "cli",
    "safetensors": "bench_naive_stacks",
    "starlette": "proxy",
    "tokenizers": "text",
    "torch": "torch_*",
    "torch_neuronx": "neuron",
    "transformers": "hf_reference",
    "uvicorn": "cli",
    "vllm": "vllm",
    "zmq": "zmq_side_channel",
}
"""Third party -> the module or sub-package of gk_adapters through which it comes in."""

ALSO_TORCH = {"vllm", "neuron", "hf_reference.py", "bench_naive_stacks.py", "nki_kernel.py", "nodes.py"}
"""Where torch comes along: with systems that hand out its tensors, in a peer to measure against, in the kernel port
that takes the engines' tensors, and in the root that puts the torch adapters together."""

WIRE_OF_VLLM = {"vllm/handshake_channel.py": {"msgspec", "zmq"}}
"""vLLM's own handshake is msgpack over ZeroMQ; answering it takes what it takes."""


def door_allows(path: Path, package: str) -> bool:
    inside = path.relative_to(ADAPTERS)
    door = DOORS.get(package, "nowhere")
    return (
        inside.match(f"{door}.py")
        or inside.parts[0] == door
        or (package == "torch" and inside.parts[0] in ALSO_TORCH)
        or package in WIRE_OF_VLLM.get(inside.as_posix(), set())
    )


@pytest.mark.parametrize("path", sorted(ADAPTERS.rglob("*.py")), ids=lambda p: str(p.relative_to(ADAPTERS)))
def test_a_third_party_comes_in_by_one_door(path: Path) -> None:
    """One outside system per module or sub-package of the adapters."""
    assert {p for p in third_parties(path.read_text()) - ARRAYS if not door_allows(path, p)} == set()


def test_the_door_check_sees_statements_and_literal_imports() -> None:
    """Both ways of importing, and only foreign packages."""
    source = "import os, numpy\nfrom gk_core import errors\ndef f():\n    return import_module('zmq.auth')\n"
    assert third_parties(source) == {"numpy", "zmq"}
    assert door_allows(ADAPTERS / "torch_decode.py", "torch")
    assert door_allows(ADAPTERS / "vllm" / "attention.py", "torch")
    assert not door_allows(ADAPTERS / "block_pool.py", "torch")
    assert not door_allows(ADAPTERS / "cli" / "plan.py", "zmq")
    assert not door_allows(ADAPTERS / "cli" / "plan.py", "unheard_of")


SNIPPET = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import gk_core
for module in pkgutil.iter_modules(gk_core.__path__):
    importlib.import_module("gk_core." + module.name)
top = {name.partition(".")[0] for name in sys.modules}
print(sorted(top - set(sys.stdlib_module_names) - {"__main__", "attr", "attrs", "gk_core"}))
print(len([name for name in sys.modules if name.startswith("gk_core.")]))
"""


def isolated(tmp_path: Path, *packages: Path) -> subprocess.CompletedProcess[str]:
    """Run SNIPPET in an interpreter that sees these packages and the standard library."""
    for package in packages:
        (tmp_path / package.name).symlink_to(package, target_is_directory=True)
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", SNIPPET, str(tmp_path)], capture_output=True, text=True, check=False
    )


def folder_of(file: str | None) -> Path:
    assert file is not None
    return Path(file).parent


def test_the_core_works_with_attrs_alone(tmp_path: Path) -> None:
    """All modules import, and load nothing else from outside the standard library."""
    done = isolated(tmp_path, CORE, folder_of(attr.__file__), folder_of(attrs.__file__))
    assert done.returncode == 0, done.stderr
    others, count = done.stdout.splitlines()
    assert others == "[]"
    assert int(count) == len(list(CORE.glob("*.py"))) - 1


def test_the_isolated_interpreter_is_isolated(tmp_path: Path) -> None:
    """Without attrs the core does not import, so the test above means something."""
    done = isolated(tmp_path, CORE)
    assert done.returncode != 0
    assert "No module named 'attr" in done.stderr


def test_import_linter_keeps_its_contracts() -> None:
    """The layers and doors of pyproject.toml."""
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(command), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
