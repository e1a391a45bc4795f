"""Counts the failures inside an engine, and logs a few of each kind per window with their tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.load import EngineCounters, FailureKind

log = logging.getLogger(__name__)

MAX_LOGGED = 5
WINDOW_S = 10.0


class Failures:
    def __init__(self, counters: Callable[[], EngineCounters], clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        self._windows: dict[FailureKind, _Window] = {}

    def note(self, kind: FailureKind, what: str, error: BaseException) -> None:
        self._counters().note_failure(kind)
        window = self._windows.setdefault(kind, _Window())
        if (num_left_out := window.take(self._clock())) is None:
            return
        more = f" ({num_left_out} more of this kind were not logged)" if num_left_out else ""
        log.error("%s%s", what, more, exc_info=error)


class _Window:
    def __init__(self) -> None:
        self._began = float("-inf")
        self._num_logged = self._num_left_out = 0

    def take(self, now: float) -> int | None:
        """How many were left out since the last logged failure; None: this one is left out too."""
        if now - self._began >= WINDOW_S:
            self._began, self._num_logged = now, 0
        if self._num_logged >= MAX_LOGGED:
            self._num_left_out += 1
            return None
        self._num_logged += 1
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out
