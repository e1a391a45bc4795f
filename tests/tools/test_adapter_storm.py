"""Tests what the storm of adapters makes of what it saw: which weights an answer may be of, and counters over an engine's restart."""

from __future__ import annotations

import pytest

from bench.storms.adapters import NEW, REPLACED, Asked, Replacement, kind_of, over_lives, weights_of
from bench.storms.failover import Answer

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("model", "began_at", "ended_at", "weights"),
    [
        (REPLACED, 1.0, 9.0, (REPLACED,)),
        (REPLACED, 9.0, 11.0, (REPLACED, NEW)),
        (REPLACED, 11.0, 12.0, (REPLACED, NEW)),
        (REPLACED, 19.0, 21.0, (REPLACED, NEW)),
        (REPLACED, 1.0, 30.0, (REPLACED, NEW)),
        (REPLACED, 21.0, 22.0, (NEW,)),
        ("adapter-7", 11.0, 12.0, ("adapter-7",)),
    ],
)
def test_an_answer_is_of_either_weights_only_where_it_met_the_load(
    model: str, began_at: float, ended_at: float, weights: tuple[str, ...]
) -> None:
    answer = Answer(began_at=began_at, ended_at=ended_at)
    assert weights_of(Asked(model, "Why?", 16), answer, Replacement(10.0, 20.0)) == weights


def test_a_counter_of_two_processes_is_the_sum_of_both() -> None:
    assert over_lives([]) == 0
    assert over_lives([0, 3, 3, 5]) == 5
    assert over_lives([2, 5, 1, 1, 4]) == 9
    assert over_lives([5, 0]) == 5


def test_errors_of_one_kind_are_counted_together() -> None:
    said = '503 {"error":{"message":"The adapter adapter-17 is away.","type":"service_unavailable_error","param":nu'
    assert kind_of(said) == kind_of(said.replace("17", "0")) == "503 The adapter adapter-N is away."
    assert kind_of("ServerDisconnectedError") == "ServerDisconnectedError"
