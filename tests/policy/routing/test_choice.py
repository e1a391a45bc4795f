"""Tests the choice of a replica: the cheaper of two, no replica that is not a candidate, fair among equals."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.choice import Candidate, Cost, Decision, ReplicaId, cost, home_of, seed_of
from headrace.policy.routing.predicted_time import RequestSize, SentSince
from headrace.policy.routing.replicas import MAX_FIGURES, POLICIES, choose

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


def decision(prompt_tokens: int = 16, *, seed: int = 0, **facts: Any) -> Decision:
    return Decision(RequestSize(prompt_tokens, 1), 16, random.Random(seed), **facts)


def pick(*candidates: Candidate, prompt_tokens: int = 16, seed: int = 0, policy: str = "power-of-two", **facts: Any) -> str | None:
    """Prefix-aware: with the holders of the longest beginning."""
    most = max([each.cached_tokens for each in candidates], default=0)
    longest = {each.replica_id for each in candidates if each.cached_tokens == most and most}
    chosen = choose(policy, candidates, decision(prompt_tokens, seed=seed, **facts), longest=longest)
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cached", [0, 512])
def test_equals_share_evenly(policy: str, cached: int) -> None:
    """4,000 decisions over four idle replicas that hold the same: each within 20 % of its quarter (over 7 standard deviations)."""
    idle = [candidate(name, load())._replace(cached_tokens=cached) for name in "abcd"]
    chosen = Counter(
        pick(*idle, prompt_tokens=600, seed=number, policy=policy, session=f"session {number}", number=number) for number in range(4000)
    )
    assert all(800 <= chosen[name] <= 1200 for name in "abcd")


def test_two_choices_keep_the_fullest_queue_short() -> None:
    """500 requests onto 25 replicas: the longest queue is at most 4 above the mean (one random choice gives about 10)."""
    source = random.Random(3)
    counts = [0] * 25
    for _ in range(500):
        candidates = [candidate(str(number), load(running=count)) for number, count in enumerate(counts)]
        found = choose("power-of-two", candidates, Decision(RequestSize(16, 1), 16, source))
        assert found is not None
        counts[int(found.replica_id)] += 1
    assert max(counts) <= 20 + 4


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 100)), min_size=1, max_size=8), st.integers(0, 2**32))
def test_the_choice_is_a_candidate_and_never_the_single_worst(loads: list[tuple[int, int, int]], seed: int) -> None:
    candidates = [
        candidate(str(number), load(running=running, waiting=waiting, free=free)) for number, (running, waiting, free) in enumerate(loads)
    ]
    found = choose("power-of-two", candidates, decision(seed=seed))
    assert found is not None
    taken = next(each for each in candidates if each.replica_id == found.replica_id)
    costs = sorted(cost(each, prompt_tokens=16, block_size=16) for each in candidates)
    if len(costs) > 1 and costs[-1] > costs[-2]:
        assert cost(taken, prompt_tokens=16, block_size=16) < costs[-1]


def with_speed(factor: float, *, waiting: int = 0, queued: int = 0) -> LoadSnapshot:
    """A replica whose steps take `factor` times as long: idle, 0.51 s for a prompt of 500 tokens at 1."""
    known = replace(load(waiting=waiting), step_fixed_s=0.01 * factor, step_token_s=0.001 * factor, max_num_seqs=8)
    return replace(known, num_queued_tokens=queued)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 100), st.floats(0, 4), st.integers(0, 640), st.floats(0, 1)), min_size=1, max_size=20
    ),
    st.integers(0, 2**32),
    st.sampled_from(list(POLICIES)),
    st.sets(st.integers(0, 30)),
    st.booleans(),
    st.sampled_from(["", "a session"]),
)
def test_every_choice_is_a_candidate_with_its_figures_and_a_reason(
    loads: list[tuple[int, int, float, int, float]], seed: int, policy: str, longest: set[int], is_blind: bool, session: str
) -> None:
    """longest: replicas that are no candidates too"""
    candidates = [
        Candidate(
            ReplicaId(f"r{number}"),
            replace(load(running=running, free=free), step_fixed_s=speed / 100, step_token_s=speed / 1000, max_num_seqs=8),
            cached_tokens=cached,
            adapter_s=adapter_s,
        )
        for number, (running, free, speed, cached, adapter_s) in enumerate(loads)
    ]
    facts = decision(640, seed=seed, is_blind=is_blind, session=session, number=seed % 100)
    chosen = choose(policy, candidates, facts, longest={ReplicaId(f"r{number}") for number in longest})
    assert chosen is not None
    names = [each.replica_id for each in candidates]
    assert chosen.replica_id in names
    assert chosen.reason
    if len(candidates) > 1:
        compared = [each.replica_id for each in chosen.figures]
        assert (chosen.policy, compared[0]) == (policy, chosen.replica_id)
        assert set(compared) <= set(names)
        assert len(compared) == len(set(compared)) <= (4 if POLICIES[policy].draws else MAX_FIGURES)


# ---------------------------------------------------------------------------------------------------------------------- prefix-aware


def holder(name: str, snapshot: LoadSnapshot, cached: int) -> Candidate:
    return Candidate(ReplicaId(name), snapshot, cached_tokens=cached)


def test_a_replica_that_holds_most_of_the_prompt_is_taken_among_many() -> None:
    idle = [candidate(str(number), with_speed(1)) for number in range(50)]
    for seed in range(50):
        assert pick(*idle, holder("mine", with_speed(1), 384), prompt_tokens=500, seed=seed, policy="prefix-aware") == "mine"


def test_it_loses_to_one_that_computes_the_whole_prompt_sooner() -> None:
    """384 tokens of the prompt save 0.38 s."""
    for queued, taken in ((200, "mine"), (600, "idle")):
        mine = holder("mine", with_speed(1, queued=queued), 384)
        seen = [pick(candidate("idle", with_speed(1)), mine, prompt_tokens=500, seed=seed, policy="prefix-aware") for seed in range(50)]
        assert set(seen) == {taken}


def test_of_those_done_about_as_soon_the_one_with_more_of_the_prompt_is_taken() -> None:
    """So that a beginning is not computed at every replica: the other is 0.06 s sooner, of 0.3."""
    mine, other = holder("mine", with_speed(1, queued=180), 384), holder("other", with_speed(1), 256)
    for seed in range(50):
        assert pick(other, mine, prompt_tokens=500, seed=seed, policy="prefix-aware") == "mine"


def test_while_no_speed_is_known_the_cache_decides_between_equally_busy_ones() -> None:
    for seed in range(20):
        assert pick(candidate("idle", load()), holder("mine", load(), 16), seed=seed, policy="prefix-aware") == "mine"
        assert pick(candidate("idle", load()), holder("mine", load(running=1), 16), seed=seed, policy="prefix-aware") == "idle"


def test_an_adapter_that_has_to_be_read_counts_as_its_time() -> None:
    there, away = candidate("there", with_speed(1, queued=300)), candidate("away", with_speed(1))._replace(adapter_s=1.0)
    for seed in range(20):
        assert pick(there, away, prompt_tokens=500, seed=seed) == "there"


def test_the_reason_says_what_is_cached() -> None:
    mine, idle = holder("mine", with_speed(1), 384), candidate("idle", with_speed(1))
    held = choose("prefix-aware", [mine, idle], decision(500))
    busy = choose("prefix-aware", [mine._replace(snapshot=with_speed(1, queued=5000)), idle], decision(500))
    assert held is not None
    assert busy is not None
    assert held.reason == "expected to be done first, with 384 of the prompt's 500 tokens in its prefix cache"
    assert busy.reason == "expected to be done first, although a busier one has 384 of the prompt's 500 tokens in its prefix cache"
    assert [each.cached_tokens for each in held.figures] == [384, 0]


# --------------------------------------------------------------------------------------------------------------------------- others


def test_the_least_loaded_of_all_is_taken() -> None:
    busy = [candidate(str(number), with_speed(1, waiting=1, queued=100)) for number in range(30)]
    for seed in range(30):
        assert pick(*busy, candidate("idle", with_speed(1)), seed=seed, policy="least-loaded") == "idle"
        assert pick(*busy, candidate("idle", with_speed(9)), seed=seed, policy="least-loaded", is_blind=True) == "idle"


def test_a_session_stays_at_its_replica_while_others_come_and_go() -> None:
    """Five replicas become four and six: only sessions of the one that left, and those that the new one takes, move."""
    five = [candidate(name, load(running=ord(name))) for name in "abcde"]
    six = [*five, candidate("f", load())]
    for number in range(200):
        of_five, of_six, of_four = (
            pick(*some, seed=number, policy="session", session=f"session {number}") for some in (five, six, [*five[1:]])
        )
        assert of_six in (of_five, "f")
        assert of_four == of_five or of_five == "a"


@given(st.lists(st.text(max_size=12), min_size=1, max_size=12, unique=True), st.integers(-(2**62), 2**62))
def test_a_key_moves_only_from_a_replica_that_leaves(names: list[str], key: int) -> None:
    seeds = [seed_of(ReplicaId(name)) for name in names]
    home = home_of(key, seeds)
    for place, _ in enumerate(seeds):
        left = [*seeds[:place], *seeds[place + 1 :]]
        assert place == home or left[home_of(key, left)] == seeds[home]


def test_keys_are_spread_over_many_replicas() -> None:
    """40,000 keys over 100 replicas: each within 30 % of its hundredth (six standard deviations)."""
    seeds, draw = [seed_of(ReplicaId(f"r{number}")) for number in range(100)], random.Random(3)
    taken = Counter(home_of(draw.getrandbits(62), seeds) for _ in range(40_000))
    assert all(280 <= taken[place] <= 520 for place in range(100))


def test_without_a_session_the_least_loaded_is_taken() -> None:
    for seed in range(20):
        assert pick(candidate("busy", load(running=3)), candidate("idle", load()), seed=seed, policy="session") == "idle"


def test_round_robin_takes_each_in_turn_whatever_its_load() -> None:
    three = [candidate(name, load(running=ord(name))) for name in "abc"]
    assert "".join(str(pick(*three, policy="round-robin", number=number)) for number in range(7)) == "abcabca"
