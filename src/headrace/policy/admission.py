"""Decides what becomes of a request at a model that may be busy, and tells a lasting overload from a peak. The first outcome that is
possible is taken:

    served -> queued -> refused

`policy.fallbacks` decides whether another model answers. See docs/tenancy.md, "Busy models".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from headrace.core.load import ClassLoad, LoadSnapshot, summed
from headrace.core.request import PriorityClass
from headrace.policy.config import AdmissionRules
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, SentSince, mean_output_tokens, speed_of, wait_and_output_s

BUSY_DEPTH = 10
"""A model is busy if every replica has more waiting sequences than this, whatever wait is predicted."""

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class AdmissionOutcome(StrEnum):
    """The value is sent in a header of the answer."""

    SERVED = "served"
    CACHED_ANSWER = "cached_answer"
    FALLBACK = "fallback"
    QUEUED = "queued"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class QueueState:
    """depth      waiting sequences that are served before the request, at the replica with the shortest wait
    num_slots  sequences that the replica runs at once, where engines serve tenants in turns; 0: engines do not distinguish tenants
    answer_s   predicted seconds of a mean answer of the model at that replica, if it ran alone; 0: not known
    is_growing  another replica of the model is starting
    """

    depth: int
    wait_s: float
    num_slots: int = 0
    answer_s: float = 0.0
    is_overloaded: bool = False
    is_growing: bool = False

    def at_turn(self, turn: TenantTurn) -> QueueState:
        """The part of the queue that is served before a tenant's newest request.

        A turn within a quarter of the slots counts as no wait: the engine preempts a sequence of a tenant that holds four times as many
        (docs/fairness.md).
        """
        if not self.num_slots or turn.num_tenants < 2:
            return self
        num_before = turn.num_own * turn.num_tenants
        if num_before <= self.num_slots / 4:
            return replace(self, depth=0, wait_s=0.0)
        part = min(1.0, num_before / turn.num_open)
        is_overloaded = self.is_overloaded and part > 0.5
        return replace(self, depth=math.ceil(self.depth * part), wait_s=self.wait_s * part, is_overloaded=is_overloaded)


class TenantTurn(NamedTuple):
    num_own: int
    num_open: int
    num_tenants: int


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """retry_after_s: for a refusal, seconds until the queue is short enough if nothing more joins it"""

    outcome: AdmissionOutcome
    retry_after_s: float = 0.0


def decide(queue: QueueState | None, *, rules: AdmissionRules, ttft_goal_s: float | None = None) -> AdmissionVerdict:
    if queue is None or not _is_busy(queue, rules, ttft_goal_s):
        return AdmissionVerdict(AdmissionOutcome.SERVED)
    if queue.wait_s <= _bound_s(queue, rules, ttft_goal_s):
        return AdmissionVerdict(AdmissionOutcome.QUEUED)
    # A refusal begins or continues an overload, so that the short wait will be asked of the request when it comes back.
    back_s = _bound_s(replace(queue, is_overloaded=True), rules, ttft_goal_s)
    return AdmissionVerdict(AdmissionOutcome.REFUSED, retry_after_s(queue, back_s))


def retry_after_s(queue: QueueState, bound_s: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, queue.wait_s - bound_s))


def full_queue_retry_s(load: LoadSnapshot, lowest: PriorityClass, *, block_size: int) -> float:
    """Retry time in seconds of a request that an engine's full queue refuses: the predicted wait of a new request."""
    size = RequestSize(0, mean_output_tokens(sum(load.counters.finished.values()), load.counters.generation_tokens))
    return retry_after_s(queue_state(load, NOTHING_SENT, size, lowest=lowest, block_size=block_size), 0.0)


def queue_state(load: LoadSnapshot, sent: SentSince, size: RequestSize, *, lowest: PriorityClass, block_size: int) -> QueueState:
    """lowest: class of the last sequences that are served before the request. Running ones of lower classes make room for it."""
    before = ClassLoad(load.num_running, load.num_waiting, load.num_queued_tokens)
    if load.classes:
        before = summed(load.classes[: lowest + 1])
    num_free_slots = max(0, load.max_num_seqs - before.num_running - before.num_waiting)
    depth = before.num_waiting + max(0, sent.num_requests - num_free_slots)
    speed = speed_of(load)
    if speed is None:
        return QueueState(depth, 0.0)
    ahead = ClassLoad(before.num_running, before.num_waiting + sent.num_requests, before.num_queued_tokens + sent.num_tokens)
    waiting_s, _ = wait_and_output_s(load, ahead, RequestSize(0, size.output_tokens), speed, block_size=block_size)
    return QueueState(depth, waiting_s, answer_s=speed.idle_s(size))


def _bound_s(queue: QueueState, rules: AdmissionRules, ttft_goal_s: float | None) -> float:
    if queue.is_growing:  # the wait is predicted without that replica
        return rules.longest_s(ttft_goal_s)
    return rules.wait_bound_s(queue.answer_s, ttft_goal_s, is_overloaded=queue.is_overloaded)


def _is_busy(queue: QueueState, rules: AdmissionRules, ttft_goal_s: float | None) -> bool:
    return queue.depth > BUSY_DEPTH or queue.wait_s > _bound_s(queue, rules, ttft_goal_s)


GROWTH_SHARE = 0.2
"""More requests come than end if the open ones have grown by more than this part of those that came, and by more than chance does."""

CALM_WAITS = 10.0


class OverloadWatch:
    """Used on one event loop.

    An overload is distinguished from a peak, which ends by itself, by one of two signs:

    - A request was refused although the long wait of a peak was allowed (`AdmissionRules.wait_bound_s`).
    - The queue stays long for two short waits, and in the second one clearly more requests came than ended.
    """

    __slots__ = ("_has_begun_long", "_last_long", "_num_arrived", "_num_open", "_since", "_until")

    def __init__(self) -> None:
        self._until = self._last_long = -math.inf
        self._watch_from(0.0, 0, has_begun_long=False)

    def seen(self, queue: QueueState, now: float) -> QueueState:
        return replace(queue, is_overloaded=now < self._until and not queue.is_growing)

    def arrive(self, queue: QueueState, rules: AdmissionRules, *, num_open: int, now: float) -> QueueState:
        if queue.is_growing:  # the load was seen without the replica that comes
            self._until, self._last_long = -math.inf, -math.inf
            return queue
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
        """A refusal by the goal of a tier alone changes nothing."""
        if queue.wait_s > _bound_s(queue, rules, None):
            self._until = now + CALM_WAITS * rules.short_wait_s(queue.answer_s)

    def _watch_from(self, now: float, num_open: int, *, has_begun_long: bool) -> None:
        self._since, self._num_arrived, self._num_open, self._has_begun_long = now, 0, num_open, has_begun_long


class UnsentRequest:
    __slots__ = ("_counts", "_is_counted", "_priority")

    def __init__(self, counts: list[int], priority: PriorityClass) -> None:
        self._counts, self._priority, self._is_counted = counts, priority, False
        self.count()

    def count(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._counts[self._priority] += 1

    @property
    def num_counted(self) -> int:
        """Unsent requests of the model, of every class."""
        return sum(self._counts)

    def uncount(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._counts[self._priority] -= 1


class UnsentRequests:
    """The admitted requests of one model that no replica was sent yet: a prompt is being read, or its tenant's limits are asked. Used on
    one event loop.

    Without this count the same short queue would admit every request that arrives while the event loop is busy.
    """

    def __init__(self) -> None:
        self._counts = [0] * len(PriorityClass)

    def add(self, priority: PriorityClass) -> UnsentRequest:
        return UnsentRequest(self._counts, priority)

    def num_requests(self, lowest: PriorityClass) -> int:
        return sum(self._counts[: lowest + 1])
