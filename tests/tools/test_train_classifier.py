"""Tests the classifier's training: held-out prompts are apart from it, how many are right, and equal seeds give equal bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from bench.classifier_cost import MIXES, confusion, figures, judged_prompts
from bench.harness import RESULTS
from headrace.bundled import CLASSIFIER
from headrace.core.request import PriorityClass
from headrace.text.classifier import NUM_BUCKETS, TASKS, Task
from tools.train_classifier.prompts import held_out_prompts, training_prompts
from tools.train_classifier.train import features_of, fit

pytestmark = pytest.mark.pure

RIGHT = 0.9


def runs_of_words(text: str, count: int = 8) -> Iterator[tuple[str, ...]]:
    words = text.lower().split()
    return (tuple(words[at : at + count]) for at in range(len(words) - count + 1))


def test_no_held_out_prompt_shares_eight_words_with_the_training() -> None:
    prompts = training_prompts()
    trained = {run for prompt in prompts for run in runs_of_words(prompt.text)}
    whole = {prompt.text.lower().strip() for prompt in prompts}
    shared = [
        prompt.text for prompt in held_out_prompts() if prompt.text.lower().strip() in whole or trained & set(runs_of_words(prompt.text))
    ]
    assert shared == []


def test_held_out_prompts_are_many_and_balanced() -> None:
    prompts = held_out_prompts()
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 500
    assert all(count > 150 for count in Counter(prompt.task for prompt in prompts).values())


def test_held_out_prompts_are_mostly_right() -> None:
    table = confusion(judged_prompts())
    assert sum(table[task][task] for task in TASKS) >= RIGHT * 500
    num_wrong_size = sum(row[task] for label, row in table.items() for task in TASKS if (label is Task.QUESTION) != (task is Task.QUESTION))
    assert num_wrong_size <= 0.1 * 500


def test_the_recorded_costs_are_those_of_the_committed_weights() -> None:
    recorded = json.loads((RESULTS / "classifier-cost.json").read_text())
    rows = judged_prompts()
    assert recorded["confusion"] == confusion(rows)
    assert recorded["figures"] == {
        name: {each.name.lower(): figures(rows, mix, each) for each in PriorityClass} for name, mix in MIXES.items()
    }


def test_equal_seeds_give_equal_bytes() -> None:
    first, second = (training_prompts(seed=3, num_per_task=60)[:180] for _ in range(2))
    assert first == second
    rows = features_of(first)
    assert fit(rows) == fit(rows) != fit(rows, seed=1)


@pytest.mark.slow
def test_the_shipped_weights_are_those_of_the_script() -> None:
    """Other CPUs round sums of floats differently, so that a weight may differ by a step."""
    made, shipped = fit(features_of(training_prompts())), CLASSIFIER.read_bytes()
    steps = np.frombuffer(made[-len(TASKS) * NUM_BUCKETS :], np.int8).astype(int) - np.frombuffer(
        shipped[-len(TASKS) * NUM_BUCKETS :], np.int8
    )
    assert abs(steps).max() <= 1
