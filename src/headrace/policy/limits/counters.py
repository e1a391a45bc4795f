"""Keeps the counters that limits are compared with.

Everything is a whole number, so that a script in Redis and this module agree to the last digit.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import NamedTuple

MINUTE_MS = 60_000
DAY_MS = 86_400_000

OPEN_RETRY_MS = 1000

KEPT_BUCKETS = 8
"""A clock that jumps ahead and back makes one extra bucket, so the counts of the right day are still there."""


class Window(StrEnum):
    OPEN = "open"
    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"


class Unit(IntEnum):
    REQUESTS = 0
    OPEN = 1
    INPUT = 2
    OUTPUT = 3
    TOKENS = 4
    NANOS = 5


class Amounts(NamedTuple):
    """nanos: money (`core.money.NANOS`)"""

    requests: int = 0
    open: int = 0
    input: int = 0
    output: int = 0
    tokens: int = 0
    nanos: int = 0


class Moment(NamedTuple):
    """Minutes are measured on `steady_ms`, days and months are those of `unix_ms`."""

    steady_ms: int
    unix_ms: int


def bucket_of(window: Window, now: Moment) -> int:
    if window is Window.OPEN:
        return 0
    if window is Window.MINUTE:
        return now.steady_ms // MINUTE_MS
    day = now.unix_ms // DAY_MS
    return day if window is Window.DAY else month_of(day)


@lru_cache(maxsize=16)
def month_of(day: int) -> int:
    """For a day counted from 1970-01-01. Source: Hinnant, days_from_civil. The script in Redis repeats this."""
    day += 719_468
    era = day // 146_097
    day_of_era = day - era * 146_097
    year = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    month = (5 * (day_of_era - (365 * year + year // 4 - year // 100)) + 2) // 153  # from March
    return (year + era * 400) * 12 + month + 2


def first_day_of(month: int) -> int:
    year, month_index = divmod(month - 2, 12)
    era = year // 400
    year_of_era = year - era * 400
    return era * 146_097 + 365 * year_of_era + year_of_era // 4 - year_of_era // 100 + (153 * month_index + 2) // 5 - 719_468


def used_of(window: Window, now: Moment, current: int, previous: int) -> int:
    if window is not Window.MINUTE or previous <= 0:
        return current
    left_ms = MINUTE_MS - now.steady_ms % MINUTE_MS
    return current - (-previous * left_ms // MINUTE_MS)


def retry_after_ms(window: Window, now: Moment, *, current: int, previous: int, allowed: int) -> int:
    """Milliseconds until at most `allowed` counts, if nothing more is used. If that never happens, the length of the window."""
    if window is Window.OPEN:
        return OPEN_RETRY_MS
    if window is Window.MINUTE:
        return _minute_ms(now, current=current, previous=previous, allowed=allowed)
    return reset_ms(window, now)


def reset_ms(window: Window, now: Moment) -> int:
    """Milliseconds until nothing used up to now counts any more; 0 for open requests, which only their end resets."""
    if window is Window.OPEN:
        return 0
    if window is Window.MINUTE:
        return 2 * MINUTE_MS - now.steady_ms % MINUTE_MS
    bucket = bucket_of(window, now)
    next_day = bucket + 1 if window is Window.DAY else first_day_of(bucket + 1)
    return next_day * DAY_MS - now.unix_ms


def _minute_ms(now: Moment, *, current: int, previous: int, allowed: int) -> int:
    elapsed_ms = now.steady_ms % MINUTE_MS
    if allowed < 0:
        return MINUTE_MS
    if current <= allowed:
        return max(0, _decay_ms(previous, allowed - current) - elapsed_ms)
    return MINUTE_MS - elapsed_ms + _decay_ms(current, allowed)


def _decay_ms(previous: int, allowed: int) -> int:
    return max(0, MINUTE_MS - allowed * MINUTE_MS // previous) if previous > allowed else 0
