"""Tests the meaning of foreign servers' token counts, in whatever forms and order the objects of one answer come."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream.foreign.chunk import SaidUsage, UsageCounts
from headrace.gateway.upstream.seam import TokenUsage

pytestmark = pytest.mark.pure

Fields = dict[str, Any]


class Truth(NamedTuple):
    """What an answer used. rest: of the prompt, neither cached nor written;  text: of the output, without reasoning"""

    rest: int
    cached: int
    written: int
    text: int
    reasoning: int

    @property
    def prompt(self) -> int:
        return self.rest + self.cached + self.written

    @property
    def output(self) -> int:
        return self.text + self.reasoning

    @property
    def parts(self) -> int:
        return self.cached + self.written

    @property
    def total(self) -> int:
        return self.prompt + self.output


def openai(true: Truth) -> Fields:
    prompt_parts = {"cached_tokens": true.cached, "cache_write_tokens": true.written}
    return {
        "prompt_tokens": true.prompt,
        "completion_tokens": true.output,
        "prompt_tokens_details": prompt_parts,
        "completion_tokens_details": {"reasoning_tokens": true.reasoning},
    }


def newer(true: Truth) -> Fields:
    """OpenAI's newer interface. Without cached tokens it has the names, and the meaning, of Anthropic's."""
    return {
        "input_tokens": true.prompt,
        "output_tokens": true.output,
        "input_tokens_details": {"cached_tokens": true.cached},
        "output_tokens_details": {"reasoning_tokens": true.reasoning},
    }


def anthropic(true: Truth) -> Fields:
    written = {"cache_read_input_tokens": true.cached, "cache_creation_input_tokens": true.written}
    return {"input_tokens": true.rest, "output_tokens": true.output, **written}


def anthropic_by_a_proxy(true: Truth) -> Fields:
    return anthropic(true) | {"total_tokens": true.rest + true.output}


def deepseek(true: Truth) -> Fields:
    hits = {"prompt_cache_hit_tokens": true.cached, "prompt_cache_miss_tokens": true.prompt - true.cached}
    return {"completion_tokens": true.output, **hits}


def moonshot(true: Truth) -> Fields:
    return {"prompt_tokens": true.prompt, "completion_tokens": true.output, "total_tokens": true.total, "cached_tokens": true.cached}


def beside_by_the_total(true: Truth) -> Fields:
    """What stands in the prompt's details is a part of it, whatever the total is."""
    details = {"prompt_tokens_details": {}, "cached_tokens": true.cached, "cache_creation_input_tokens": true.written}
    return openai(true) | {"prompt_tokens": true.rest, "total_tokens": true.total} | details


def beside_by_the_number(true: Truth) -> Fields:
    return openai(true) | {"prompt_tokens": true.rest}


def xai(true: Truth) -> Fields:
    return openai(true) | {"completion_tokens": true.text, "total_tokens": true.total}


def xai_without_a_total(true: Truth) -> Fields:
    return openai(true) | {"completion_tokens": true.text}


def gemini(true: Truth) -> Fields:
    return {"prompt_tokens": true.prompt, "completion_tokens": true.text, "total_tokens": true.total}


def gemini_with_details(true: Truth) -> Fields:
    return gemini(true) | {"prompt_tokens_details": {"cached_tokens": true.cached}}


FORMS: dict[Callable[[Truth], Fields], Callable[[Truth], bool]] = {
    openai: lambda _: True,
    lambda true: openai(true) | {"total_tokens": true.total}: lambda _: True,
    newer: lambda _: True,
    anthropic: lambda _: True,
    anthropic_by_a_proxy: lambda _: True,
    deepseek: lambda true: not true.written,
    moonshot: lambda _: True,
    beside_by_the_total: lambda true: true.parts not in (0, true.reasoning),
    beside_by_the_number: lambda true: true.parts > true.rest,
    xai: lambda _: True,
    xai_without_a_total: lambda true: true.reasoning > true.text,
    gemini: lambda true: true.text > 0 and true.reasoning != true.parts,
    gemini_with_details: lambda true: true.text > 0,
}
"""A form of a true usage -> whether it can be told from the others: where its parts are less, its numbers could be another form's."""


def meant(objects: list[Fields], num_tokens: int = 2, num_sequences: int = 1) -> TokenUsage:
    said = [msgspec.convert(each, UsageCounts).said() for each in objects]
    return reduce(SaidUsage.merged, said, SaidUsage()).meant(num_tokens, num_sequences)


SIZES = st.integers(0, 3) | st.integers(0, 5000)
TRUTHS = st.builds(Truth, st.integers(1, 5000), SIZES, SIZES, st.integers(1, 3) | st.integers(1, 5000), SIZES)


@st.composite
def usages(draw: st.DrawFn) -> tuple[Truth, list[Fields]]:
    """A true usage, and objects of an answer that end with it: counts so far, zeros, halves, in any form each and in any order."""
    true = draw(TRUTHS)
    made = [_in_some_form(draw, true)]
    for _ in range(draw(st.integers(0, 4))):
        so_far = true._replace(text=draw(st.integers(1, true.text)), reasoning=draw(st.integers(0, true.reasoning)))
        sent = _in_some_form(draw, so_far)
        match draw(st.sampled_from(["whole", "zeros", "prompt", "output"])):
            case "zeros":
                sent = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            case "prompt":
                sent = {name: value for name, value in sent.items() if not name.startswith(("completion", "output", "total"))}
            case "output":
                sent = {"output_tokens": so_far.output, "input_tokens": 0}
        made.append(sent)
    return true, draw(st.permutations(made))


def _in_some_form(draw: st.DrawFn, true: Truth) -> Fields:
    return draw(st.sampled_from([form for form, can_be_told in FORMS.items() if can_be_told(true)]))(true)


@given(usages())
def test_any_mix_of_forms_means_the_one_true_usage(given_usage: tuple[Truth, list[Fields]]) -> None:
    true, objects = given_usage
    found = meant(objects)
    assert (found.prompt_tokens, found.completion_tokens) == (true.prompt, true.output)
    assert found.cached_tokens in (0, true.cached)
    assert found.reasoning_tokens <= true.reasoning
    if any("cached_tokens" in str(each) or "cache_read" in str(each) or "hit" in str(each) for each in objects):
        assert found.cached_tokens == true.cached


def test_reasoning_without_a_name_is_no_cached_prompt_where_both_are_as_many() -> None:
    counts = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1250}
    assert meant([counts | {"prompt_tokens_details": {"cached_tokens": 200}}])[:4] == (1000, 250, 200, 200)


BESIDE = {"input_tokens": 10, "cache_read_input_tokens": 900, "output_tokens": 3}
INSIDE = {"prompt_tokens": 910, "completion_tokens": 3}
DETAILS = {"prompt_tokens_details": {"cached_tokens": 900}}


@pytest.mark.parametrize("later", [INSIDE, INSIDE | DETAILS, INSIDE | DETAILS | {"total_tokens": 913}, {"total_tokens": 913}])
def test_cached_tokens_beside_the_prompt_and_then_inside_count_once(later: Fields) -> None:
    assert meant([BESIDE, later])[:3] == meant([later, BESIDE])[:3] == (910, 3, 900)


def test_cached_tokens_that_come_without_their_prompt_are_added_to_it() -> None:
    assert meant([{"input_tokens": 1000, "output_tokens": 1}, {"cache_read_input_tokens": 900, "output_tokens": 50}])[:3] == (1900, 50, 900)


def test_a_choice_has_no_more_cached_tokens_than_the_prompt() -> None:
    """Servers that count them once for each choice stay below that; what is above it stands beside the prompt."""
    counts = {"prompt_tokens": 10, "completion_tokens": 3}
    assert meant([counts | {"cached_tokens": 20}], num_sequences=2)[:3] == (10, 3, 10)
    assert meant([counts | {"cached_tokens": 21}], num_sequences=2)[:3] == (31, 3, 21)


@pytest.mark.parametrize("name", [name for name in UsageCounts.__struct_fields__ if not name.endswith("_details")])
def test_an_object_with_any_one_count_says_something(name: str) -> None:
    assert msgspec.convert({name: 7}, UsageCounts).has_any
    assert meant([{name: 7}], num_tokens=0) != meant([], num_tokens=0)
    assert not UsageCounts().has_any
