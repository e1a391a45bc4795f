"""Declares the protocol of a queue policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.core.plan import StepCosts
from headrace.core.request import PriorityClass
from headrace.policy.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepShares:
    """long_prompt_steps     a prompt is long when the rest of it would fill more steps than this
    queued_share_divisor  while a long prompt prefills, 1/N of the step's remaining budget is reserved for the sequences behind it
    premium_headroom      fraction of slots and KV blocks that other classes leave free while premium requests come
    prefill               fraction of the tokens left over by decoding rows that prefills may take
    """

    long_prompt_steps: int = 2
    queued_share_divisor: int = 4
    premium_headroom: float = 0.0
    prefill: float = 1.0

    def for_prefill(self, budget: int) -> int:
        return budget if self.prefill >= 1.0 or budget <= 0 else max(1, int(budget * self.prefill))

    def is_long(self, num_tokens: int, budget: int) -> bool:
        return num_tokens > self.long_prompt_steps * max(budget, 1)

    def withheld_for_long(self, budget: int) -> int:
        return budget - max(budget // self.queued_share_divisor, 1) if budget > 1 else max(budget, 0)


@dataclass(frozen=True, slots=True)
class QueueTraits:
    """has_tenants: tenants are served in turns, by the tokens computed for each"""

    has_classes: bool = False
    has_tenants: bool = False

    def lowest_before(self, priority: PriorityClass) -> PriorityClass:
        return priority if self.has_classes else PriorityClass.BATCH


class Queue(Protocol):
    traits: QueueTraits
    shares: StepShares

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        """cost_tokens: uncached prompt + tokens it may still generate"""
        ...

    def head(self, now: float, costs: StepCosts) -> Sequence | None:
        """Changes nothing."""
        ...

    def heads(self, now: float, costs: StepCosts) -> Iterator[Sequence]:
        """The queue must not change meanwhile."""
        ...

    def num_of_tenant(self, seq: Sequence) -> int: ...

    def start(self, seq: Sequence, now: float) -> None: ...

    def remove(self, seq: Sequence) -> None: ...

    def outranks(self, seq: Sequence, other: Sequence) -> bool: ...

    def precedes(self, seq: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence takes prefill budget before a running one."""
        ...

    def victim(self, candidates: Iterable[Sequence]) -> Sequence: ...

    def prefill_order(self, sequences: list[Sequence], now: float, costs: StepCosts) -> list[Sequence]: ...

    def charge(self, sequences: Iterable[Sequence]) -> None: ...

    def __len__(self) -> int: ...
