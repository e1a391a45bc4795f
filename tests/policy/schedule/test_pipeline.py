"""Tests plans of a pipeline, whose stages compute the steps in flight at the same time: equal parts of the sequences that decode, none of
which is planned behind a token of its own that is not known yet. Random lives of one are in test_scheduler_machine.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from engine_kit import FULL, VOCAB, WINDOW, DrivenEngine, request
from kv_oracle import expected_tokens
from random_speculation import decide_at_random

from headrace.core.plan import Plan, StepCosts
from headrace.core.request import TierTerms

pytestmark = pytest.mark.pure

PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(2 + 3 * (i % 6))] for i in range(12)]


def pipeline(depth: int, **config: Any) -> DrivenEngine:
    return DrivenEngine(depth=depth, is_pipeline=True, **config)


def plans(driven: DrivenEngine) -> list[Plan]:
    return [plan for plan in driven.engine._steps.recent if plan.num_rows]


def decoding(driven: DrivenEngine, num_turns: int) -> list[set[int]]:
    """The slots of the plans of so many turns, in which nothing starts or ends."""
    before = len(plans(driven))
    for _ in range(num_turns):
        driven.turn()
        driven.scheduler.check()
    return [set(plan.slots) for plan in plans(driven)[before:]]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "full+window"])
@pytest.mark.parametrize("n", [1, 3])
def test_batched_preempted_and_forked_sequences_equal_the_plain_loop(depth: int, groups: Any, n: int) -> None:
    driven = pipeline(depth, groups=groups, num_blocks=22, max_num_batched_tokens=9)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10, n=n) for i, prompt in enumerate(PROMPTS)))
    driven.run()
    for i, prompt in enumerate(PROMPTS):
        for index in range(n):
            assert driven.tokens[f"r{i}", index] == expected_tokens(prompt, 10, VOCAB, index), driven.errors
    assert driven.scheduler.sequences.counters.preemptions > 0


@pytest.mark.parametrize(
    ("depth", "num_streams", "sizes"), [(2, 6, [3, 3]), (2, 5, [2, 3]), (3, 8, [2, 3, 3]), (3, 2, [1, 1]), (2, 1, [1])]
)
def test_sequences_that_decode_are_shared_out_over_the_steps_in_flight(depth: int, num_streams: int, sizes: list[int]) -> None:
    driven = pipeline(depth)
    driven.submit(*(request(f"r{i}", [i, 1], max_tokens=50) for i in range(num_streams)))
    driven.turn(8)
    found = decoding(driven, 9)
    num_groups = len(sizes)
    for group in zip(*[found[first:] for first in range(num_groups)], strict=False):
        assert sorted(map(len, group)) == sizes
        assert len(set.union(*group)) == num_streams, "none is in two of them"
    assert all(later == earlier for earlier, later in zip(found, found[num_groups:], strict=False)), "each decodes in every round"


def test_a_new_sequence_joins_the_smallest_part_and_others_close_the_gap_of_one_that_ends() -> None:
    driven = pipeline(2)
    driven.submit(*(request(f"r{i}", [i, 1], max_tokens=20 if i else 12) for i in range(5)))
    driven.turn(6)
    driven.submit(request("new", [9, 1], max_tokens=30))
    driven.turn(5)
    assert [len(slots) for slots in decoding(driven, 2)] == [3, 3]
    while ("r0", 0) not in driven.finish:
        driven.turn()
    driven.turn(4)
    assert sorted(len(slots) for slots in decoding(driven, 2)) == [2, 3]


def test_chunks_of_a_prompt_follow_each_other_in_the_steps_in_flight() -> None:
    driven = pipeline(3, num_blocks=64, max_model_len=200)
    driven.submit(request("long", list(range(90)), max_tokens=1))
    driven.turn(2)
    assert len(driven.engine._steps) == 2
    assert [(plan.starts[0], plan.counts[0]) for plan in plans(driven)] == [(0, 16), (16, 16)]
    driven.run()
    assert driven.tokens["long", 0] == expected_tokens(list(range(90)), 1, VOCAB)


def test_goals_for_further_tokens_count_all_steps_from_one_token_to_the_next() -> None:
    costs, goal_s = StepCosts(fixed_s=0.01, token_s=0.001), 0.1
    driven = pipeline(2, num_blocks=200, max_model_len=500, max_num_batched_tokens=200)
    driven.submit(request("r0", [0, 1], max_tokens=50, tier=TierTerms(name="gold", tpot_ms=1000 * goal_s)))
    driven.submit(request("r1", [1, 1], max_tokens=50))  # in the other step, for which the first one waits too
    driven.turn(5)
    driven.submit(request("long", [i % VOCAB for i in range(400)], max_tokens=1))
    driven.engine._take_messages()
    seconds = []
    for _ in range(6):
        plan = driven.scheduler.plan(driven.clock.now, costs)
        assert plan is not None
        seconds.append(costs.fixed_s + costs.token_s * plan.num_tokens)
        driven.engine._steps.submit(plan)
        driven.engine._commit_oldest()
    assert max(one + other for one, other in pairwise(seconds)) <= goal_s
    assert min(seconds) > goal_s / 4, "a prompt takes what the goals leave"


@pytest.mark.parametrize("seed", range(3))
def test_while_drafts_are_verified_there_is_one_step_at_a_time_and_it_has_all(seed: int) -> None:
    driven = pipeline(2, num_speculative_tokens=3)
    decide_at_random(driven.scheduler, seed)
    driven.submit(*(request(f"r{i}", [i, 1, 2], max_tokens=30) for i in range(4)))
    drafted = []
    for _ in range(200):
        driven.turn()
        driven.scheduler.check()
        if (plan := driven.engine.last_plan) is not None and plan.drafts:
            drafted.append(plan)
    assert drafted
    assert max(plan.num_rows for plan in drafted) == 4
    for i in range(4):
        assert driven.tokens[f"r{i}", 0] == expected_tokens([i, 1, 2], 30, VOCAB)
