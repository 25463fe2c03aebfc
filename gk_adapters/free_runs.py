"""Free block ids as runs of neighbours: what keeps a request's KV in few long pieces."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from gk_core.errors import CapacityError

__all__ = ["FreeRuns"]


class FreeRuns:
    """Free ids, kept as maximal runs.

    Strategy:
        1. A table that grows takes the ids right behind its last block while they are free.
        2. What is left goes to the shortest run that holds all of it (best fit), so that long runs stay long; failing
           that, the longest runs are used up one after the other, which makes the fewest pieces.
        3. Blocks that will soon be given back (`passing`: those of a sliding window) are taken from a run's far end,
           away from the tables that grow into its near end.
    """

    def __init__(self, ids: range) -> None:
        self._length: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._count = 0
        if ids:
            self._add(ids.start, len(ids))

    def __len__(self) -> int:
        return self._count

    @property
    def num_runs(self) -> int:
        """Maximal runs."""
        return len(self._length)

    def ids(self) -> Iterator[int]:
        """Every free id, ascending."""
        for start in sorted(self._length):
            yield from range(start, start + self._length[start])

    def take(self, count: int, *, after: int | None, passing: bool) -> list[int]:
        """`count` ids, continuing behind `after` where possible.

        Raises:
            CapacityError: fewer are free; nothing was taken.
        """
        if count > self._count:
            raise CapacityError(f"{count} blocks wanted, {self._count} are free")
        ids: list[int] = []
        if after is not None and after + 1 in self._length:
            ids += self._cut(after + 1, count, far_end=False)
        while len(ids) < count:
            left = count - len(ids)
            fit = bisect_left(self._by_length, (left, 0))
            start = self._by_length[min(fit, len(self._by_length) - 1)][1]
            ids += self._cut(start, left, far_end=passing)
        return ids

    def give(self, ids: Sequence[int]) -> None:
        """Return ids; neighbours join."""
        ordered = sorted(ids)
        first = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                self._join(ordered[first], i - first)
                first = i

    def _cut(self, start: int, most: int, *, far_end: bool) -> range:
        """Up to `most` ids of the run at `start`."""
        length = self._length[start]
        self._remove(start)
        took = min(most, length)
        if took < length:
            self._add(start if far_end else start + took, length - took)
        first = start + length - took if far_end else start
        return range(first, first + took)

    def _join(self, start: int, length: int) -> None:
        before = self._start_of_end.get(start)
        if before is not None:
            length += self._length[before]
            self._remove(before)
            start = before
        if (after := start + length) in self._length:
            length += self._length[after]
            self._remove(after)
        self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start_of_end[start + length] = start
        insort(self._by_length, (length, start))
        self._count += length

    def _remove(self, start: int) -> None:
        length = self._length.pop(start)
        del self._start_of_end[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._count -= length
