"""The stages of a request: none overlaps another, and together they cover what their parts cover."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.timeline import ADMIT, ANSWER, CLOSE, PRECEDENCE, Span, StageMarks, flat, stages_of

pytestmark = pytest.mark.pure

spans = st.builds(
    lambda name, start, length: Span(name, start / 8, (start + length) / 8),
    st.sampled_from(PRECEDENCE),
    st.integers(0, 40),
    st.integers(1, 20),
)


@given(st.lists(spans, max_size=12))
def test_each_moment_has_the_first_name_that_covers_it(given_spans: list[Span]) -> None:
    made = flat(given_spans)
    assert all(one.end <= other.start for one, other in itertools.pairwise(made))
    for eighth in range(61):
        moment = (eighth + 0.5) / 8
        expected = next((name for name in PRECEDENCE if any(s.name == name and s.start < moment < s.end for s in given_spans)), None)
        assert next((span.name for span in made if span.start < moment < span.end), None) == expected


def marks_at(*entered: tuple[str, float]) -> StageMarks:
    moments = iter([moment for _, moment in entered])
    marks = StageMarks(lambda: next(moments))
    for name, _ in entered[1:]:
        marks.enter(name)
    return marks


def test_an_answer_is_divided_by_its_sequences() -> None:
    marks = marks_at((ADMIT, 10.0), ("prepare", 10.5), (ANSWER, 11.0), (CLOSE, 16.0))
    one = [Span("queue", 11.25, 12.0), Span("prefill", 12.0, 13.0), Span("decode", 13.0, 14.0)]
    other = [Span("queue", 11.25, 13.5), Span("decode", 13.5, 15.0)]
    made = stages_of(marks.entered, [*one, *other], 6.5)
    assert made == (
        ("admit", 0.0, 0.5),
        ("prepare", 0.5, 0.5),
        ("queue", 1.25, 0.75),
        ("prefill", 2.0, 1.0),
        ("decode", 3.0, 2.0),
        ("deliver", 5.0, 1.0),
        ("close", 6.0, 0.5),
    )
    assert sum(stage.seconds for stage in made) == 6.5 - 0.25, "the way to the engine belongs to no stage"


def test_an_answer_without_spans_is_delivered() -> None:
    assert stages_of(marks_at((ADMIT, 0.0), (ANSWER, 1.0)).entered, [], 2.0) == (("admit", 0.0, 1.0), ("deliver", 1.0, 1.0))


def test_a_span_that_has_no_end_ends_with_the_answer() -> None:
    made = stages_of(marks_at((ADMIT, 0.0), (ANSWER, 1.0), (CLOSE, 3.0)).entered, [Span("resume", 2.0, 1e15)], 4.0)
    assert made == (("admit", 0.0, 1.0), ("resume", 2.0, 1.0), ("close", 3.0, 1.0))
