"""Tests streams of tokens as text: whole characters, no leaked stop strings, nothing lost or repeated."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.detokenize import Delta, Detokenizer, StopMatcher
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.pure

SMALL = st.text("ab\u00e9", max_size=24)
SMALL_STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The plain definition: the smallest end, then the longest string."""
    found = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    return (min(found)[0], min(found)[2]) if found else None


@given(text=SMALL, stops=SMALL_STOPS, cuts=st.lists(st.integers(0, 24), max_size=5))
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


@given(text=SMALL, stops=SMALL_STOPS)
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


WORDS = st.lists(st.sampled_from(["ab", "b", " stop", "\u00e9", "\u65e5", "\U0001f389", "x", "aab"]), max_size=12).map("".join)
STOPS = st.lists(st.sampled_from(["ab", "aab", "b\u65e5", "stop", "\U0001f389x", "\ufffd", "xx"]), max_size=3)
IDS = st.lists(st.integers(0, 344), max_size=25)


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[Delta]:
    """All deltas, the tokens arriving in chunks cut at `cuts`, the final flush last."""
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    deltas = [detokenizer.push(ids[start:end]) for start, end in pairwise(borders)]
    return [*deltas, detokenizer.flush()]


def expected(tokenizer: Tokenizer, ids: list[int], stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    whole = tokenizer.join(ids).decode("utf-8", "replace")
    found = first_stop(whole, stops)
    if found is None:
        return whole, None
    end, stop = found
    return whole[: end if include_stop else end - len(stop)], stop


@given(text=WORDS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8), include=st.booleans())
@settings(max_examples=300, deadline=None)
def test_deltas_add_up_to_the_whole_cut_at_the_first_stop(
    byte_level: Tokenizer, metaspace: Tokenizer, text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    for tokenizer in (byte_level, metaspace):
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas = stream(Detokenizer(tokenizer, stop=stops, include_stop=include), ids, cuts)
        assert ("".join(d.text for d in deltas), next((d.stop_match for d in deltas if d.stop_match), None)) == expected(
            tokenizer, ids, stops, include_stop=include
        )


@given(ids=IDS, stops=STOPS, cuts=st.lists(st.integers(0, 25), max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_tokens_add_up_broken_characters_included(byte_level: Tokenizer, ids: list[int], stops: list[str], cuts: list[int]) -> None:
    deltas = stream(Detokenizer(byte_level, stop=stops), ids, cuts)
    assert "".join(d.text for d in deltas) == expected(byte_level, ids, stops, include_stop=False)[0]


@given(text=WORDS, stops=STOPS)
@settings(max_examples=150, deadline=None)
def test_one_token_at_a_time_holds_back_no_more_than_a_beginning_of_a_stop(byte_level: Tokenizer, text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(byte_level, stop=stops)
    ids = byte_level.encode(text, add_special_tokens=False)
    given_out = ""
    for number, token_id in enumerate(ids):
        delta = detokenizer.push([token_id])
        given_out += delta.text
        if delta.stop_match is not None:
            assert delta.keep_tokens == number + 1
            return
        complete = byte_level.join(ids[: number + 1]).decode("utf-8", "ignore")
        held = complete[len(given_out) :]
        assert complete.startswith(given_out)
        assert held == max((stop[:n] for stop in stops for n in range(len(stop)) if complete.endswith(stop[:n])), key=len, default="")


def test_a_character_spread_over_tokens_comes_out_whole(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_to_id(c) for c in ("\u00e6", "\u0139", "\u00a5")]  # the bytes of U+65E5 in the byte-level table
    assert None not in ids
    detokenizer = Detokenizer(byte_level)
    texts = [detokenizer.push([i]).text for i in ids if i is not None]
    assert texts == ["", "", "\u65e5"]
    assert not detokenizer.has_partial


def test_an_unfinished_character_ends_as_one_replacement(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("\u65e5", add_special_tokens=False)
    first = byte_level.token_to_id("\u00e6")
    assert first is not None
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push([first]).text == ""
    assert detokenizer.has_partial
    assert detokenizer.flush().text == "\ufffd"
    assert ids


def test_endless_broken_bytes_come_out_as_they_arrive(byte_level: Tokenizer) -> None:
    broken = byte_level.token_to_id("\u0142")
    assert broken is not None
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push([broken]).text for _ in range(50)] == ["\ufffd"] * 50


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "a<|im_start|>b")])
def test_control_tokens_have_text_only_when_not_skipped(byte_level: Tokenizer, skip: bool, shown: str) -> None:
    ids = byte_level.encode("a<|im_start|>b", add_special_tokens=False, allow_control_tokens=True)
    detokenizer = Detokenizer(byte_level, skip_special_tokens=skip)
    assert detokenizer.push(ids).text + detokenizer.flush().text == shown


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per letter."""
    ids = [tokenizer.token_to_id(char) for char in text]
    return [i for i in ids if i is not None]


@pytest.mark.parametrize(("min_tokens", "shown", "keep"), [(0, "x", 3), (2, "x", 3), (3, "xabx", 6), (6, "xabxabx", None)])
def test_stop_strings_are_not_matched_before_min_tokens(byte_level: Tokenizer, min_tokens: int, shown: str, keep: int | None) -> None:
    ids = letters(byte_level, "xabxabx")
    detokenizer = Detokenizer(byte_level, stop=("ab",), min_tokens=min_tokens)
    deltas = [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]
    assert "".join(d.text for d in deltas) == shown
    assert next((d.keep_tokens for d in deltas if d.stop_match), None) == keep


def test_nothing_comes_after_a_stop_string(byte_level: Tokenizer) -> None:
    ids = letters(byte_level, "xaby")
    detokenizer = Detokenizer(byte_level, stop=("ab",))
    assert detokenizer.push(ids) == Delta("x", "ab", 3)
    assert detokenizer.push(ids) == Delta()
    assert detokenizer.flush() == Delta()
    assert detokenizer.num_tokens == 3


def test_the_space_before_a_first_word_is_kept_in_a_continuation(metaspace: Tokenizer) -> None:
    ids = metaspace.encode("hello", add_special_tokens=False)
    assert Detokenizer(metaspace).push(ids).text == " hello"
    assert metaspace.decode(ids) == "hello"
