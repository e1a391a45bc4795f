"""Tests the request classifier: any text has an answer at a bounded cost, and its features are those of a plain twin."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.bundled import CLASSIFIER
from headrace.text import classifier as module
from headrace.text.classifier import (
    FIRST_CHARACTERS,
    LAST_CHARACTERS,
    MOST_CHARACTERS,
    TASKS,
    RequestClassifier,
    Task,
    buckets,
)

pytestmark = pytest.mark.pure

BUNDLED = RequestClassifier(CLASSIFIER.read_bytes())
WORD = 1 << 64
MIX = int(module._MIX)


def plain_bucket(kind: int, run: str) -> int:
    value = sum(ord(character) * pow(module._FACTOR, place, WORD) for place, character in enumerate(run)) + kind
    mixed = value * MIX % WORD
    return (mixed ^ (mixed >> 32)) * MIX % WORD >> (64 - module.BUCKET_BITS)


def plain_buckets(text: str) -> list[int]:
    """The twin: strings and sets instead of arrays and sums."""
    if len(text) > MOST_CHARACTERS:
        text = text[:FIRST_CHARACTERS] + text[-LAST_CHARACTERS:]
    text = re.sub("[0-9]", "0", f"\n{text.lower()[:MOST_CHARACTERS]}\n")
    words = [match.span() for match in re.finditer("[0a-z_\x80-\U0010ffff]+", text)]
    found = {plain_bucket(0, text[begin:end]) for begin, end in words}
    found |= {plain_bucket(1, text[first[0] : second[1]]) for first, second in pairwise(words)}
    found |= {plain_bucket(run, text[at : at + run]) for run in module.RUNS for at in range(len(text) - run + 1)}
    return sorted(found | {plain_bucket(module.LENGTH_KIND + int(2 * math.log2(len(text))), "")})


@given(st.text(max_size=60))
@example("")
@example("İstanbul 42 \ud800 _x {")
def test_features_are_those_of_the_plain_twin(text: str) -> None:
    assert buckets(text).tolist() == plain_buckets(text)


@given(st.text(alphabet=st.characters(), max_size=200), st.integers(1, 400))
def test_any_text_is_classified_and_only_its_two_ends_are_read(text: str, times: int) -> None:
    found = BUNDLED.classify(text * times)
    assert found.task in TASKS
    assert 0 <= found.question <= 1
    assert found.question >= 1 / len(TASKS) if found.task is Task.QUESTION else found.question <= 1 / 2
    first, last = "a" * FIRST_CHARACTERS, "b" * LAST_CHARACTERS
    assert BUNDLED.classify(first + text * times + last) == BUNDLED.classify(first + "x" + last)


def test_letters_that_become_two_in_lower_case_stay_within_the_bound() -> None:
    assert BUNDLED.classify("İ" * (2 * MOST_CHARACTERS)).task in TASKS


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("Which city is the capital of Sweden?", Task.QUESTION),
        ("Write a Go function that reverses a slice in place.", Task.CODE),
        ("Prove by induction that 2^n > n for all n, and explain each step.", Task.REASONING),
    ],
)
def test_a_plain_prompt_gets_its_task(text: str, task: Task) -> None:
    assert BUNDLED.classify(text).task is task


def test_a_file_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes and must be"):
        RequestClassifier(CLASSIFIER.read_bytes()[:-1])


def test_the_file_is_below_a_megabyte() -> None:
    assert CLASSIFIER.stat().st_size < 1_000_000


def test_probabilities_are_the_softmax_of_the_weights() -> None:
    weights = np.zeros((len(TASKS), module.NUM_BUCKETS), np.int8)
    weights[1] = 100
    head = np.array([1e-3, 1e-3, 1e-3, 0.0, 1.0, 0.0], "<f4").tobytes()
    found = RequestClassifier(head + weights.tobytes()).classify("any text")
    score = 1e-3 * 100 * math.sqrt(len(buckets("any text"))) + 1
    assert found.task is Task.CODE
    assert found.question == pytest.approx(math.exp(-score) / (1 + 2 * math.exp(-score)))
