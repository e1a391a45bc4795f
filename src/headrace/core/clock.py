"""The type of the clock that components are given. Policy code takes `now` as an argument and reads no clock itself."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, as `time.monotonic`."""

    def __call__(self) -> float: ...
