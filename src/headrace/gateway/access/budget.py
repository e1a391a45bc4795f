"""Bytes that requests hold in this process: one sum, refused beyond its limits per request, per tenant and in all.

Held are bodies and what they are parsed into, prompts, log-probabilities, and answers until they are written. What is not known
beforehand is added while it grows. Scopes give back what they took; streams that wait for their reader are looked at by `http.sse`, which
asks here what is left. Nothing is counted per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from headrace.core.errors import Overloaded, RequestTooLarge


@dataclass(frozen=True, slots=True)
class HeldLimits:
    """Bytes, inclusive."""

    request: int
    tenant: int
    total: int


class ByteBudget:
    """held  by all requests;  num_refused  requests that were told there is no room"""

    def __init__(self, limits: HeldLimits) -> None:
        self.limits = limits
        self.held = 0
        self.num_refused = 0
        self._by_tenant: dict[str, int] = {}
        self._open: set[Held] = set()

    @property
    def left(self) -> int:
        return self.limits.total - self.held

    def open(self, tenant: str) -> Held:
        """A request's share, empty as yet. Leave it by scope."""
        return Held(self, tenant)

    def check(self) -> None:
        """What is held is the sum over requests, and over tenants."""
        assert self.held == sum(held.num_bytes for held in self._open) == sum(self._by_tenant.values())
        assert all(self._by_tenant.values()), "a tenant without bytes is forgotten"
        assert self.held <= self.limits.total

    def _add(self, held: Held, num_bytes: int) -> None:
        of_tenant = self._by_tenant.get(held.tenant, 0) + num_bytes
        limits = self.limits
        if held.num_bytes + num_bytes > limits.request:
            self.num_refused += 1
            rule = f"a request that needs at most {limits.request} bytes here (limits.max_request_held_bytes)"
            raise RequestTooLarge(
                "body", rule, held.num_bytes + num_bytes, "Ask for fewer choices or log-probabilities, or send less text."
            )
        if of_tenant > limits.tenant or self.held + num_bytes > limits.total:
            self.num_refused += 1
            whose = "your other requests" if of_tenant > limits.tenant else "running requests"
            raise Overloaded(f"The memory for answers is taken by {whose}; try again in a moment.", retry_after_s=1.0)
        self._open.add(held)
        self._by_tenant[held.tenant] = of_tenant
        self.held += num_bytes
        held.num_bytes += num_bytes

    def _give_back(self, held: Held) -> None:
        if not held.num_bytes:
            return
        self._open.discard(held)
        self.held -= held.num_bytes
        left = self._by_tenant.pop(held.tenant) - held.num_bytes
        if left:
            self._by_tenant[held.tenant] = left
        held.num_bytes = 0


class Held:
    """What one request holds. `with budget.open(tenant) as held:` gives it all back."""

    __slots__ = ("_budget", "num_bytes", "tenant")

    def __init__(self, budget: ByteBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Take more, all or nothing. Raises RequestTooLarge or Overloaded, naming the limit."""
        if num_bytes > 0:
            self._budget._add(self, num_bytes)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._budget._give_back(self)
