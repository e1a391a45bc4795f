"""Tests the queues that share between tiers and tenants: their heaps against a search of all that wait, and the order between classes."""

from __future__ import annotations

from array import array

import pytest
from engine_kit import request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.ids import SeqId
from headrace.core.plan import UNKNOWN_COSTS, StepCosts
from headrace.core.request import PriorityClass, TierTerms
from headrace.policy.queues import QUEUES, fair, traits_of
from headrace.policy.queues.fair import IDLE_CREDIT_TOKENS, SLACK_LEAD_TOKENS, FairShareQueue, TenantOrder
from headrace.policy.queues.priority import CLASS_WEIGHTS, PRIORITY_AGING_S, PriorityQueue
from headrace.policy.queues.queue import QueueTraits
from headrace.policy.sequence import Sequence

pytestmark = pytest.mark.pure

NOW = 100.0


def sequence(number: int, arrival: float = 0.0, num_prompt: int = 1, **given: object) -> Sequence:
    made = Sequence(
        SeqId(number), request(f"r{number}", [1], **given), 0, arrival, array("i", [1] * num_prompt), num_prompt, num_prompt + 8
    )
    made.stage_since = arrival
    made.num_expected = num_prompt
    return made


def serve(queue: FairShareQueue | PriorityQueue, seq: Sequence, num_tokens: int) -> None:
    """Compute tokens of a running sequence."""
    seq.num_planned += num_tokens
    queue.charge([seq])


class FairQueueMachine(RuleBasedStateMachine):
    """Sequences of few tenants in two tiers come, go, are preempted, charged and rolled back; the first is found by looking at all."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairShareQueue()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_made = 0

    @rule(
        tenant=st.sampled_from("abcdef"),
        tier=st.sampled_from([TierTerms(name="gold", weight=3.0), TierTerms(name="free")]),
        arrival=st.integers(0, 3),
    )
    def add(self, tenant: str, tier: TierTerms, arrival: int) -> None:
        self.num_made += 1
        self._push(sequence(self.num_made, float(arrival), tenant=tenant, tier=tier))

    def _push(self, seq: Sequence) -> None:
        name, tenant = seq.request.tier.name, seq.request.tenant
        tiers = {other.request.tier.name for other in self.waiting}
        peers = {other.request.tenant for other in self.waiting if other.request.tier.name == name}
        floors = [min(self._tier(other).served for other in tiers)] if tiers else []
        peer_floors = [min(self._tier(name).service_of(peer) for peer in peers)] if peers else []
        self.queue.push(seq, 1)
        self.waiting.append(seq)
        if floors and name not in tiers:
            assert self._tier(name).served >= floors[0] - IDLE_CREDIT_TOKENS, "idling earned more than its credit"
        if peer_floors and tenant not in peers:
            assert self._tier(name).service_of(tenant) >= peer_floors[0] - IDLE_CREDIT_TOKENS, "idling earned more than its credit"

    def _tier(self, name: str) -> TenantOrder:
        return self.queue._tiers[name]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), runs=st.booleans())
    def take(self, data: st.DataObject, runs: bool) -> None:
        seq = self.queue.head(NOW, UNKNOWN_COSTS) if runs else data.draw(st.sampled_from(self.waiting))
        assert seq is not None
        self.queue.start(seq, NOW) if runs else self.queue.remove(seq)
        self.waiting.remove(seq)
        if runs:
            self.running.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        seq.plan_epoch += 1
        seq.reset()
        self._push(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3000), is_rolled_back=st.booleans())
    def compute(self, data: st.DataObject, count: int, is_rolled_back: bool) -> None:
        seq = data.draw(st.sampled_from(self.running))
        serve(self.queue, seq, count)
        if is_rolled_back:
            self.queue.head(NOW, UNKNOWN_COSTS)
            serve(self.queue, seq, -count)

    @invariant()
    def the_least_served_tenant_of_the_least_served_tier_is_first(self) -> None:
        assert len(self.queue) == len(self.waiting)
        head = self.queue.head(NOW, UNKNOWN_COSTS)
        heads = list(self.queue.heads(NOW, UNKNOWN_COSTS))
        assert {(seq.request.tier.name, seq.request.tenant) for seq in heads} == {
            (seq.request.tier.name, seq.request.tenant) for seq in self.waiting
        }
        if head is None:
            assert not self.waiting
            return
        name = head.request.tier.name
        assert self._tier(name).served == min(self._tier(seq.request.tier.name).served for seq in self.waiting)
        rank = [(self._tier(name).service_of(seq.request.tenant), seq.key) for seq in heads if seq.request.tier.name == name]
        assert (self._tier(name).service_of(head.request.tenant), head.key) == min(rank)


FairQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_fair_queue_state_machine = FairQueueMachine.TestCase


def test_a_tenant_that_comes_back_is_not_forgotten_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tenants than are remembered, all idle but one that was served little."""
    monkeypatch.setattr(fair, "MAX_REMEMBERED_TENANTS", 3)
    order = TenantOrder()
    made = [sequence(i, float(i), tenant=f"t{i}") for i in range(12)]
    for count, seq in enumerate(made):
        order.push(seq)
        if count > 0:
            order.remove(seq)
            order.charge(seq.request.tenant, 2000.0 * count)
    assert order.head() is made[0]
    again = sequence(99, 99.0, tenant="t11")
    order.push(again)
    order.remove(made[0])
    assert order.head() is again
    assert len(order._served) <= 3 + 1


def test_tiers_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.policy.queues.fair.MAX_REMEMBERED_TIERS", 4)
    queue = FairShareQueue()
    waits = sequence(0, tier=TierTerms(name="waits"))
    queue.push(waits, 1)
    for number in range(1, 40):
        seq = sequence(number, tier=TierTerms(name=f"tier{number}"))
        queue.push(seq, 1)
        queue.remove(seq)
    assert len(queue._tiers) <= 4
    assert queue.head(NOW, UNKNOWN_COSTS) is waits


def test_a_tier_gets_its_share_however_many_tenants_another_has() -> None:
    """A hundred free tenants get together what one tenant of a tier of the same weight gets."""
    queue = FairShareQueue()
    made = [sequence(i, tenant=f"free{i % 100}", tier=TierTerms(name="free")) for i in range(1000)]
    made += [sequence(2000 + i, tenant="paying", tier=TierTerms(name="standard")) for i in range(1000)]
    for seq in made:
        queue.push(seq, 1)
    served = {"free": 0, "standard": 0}
    for _ in range(400):
        head = queue.head(NOW, UNKNOWN_COSTS)
        assert head is not None
        queue.start(head, NOW)
        serve(queue, head, 50)
        served[head.request.tier.name] += 1
    assert served == {"free": 200, "standard": 200}


def test_tiers_are_ordered_by_slack_while_none_is_far_ahead() -> None:
    queue = FairShareQueue()
    calm, hasty = TierTerms(name="calm", ttft_ms=60_000.0), TierTerms(name="hasty", ttft_ms=500.0)
    first, second = sequence(1, NOW, tenant="a", tier=calm), sequence(2, NOW, tenant="b", tier=hasty)
    queue.push(first, 1)
    queue.push(second, 1)
    assert queue.head(NOW, UNKNOWN_COSTS) is second, "less time is left until its goal"
    assert queue.head(NOW + 0.6, UNKNOWN_COSTS) is first, "its goal is missed, whatever is done"
    assert queue.head(NOW, StepCosts(0.0, 0.6)) is first, "its prompt takes longer than its goal leaves"
    queue.start(second, NOW)
    serve(queue, second, int(SLACK_LEAD_TOKENS) + 2)
    third = sequence(3, NOW, tenant="b", tier=hasty)
    queue.push(third, 1)
    assert queue.head(NOW, UNKNOWN_COSTS) is first, "the hasty tier has had more than its lead"


def test_running_prompts_take_tokens_in_the_order_in_which_they_started() -> None:
    queue = FairShareQueue()
    made = [sequence(i, float(i), tenant="noisy") for i in range(3)] + [sequence(9, 9.0, tenant="quiet")]
    for seq in made[:3]:
        serve(queue, seq, 500)
    assert queue.prefill_order(made, NOW, UNKNOWN_COSTS)[0] is made[3]
    tiers = [sequence(20, tier=TierTerms(name="calm")), sequence(21, tier=TierTerms(name="hasty", ttft_ms=900.0))]
    assert queue.prefill_order(tiers, 0.0, UNKNOWN_COSTS)[0] is tiers[1]


def classes(queue: PriorityQueue, *, seconds: float) -> dict[PriorityClass, int]:
    """Tokens per class while all three always wait. A sequence starts every 10 ms and takes 50 tokens."""
    served = dict.fromkeys(PriorityClass, 0)
    for number in range(9):
        queue.push(sequence(number, tenant=f"t{number % 3}", priority=PriorityClass(number // 3)), 1)
    for step in range(int(seconds * 100)):
        now = step / 100
        head = queue.head(now, UNKNOWN_COSTS)
        assert head is not None
        queue.start(head, now)
        serve(queue, head, 50)
        served[head.request.priority] += 50
        queue.push(sequence(1000 + step, now, tenant=head.request.tenant, priority=head.request.priority), 1)
    return served


def test_classes_are_strict_until_a_lower_one_has_waited_for_its_aging() -> None:
    assert classes(PriorityQueue(), seconds=PRIORITY_AGING_S - 0.1)[PriorityClass.STANDARD] == 0
    assert classes(PriorityQueue(), seconds=2 * PRIORITY_AGING_S - 0.1)[PriorityClass.BATCH] == 0


def test_all_classes_get_their_weights_in_the_long_run() -> None:
    served = classes(PriorityQueue(), seconds=400.0)
    total = sum(served.values())
    weights = sum(CLASS_WEIGHTS.values())
    for priority, weight in CLASS_WEIGHTS.items():
        assert served[priority] / total == pytest.approx(weight / weights, rel=0.25), priority


def test_a_class_that_is_served_now_and_then_is_never_ahead_of_a_higher_one() -> None:
    """A flood of batch requests, all of them old: a premium request that comes is served before them."""
    queue = PriorityQueue()
    for number in range(5000):
        queue.push(sequence(number, 0.0, tenant="nightly", priority=PriorityClass.BATCH), 1)
    for step in range(2000):
        now = step / 10
        if step % 7 == 0:
            premium = sequence(10_000 + step, now, tenant="acme", priority=PriorityClass.PREMIUM)
            queue.push(premium, 1)
            assert queue.head(now, UNKNOWN_COSTS) is premium
        head = queue.head(now, UNKNOWN_COSTS)
        assert head is not None
        queue.start(head, now)
        serve(queue, head, 50)


@pytest.mark.parametrize("arrival", [0.1, 1234567.1, 1e-9])
def test_a_requests_place_in_its_tenants_line_is_its_arrival_to_the_bit(arrival: float) -> None:
    queue = PriorityQueue()
    seq = sequence(1, arrival)
    queue.push(seq, 1)
    assert seq.key == arrival


def test_a_policy_says_what_it_takes_into_account() -> None:
    assert {name for name in QUEUES if traits_of(name).has_classes} == {"priority"}
    assert {name for name in QUEUES if traits_of(name).has_tenants} == {"priority", "fair"}
    unknown = traits_of("of a later version")
    assert unknown == QueueTraits(has_classes=False, has_tenants=False)
    assert unknown.lowest_before(PriorityClass.PREMIUM) is PriorityClass.BATCH
    assert traits_of("priority").lowest_before(PriorityClass.STANDARD) is PriorityClass.STANDARD
