"""FakeClock: time that moves only when told to.

>>> clock = FakeClock()
>>> clock.advance(1.5)
>>> clock.now()
1.5
"""

from __future__ import annotations

from gk_core.errors import LayoutError
from gk_core.ports import Clock

__all__ = ["FakeClock"]


class FakeClock(Clock):
    """A clock for tests.

    Args:
        start: seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on.

        Raises:
            LayoutError: seconds is negative.
        """
        if seconds < 0:
            raise LayoutError(f"a clock never goes back, got {seconds} seconds")
        self._now += seconds
