"""A producer's notices answered between steps and while the engine is idle.

An engine without requests stops stepping, and a long prefill step is one call; either way nobody would answer claims,
and over a transport without a progress thread reads from this side would not move. So one thread polls: often while
leases are out or peers talk, seldom otherwise. It costs a wake-up per interval, not a core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from gk_core.errors import TransferError
from gk_core.notices import Claim, PeerNotice, Release

__all__ = ["NoticeThread"]

_log = logging.getLogger("vllm.gk")
_BUSY_SECONDS, _IDLE_SECONDS, _QUIET_AFTER_SECONDS = 0.001, 0.02, 2.0


class NoticeThread:
    """Polls until closed.

    Args:
        take: notices since the last call.
        answer: deals with a reader's notice; called under `lock`.
        is_busy: whether somebody may be about to talk; called under `lock`.
        lock: held around both, and by whoever else touches what they touch.
    """

    def __init__(
        self,
        *,
        take: Callable[[], tuple[PeerNotice, ...]],
        answer: Callable[[Claim | Release], None],
        is_busy: Callable[[], bool],
        lock: threading.RLock,
    ) -> None:
        self._take, self._answer, self._is_busy, self._lock = take, answer, is_busy, lock
        self._others: deque[PeerNotice] = deque()
        self._stop = threading.Event()
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gk-notices", daemon=True)
        self._thread.start()

    def take_others(self) -> tuple[PeerNotice, ...]:
        """Notices that are not a reader's."""
        taken = []
        while self._others:
            taken.append(self._others.popleft())
        return tuple(taken)

    def close(self) -> None:
        """Stop; harmless twice."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        interval = _BUSY_SECONDS
        while not self._stop.wait(interval):
            try:
                interval = self._poll()
            except TransferError as error:
                # A closed transport ends the thread; any other hiccup must not.
                if self._stop.is_set():
                    return
                _log.warning("gk: notices could not be taken: %s", error)
                interval = _IDLE_SECONDS
            except Exception:
                _log.exception("gk: a notice could not be dealt with")
                interval = _IDLE_SECONDS

    def _poll(self) -> float:
        notices = self._take()
        with self._lock:
            for notice in notices:
                if isinstance(notice, Claim | Release):
                    self._answer(notice)
                else:
                    self._others.append(notice)
            busy = self._is_busy()
        now = time.monotonic()
        if notices or busy:
            self._heard_at = now
        return _BUSY_SECONDS if now - self._heard_at < _QUIET_AFTER_SECONDS else _IDLE_SECONDS
