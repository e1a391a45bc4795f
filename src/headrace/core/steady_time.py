"""A Unix clock that does not follow the system clock when that is set back, so that an expired key stays expired."""

from __future__ import annotations

from headrace.core.clock import Clock


class SteadyUnixTime:
    """The later of the wall clock, and the wall clock at creation plus the seconds since. clock: monotonic."""

    def __init__(self, unix_time: Clock, clock: Clock) -> None:
        self._unix_time = unix_time
        self._clock = clock
        self._offset = unix_time() - clock()

    def __call__(self) -> float:
        return max(self._unix_time(), self._clock() + self._offset)
