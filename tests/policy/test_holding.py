"""Tests the requests that wait for a replica of their model: their order, and who leaves a full queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import Unavailable
from headrace.core.ids import SeqId
from headrace.core.request import PriorityClass, TierTerms
from headrace.policy import holding
from headrace.policy.holding import HeldQueue, HeldTerms, HeldTotals

pytestmark = pytest.mark.pure

MODELS, MAX_HELD, MAX_HELD_BYTES, MAX_ALL_HELD, MAX_ALL_HELD_BYTES = 2, 6, 60, 8, 90
PREMIUM, STANDARD, BATCH = PriorityClass

TERMS = st.builds(
    HeldTerms,
    tenant=st.sampled_from(["ant", "bee", "cat"]),
    priority=st.sampled_from(PriorityClass),
    tier=st.sampled_from([TierTerms(name="one"), TierTerms(name="four", weight=4.0)]),
    num_bytes=st.integers(0, 40),
    max_output_tokens=st.none() | st.integers(1, 2000),
)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_HELD", "MAX_HELD_BYTES", "MAX_ALL_HELD", "MAX_ALL_HELD_BYTES"):
            patch.setattr(holding, name, globals()[name])
        yield


@dataclass
class Plain:
    """What two models of one gateway hold, as lists."""

    totals: HeldTotals = field(default_factory=HeldTotals)
    held: list[dict[SeqId, HeldTerms]] = field(default_factory=lambda: [{} for _ in range(MODELS)])

    def __post_init__(self) -> None:
        self.queues = [HeldQueue(self.totals) for _ in range(MODELS)]

    def add(self, model: int, terms: HeldTerms, now: float) -> None:
        held = self.held[model]
        try:
            number, displaced = self.queues[model].add(terms, now)
        except Unavailable:
            assert not self.fits(model, terms), "refused although there was a place"
            return
        for other in displaced:
            left = held.pop(other)
            assert left.priority >= terms.priority, "a lower class displaces no higher one"
            assert left.priority > terms.priority or left.tenant != terms.tenant
        held[number] = terms

    def fits(self, model: int, terms: HeldTerms) -> bool:
        every = [each for held in self.held for each in held.values()]
        own_bytes, all_bytes = (sum(each.num_bytes for each in some) + terms.num_bytes for some in (self.held[model].values(), every))
        has_number = len(self.held[model]) < MAX_HELD and len(every) < MAX_ALL_HELD
        return has_number and own_bytes <= MAX_HELD_BYTES and all_bytes <= MAX_ALL_HELD_BYTES

    def check(self) -> None:
        for queue, held in zip(self.queues, self.held, strict=True):
            queue.check()
            assert len(queue) == len(held)
            for lowest in PriorityClass:
                assert queue.num_requests(lowest) == sum(terms.priority <= lowest for terms in held.values())
        assert self.totals.num_requests == sum(map(len, self.held)) <= MAX_ALL_HELD
        assert self.totals.num_bytes == sum(terms.num_bytes for held in self.held for terms in held.values()) <= MAX_ALL_HELD_BYTES


@given(st.lists(st.tuples(st.integers(0, MODELS - 1), TERMS | st.sampled_from(["release", "leave"]), st.integers(0, 7)), max_size=40))
def test_what_is_held_is_bounded_and_counted_and_each_request_goes_once(events: list[tuple[int, HeldTerms | str, int]]) -> None:
    plain, now = Plain(), 0.0
    for model, event, number in events:
        now += 1.0
        queue, held = plain.queues[model], plain.held[model]
        if isinstance(event, HeldTerms):
            plain.add(model, event, now)
        elif event == "leave" and held:
            left = sorted(held)[number % len(held)]
            queue.remove(left)
            del held[left]
        elif event == "release":
            head = queue.head(now)
            assert (head is None) == (not held)
            if head is not None:
                queue.release(head, now)
                del held[head]
        plain.check()


def released(queue: HeldQueue, numbers: dict[SeqId, str]) -> list[str]:
    names = []
    while (head := queue.head(10.0)) is not None:
        queue.release(head, 10.0)
        names.append(numbers[head])
    return names


def test_classes_go_in_their_order_and_tenants_in_turns() -> None:
    queue = HeldQueue(HeldTotals())
    asked = [("ant", BATCH), ("ant", STANDARD), ("ant", STANDARD), ("bee", STANDARD), ("bee", PREMIUM)]
    numbers = {queue.add(HeldTerms(tenant, priority), 9.0)[0]: f"{tenant} {priority.name}" for tenant, priority in asked}
    assert released(queue, numbers) == ["bee PREMIUM", "ant STANDARD", "bee STANDARD", "ant STANDARD", "ant BATCH"]
    queue.check()


def test_a_full_queue_loses_batch_requests_first_and_then_the_newest_of_the_largest_tenant() -> None:
    queue = HeldQueue(HeldTotals())
    numbers = [queue.add(HeldTerms("ant", priority), 0.0)[0] for priority in (BATCH, *[STANDARD] * 5)]
    assert queue.add(HeldTerms("bee", STANDARD), 0.0)[1] == [numbers[0]]
    assert queue.add(HeldTerms("bee", STANDARD), 0.0)[1] == [numbers[5]]
    assert queue.add(HeldTerms("bee", STANDARD), 0.0)[1] == [numbers[4]]
    with pytest.raises(Unavailable):
        queue.add(HeldTerms("bee", STANDARD), 0.0)
    with pytest.raises(Unavailable):
        queue.add(HeldTerms("cat", BATCH), 0.0)
    queue.check()


def test_a_large_request_displaces_no_more_than_makes_its_place() -> None:
    queue = HeldQueue(HeldTotals())
    numbers = [queue.add(HeldTerms("ant", STANDARD, num_bytes=15), 0.0)[0] for _ in range(4)]
    assert queue.add(HeldTerms("bee", PREMIUM, num_bytes=20), 0.0)[1] == [numbers[3], numbers[2]]
    queue.check()
