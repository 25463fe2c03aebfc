"""Capturing in forked children: results come back, and a child that hangs, crashes or lies does no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from gk_adapters.neuron.capture import (
    CaptureCrashedError,
    CaptureError,
    CaptureJob,
    CaptureStatusError,
    CaptureTimeoutError,
    capture_all,
)
from gk_adapters.neuron.graph_audit import GraphAudit
from gk_core.errors import LayoutError
from tests.neuron.stand_ins import control_of
from tests.neuron.test_holder import bound_holder
from tests.neuron.test_meta_swap import Leaf, ListHolder


def job(capture: Callable[..., Any], name: str = "decode", *modules: torch.nn.Module, **inputs: object) -> CaptureJob:
    return CaptureJob(name=name, modules=modules, inputs=inputs, capture=capture)


def run(directory: Path, *jobs: CaptureJob, seconds: float = 60, lanes: int = 1) -> dict[str, Any]:
    return capture_all(jobs, directory=directory, lanes=lanes, timeout_seconds=seconds, grace_seconds=0.2)


def no_children_left() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def test_a_holders_step_is_captured_on_meta(tmp_path: Path) -> None:
    """The whole way: swap, check, run under the audit, report; the parent's tensors stay where they were."""
    holder = bound_holder()

    def capture(hidden: torch.Tensor, **control: torch.Tensor) -> dict[str, Any]:
        with GraphAudit(holder.held()) as audit:
            out = holder(hidden, **control)
        audit.require_clean()
        return {"device": out.device.type, "shape": list(out.shape), "pid": os.getpid()}

    inputs = {"hidden": torch.zeros(3, 6, device="meta"), **control_of(holder.contract, "meta")}
    found = run(tmp_path, job(capture, "decode", holder, **inputs))["decode"]
    assert (found["device"], found["shape"]) == ("meta", [3, 6])
    assert found["pid"] != os.getpid()
    assert holder.W_qkv.device.type == "cpu"
    assert no_children_left()


def test_jobs_are_dealt_to_lanes_in_turn(tmp_path: Path) -> None:
    """Five jobs over two lanes: two processes, three jobs and two."""
    jobs = [job(os.getpid, f"bucket-{i}") for i in range(5)]
    found = run(tmp_path, *jobs, lanes=2)
    pids = [found[f"bucket-{i}"] for i in range(5)]
    assert pids[0] == pids[2] == pids[4] != pids[1] == pids[3]


def test_jobs_of_one_lane_see_the_same_meta_tensor(tmp_path: Path) -> None:
    """A module that two jobs share is swapped once."""
    leaf = Leaf()
    jobs = [job(lambda: id(leaf.plain), name, leaf) for name in ("a", "b")]
    # The capture's closure holds the module, which is on meta by then.
    found = run(tmp_path, *jobs)
    assert found["a"] == found["b"]


def test_a_list_held_buffer_fails_the_capture_with_its_path(tmp_path: Path) -> None:
    """In the child, before anything is traced."""
    with pytest.raises(CaptureError, match=r"decode\.modules\[0\]\.caches\[0\]"):
        run(tmp_path, job(int, "decode", ListHolder()))


def test_a_tensor_in_the_captures_closure_is_found(tmp_path: Path) -> None:
    """What the graph sees is more than the module."""
    stray = torch.zeros(2)
    with pytest.raises(CaptureError, match=r"decode\.capture\.<stray>"):
        run(tmp_path, job(lambda: stray.shape[0]))


def test_inputs_off_meta_are_refused_before_any_fork(tmp_path: Path) -> None:
    """Naming where the tensor is."""
    with pytest.raises(LayoutError, match=r"decode\.inputs\['kv'\]\[1\]"):
        run(tmp_path, job(int, kv=[torch.zeros(1, device="meta"), torch.zeros(1)]))


def test_an_error_in_the_child_comes_back_in_its_words(tmp_path: Path) -> None:
    """Type and text."""
    with pytest.raises(CaptureError, match="failed: ZeroDivisionError: integer division"):
        run(tmp_path, job(lambda: 1 // 0))


def test_a_result_that_json_cannot_hold_is_an_error(tmp_path: Path) -> None:
    """Not a crash."""
    with pytest.raises(CaptureError, match="TypeError"):
        run(tmp_path, job(object))


def hang() -> NoReturn:
    while True:
        signal.pause()


def hang_deaf() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


@pytest.mark.parametrize("capture", [hang, hang_deaf])
def test_a_child_that_hangs_is_ended(tmp_path: Path, capture: Callable[[], NoReturn]) -> None:
    """By SIGTERM, or SIGKILL where it does not listen; none is left behind."""
    with pytest.raises(CaptureTimeoutError, match=r"\['decode'\] took longer than 0.3 s"):
        run(tmp_path, job(capture), seconds=0.3)
    assert no_children_left()


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    """A compiler that a child runs belongs to its process group."""
    note = tmp_path / "pid"

    def capture() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        note.with_suffix(".part").write_text(str(child.pid))
        note.with_suffix(".part").replace(note)
        hang()

    with pytest.raises(CaptureTimeoutError):
        run(tmp_path, job(capture), seconds=3)
    pid = int(note.read_text())
    deadline = time.monotonic() + 20
    while _alive(pid) and time.monotonic() < deadline:
        os.sched_yield()
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("capture", "how"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (lambda: os._exit(0), "exit code 0"),
    ],
)
def test_a_child_that_ends_without_a_report_is_a_crash(tmp_path: Path, capture: Callable[[], Any], how: str) -> None:
    """Exit code 0 too: no report is no result."""
    with pytest.raises(CaptureCrashedError, match=how):
        run(tmp_path, job(capture))
    assert no_children_left()


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "{",
        "[]",
        "null",
        '{"job": "other", "ok": true}',
        '{"job": "decode", "ok": 1}',
        "[" * 100000,
        "x" * (1 << 21),
    ],
    ids=range(8),
)
def test_a_report_that_is_garbage_is_refused(tmp_path: Path, garbage: str) -> None:
    """Wrong shape, wrong job, too deep, too long."""

    def capture() -> None:
        (tmp_path / "decode.json").write_text(garbage)
        os._exit(0)

    with pytest.raises(CaptureStatusError, match="decode is not one"):
        run(tmp_path, job(capture))


def test_a_report_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    """It is removed before the fork."""
    (tmp_path / "decode.json").write_text('{"job": "decode", "ok": true, "result": 1}')
    with pytest.raises(CaptureCrashedError):
        run(tmp_path, job(lambda: os._exit(0)))


def test_the_first_failure_ends_the_siblings(tmp_path: Path) -> None:
    """One lane fails, the other hangs: the error is the failure's, long before the deadline."""
    with pytest.raises(CaptureError, match="a failed: ZeroDivisionError"):
        run(tmp_path, job(lambda: 1 // 0, "a"), job(hang, "b"), lanes=2, seconds=500)
    assert no_children_left()


def test_a_child_runs_no_finalizers(tmp_path: Path) -> None:
    """Freeing in the child what the device lent the parent would be fatal; atexit and __del__ stay silent."""
    mark = tmp_path / "finalized"

    class Lent:
        def __del__(self) -> None:
            if os.getpid() != parent:
                mark.write_text("freed in the child")

    parent, lent = os.getpid(), Lent()
    assert run(tmp_path, job(lambda: lent is not None)) == {"decode": True}
    assert not mark.exists()


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b"])
def test_a_jobs_name_must_be_a_files_name(tmp_path: Path, name: str) -> None:
    """It becomes one."""
    with pytest.raises(LayoutError, match="file's name"):
        run(tmp_path, job(int, name))


def test_doubled_names_and_no_lanes_are_refused(tmp_path: Path) -> None:
    """Before anything is forked."""
    with pytest.raises(LayoutError, match="unique"):
        run(tmp_path, job(int), job(int))
    with pytest.raises(LayoutError, match="lanes"):
        run(tmp_path, job(int), lanes=0)
