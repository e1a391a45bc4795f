"""Tests which waiting requests move to a replica that has become ready."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.choice import Candidate, ReplicaId
from headrace.policy.routing.moves import LEAST_GAIN_S, MAX_MOVES, moving
from headrace.policy.routing.predicted_time import RequestSize, SentSince

pytestmark = pytest.mark.pure

OLD, NEW = ReplicaId("old"), ReplicaId("new")
SIZE = RequestSize(100, 100)


def replica(name: ReplicaId, *, running: int = 16, waiting: int = 0, step_s: float = 0.1, **more: Any) -> Candidate:
    """A step of `step_s` seconds for all of 16 slots: an answer takes 100 of them."""
    load = LoadSnapshot(
        num_running=running,
        num_waiting=waiting,
        kv_blocks_free=10_000,
        kv_blocks_cached=0,
        kv_blocks_used=1,
        kv_blocks_total=10_001,
        counters=EngineCounters(),
        max_num_seqs=16,
        step_fixed_s=step_s,
        num_queued_tokens=100 * waiting,
    )
    return Candidate(name, load, **more)


def places(num_own: int, old: Candidate, new: Candidate) -> list[int]:
    return moving([OLD] * num_own, {OLD: old}, new, SIZE, block_size=16)


def test_an_idle_replica_takes_the_ones_that_wait_longest_until_its_slots_are_full() -> None:
    """The first one is next where it is."""
    assert places(16, replica(OLD, waiting=16), replica(NEW, running=0)) == [*range(1, 16)]
    assert places(8, replica(OLD, waiting=8), replica(NEW, running=12)) == [1, 2, 3, 4, 6]


def test_a_queue_is_shared_with_a_full_replica_once_it_is_twice_as_long() -> None:
    moved = places(40, replica(OLD, waiting=40), replica(NEW, running=16, waiting=5))
    assert moved[0] > 5, "the first ones are served sooner where they are"
    assert all(b - a in (2, 3) for a, b in pairwise(moved)), "then nearly every other one"
    assert len(places(60, replica(OLD, waiting=60), replica(NEW, running=16, waiting=5))) == MAX_MOVES


def test_nothing_moves_for_a_short_gain_or_without_a_measured_speed() -> None:
    short = LEAST_GAIN_S / 100 / 2
    assert places(8, replica(OLD, waiting=8, step_s=short), replica(NEW, running=0)) == []
    assert places(8, replica(OLD, waiting=8, step_s=0.0), replica(NEW, running=0)) == []
    assert places(8, replica(OLD, waiting=8), replica(NEW, running=16, waiting=8)) == []


def test_requests_of_other_gateways_count_among_those_that_wait() -> None:
    assert len(places(2, replica(OLD, waiting=40), replica(NEW, running=16, waiting=5))) == 1
    assert places(2, replica(OLD, waiting=2), replica(NEW, running=16, waiting=5)) == []
    assert places(16, replica(OLD, waiting=16), replica(NEW, running=0, sent=SentSince(12, 1200)))[:5] == [1, 2, 3, 4, 6]


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=60), st.integers(0, 40), st.integers(0, 16), st.integers(0, 40))
def test_moves_are_in_order_bounded_and_none_is_named_twice(names: list[str], waiting: int, running: int, at_new: int) -> None:
    own = [ReplicaId(name) for name in names]
    queues = {name: replica(name, waiting=max(waiting, own.count(name))) for name in own}
    moved = moving(own, queues, replica(NEW, running=running, waiting=at_new), SIZE, block_size=16)
    assert moved == sorted(set(moved))
    assert len(moved) <= MAX_MOVES
    assert all(0 <= place < len(own) for place in moved)
