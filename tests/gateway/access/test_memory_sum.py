"""Tests one sum of bytes: limits hold, whatever is taken comes back, and refusals say which limit it was."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from headrace.core.errors import Overloaded, RequestTooLarge
from headrace.gateway.access.memory_charges import ChargeLimits, MemoryCharge, MemorySum

pytestmark = pytest.mark.pure

LIMITS = ChargeLimits(request=100, total=250, tenant_share=lambda: 0.6)


def test_each_limit_is_inclusive_and_named() -> None:
    budget = MemorySum(LIMITS)
    with budget.open("a") as first, budget.open("a") as second, budget.open("b") as third:
        first.add(100)
        with pytest.raises(RequestTooLarge, match=r"at most 100 bytes here, got 101"):
            first.add(1)
        second.add(50)
        with pytest.raises(Overloaded, match="taken by your other requests"):
            second.add(1)
        third.add(100)
        with budget.open("c") as fourth, pytest.raises(Overloaded, match="taken by running requests"):
            fourth.add(1)
        assert (budget.held, budget.left, budget.num_refused) == (250, 0, 3)
        budget.check()
    assert (budget.held, budget.left) == (0, 250)
    budget.check()


@pytest.mark.parametrize(
    ("limits", "name"),
    [(ChargeLimits(100, 80, lambda: 0.625), "max_tenant_share"), (ChargeLimits(100, 80, lambda: 1.0), "max_answer_bytes")],
)
def test_a_request_above_a_tenants_share_or_the_sum_is_refused_under_its_name(limits: ChargeLimits, name: str) -> None:
    with MemorySum(limits).open("a") as held, pytest.raises(RequestTooLarge, match=rf"limits\.{name}\)"):
        held.add(81)


class Requests(RuleBasedStateMachine):
    """Against a dictionary that is summed anew each time."""

    opened = Bundle("opened")

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemorySum(LIMITS)
        self.known: dict[MemoryCharge, int] = {}

    @rule(target=opened, tenant=st.sampled_from(["a", "b", "c"]))
    def begin(self, tenant: str) -> MemoryCharge:
        held = self.budget.open(tenant).__enter__()
        self.known[held] = 0
        return held

    @rule(held=opened, num_bytes=st.integers(0, 120))
    def add(self, held: MemoryCharge, num_bytes: int) -> None:
        of_tenant = sum(size for other, size in self.known.items() if other.tenant == held.tenant)
        fits = (
            self.known[held] + num_bytes <= LIMITS.request
            and of_tenant + num_bytes <= LIMITS.tenant
            and sum(self.known.values()) + num_bytes <= LIMITS.total
        )
        if fits or num_bytes == 0:
            held.add(num_bytes)
            self.known[held] += num_bytes
        else:
            with pytest.raises((RequestTooLarge, Overloaded)):
                held.add(num_bytes)

    @rule(held=consumes(opened))
    def end(self, held: MemoryCharge) -> None:
        held.__exit__(None, None, None)
        del self.known[held]

    @invariant()
    def holds(self) -> None:
        assert self.budget.held == sum(self.known.values())
        self.budget.check()


TestRequests = Requests.TestCase
