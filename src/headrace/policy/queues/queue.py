"""What a queue policy answers: order of admission, choice of victim, shares of the step's prefill budget (`shares`).

A smaller key goes first everywhere; the victim is the largest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.policy.queues.shares import StepShares
from headrace.policy.schedule.sequence import Sequence


class Queue(Protocol):
    """Waiting sequences of one engine.

    charges  whether `charge` means anything to this policy
    shares   how it divides a step's tokens between prefills
    """

    charges: bool
    shares: StepShares

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        """Add a new or preempted sequence. cost_tokens: uncached prompt + tokens it may still generate."""
        ...

    def head(self) -> Sequence | None:
        """Who is next; changes nothing."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take any waiting sequence out (admitted, cancelled, expired)."""
        ...

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """Which running sequence gives its blocks back."""
        ...

    def prefill_order(self, sequences: list[Sequence]) -> list[Sequence]:
        """Who takes prefill budget first this step."""
        ...

    def charge(self, seqs: Iterable[Sequence], counts: Iterable[int]) -> None:
        """So many tokens are computed for each; less than none when it turns out that they were not."""
        ...

    def __len__(self) -> int: ...
