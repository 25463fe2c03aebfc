"""Captures graphs in forked children and survives whatever those do.

Tracing state is global to a process, so each lane of jobs gets a child of its own. A child swaps the job's modules to
meta, checks that nothing else is left, captures, and reports by renaming a finished file into place; then it exits
without finalizers, which would free device memory that is not the child's. The parent waits with a deadline; the first
failure ends the others: SIGTERM, a grace period, SIGKILL, to the child's whole process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from attrs import frozen

from gk_adapters.neuron.meta_swap import MetaSwap, require_meta
from gk_core.errors import GkError, LayoutError

__all__ = [
    "CaptureCrashedError",
    "CaptureError",
    "CaptureJob",
    "CaptureStatusError",
    "CaptureTimeoutError",
    "capture_all",
]

_MAX_STATUS_BYTES = 1 << 20
_MAX_WORDS = 2000
_POLL_SECONDS = 0.005


class CaptureError(GkError):
    """A graph could not be captured; no child of the call is left."""


class CaptureTimeoutError(CaptureError):
    """The deadline passed first."""


class CaptureCrashedError(CaptureError):
    """A child ended without reporting all its jobs."""


class CaptureStatusError(CaptureError):
    """A child's report is not one."""


@frozen(kw_only=True)
class CaptureJob:
    """One graph to capture.

    Attributes:
        name: unique among the jobs; letters, digits, dot, dash and underscore.
        modules: what the graph reads; swapped to meta in the child.
        inputs: keyword arguments of `capture`, all on meta already.
        capture: does the work in the child and returns something that JSON can hold.
    """

    name: str
    modules: tuple[torch.nn.Module, ...]
    inputs: Mapping[str, object]
    capture: Callable[..., Any]


def capture_all(
    jobs: Sequence[CaptureJob],
    *,
    directory: Path,
    lanes: int = 1,
    timeout_seconds: float,
    grace_seconds: float = 5.0,
) -> dict[str, Any]:
    """Capture all jobs, dealt to `lanes` children in turn, and return what each capture returned, by name.

    Args:
        directory: existing, for the children's reports; ours alone.
        timeout_seconds: for all of it.
        grace_seconds: between SIGTERM and SIGKILL.

    Raises:
        LayoutError: names that are doubled or no file names, no lanes, or inputs that are not on meta (seen before
            anything is forked).
        CaptureError: a job failed, with the child's words; or one of its kinds.
    """
    _check(jobs, lanes)
    for job in jobs:
        _status_path(directory, job).unlink(missing_ok=True)
        require_meta(dict(job.inputs), f"{job.name}.inputs")
    deadline = time.monotonic() + timeout_seconds
    children: dict[int, list[CaptureJob]] = {}
    results: dict[str, Any] = {}
    try:
        for lane in range(min(lanes, len(jobs))):
            mine = list(jobs[lane::lanes])
            children[_fork(mine, directory)] = mine
        while children:
            for pid in list(children):
                ended, code = os.waitpid(pid, os.WNOHANG)
                if ended:
                    for job in children.pop(pid):
                        results[job.name] = _read_status(directory, job, os.waitstatus_to_exitcode(code))
            if children and time.monotonic() > deadline:
                names = sorted(job.name for lane_jobs in children.values() for job in lane_jobs)
                raise CaptureTimeoutError(f"capturing {names} took longer than {timeout_seconds} s")
            if children:
                time.sleep(_POLL_SECONDS)
    finally:
        _end(set(children), grace_seconds)
    return results


def _check(jobs: Sequence[CaptureJob], lanes: int) -> None:
    names = [job.name for job in jobs]
    if len(set(names)) != len(names):
        raise LayoutError(f"job names must be unique, got {names}")
    for name in names:
        if not name or name.startswith(".") or not all(c.isalnum() or c in "._-" for c in name):
            raise LayoutError(f"a job's name becomes a file's name: letters, digits, '.', '-' and '_', got {name!r}")
    if lanes < 1:
        raise LayoutError(f"lanes must be >= 1, got {lanes}")


def _status_path(directory: Path, job: CaptureJob) -> Path:
    return directory / f"{job.name}.json"


# ---- in the child


def _fork(jobs: Sequence[CaptureJob], directory: Path) -> int:
    pid = os.fork()
    if pid == 0:
        _run_child(jobs, directory)
    with contextlib.suppress(OSError):  # the child does the same; whoever comes second may find it done
        os.setpgid(pid, pid)
    return pid


def _run_child(jobs: Sequence[CaptureJob], directory: Path) -> NoReturn:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        swap = MetaSwap()  # for all jobs of the lane, so that they see one meta tensor per tensor
        for job in jobs:
            _report(_status_path(directory, job), _outcome(job, swap))
        code = 0
    finally:
        os._exit(code)


def _outcome(job: CaptureJob, swap: MetaSwap) -> dict[str, Any]:
    try:
        swap.swap(job.modules)
        for i, module in enumerate(job.modules):
            require_meta(module, f"{job.name}.modules[{i}]")
        require_meta(job.capture, f"{job.name}.capture")
        result = job.capture(**job.inputs)
        json.dumps(result)
    except Exception as error:
        return {"job": job.name, "ok": False, "error": f"{type(error).__name__}: {error}"[:_MAX_WORDS]}
    return {"job": job.name, "ok": True, "result": result}


def _report(path: Path, status: Mapping[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.tmp")
    with part.open("w") as file:
        json.dump(status, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


# ---- in the parent


def _read_status(directory: Path, job: CaptureJob, code: int) -> Any:
    path = _status_path(directory, job)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if not path.is_file():
        raise CaptureCrashedError(f"the child that captures {job.name} ended with {how} and left no report")
    with path.open("rb") as file:
        data = file.read(_MAX_STATUS_BYTES + 1)
    try:
        status = json.loads(data) if len(data) <= _MAX_STATUS_BYTES else None
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict) or status.get("job") != job.name or not isinstance(status.get("ok"), bool):
        raise CaptureStatusError(f"the report of {job.name} is not one ({how}): {data[:80]!r}")
    if not status["ok"]:
        raise CaptureError(f"capturing {job.name} failed: {status.get('error')}")
    if code != 0:
        raise CaptureCrashedError(f"the child that captured {job.name} then ended with {how}")
    return status.get("result")


def _end(pids: set[int], grace_seconds: float) -> None:
    """Stop children and their children; each is reaped before this returns."""
    _signal(pids, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    while pids and time.monotonic() < until:
        pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
        if pids:
            time.sleep(_POLL_SECONDS)
    _signal(pids, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.killpg(pid, number)
        except OSError:  # its group is not there yet
            with contextlib.suppress(OSError):
                os.kill(pid, number)
