"""Results as bytes: what is encoded comes back, what is damaged is refused, columns and entries say the same."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.plan import LogprobColumns, Result, TokenLogprobs, wide_columns
from headrace.core.result_codec import ResultCodecError, decode_result, encode_result

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
    counts = draw(st.lists(st.integers(0, 3), max_size=4))
    tokens = sum(counts)
    optional = st.lists(st.none() | entries(), min_size=tokens, max_size=tokens)
    rows = sorted(draw(st.sets(st.integers(0, len(counts) - 1)))) if counts else []
    prompts = [draw(st.lists(entries(), min_size=1, max_size=3)) for _ in rows]
    errors = draw(st.lists(st.tuples(st.integers(0, len(counts) - 1), st.text(max_size=5)), max_size=2)) if counts else []
    drafted = draw(st.just([]) | st.lists(st.integers(0, 2), min_size=len(counts), max_size=len(counts)))
    return Result(
        step_id=draw(st.integers(0, 2**40)),
        token_counts=array("i", counts),
        token_ids=array("i", draw(st.lists(ids, min_size=tokens, max_size=tokens))),
        logprobs=columns_of(draw(st.just([]) | optional)),
        prompt_rows=array("i", rows),
        prompt_counts=array("i", [len(found) for found in prompts]),
        prompt_logprobs=columns_of([entry for found in prompts for entry in found]),
        draft_counts=array("i", drafted),
        drafts=array("i", draw(st.lists(ids, min_size=sum(drafted), max_size=sum(drafted)))),
        moves_done=array("i", draw(st.lists(st.integers(1, 2**31 - 1), max_size=3))),
        errors=tuple(errors),
    )


@given(results())
@settings(max_examples=100, deadline=None)
def test_results_survive_the_codec(result: Result) -> None:
    assert decode_result(encode_result(result)) == result


@given(result=results(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_results_are_refused_cleanly(result: Result, data: st.DataObject) -> None:
    good = encode_result(result)
    position = data.draw(st.integers(0, len(good) - 1))
    damaged = bytearray(good)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([bytes(damaged), good[:position], good + b"x"]))
    try:
        decode_result(cut)
    except ResultCodecError:
        return
    assert len(cut) == len(good), "lengths are always checked"


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


WHOLE = Result(
    step_id=1,
    token_counts=array("i", [1, 0]),
    token_ids=array("i", [5]),
    logprobs=columns_of([TokenLogprobs(5, -0.5, 1, (5, 6), (-0.5, -1.5))]),
    prompt_rows=array("i", [1]),
    prompt_counts=array("i", [1]),
    prompt_logprobs=columns_of([TokenLogprobs(7, -2.0, 3)]),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_counts": array("i", [2, 0])}, "counts of tokens"),
        ({"token_counts": array("i", [2, -1])}, "counts of tokens"),
        ({"draft_counts": array("i", [1, 0])}, "counts of drafted tokens"),
        ({"draft_counts": array("i", [1]), "drafts": array("i", [3])}, "drafts of some rows"),
        ({"logprobs": columns_of([None, None])}, "differ in number"),
        ({"logprobs": replace(WHOLE.logprobs, ranks=array("i"))}, "differ in length"),
        ({"logprobs": replace(WHOLE.logprobs, top_counts=array("i", [1]))}, "listed tokens"),
        ({"logprobs": replace(WHOLE.logprobs, top_logprobs=array("f", [1.0]))}, "listed log-probabilities"),
        ({"prompt_counts": array("i", [2])}, "prompt positions"),
        ({"prompt_rows": array("i")}, "without a row"),
        ({"prompt_rows": array("i", [2])}, "does not have"),
        ({"prompt_logprobs": columns_of([None])}, "not asked for"),
        ({"errors": ((-1, "x"),)}, "does not have"),
        ({"errors": ((1.0, "x"),)}, "no integer"),
        ({"moves_done": array("i", [0])}, "no asynchronous move"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(change: dict[str, object], reason: str) -> None:
    assert decode_result(encode_result(WHOLE)) == WHOLE
    with pytest.raises(ResultCodecError, match=reason):
        decode_result(encode_result(replace(WHOLE, **change)))  # type: ignore[arg-type]
