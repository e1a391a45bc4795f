"""Decides about drafts at random, so that every way of them through plans and commits is taken in a short life."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace.policy.schedule.scheduler import Scheduler
from headrace.policy.speculation import DraftRecord, Offer, Speculation, StepShape


class RandomSpeculation(Speculation):
    """Speculation goes on and off at any plan, and drafts are taken whether it is on or off."""

    def __init__(self, most: int, seed: int, *, is_overlapped: bool) -> None:
        super().__init__(most, is_free=True, is_overlapped=is_overlapped)
        self.random = Random(seed)

    def choose(self, offers: Sequence[Offer], shape: StepShape) -> list[int]:
        left, counts = shape.most, []
        for offer in offers:
            counts.append(self.random.randint(0, max(0, min(left, offer.num_drafts))))
            left -= counts[-1]
        return counts

    def most_asked(self) -> int:
        self.is_on = self.random.random() < 0.7
        return self.random.randint(0, self.most)

    def asked_for(self, record: DraftRecord, most: int) -> int:
        return self.random.randint(0, most)


def decide_at_random(scheduler: Scheduler, seed: int) -> None:
    if scheduler._drafting is not None:
        config = scheduler.config
        scheduler._drafting.speculation = RandomSpeculation(config.num_speculative_tokens, seed, is_overlapped=config.depth > 1)
