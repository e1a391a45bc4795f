"""Declares the protocol of a queue policy: the order in which sequences start, the sequence to preempt, and shares of the step's prefill
budget.

The sequence that a policy would serve last is preempted first. Implementations: `keyed` (first come first served, shortest job
first), `fair` and `priority`; `QUEUES` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.core.plan import StepCosts
from headrace.core.request import PriorityClass
from headrace.policy.queues.shares import StepShares
from headrace.policy.sequence import Sequence


@dataclass(frozen=True, slots=True)
class QueueTraits:
    """The facts that a queue policy takes into account.

    has_classes  higher classes are served first
    has_tenants  tenants are served in turns, by the tokens computed for each: `Queue.charge` has to be called
    """

    has_classes: bool = False
    has_tenants: bool = False

    def lowest_before(self, priority: PriorityClass) -> PriorityClass:
        """The lowest class of the requests that are served before a new one of this class."""
        return priority if self.has_classes else PriorityClass.BATCH


class Queue(Protocol):
    """The waiting sequences of one engine. shares: how a step's tokens are divided between prefilling sequences"""

    traits: QueueTraits
    shares: StepShares

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        """Add a new or preempted sequence. cost_tokens: uncached prompt + tokens it may still generate."""
        ...

    def head(self, now: float, costs: StepCosts) -> Sequence | None:
        """The sequence to start next, None when the queue is empty. Changes nothing. costs: what steps cost lately"""
        ...

    def heads(self, now: float, costs: StepCosts) -> Iterator[Sequence]:
        """`head` and the sequences after it, one per tenant where the policy distinguishes tenants. The queue must not change meanwhile."""
        ...

    def num_of_tenant(self, seq: Sequence) -> int:
        """The number of waiting sequences of the same tenant, class and tier as `seq`, itself included."""
        ...

    def start(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that starts now."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take out a waiting sequence that was cancelled or expired. A sequence that does not wait is ignored."""
        ...

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        """Whether a sequence may take the place of a running one because of its class."""
        ...

    def precedes(self, seq: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence of another tenant or class takes prefill budget before a running one."""
        ...

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """The running sequence to preempt."""
        ...

    def prefill_order(self, sequences: list[Sequence], now: float, costs: StepCosts) -> list[Sequence]:
        """Running sequences in the order in which they take prefill budget this step."""
        ...

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Count what was planned for these sequences since their last charge (`Sequence.take_uncharged`)."""
        ...

    def __len__(self) -> int: ...
