"""Tests that a log line that every request may cause is written once an interval, and that no event goes uncounted."""

from __future__ import annotations

import logging

import pytest

from headrace.observe.limited_log import INTERVAL_S, LimitedLog

pytestmark = pytest.mark.pure


def test_a_storm_of_equal_events_is_one_line_an_interval_that_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LimitedLog(logging.getLogger("storm"), lambda: now)
    with caplog.at_level(logging.INFO, logger="storm"):
        for _ in range(1280):
            log.info("a request falls back: %s", "100 % full")
            now += 1 / 64
        now += INTERVAL_S
        log.info("a request falls back: %s", "gone")
        now += INTERVAL_S
        log.info("a request falls back: %s", "gone")
    assert [record.getMessage() for record in caplog.records] == [
        "a request falls back: 100 % full",
        "a request falls back: 100 % full (and 639 more since the last such line)",
        "a request falls back: gone (and 639 more since the last such line)",
        "a request falls back: gone",
    ]
