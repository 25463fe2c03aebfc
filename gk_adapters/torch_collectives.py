"""Collectives between ranks that are threads of one process: for tests, and as an oracle for kernels over a mesh.

Dims: n ranks of a group, T rows per rank, H columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from gk_core.errors import TransferError

__all__ = ["Collectives", "ThreadCollectives", "run_ranks"]

R = TypeVar("R")


class Collectives(Protocol):
    """What a rank's kernel needs of the others. Every rank of a group makes the same calls in the same order."""

    def all_gather(self, x: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """Rows of all ranks, in group order: [T, ...] -> [n * T, ...]. T may differ from rank to rank."""
        ...

    def reduce_scatter(self, x: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """Sum over ranks, of which each keeps its share of the rows: [n * T, H] -> [T, H]."""
        ...


class _Meeting:
    """One group's exchange of tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.tensors: list[torch.Tensor | None] = [None] * size


class ThreadCollectives(Collectives):
    """One rank's view of a shared set of meetings; made by `run_ranks`."""

    def __init__(self, rank: int, meetings: dict[tuple[int, ...], _Meeting], timeout_seconds: float) -> None:
        self._rank, self._meetings, self._timeout_seconds = rank, meetings, timeout_seconds

    def all_gather(self, x: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """See `Collectives`.

        Raises:
            TransferError: another rank failed, or did not come in time.
        """
        return torch.cat(self._exchange(x, group))

    def reduce_scatter(self, x: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """See `Collectives`.

        Raises:
            TransferError: another rank failed, or did not come in time.
        """
        place, share = group.index(self._rank), x.shape[0] // len(group)
        parts = [t[place * share : (place + 1) * share] for t in self._exchange(x, group)]
        return torch.stack(parts).sum(dim=0)

    def _exchange(self, x: torch.Tensor, group: tuple[int, ...]) -> list[torch.Tensor]:
        if len(group) == 1:
            return [x]
        meeting = self._meetings[group]
        meeting.tensors[group.index(self._rank)] = x
        try:
            meeting.barrier.wait(self._timeout_seconds)
            tensors = [t for t in meeting.tensors if t is not None]
            meeting.barrier.wait(self._timeout_seconds)  # nobody overwrites before everybody has read
        except threading.BrokenBarrierError:
            raise TransferError(f"rank {self._rank}: a rank of group {group} failed or did not come") from None
        return tensors


def run_ranks(
    groups: Sequence[tuple[int, ...]], bodies: Sequence[Callable[[Collectives], R]], timeout_seconds: float = 60.0
) -> list[R]:
    """Run each rank's body in a thread of its own; results in rank order.

    Args:
        groups: every group that the bodies name.
        bodies: one per rank.

    Raises:
        Exception: the first failure that is not a consequence of another rank's; the other ranks are released.
    """
    meetings = {tuple(group): _Meeting(len(group)) for group in groups}
    results: list[R | None] = [None] * len(bodies)
    failures: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = bodies[rank](ThreadCollectives(rank, meetings, timeout_seconds))
        except Exception as error:
            failures.append(error)
            for meeting in meetings.values():
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, TransferError)), failures[0])
    return [result for result in results if result is not None]
