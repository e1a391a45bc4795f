"""Tests stop strings on characters alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.stop import StopMatcher

pytestmark = pytest.mark.pure

SMALL = st.text("ab\u00e9", max_size=24)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The plain definition: the smallest end, then the longest string."""
    found = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    return (min(found)[0], min(found)[2]) if found else None


@given(text=SMALL, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=5))
def test_first_stop_string_is_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = None
    for start, end in pairwise(borders):
        match = matcher.push(text[start:end])
        if match is not None:
            found = (start + match.end, match.text)
            break
    assert found == first_stop(text, stops)


@given(text=SMALL, stops=STOPS)
def test_what_is_held_is_the_longest_possible_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    if first_stop(text, stops) is not None:
        return
    matcher = StopMatcher(stops)
    matcher.push(text)
    longest = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
    assert matcher.held == longest


def test_an_unarmed_match_is_passed_over_and_the_next_one_found() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", is_armed=False) is None
    match = matcher.push("a")
    assert match is not None
    assert match.end == 1


def test_sixteen_long_stop_strings_cost_linear_time() -> None:
    stops = ["a" * 1000 + str(number) for number in range(16)]
    matcher = StopMatcher(stops)
    assert matcher.push("a" * 20_000) is None
    assert matcher.held == 1000


def test_sequences_of_one_request_share_what_their_stop_strings_take_to_prepare() -> None:
    """64 sequences with 16 stop strings of 1,024 characters held the gateway's event loop for 130 ms."""
    stops = [f"{number:02}" + "ab" * 511 for number in range(16)]
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert first._borders is second._borders
    assert first.push(stops[3][:1000]) is None
    assert second.push("." + stops[3]) is not None
    assert first.push(stops[3][1000:]) is not None
