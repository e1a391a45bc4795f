"""Logs lines that every request may cause: writes one line per interval, with the number left out since the last one."""

from __future__ import annotations

import logging
import math

from headrace.core.clock import Clock

INTERVAL_S = 10.0
"""Least seconds between two lines. An outage of an hour leaves 360 lines instead of one for each request."""


class LimitedLog:
    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        """clock: monotonic seconds"""
        self._log = log
        self._clock = clock
        self._last_at = -math.inf
        self._num_left_out = 0

    def info(self, message: str, *args: object) -> None:
        """Log at INFO, or count the line as left out. Arguments are formatted as in `logging`."""
        now = self._clock()
        if now - self._last_at < INTERVAL_S:
            self._num_left_out += 1
            return
        more = f" (and {self._num_left_out} more since the last such line)" if self._num_left_out else ""
        self._last_at, self._num_left_out = now, 0
        self._log.info(f"{message}%s", *args, more)
