"""Unix time for decisions that a jump of the clock must not turn back: an expired key stays expired."""

from __future__ import annotations

from headrace.core.clock import Clock


class SteadyUnixTime:
    """The later of the wall clock and of the time at its making plus the seconds since.

    A wall clock that jumps back is not followed. One that jumps forward is, until it jumps back again: then this time goes on as if
    neither had happened.
    """

    def __init__(self, unix_time: Clock, clock: Clock) -> None:
        """clock: monotonic"""
        self._unix_time = unix_time
        self._clock = clock
        self._offset = unix_time() - clock()

    def __call__(self) -> float:
        return max(self._unix_time(), self._clock() + self._offset)
