"""Without NIXL, ZeroMQ, vLLM or CUDA the adapters import; whoever needs one of them hears which, and how to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys
class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"nixl", "nixl_cu12", "zmq", "vllm", "cuda", "cupy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nobody())
from gk_core.errors import MissingDependencyError
def refused(make):
    try:
        make()
    except MissingDependencyError as error:
        print(error)
    else:
        raise SystemExit("it was made")
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import gk_adapters.nixl_transport as m; refused(lambda: m.NixlTransport(agent_name='a'))",
            ("NIXL is not usable here", "pip install 'gk-decode[nixl]'", "--no-deps nixl nixl-cu12"),
        ),
        (
            "import gk_adapters.zmq_side_channel as m; refused(m.ZmqSideChannel); refused(m.ZmqSideChannelServer)",
            ("pyzmq is not installed: pip install 'gk-decode[nixl]'",),
        ),
        ("import gk_adapters.nodes, gk_adapters.services, gk_adapters.peer_directory, gk_adapters.fakes", ()),
    ],
    ids=["nixl", "zmq", "neither"],
)
def test_what_is_missing_is_said_by_whoever_needs_it(code: str, says: tuple[str, ...]) -> None:
    """In an interpreter that cannot import them."""
    done = subprocess.run([sys.executable, "-c", BLOCKED + code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in says:
        assert text in done.stdout


def test_the_interpreter_above_is_without_them() -> None:
    """So the tests above mean something."""
    code = (
        BLOCKED
        + "import importlib.util as u\ntry:\n    u.find_spec('zmq')\nexcept ModuleNotFoundError:\n    print('no')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "no\n"
