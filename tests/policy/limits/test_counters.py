"""Tests windows: buckets of days and months are the calendar's, and the minute slides."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.limits.counters import DAY_MS, Moment, Window, bucket_of, first_day_of, month_of, reset_ms, retry_after_ms, used_of

pytestmark = pytest.mark.pure

EPOCH = date(1970, 1, 1)


@given(st.dates(date(1970, 1, 1), date(2400, 12, 31)))
def test_months_are_those_of_the_calendar(day: date) -> None:
    number = (day - EPOCH).days
    month = month_of(number)
    assert month - month_of(0) == (day.year - 1970) * 12 + day.month - 1
    assert EPOCH + timedelta(days=first_day_of(month)) == day.replace(day=1)


@given(st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1)))
def test_a_window_of_the_calendar_ends_where_the_next_begins(at: datetime) -> None:
    now = Moment(0, int(at.replace(tzinfo=UTC).timestamp() * 1000))
    for window in (Window.DAY, Window.MONTH):
        left = reset_ms(window, now)
        assert left > 0
        bucket = bucket_of(window, now)
        assert bucket_of(window, Moment(0, now.unix_ms + left - 1)) == bucket
        assert bucket_of(window, Moment(0, now.unix_ms + left)) == bucket + 1


def test_the_day_and_the_month_begin_at_midnight_utc() -> None:
    now = Moment(0, int(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp() * 1000))
    assert reset_ms(Window.DAY, now) == reset_ms(Window.MONTH, now) == 1000
    assert reset_ms(Window.DAY, Moment(0, now.unix_ms + 1000)) == DAY_MS
    assert reset_ms(Window.MONTH, Moment(0, now.unix_ms + 1000)) == 31 * DAY_MS


def test_the_minute_before_fades() -> None:
    used = [used_of(Window.MINUTE, Moment(60_000 + ms, 0), 1, 3) for ms in (0, 1, 20_000, 20_001, 40_000, 59_999)]
    assert used == [4, 4, 3, 3, 2, 2]


def test_nothing_fades_within_a_bucket() -> None:
    assert used_of(Window.MINUTE, Moment(119_999, 0), 3, 0) == 3


@given(st.integers(0, 10**7), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_retry_after_its_time_succeeds_and_one_before_does_not(steady_ms: int, current: int, previous: int, allowed: int) -> None:
    now = Moment(steady_ms, 0)
    wait_ms = retry_after_ms(Window.MINUTE, now, current=current, previous=previous, allowed=allowed)
    assert wait_ms >= 0

    def used_after(ms: int) -> int:
        then = Moment(steady_ms + ms, 0)
        passed = bucket_of(Window.MINUTE, then) - bucket_of(Window.MINUTE, now)
        buckets = {0: (current, previous), 1: (0, current)}.get(passed, (0, 0))
        return used_of(Window.MINUTE, then, *buckets)

    assert used_after(wait_ms) <= allowed
    assert wait_ms <= 1 or used_after(wait_ms - 2) > allowed or used_of(Window.MINUTE, now, current, previous) <= allowed
    assert used_after(reset_ms(Window.MINUTE, now)) == 0


@pytest.mark.parametrize("unix_ms", [-1, -DAY_MS, 0])
def test_times_before_1970_have_buckets_too(unix_ms: int) -> None:
    now = Moment(0, unix_ms)
    assert bucket_of(Window.DAY, now) == unix_ms // DAY_MS
    assert 0 < reset_ms(Window.MONTH, now) <= 31 * DAY_MS
