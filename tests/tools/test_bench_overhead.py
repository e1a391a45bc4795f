"""Host overhead and quality: what they count, on things small enough to know the answer."""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")

from bench.host_overhead import busiest, thread_seconds
from bench.quality import PRECISIONS, exact_matches
from headrace import LLM, SamplingParams

PROMPT = [5, 6, 7]


def test_thread_seconds_grow_by_what_was_computed() -> None:
    before, began = sum(thread_seconds(os.getpid()).values()), time.process_time()
    while time.process_time() - began < 0.3:
        sum(range(1000))
    spent = time.process_time() - began
    assert sum(thread_seconds(os.getpid()).values()) - before == pytest.approx(spent, abs=0.1)


def test_the_busiest_thread_comes_first_and_absence_counts_as_idle() -> None:
    found = busiest([{"a": 0.2, "b": 0.5, "c": 0.0}, {"a": 0.4}], most=2)
    assert [name for name, _ in found] == ["a", "b"]
    assert dict(found) == pytest.approx({"a": 0.3, "b": 0.25})


def test_an_answer_is_exact_only_token_by_token() -> None:
    """What the model says is learned first, then compared: whole, with its last token changed, and with one more."""
    with LLM(**PRECISIONS["float32"]) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.0, max_tokens=6)
        said = list(llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids)
        assert exact_matches(llm, [PROMPT], [said]) == [True]
        assert exact_matches(llm, [PROMPT], [[*said[:-1], said[-1] + 1]]) == [False]
        assert exact_matches(llm, [PROMPT], [said[:-1] + [said[-1]] * 2]) == [False]
