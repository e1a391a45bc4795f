"""Tests the circuit breaker against a plain model of it, under random requests, outcomes and times; and its states once in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.policy.routing.choice import FIRST_SHARE, ReplicaId, started, started_share
from headrace.policy.routing.failures import (
    OTHERS_S,
    REPLICA_LIMITS,
    BreakerLimits,
    CircuitBreaker,
    CircuitState,
    RetryBudget,
    TenantFailures,
    Ticket,
    ejected,
)

pytestmark = pytest.mark.pure

LIMITS = BreakerLimits(max_failures=3, cooldown_s=5.0, max_cooldown_s=18.0)


class BreakerMachine(RuleBasedStateMachine):
    """Requests under way are kept with the model's number of the state they were sent in."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(LIMITS)
        self.now = 100.0
        self.under_way: list[tuple[Ticket, int]] = []
        self.changes = 0
        self.state = CircuitState.CLOSED
        self.failures = 0
        self.open_until = 0.0
        self.num_failed_probes = 0

    def change(self, state: CircuitState) -> None:
        self.state, self.failures, self.changes = state, 0, self.changes + 1

    def open(self) -> None:
        self.change(CircuitState.OPEN)
        self.open_until = self.now + min(LIMITS.cooldown_s * 2**self.num_failed_probes, LIMITS.max_cooldown_s)

    def close(self) -> None:
        self.change(CircuitState.CLOSED)
        self.num_failed_probes = 0

    def take(self, data: st.DataObject) -> tuple[Ticket, bool]:
        """One of the requests under way, and whether its outcome counts."""
        ticket, sent_in = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        return ticket, sent_in == self.changes

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.9, 5.0, 10.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.can_send(self.now))
    @rule()
    def send(self) -> None:
        ticket = self.breaker.send(self.now)
        if self.state is CircuitState.OPEN:
            self.change(CircuitState.HALF_OPEN)
        self.under_way.append((ticket, self.changes))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.under_way) - 1))
        ticket, sent_in = self.under_way[index]
        self.breaker.begin(ticket)
        if sent_in == self.changes and self.state is CircuitState.HALF_OPEN:
            self.close()

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        ticket, counts = self.take(data)
        self.breaker.succeed(ticket)
        if counts and self.state is CircuitState.HALF_OPEN:
            self.close()
        elif counts:
            self.failures = 0

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        ticket, counts = self.take(data)
        self.breaker.fail(ticket, self.now)
        if not counts:
            return
        if self.state is CircuitState.HALF_OPEN:
            self.num_failed_probes += 1
            self.open()
        else:
            self.failures += 1
            if self.failures == LIMITS.max_failures:
                self.open()

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        ticket, counts = self.take(data)
        self.breaker.abandon(ticket, self.now)
        if counts and self.state is CircuitState.HALF_OPEN:
            self.change(CircuitState.OPEN)
            self.open_until = self.now

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert (self.breaker.state, self.breaker.num_failures) == (self.state, self.failures)
        may_send = self.state is CircuitState.CLOSED or (self.state is CircuitState.OPEN and self.now >= self.open_until)
        assert self.breaker.can_send(self.now) == may_send

    @invariant()
    def at_most_one_probe_is_under_way(self) -> None:
        if self.state is CircuitState.HALF_OPEN:
            assert sum(sent_in == self.changes for _, sent_in in self.under_way) == 1

    def teardown(self) -> None:
        self.breaker.check()


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(stateful_step_count=40, deadline=None)


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(LIMITS.max_failures):
        breaker.fail(breaker.send(now), now)
    return breaker


def test_failures_in_a_row_open_the_circuit_and_an_answer_between_them_does_not() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(4):
        for _ in range(LIMITS.max_failures - 1):
            breaker.fail(breaker.send(0.0), 0.0)
        breaker.succeed(breaker.send(0.0))
    assert breaker.state is CircuitState.CLOSED
    assert opened().state is CircuitState.OPEN
    assert not opened().can_send(4.9)


def test_after_its_cooldown_one_probe_is_sent_and_its_first_token_closes_the_circuit() -> None:
    breaker = opened()
    probe = breaker.send(5.0)
    assert not breaker.can_send(6.0)
    breaker.begin(probe)
    assert breaker.can_send(6.0)
    assert breaker.state is CircuitState.CLOSED


def test_each_failed_probe_doubles_the_cooldown_up_to_its_bound() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(4):
        waits.append(breaker.wait_s(now))
        now += waits[-1]
        breaker.fail(breaker.send(now), now)
    assert waits == [5.0, 10.0, 18.0, 18.0]


def test_requests_sent_before_the_circuit_opened_change_nothing() -> None:
    breaker = CircuitBreaker(LIMITS)
    tickets = [breaker.send(0.0) for _ in range(10)]
    for now, ticket in enumerate(tickets[:-1]):
        breaker.fail(ticket, float(now))
    assert breaker.wait_s(2.0) == 5.0  # as the third failure left it
    breaker.succeed(tickets[-1])
    assert breaker.state is CircuitState.OPEN


def test_a_probe_without_an_outcome_lets_the_next_request_be_the_probe() -> None:
    breaker = opened()
    breaker.abandon(breaker.send(5.0), 5.5)
    assert breaker.can_send(5.5)
    breaker.fail(breaker.send(5.5), 6.0)
    assert breaker.wait_s(6.0) == 10.0


def test_a_request_without_leave_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        opened().send(1.0)


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


def test_failures_of_one_tenant_are_its_own_while_another_is_answered() -> None:
    failures = TenantFailures()
    failures.answered(b"beta", 0.0)
    assert all(failures.is_tenants(b"acme", now) for now in (1.0, 2.0, OTHERS_S - 0.1))
    assert not failures.is_tenants(b"acme", OTHERS_S), "the answer is too old"


def test_failures_of_two_tenants_are_the_servers_until_it_answers() -> None:
    failures = TenantFailures()
    for tenant in (b"acme", b"beta", b"third"):
        failures.answered(tenant, 0.0)
    assert failures.is_tenants(b"acme", 1.0)
    assert not failures.is_tenants(b"beta", 1.0)
    assert not failures.is_tenants(b"acme", 1.0)
    failures.answered(b"third", 2.0)
    assert failures.is_tenants(b"acme", 3.0)


@given(steps=st.lists(st.booleans()))
def test_failures_of_the_only_tenant_are_the_servers(steps: list[bool]) -> None:
    failures = TenantFailures()
    for number, is_answered in enumerate(steps):
        if is_answered:
            failures.answered(b"only", float(number))
        else:
            assert not failures.is_tenants(b"only", float(number))


@given(is_request=st.lists(st.booleans(), max_size=300))
def test_retries_are_a_share_of_the_requests_and_a_burst(is_request: list[bool]) -> None:
    budget, num_requests, num_retries = RetryBudget(share=0.25, burst=4.0), 0, 0
    for each in is_request:
        if each:
            budget.deposit()
            num_requests += 1
        else:
            num_retries += budget.withdraw()
        budget.check()
    assert num_retries <= 4.0 + 0.25 * num_requests


def test_a_budget_used_up_refills_with_requests() -> None:
    budget = RetryBudget(share=0.25, burst=2.0)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.deposit()
    assert [budget.withdraw() for _ in range(2)] == [True, False]
