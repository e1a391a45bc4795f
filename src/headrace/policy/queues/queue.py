"""The protocol of a queue policy: order of admission, choice of the sequence to preempt, shares of the step's prefill budget.

The sequence that a policy would serve last is preempted first. Implementations: `keyed` (first come first served, priority, shortest job
first) and `fair`; `QUEUES` names them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.policy.queues.shares import StepShares
from headrace.policy.schedule.sequence import Sequence


class Queue(Protocol):
    """The waiting sequences of one engine.

    charges  whether this policy counts computed tokens, so that `charge` has to be called
    shares   how a step's tokens are divided between prefilling sequences
    """

    charges: bool
    shares: StepShares

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        """Add a new or preempted sequence. cost_tokens: uncached prompt + tokens it may still generate."""
        ...

    def head(self) -> Sequence | None:
        """The sequence to admit next, None when the queue is empty. Changes nothing."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take out a waiting sequence that was admitted, cancelled or expired. A sequence that does not wait is ignored."""
        ...

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """The running sequence to preempt."""
        ...

    def prefill_order(self, sequences: list[Sequence]) -> list[Sequence]:
        """Running sequences in the order in which they take prefill budget this step."""
        ...

    def charge(self, seqs: Iterable[Sequence], counts: Iterable[int]) -> None:
        """Count tokens computed for each sequence; a negative count takes back a row that was rolled back."""
        ...

    def __len__(self) -> int: ...
