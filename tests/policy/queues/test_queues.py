"""The fair queue's heap against a look at every tenant."""

from __future__ import annotations

from array import array

import pytest
from engine_kit import request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.ids import SeqId
from headrace.policy.queues import fair
from headrace.policy.queues.fair import FairShareQueue
from headrace.policy.queues.keyed import FcfsQueue, PriorityQueue
from headrace.policy.schedule.sequence import Sequence


class FairQueueMachine(RuleBasedStateMachine):
    """Sequences of few tenants come, go, are preempted, charged and refunded; whoever is first is found by looking at all."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairShareQueue()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.tenants: list[str] = []
        """Those that wait, in the order in which they began to."""
        self.num_made = 0

    @rule(tenant=st.sampled_from("abcdef"), weight=st.sampled_from([1.0, 2.0]), arrival=st.integers(0, 3))
    def add(self, tenant: str, weight: float, arrival: int) -> None:
        self.num_made += 1
        made = request(f"r{self.num_made}", [1], tenant=tenant, weight=weight)
        self._push(Sequence(SeqId(self.num_made), made, 0, float(arrival), array("i", [1]), 1, 8))

    def _push(self, seq: Sequence) -> None:
        if seq.request.tenant not in self.tenants:
            self.tenants.append(seq.request.tenant)
        self.queue.push(seq, 1)
        self.waiting.append(seq)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), runs=st.booleans())
    def take(self, data: st.DataObject, runs: bool) -> None:
        seq = self.queue.head() if runs else data.draw(st.sampled_from(self.waiting))
        assert seq is not None
        self.queue.remove(seq)
        self.waiting.remove(seq)
        if not any(other.request.tenant == seq.request.tenant for other in self.waiting):
            self.tenants.remove(seq.request.tenant)
        if runs:
            self.running.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        seq.incarnation += 1
        self._push(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 9), is_refunded=st.booleans())
    def charge(self, data: st.DataObject, count: int, is_refunded: bool) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.queue.charge([seq], [count])
        if is_refunded:
            self.queue.head()
            self.queue.charge([seq], [-count])

    @invariant()
    def the_least_served_tenant_is_first(self) -> None:
        firsts = [self.queue._queues[tenant][0] for tenant in self.tenants]
        assert {seq.request.tenant for seq in self.waiting} == set(self.tenants)
        assert self.queue.head() is min(firsts, key=lambda seq: (self.queue._served[seq.request.tenant], seq.key), default=None)
        assert len(self.queue) == len(self.waiting)


FairQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_fair_queue_state_machine = FairQueueMachine.TestCase


def test_who_comes_back_is_not_forgotten_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tenants than are remembered, all idle but one that was served little."""
    monkeypatch.setattr(fair, "MAX_REMEMBERED_TENANTS", 3)
    queue = FairShareQueue()
    made = [Sequence(SeqId(i), request(f"r{i}", [1], tenant=f"t{i}"), 0, float(i), array("i", [1]), 1, 8) for i in range(12)]
    for count, seq in enumerate(made):
        queue.push(seq, 1)
        if count > 0:
            queue.remove(seq)
            queue.charge([seq], [100 * count])
    assert queue.head() is made[0]
    again = Sequence(SeqId(99), request("again", [1], tenant="t11"), 0, 99.0, array("i", [1]), 1, 8)
    queue.push(again, 1)
    queue.remove(made[0])
    assert queue.head() is again
    assert len(queue._served) <= 3 + 1


@pytest.mark.parametrize("arrival", [0.1, 1234567.1, 1e-9])
def test_a_standard_requests_place_is_its_arrival_to_the_bit(arrival: float) -> None:
    seq = Sequence(SeqId(1), request("r", [1]), 0, arrival, array("i", [1]), 1, 8)
    assert PriorityQueue().key_of(seq, 1) == FcfsQueue().key_of(seq, 1) == arrival
