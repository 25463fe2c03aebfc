"""nki.jit, and how ranks and cores take turns.

Strategy: each (rank, core) is a thread, but only one runs at a time: it runs until it reaches a collective, a
sendrecv or a core_barrier, or ends. When all of them wait or have ended, the scheduler matches what they wait for,
computes what each receives, and lets them run again. So a run is deterministic, and a program that diverges is seen at
the first point where ranks disagree.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gk_kernels.simulator import context as cx
from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import DivergenceError, SimulationError, UsageError, kernel_site, refuse


@dataclass
class Request:
    """Something a core waits for. `site` is the kernel line that waits."""

    site: str = field(default_factory=lambda: kernel_site(3, callers=0), init=False)


@dataclass
class CoreBarrier(Request):
    """core_barrier."""


@dataclass
class SendRecv(Request):
    """sendrecv: the values sent (None while tracing), and the pipe."""

    values: Array | None
    send_to: int
    receive_from: int
    pipe: int
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Collective(Request):
    """A collective.

    Attributes:
        sources: live views of this core's inputs (None while tracing).
        compute: inputs of every member of a group, in the group's order -> what each member receives.
    """

    op: str
    groups: tuple[tuple[int, ...], ...]
    signature: tuple[Any, ...]
    sources: list[Array] | None
    compute: Callable[[list[list[Array]]], list[list[Array]]]


class _Aborted(BaseException):
    """Unwinds a core's thread after another one failed."""


class _Task:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.resume = threading.Semaphore(0)
        self.request: Request | None = None
        self.result: Any = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.thread: threading.Thread | None = None

    @property
    def label(self) -> str:
        core = self.core
        return f"rank {core.rank}" + (f" core {core.core_id}" if core.lnc > 1 else "")


def _tag(error: BaseException, core: Core) -> None:
    if isinstance(error, SimulationError) and not error.ranks and core.ranks > 1:
        error.ranks = (core.rank,)


def run(cores: Sequence[Core], body: Callable[[Core], Any]) -> list[Any]:
    """Run `body(core)` once per core; its results in the order of `cores`.

    Raises:
        SimulationError: the first refusal of any core, tagged with its rank.
    """
    if len(cores) == 1:
        return [_run_alone(cores[0], body)]
    return _Lockstep(cores, body).run()


def _run_alone(core: Core, body: Callable[[Core], Any]) -> Any:
    def rendezvous(request: Request) -> Any:
        assert isinstance(request, Collective)
        task = _waiting(core, request)
        if core.trace:  # one rank of a larger mesh can be traced alone: without data nobody sends anything
            _check_groups(request, [task], everyone=False)
            return []
        return _complete([task])[0]

    core.rendezvous = rendezvous
    before = cx.activate(core)
    try:
        with np.errstate(all="ignore"):
            return body(core)
    finally:
        cx.activate(before)


def _waiting(core: Core, request: Request) -> _Task:
    task = _Task(core)
    task.request = request
    return task


class _Lockstep:
    def __init__(self, cores: Sequence[Core], body: Callable[[Core], Any]) -> None:
        self.body = body
        self.turn = threading.Semaphore(0)
        self.aborting = False
        self.tasks = [_Task(core) for core in cores]
        for task in self.tasks:
            task.core.rendezvous = functools.partial(self._wait, task)

    def run(self) -> list[Any]:
        before = cx.activate(None)
        try:
            for task in self.tasks:
                task.thread = threading.Thread(target=self._main, args=(task,), daemon=True)
                task.thread.start()
            while True:
                for task in self.tasks:
                    if not task.done and task.request is None:
                        self._step(task)
                if all(task.done for task in self.tasks):
                    return [task.value for task in self.tasks]
                self._resolve()
        finally:
            self._abort()
            cx.activate(before)

    def _main(self, task: _Task) -> None:
        task.resume.acquire()
        try:
            if not self.aborting:
                with np.errstate(all="ignore"):
                    task.value = self.body(task.core)
        except _Aborted:
            pass
        except BaseException as error:  # handed to the thread that called run()
            task.error = error
        task.done = True
        self.turn.release()

    def _step(self, task: _Task) -> None:
        cx.activate(task.core)
        task.resume.release()
        self.turn.acquire()
        cx.activate(None)
        if task.error is not None:
            _tag(task.error, task.core)
            raise task.error

    def _wait(self, task: _Task, request: Request) -> Any:
        task.request = request
        self.turn.release()
        task.resume.acquire()
        if self.aborting:
            raise _Aborted
        result, task.result = task.result, None
        return result

    def _abort(self) -> None:
        self.aborting = True
        for task in self.tasks:
            if task.thread is not None and not task.done:
                task.resume.release()
                self.turn.acquire()
            if task.thread is not None:
                task.thread.join()

    def _resolve(self) -> None:
        """Everything waits or has ended: let through what matches, or refuse."""
        if self._resolve_cores():
            return
        waiting = [task for task in self.tasks if not task.done]
        ended = [task for task in self.tasks if task.done]
        if ended:
            first = waiting[0].request
            assert first is not None
            _diverge(
                "a rank ends before a collective that others wait in",
                f"{_labels(ended)} ended; {_labels(waiting)} wait in {_name(first)}",
                "every rank runs the same collectives",
                first.site,
                ended,
            )
        for task, result in zip(waiting, _complete(waiting), strict=True):
            task.request, task.result = None, result

    def _resolve_cores(self) -> bool:
        """sendrecv and core_barrier between the two cores of each rank."""
        progress = False
        for first, second in zip(self.tasks[::2], self.tasks[1::2], strict=False):
            if first.core.lnc != 2:
                return False
            a, b = first.request, second.request
            if not isinstance(a, (SendRecv, CoreBarrier)) and not isinstance(b, (SendRecv, CoreBarrier)):
                continue
            waits = a if isinstance(a, (SendRecv, CoreBarrier)) else b
            assert waits is not None
            if type(a) is not type(b):
                other = "ended" if first.done or second.done else f"waits in {_name(a if waits is b else b)}"
                _diverge(
                    "the two cores of a rank do not meet",
                    f"one core waits in {_name(waits)}, the other {other}",
                    "both cores run the same sendrecv and core_barrier",
                    waits.site,
                    [first],
                )
            if isinstance(a, SendRecv) and isinstance(b, SendRecv):
                _exchange(first, second, a, b)
            first.request = second.request = None
            progress = True
        return progress


def _exchange(first: _Task, second: _Task, a: SendRecv, b: SendRecv) -> None:
    if (a.pipe, a.shape, a.dtype) != (b.pipe, b.shape, b.dtype):
        _diverge(
            "sendrecv of two cores",
            f"pipe {a.pipe} {a.dtype} {a.shape} and pipe {b.pipe} {b.dtype} {b.shape}",
            "equal pipe_id, shape and dtype",
            a.site,
            [first],
        )
    sides = (a, b)
    for core_id, (task, mine) in enumerate(((first, a), (second, b))):
        if sides[mine.receive_from].send_to != core_id:
            _diverge(
                "sendrecv directions",
                f"core {core_id} receives from core {mine.receive_from}, "
                f"which sends to core {sides[mine.receive_from].send_to}",
                "matching directions",
                mine.site,
                [first],
            )
        task.result = sides[mine.receive_from].values


def _name(request: Request | None) -> str:
    return request.op if isinstance(request, Collective) else type(request).__name__


def _labels(tasks: Sequence[_Task]) -> str:
    names = [task.label for task in tasks]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _diverge(rule: str, got: str, limit: str, site: str, tasks: Sequence[_Task]) -> None:
    error = DivergenceError(rule, got, limit, site)
    error.ranks = tuple(dict.fromkeys(task.core.rank for task in tasks))
    raise error


def _complete(tasks: Sequence[_Task]) -> list[Any]:
    """Results of one collective in which all `tasks` wait."""
    requests: list[Collective] = []
    for task in tasks:
        request = task.request
        assert isinstance(request, Collective)
        requests.append(request)
    lead = requests[0]
    for what, field_name in (
        ("collectives", "op"),
        ("kernel lines", "site"),
        ("replica groups", "groups"),
        ("operands", "signature"),
    ):
        key = operator.attrgetter(field_name)
        odd = [task for task, r in zip(tasks, requests, strict=True) if key(r) != key(lead)]
        if odd:
            request = odd[0].request
            assert isinstance(request, Collective)
            _diverge(
                f"ranks disagree about {what}",
                f"{_labels(tasks[:1])}: {key(lead)} ({lead.op}); {_labels(odd)}: {key(request)} ({request.op})",
                "the same program on every rank",
                lead.site,
                odd,
            )
    _check_groups(lead, tasks)
    if lead.sources is None:
        return [None] * len(tasks)
    place = {(task.core.rank, task.core.core_id): i for i, task in enumerate(tasks)}
    results: list[Any] = [None] * len(tasks)
    for core_id in range(tasks[0].core.lnc):
        for group in lead.groups:
            members = [place[rank, core_id] for rank in group]
            inputs = [_sources(requests[i]) for i in members]
            for i, received in zip(members, lead.compute(inputs), strict=True):
                results[i] = received
    return results


def _sources(request: Collective) -> list[Array]:
    assert request.sources is not None
    return request.sources


def _check_groups(request: Collective, tasks: Sequence[_Task], *, everyone: bool = True) -> None:
    ranks = {task.core.rank for task in tasks}
    listed = [rank for group in request.groups for rank in group]
    if len(set(listed)) != len(listed):
        _diverge(
            f"{request.op}: replica_group", str(request.groups), "groups that do not overlap", request.site, tasks[:1]
        )
    if everyone and set(listed) != ranks:
        _diverge(
            f"{request.op}: replica_group",
            f"ranks {sorted(set(listed))}",
            f"exactly the {len(ranks)} simulated ranks",
            request.site,
            tasks[:1],
        )
    if len({len(group) for group in request.groups}) > 1:
        _diverge(f"{request.op}: replica_group", str(request.groups), "groups of one size", request.site, tasks[:1])


class Kernel:
    """A function under nki.jit. `kernel[lnc](...)` sets the logical core size."""

    def __init__(self, function: Callable[..., Any], lnc: int = 1) -> None:
        self.function, self.lnc = function, lnc
        functools.update_wrapper(self, function)

    def __getitem__(self, lnc: int) -> Kernel:
        if lnc not in (1, 2):
            raise UsageError("logical core size", lnc, "1 or 2")
        return Kernel(self.function, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on this process's simulator with its defaults; returns the kernel's outputs as NumPy arrays.

        Raises:
            UsageError: called from another kernel (a sub-kernel is a plain function).
        """
        if cx.core is not None:
            refuse(
                "a kernel calls a kernel",
                f"{self.function.__name__} has its own nki.jit",
                "sub-kernels without nki.jit",
                UsageError,
            )
        from gk_kernels.simulator.api import simulate

        return simulate(self, *args, **kwargs).outputs[0]


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """nki.jit: mark a kernel's entry function. Options (mode, ...) of older releases are accepted and ignored."""
    if fn is None:
        return lambda function: jit(function, **kwargs)
    if isinstance(fn, Kernel):
        return fn
    return Kernel(fn)
