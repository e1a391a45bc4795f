"""Counts the bytes that requests hold in this process, in two sums, each with a limit per request, per tenant and in all.

prompts  bodies and what they are parsed into, prompt tokens
answers  log-probabilities, and answers until they are written, which may be far larger than the requests for them

A size that is not known beforehand is charged as it grows. `http.sse` lets unsent bytes of streams grow only to what the sums have left.
Nothing is counted per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from headrace.core.errors import Overloaded, RequestTooLarge


@dataclass(frozen=True, slots=True)
class ChargeLimits:
    """keeps_reserve: the last quarter of a tenant's limit and of the total is kept for requests that already hold bytes, so that a new
    request is refused before a running one. A request alone may hold the whole limit.
    """

    request: int
    total: int
    tenant_share: Callable[[], float]
    keeps_reserve: bool = False

    @property
    def tenant(self) -> int:
        return int(self.total * self.tenant_share())

    def allowed(self, limit: int, taken: int, *, is_new: bool) -> int:
        return limit - limit // 4 if self.keeps_reserve and is_new and taken else limit


class MemorySum:
    def __init__(self, limits: ChargeLimits, name: str = "answers") -> None:
        self.limits = limits
        self.name = name
        self.held = 0
        self.num_refused = 0
        self._by_tenant: dict[str, int] = {}
        self._open: set[MemoryCharge] = set()
        self._held_at_change = 0

    def change(self, limits: ChargeLimits) -> None:
        """Requests keep the bytes that they hold, also beyond the new limits."""
        self.limits = limits
        self._held_at_change = self.held

    @property
    def left(self) -> int:
        return self.limits.total - self.held

    def open(self, tenant: str) -> MemoryCharge:
        return MemoryCharge(self, tenant)

    def check(self) -> None:
        assert self.held == sum(charge.num_bytes for charge in self._open) == sum(self._by_tenant.values())
        assert all(self._by_tenant.values()), "a tenant without bytes is forgotten"
        assert self.held <= max(self.limits.total, self._held_at_change)

    def _add(self, charge: MemoryCharge, num_bytes: int) -> None:
        before = self._by_tenant.get(charge.tenant, 0)
        of_tenant = before + num_bytes
        limits, is_new = self.limits, not charge.num_bytes
        of_one_tenant = limits.tenant
        most = limits.request if limits.request < of_one_tenant else of_one_tenant
        if charge.num_bytes + num_bytes > most:
            self.num_refused += 1
            rule = f"a request that needs at most {most} bytes here{self._set_by(most)}"
            raise RequestTooLarge(
                "body", rule, charge.num_bytes + num_bytes, "Ask for fewer choices or log-probabilities, or send less text."
            )
        is_tenants = of_tenant > limits.allowed(of_one_tenant, before, is_new=is_new)
        if is_tenants or self.held + num_bytes > limits.allowed(limits.total, self.held, is_new=is_new):
            self.num_refused += 1
            whose = "your other requests" if is_tenants else "running requests"
            raise Overloaded(f"The memory for {self.name} is taken by {whose}; try again in a moment.", retry_after_s=1.0)
        self._open.add(charge)
        self._by_tenant[charge.tenant] = of_tenant
        self.held += num_bytes
        charge.num_bytes += num_bytes

    def _set_by(self, most: int) -> str:
        if most == self.limits.request:
            return ""
        name = f"max_{self.name.removesuffix('s')}_bytes" if most == self.limits.total else "max_tenant_share"
        return f" (limits.{name})"

    def _give_back(self, charge: MemoryCharge) -> None:
        if not charge.num_bytes:
            return
        self._open.discard(charge)
        self.held -= charge.num_bytes
        left = self._by_tenant.pop(charge.tenant) - charge.num_bytes
        if left:
            self._by_tenant[charge.tenant] = left
        charge.num_bytes = 0


class MemoryCharge:
    """The end of `with memory_sum.open(tenant) as charge:` gives the bytes back."""

    __slots__ = ("_sum", "num_bytes", "tenant")

    def __init__(self, memory_sum: MemorySum, tenant: str) -> None:
        self._sum = memory_sum
        self.tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises RequestTooLarge beyond a request's limit, else Overloaded; nothing is added then."""
        if num_bytes > 0:
            self._sum._add(self, num_bytes)

    def __enter__(self) -> MemoryCharge:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sum._give_back(self)


class MemoryLimits(NamedTuple):
    prompts: ChargeLimits
    answers: ChargeLimits


class RequestMemory:
    """num_open: open requests; num_closed: since the start"""

    def __init__(self, limits: MemoryLimits) -> None:
        self.prompts = MemorySum(limits.prompts, "prompts")
        self.answers = MemorySum(limits.answers, "answers")
        self.num_open = 0
        self.num_closed = 0

    @property
    def held(self) -> int:
        return self.prompts.held + self.answers.held

    def change(self, limits: MemoryLimits) -> None:
        self.prompts.change(limits.prompts)
        self.answers.change(limits.answers)

    def open(self, tenant: str) -> RequestCharges:
        return RequestCharges(self, tenant)

    def check(self) -> None:
        self.prompts.check()
        self.answers.check()


class RequestCharges:
    __slots__ = ("_memory", "answers", "prompts")

    def __init__(self, memory: RequestMemory, tenant: str) -> None:
        self._memory = memory
        self.prompts, self.answers = memory.prompts.open(tenant), memory.answers.open(tenant)

    def __enter__(self) -> RequestCharges:
        self._memory.num_open += 1
        return self

    def __exit__(self, *error: object) -> None:
        memory = self._memory
        memory.prompts._give_back(self.prompts)
        memory.answers._give_back(self.answers)
        memory.num_open -= 1
        memory.num_closed += 1
