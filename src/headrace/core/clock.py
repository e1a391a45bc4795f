"""The type of the clock that components are given, and a Unix clock that is not set back. Policy code takes `now` instead."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, as `time.monotonic`."""

    def __call__(self) -> float: ...


class SteadyUnixTime:
    """The later of the wall clock, and the wall clock at creation plus the seconds since, so that an expired key stays expired.

    clock: monotonic
    """

    def __init__(self, unix_time: Clock, clock: Clock) -> None:
        self._unix_time = unix_time
        self._clock = clock
        self._offset = unix_time() - clock()

    def __call__(self) -> float:
        return max(self._unix_time(), self._clock() + self._offset)
