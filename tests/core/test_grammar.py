"""Tests the grammar value: its rules, and the sources it writes itself."""

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, ReasoningSpan
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams

pytestmark = pytest.mark.pure

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")


def test_a_choice_is_written_as_alternatives_of_quoted_texts() -> None:
    assert Grammar.choice(['a "b"', "c\n"]) == Grammar(GrammarKind.LARK, 'start: CHOICE\nCHOICE: "a \\"b\\"" | "c\\n"')


@pytest.mark.parametrize("choices", [[], ["a", ""]])
def test_a_choice_of_nothing_is_refused(choices: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="choice"):
        Grammar.choice(choices)


def test_size_is_counted_in_bytes_and_named() -> None:
    fits = Grammar(GrammarKind.REGEX, "a" * MAX_GRAMMAR_BYTES)
    assert fits.checked() is fits
    with pytest.raises(InvalidRequest, match=f"guided_regex: expected at most {MAX_GRAMMAR_BYTES} bytes"):
        Grammar(GrammarKind.REGEX, "\u00e9" * (MAX_GRAMMAR_BYTES // 2 + 1)).checked(field="guided_regex")


@pytest.mark.parametrize("source", ["", "  \n"])
def test_an_empty_source_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="non-empty"):
        Grammar(GrammarKind.LARK, source).checked()


def test_markers_of_reasoning_have_a_length() -> None:
    with pytest.raises(InvalidRequest, match="reasoning markers"):
        Grammar(GrammarKind.REGEX, "a", ReasoningSpan(start="<think>", end="")).checked()


def request(grammar: Grammar, *, ignore_eos: bool = False) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId("r"), prompt_ids=(1,), params=SamplingParams(seed=0, n=2, ignore_eos=ignore_eos), grammar=grammar
    )


def test_a_request_checks_its_grammar() -> None:
    assert request(DIGITS).checked(vocab_size=9, max_model_len=99).grammar == DIGITS
    with pytest.raises(InvalidRequest, match="grammar: expected a non-empty text"):
        request(Grammar(GrammarKind.REGEX, "")).checked(vocab_size=9, max_model_len=99)


def test_end_tokens_cannot_be_ignored_beside_a_grammar() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos: expected false beside a grammar"):
        request(DIGITS, ignore_eos=True).checked(vocab_size=9, max_model_len=99)


def test_a_resumed_sequence_keeps_its_grammar() -> None:
    assert request(DIGITS).resumed(1, [4, 5], "digest").grammar == DIGITS
