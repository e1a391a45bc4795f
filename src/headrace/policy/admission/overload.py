"""Tells a lasting overload of one model from a peak, for each class apart, by what one gateway sees of it. Pure; used on one event loop.

A peak should wait: it ends by itself, and what is refused comes back. In an overload each further second of waiting only makes all later
answers late. Both look alike while the queue grows, so the watch waits for one of two signs:

- A request was refused although the long wait of a peak was allowed (`AdmissionRules.wait_bound_s`).
- The queue stays long for two short waits, and in the second one clearly more requests came than ended. A fixed number of clients, each of
  which sends its next request after an answer, looks so in the first one alone, when all of them begin.
"""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.policy.admission.config import AdmissionRules
from headrace.policy.admission.decision import QueueState

GROWTH_SHARE = 0.2
"""More requests come than end if the open ones have grown by more than this part of those that came, and by more than chance does."""

CALM_WAITS = 10.0
"""How long after the last refusal the overload is over, as a multiple of the short wait."""


class OverloadWatch:
    """The requests of one class to one model, as one gateway sees them."""

    __slots__ = ("_has_begun_long", "_last_long", "_num_arrived", "_num_open", "_since", "_until")

    def __init__(self) -> None:
        self._until = self._last_long = -math.inf
        self._watch_from(0.0, 0, has_begun_long=False)

    def seen(self, queue: QueueState, now: float) -> QueueState:
        """The queue, with whether the model is overloaded."""
        return replace(queue, is_overloaded=now < self._until)

    def arrive(self, queue: QueueState, rules: AdmissionRules, *, num_open: int, now: float) -> QueueState:
        """Note an arriving request, and return the queue as `seen` does. num_open: open requests of the model, this one included"""
        short_s = rules.short_wait_s(queue.answer_s)
        if now - self._last_long > short_s:  # the queue was short meanwhile
            self._watch_from(now, num_open, has_begun_long=False)
        self._num_arrived += 1
        if queue.wait_s > short_s:
            self._last_long = now
        if now - self._since >= short_s:
            least = GROWTH_SHARE * self._num_arrived + math.sqrt(self._num_arrived)
            if self._has_begun_long and num_open - self._num_open > least:
                self._until = now + CALM_WAITS * short_s
            self._watch_from(now, num_open, has_begun_long=True)
        return self.seen(queue, now)

    def refuse(self, queue: QueueState, rules: AdmissionRules, *, now: float) -> None:
        """Note that a request is refused. queue: as `seen` returned it. A refusal by the goal of a tier alone changes nothing."""
        if queue.wait_s > rules.wait_bound_s(queue.answer_s, None, is_overloaded=queue.is_overloaded):
            self._until = now + CALM_WAITS * rules.short_wait_s(queue.answer_s)

    def _watch_from(self, now: float, num_open: int, *, has_begun_long: bool) -> None:
        self._since, self._num_arrived, self._num_open, self._has_begun_long = now, 0, num_open, has_begun_long
