"""Tests that columns and entries hold the same log-probabilities of many positions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import LogprobColumns, Result, TokenLogprobs, wide_columns

pytestmark = pytest.mark.pure

ids = st.integers(0, 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)


@st.composite
def entries(draw: st.DrawFn) -> TokenLogprobs:
    top = draw(st.lists(st.tuples(ids, floats), max_size=4))
    return TokenLogprobs(
        draw(ids), draw(floats), draw(st.integers(1, 2**31 - 1)), tuple(token for token, _ in top), tuple(value for _, value in top)
    )


def columns_of(given_entries: Sequence[TokenLogprobs | None]) -> LogprobColumns:
    columns = LogprobColumns()
    for entry in given_entries:
        columns.append(entry)
    return columns


@st.composite
def results(draw: st.DrawFn) -> Result:
    """With log-probabilities of prompt positions."""
    num_rows = draw(st.integers(0, 4))
    rows = sorted(draw(st.sets(st.integers(0, num_rows - 1)))) if num_rows else []
    prompts = [draw(st.lists(entries(), min_size=1, max_size=3)) for _ in rows]
    return Result(
        step_id=1,
        token_counts=array("i", [0] * num_rows),
        token_ids=array("i"),
        prompt_rows=array("i", rows),
        prompt_counts=array("i", [len(found) for found in prompts]),
        prompt_logprobs=columns_of([entry for found in prompts for entry in found]),
    )


@given(st.lists(st.none() | entries(), max_size=6))
def test_entries_are_what_was_appended(given_entries: list[TokenLogprobs | None]) -> None:
    columns = columns_of(given_entries)
    assert columns.entries() == given_entries
    assert columns.picked(range(len(given_entries))) == columns
    twice = columns_of(given_entries)
    twice.extend(columns)
    assert twice.entries() == given_entries * 2


@given(st.lists(entries(), min_size=1, max_size=6))
def test_one_position_is_read_without_the_others(given_entries: list[TokenLogprobs]) -> None:
    columns = columns_of(given_entries)
    assert [columns[place] for place in range(len(columns))] == given_entries
    assert columns[-1] == given_entries[-1]
    with pytest.raises(IndexError):
        columns[len(columns)]


def test_columns_of_two_widths_are_not_joined_and_not_torn() -> None:
    narrow, wide = columns_of([TokenLogprobs(1, -0.5, 1)]), wide_columns()
    wide.append(TokenLogprobs(2, -0.25, 1))
    for one, other in ((narrow, wide), (wide, narrow)):
        before = one.entries()
        with pytest.raises(ValueError, match="32 and of 64 bits"):
            one.extend(other)
        assert one.entries() == before


@given(results())
def test_prompt_entries_go_to_their_rows(result: Result) -> None:
    found = result.prompt_entries()
    assert list(found) == list(result.prompt_rows)
    assert [len(part) for part in found.values()] == list(result.prompt_counts)
    assert [entry for part in found.values() for entry in part] == result.prompt_logprobs.entries()
