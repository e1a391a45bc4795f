"""Tests that a request is counted before, during or after an event, and that a standby replica takes one place until it is back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lab.metrics import LoadRecord
from headrace.lab.simulate.events import event_lines, event_reports, with_standby
from headrace.lab.simulate.load import Spike
from headrace.lab.simulate.site import Death

pytestmark = pytest.mark.pure


def record(begin_s: float, end_s: float, *, ttft_s: float = 0.0, error: str | None = None) -> LoadRecord:
    chunks = () if error else (begin_s + ttft_s, end_s)
    return LoadRecord(intended_s=begin_s, sent_s=begin_s, chunk_s=chunks, end_s=end_s, output_tokens=2, error=error)


def test_a_request_is_during_an_event_while_which_it_was_open() -> None:
    records = [record(0, 9), record(9, 10), record(9, 11), record(15, 16), record(20, 21), record(21, 22)]
    [report] = event_reports(records, None, [Death(10, 0, 10)])
    assert (report.event, report.begin_s, report.end_s) == ("death of replica 0", 10, 20)
    assert [report.before.requests, report.during.requests, report.after.requests] == [1, 4, 1]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 30))), st.floats(0, 100), st.floats(0, 50))
def test_each_request_is_counted_once_by_each_event(spans: list[tuple[float, float]], begin_s: float, seconds: float) -> None:
    records = [record(begin, begin + length) for begin, length in spans]
    for report in event_reports(records, Spike(begin_s, seconds + 1, 3), [Death(begin_s, 0, seconds), Death(begin_s / 2, 1, seconds)]):
        assert report.before.requests + report.during.requests + report.after.requests == len(records)


def test_a_table_has_counts_and_words_where_there_is_no_time() -> None:
    before = [record(0, 1, ttft_s=0.25)] * 20
    failed = [record(10, 11, error="refused")] * 30
    [report] = event_reports([*before, *failed, record(40, 41)], Spike(10, 20, 2.5), [])
    title, _, *rows = event_lines(report)
    assert title == "spike of 2.5 times the load, from 10 to 30 s"
    assert [row.split() for row in rows] == [
        ["before", "20", "0", "250.0", "250.0", "750.0", "750.0"],
        ["during", "30", "30", "failed", "failed", "failed", "failed"],
        ["after", "1", "0", "-", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("back_s", "num_standby", "title"),
    [
        (0, 0, "death of replica 0, at 10 s"),
        (30, 0, "death of replica 0, from 10 to 40 s"),
        (30, 1, "death of replica 0, at 10 s, taken over by a standby"),
    ],
)
def test_a_standby_is_named_where_it_took_a_place(back_s: float, num_standby: int, title: str) -> None:
    [report] = event_reports([record(0, 1)], None, with_standby([Death(10, 0, back_s)], num_standby))
    assert next(event_lines(report)) == title


def test_a_standby_that_had_to_be_loaded_is_named_too() -> None:
    reports = event_reports([record(0, 1)], None, with_standby([Death(10, 0, 30), Death(20, 1, 30)], 1))
    assert next(event_lines(reports[1])) == "death of replica 1, from 20 to 40 s, taken over by a standby"


@pytest.mark.parametrize(
    ("num_standby", "back_s"),
    [(0, [30, 30, 30]), (1, [0, 20, 20]), (2, [0, 0, 10]), (3, [0, 0, 0])],
)
def test_a_standby_takes_a_place_once_until_what_it_replaced_is_loaded(num_standby: int, back_s: list[float]) -> None:
    """One standby: the first death has it; the second waits until the first replica is loaded, the third for the second."""
    deaths = [Death(20, 1, 30), Death(10, 0, 30), Death(30, 2, 30)]
    assert [each.back_s for each in with_standby(deaths, num_standby)] == back_s
