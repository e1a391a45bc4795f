"""Entries as columns are the entries that were added."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.surfaces.dialect.answers import outputs_of
from headrace.gateway.surfaces.dialect.entries import EntryColumns, TokenNames
from headrace.text.assemble import TokenEntry, TopToken

logprobs = st.floats(allow_nan=False)
tokens = st.tuples(st.integers(0, 5), st.text(max_size=3), st.binary(max_size=3))
tops = st.builds(lambda token, logprob: TopToken(token[0], token[1], token[2], logprob), tokens, logprobs)
entries = st.builds(
    lambda token, logprob, rank, offset, top, shown: TokenEntry(token[0], token[1], token[2], logprob, rank, tuple(top), offset, shown),
    tokens,
    logprobs,
    st.integers(0, 2**20),
    st.integers(0, 2**40),
    st.lists(tops, max_size=4),
    st.booleans(),
)


@given(st.lists(st.lists(entries, max_size=5), max_size=5))
def test_what_goes_in_comes_out(batches: list[list[TokenEntry]]) -> None:
    columns = EntryColumns(TokenNames())
    for batch in batches:
        columns.extend(batch)
    whole = [entry for batch in batches for entry in batch]
    assert len(columns) == len(whole)
    assert list(columns) == whole == list(columns)


def test_an_alternative_takes_twelve_bytes() -> None:
    columns = EntryColumns(TokenNames())
    for place in range(1000):
        columns.extend([TokenEntry(7, "a", b"a", -0.5 - place, 1, tuple(TopToken(i, "b", b"b", -1.0 - i) for i in range(20)), place)])
    size = sum(sys.getsizeof(getattr(columns, name)) for name in columns.__slots__ if name != "_names")
    assert size < 1000 * (20 * 12 + 40) * 1.2


def test_sequences_of_an_answer_name_a_token_once() -> None:
    """A table of names for each of 64 choices took ten times what the numbers take."""
    first, second = (output.entries for output in outputs_of(2))
    for columns in (first, second):
        columns.extend([TokenEntry(7, "a", b"a", -0.5, 1, (TopToken(8, "b", b"b", -1.0),), 0)])
    assert first._names is second._names
    assert first._names.names == [(7, "a", b"a"), (8, "b", b"b")]
    assert list(first) == list(second)
