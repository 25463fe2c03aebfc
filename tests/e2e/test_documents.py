"""The documents tell the truth: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gk_adapters.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks_of(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_every_python_block_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding code is executed as printed."""
    monkeypatch.chdir(ROOT)
    blocks = blocks_of(ROOT / name)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})


def test_every_console_block_prints_what_it_says(tmp_path: Path) -> None:
    """Commands after `$ `, then their output to the letter; one folder for all of them."""
    blocks = re.findall(
        r"```console\n(.*?)```", (ROOT / "docs/transfer.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    steps = [
        step for block in blocks for step in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)
    ]
    assert len(steps) == 11
    for command, wanted in steps:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (wanted, ""), command


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_every_link_leads_to_a_file(path: Path) -> None:
    """Relative links name files and folders that exist."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_every_command_in_the_readme_exists() -> None:
    """The command table names what `gk` has."""
    named = set(re.findall(r"`gk ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named - set(COMMANDS) == set()
