"""Tests the choice of a replica: the cheaper of two, no replica that is not a candidate, fair among equals."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.choice import Candidate, Cost, ReplicaId, choose, cost
from headrace.policy.routing.predicted_time import RequestSize, SentSince

pytestmark = pytest.mark.pure


def load(*, running: int = 0, waiting: int = 0, free: int = 100, cached: int = 0, total: int = 100) -> LoadSnapshot:
    return LoadSnapshot(
        num_running=running,
        num_waiting=waiting,
        kv_blocks_free=free,
        kv_blocks_cached=cached,
        kv_blocks_used=total - free - cached,
        kv_blocks_total=total,
        counters=EngineCounters(),
    )


def candidate(name: str, snapshot: LoadSnapshot | None = None, *, sent: int = 0, tokens: int = 0) -> Candidate:
    return Candidate(ReplicaId(name), snapshot, SentSince(sent, tokens))


def pick(*candidates: Candidate, prompt_tokens: int = 16, seed: int = 0, preferred: str | None = None) -> str | None:
    favourite = None if preferred is None else ReplicaId(preferred)
    chosen = choose(candidates, size=RequestSize(prompt_tokens, 1), block_size=16, random=random.Random(seed), preferred=favourite)
    return chosen.replica_id if chosen else None


def test_nobody_is_none() -> None:
    assert pick() is None


def test_the_only_one_is_taken_however_busy() -> None:
    assert pick(candidate("a", load(running=99, waiting=99, free=0))) == "a"


def test_of_two_the_less_busy_is_taken() -> None:
    for seed in range(20):
        assert pick(candidate("busy", load(running=3)), candidate("idle", load(running=1)), seed=seed) == "idle"


def test_what_was_sent_since_the_snapshot_counts() -> None:
    for seed in range(20):
        assert pick(candidate("a", load(running=1), sent=5), candidate("b", load(running=4)), seed=seed) == "b"


def test_a_replica_without_room_for_the_prompt_is_avoided() -> None:
    for seed in range(20):
        assert pick(candidate("full", load(free=2)), candidate("busy", load(running=9)), prompt_tokens=64, seed=seed) == "busy"


def test_prompts_on_their_way_take_blocks() -> None:
    short = cost(candidate("a", load(free=4), sent=1, tokens=48), prompt_tokens=32, block_size=16)
    assert short.lacks_blocks
    assert not cost(candidate("a", load(free=5), sent=1, tokens=48), prompt_tokens=32, block_size=16).lacks_blocks


def test_evictable_blocks_are_room() -> None:
    assert not cost(candidate("a", load(free=0, cached=4)), prompt_tokens=64, block_size=16).lacks_blocks


def test_a_replica_without_a_snapshot_counts_as_empty() -> None:
    assert cost(candidate("new", sent=2), prompt_tokens=16, block_size=16) == Cost(False, 2, 0.0)


def test_equals_share_evenly() -> None:
    """4,000 draws over four idle replicas: each within 20 % of its quarter (over 7 standard deviations)."""
    source = random.Random(7)
    idle = [candidate(name, load()) for name in "abcd"]
    chosen = Counter(
        found.replica_id for _ in range(4000) if (found := choose(idle, size=RequestSize(16, 1), block_size=16, random=source)) is not None
    )
    assert all(800 <= chosen[ReplicaId(name)] <= 1200 for name in "abcd")


def test_two_choices_keep_the_fullest_queue_short() -> None:
    """500 requests onto 25 replicas: the longest queue is at most 4 above the mean (one random choice gives about 10)."""
    source = random.Random(3)
    counts = [0] * 25
    for _ in range(500):
        candidates = [candidate(str(number), load(running=count)) for number, count in enumerate(counts)]
        found = choose(candidates, size=RequestSize(16, 1), block_size=16, random=source)
        assert found is not None
        counts[int(found.replica_id)] += 1
    assert max(counts) <= 20 + 4


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 100)), min_size=1, max_size=8), st.integers(0, 2**32))
def test_the_choice_is_a_candidate_and_never_the_single_worst(loads: list[tuple[int, int, int]], seed: int) -> None:
    candidates = [
        candidate(str(number), load(running=running, waiting=waiting, free=free)) for number, (running, waiting, free) in enumerate(loads)
    ]
    found = choose(candidates, size=RequestSize(16, 1), block_size=16, random=random.Random(seed))
    assert found is not None
    taken = next(each for each in candidates if each.replica_id == found.replica_id)
    costs = sorted(cost(each, prompt_tokens=16, block_size=16) for each in candidates)
    if len(costs) > 1 and costs[-1] > costs[-2]:
        assert cost(taken, prompt_tokens=16, block_size=16) < costs[-1]


def test_a_preferred_replica_is_taken_while_it_is_about_as_cheap() -> None:
    for seed in range(20):
        assert pick(candidate("idle", load()), candidate("mine", load(running=2)), seed=seed, preferred="mine") == "mine"
        assert pick(candidate("idle", load()), candidate("mine", load(running=3)), seed=seed, preferred="mine") == "idle"
        assert pick(candidate("idle", load()), candidate("mine", load(free=0)), seed=seed, preferred="mine") == "idle"


def with_speed(factor: float, *, waiting: int = 0) -> LoadSnapshot:
    """A replica whose steps take `factor` times as long."""
    return replace(load(waiting=waiting), step_fixed_s=0.01 * factor, step_token_s=0.001 * factor, max_num_seqs=8)


def test_a_preferred_replica_is_taken_unless_its_predicted_time_is_twice_as_long() -> None:
    for seed in range(200):
        assert pick(candidate("other", with_speed(1)), candidate("mine", with_speed(1.9)), seed=seed, preferred="mine") == "mine"
    slow = [pick(candidate("other", with_speed(1)), candidate("mine", with_speed(5)), seed=seed, preferred="mine") for seed in range(200)]
    assert slow.count("mine") < 20, "apart from choices that are made without speeds"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100), st.floats(0, 4)), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_a_preference_that_is_no_candidate_changes_no_choice(loads: list[tuple[int, int, float]], seed: int, names_one: bool) -> None:
    """And the random numbers that are drawn are the same with one that is."""
    known = [
        replace(load(running=running, free=free), step_fixed_s=speed / 100, step_token_s=speed / 1000, max_num_seqs=8)
        for running, free, speed in loads
    ]
    candidates = [candidate(f"r{number}", snapshot) for number, snapshot in enumerate(known)]
    plain, other = random.Random(seed), random.Random(seed)
    without = choose(candidates, size=RequestSize(64, 8), block_size=16, random=plain)
    preferred = ReplicaId("r0" if names_one else "none")
    chosen = choose(candidates, size=RequestSize(64, 8), block_size=16, random=other, preferred=preferred)
    assert plain.getstate() == other.getstate()
    assert chosen is not None
    assert without is not None
    assert chosen.replica_id in (without.replica_id, "r0")
