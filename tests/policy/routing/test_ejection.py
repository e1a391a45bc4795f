"""Tests replicas that are left out after failures, and the growing share of a new one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.circuit_breaker import CircuitBreaker
from headrace.policy.routing.ejection import REPLICA_LIMITS, ejected
from headrace.policy.routing.slow_start import FIRST_SHARE, started, started_share

pytestmark = pytest.mark.pure


def breaker(*, failed_at: float | None = None, rounds: int = 1) -> CircuitBreaker:
    """A closed one, or one that failed so often in a row that it is open; each further round doubles its cooldown."""
    made = CircuitBreaker(REPLICA_LIMITS)
    if failed_at is not None:
        for _ in range(REPLICA_LIMITS.max_failures):
            made.fail(made.send(failed_at), failed_at)
        for _ in range(rounds - 1):
            now = failed_at + made.wait_s(failed_at)
            made.fail(made.send(now), now)
    return made


def circuits(num_closed: int, num_open: int) -> dict[ReplicaId, CircuitBreaker]:
    made = [breaker() for _ in range(num_closed)] + [breaker(failed_at=0.0) for _ in range(num_open)]
    return {ReplicaId(f"r{number}"): each for number, each in enumerate(made)}


@pytest.mark.parametrize(
    ("num_closed", "num_open", "num_ejected"),
    [(1, 0, 0), (0, 1, 0), (1, 1, 1), (0, 2, 1), (5, 3, 1), (17, 2, 1), (18, 2, 2), (15, 15, 3), (0, 0, 0)],
)
def test_a_tenth_of_the_replicas_is_left_out_at_least_one_and_never_the_last(num_closed: int, num_open: int, num_ejected: int) -> None:
    assert len(ejected(circuits(num_closed, num_open), 1.0)) == num_ejected


def test_of_too_many_open_circuits_those_that_stay_open_longest_are_left_out() -> None:
    ready = {ReplicaId("a"): breaker(failed_at=0.0), ReplicaId("b"): breaker(failed_at=0.0, rounds=3), ReplicaId("c"): breaker()}
    assert ejected(ready, 1.0) == {"b"}


def test_a_replica_comes_back_when_its_cooldown_is_over_and_waits_while_its_probe_is_under_way() -> None:
    ready = circuits(1, 1)
    assert ejected(ready, 4.9) == {"r1"}
    assert not ejected(ready, 5.0)
    ticket = ready[ReplicaId("r1")].send(5.0)
    assert ejected(ready, 5.0) == {"r1"}, "one request finds out whether it works"
    ready[ReplicaId("r1")].begin(ticket)
    assert not ejected(ready, 5.0)


@given(st.lists(st.sampled_from(["fail", "succeed", "wait", "abandon"]), max_size=60), st.integers(1, 25), st.integers(0, 2**32))
def test_the_bound_holds_whatever_happens(events: list[str], count: int, seed: int) -> None:
    ready = {ReplicaId(f"r{number}"): breaker() for number in range(count)}
    draw, now = random.Random(seed), 0.0
    for event in events:
        each = ready[ReplicaId(f"r{draw.randrange(count)}")]
        if event == "wait":
            now += draw.uniform(0.0, 8.0)
        elif each.can_send(now):
            ticket = each.send(now)
            if event == "fail":
                each.fail(ticket, now)
            elif event == "succeed":
                each.succeed(ticket)
            else:
                each.abandon(ticket, now)
        left_out = ejected(ready, now)
        assert len(left_out) <= max(1, count // 10)
        assert len(left_out) < count
        assert all(not ready[name].can_send(now) for name in left_out)
        each.check()


# -------------------------------------------------------------------------------------------------------------------- slow start


@pytest.mark.parametrize(("ready_s", "share"), [(0.0, FIRST_SHARE), (0.5, FIRST_SHARE), (5.0, 0.5), (9.0, 0.9), (10.0, 1.0), (1e9, 1.0)])
def test_a_share_grows_with_time(ready_s: float, share: float) -> None:
    assert started_share(ready_s, 10.0) == pytest.approx(share)
    assert started_share(ready_s, 0.0) == 1.0


@pytest.mark.parametrize(
    ("shares", "part"), [((1.0, 0.1), 0.1), ((1.0, 0.5), 0.5), ((0.4, 0.1), 0.25), ((0.1, 0.1), 1.0), ((1.0, 1.0), 1.0)]
)
def test_a_new_replica_takes_part_by_its_share_of_the_largest_one(shares: tuple[float, float], part: float) -> None:
    """Those that started together do not wait for each other."""
    drawn = [started(["old", "new"], shares, random.Random(seed)) for seed in range(2000)]
    assert all("old" in each for each in drawn)
    assert sum("new" in each for each in drawn) / 2000 == pytest.approx(part, abs=0.03)


def test_a_replica_alone_does_not_start_slowly() -> None:
    assert started(["only"], [FIRST_SHARE], random.Random(0)) == ["only"]
    assert started([], [], random.Random(0)) == []
