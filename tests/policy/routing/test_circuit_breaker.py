"""Tests the circuit breaker against a plain model of it, under random requests, outcomes and times; and its states once in order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.policy.routing.circuit_breaker import BreakerLimits, CircuitBreaker, CircuitState, Ticket

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
