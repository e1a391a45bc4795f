"""What becomes of a request whose model is busy: the steps of degradation, in their order.

    served -> smaller model -> queued -> refused

A cached answer comes before all of them, and limits of the tenant do (`policy.limits`). Depths and waits are those of the
replica with the shortest wait, as its last load report and what this gateway sent since say. docs/tenancy.md, "Busy models".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.core.load import LoadSnapshot
from headrace.core.request import PriorityClass
from headrace.policy.admission.config import AdmissionRules
from headrace.policy.routing.predicted_time import RequestSize, SentSince, speed_of, wait_s

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""Bounds in seconds of the retry time of a refusal."""


class AdmissionStep(StrEnum):
    """What was decided; the value stands in the answer's header."""

    SERVED = "served"
    CACHED_ANSWER = "cached_answer"
    """Its answer was there already (docs/caches.md); nothing was decided."""
    SMALLER_MODEL = "smaller_model"
    QUEUED = "queued"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue of one model.

    depth   sequences that wait at the replica with the shortest wait
    wait_s  predicted seconds until that replica begins a new request
    """

    depth: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """retry_after_s: of a refusal, seconds until the queue is short enough, if nothing more joins it"""

    step: AdmissionStep
    retry_after_s: float = 0.0


def decide(
    queue: QueueState | None,
    smaller: QueueState | None,
    *,
    has_smaller: bool,
    priority: PriorityClass,
    rules: AdmissionRules,
    ttft_goal_s: float | None = None,
) -> AdmissionVerdict:
    """The first step that holds.

    queue, smaller  of the model and of the smaller one; None: not known, as of foreign servers, and taken as short
    has_smaller     there is a smaller model that the caller may use
    """
    bound_s = rules.wait_bound_s(priority, ttft_goal_s)
    if not _is_busy(queue, rules, bound_s):
        return AdmissionVerdict(AdmissionStep.SERVED)
    assert queue is not None
    may_wait = queue.wait_s <= bound_s
    takes_smaller = has_smaller and not _is_busy(smaller, rules, bound_s)
    if takes_smaller and (priority is not PriorityClass.PREMIUM or not may_wait):
        return AdmissionVerdict(AdmissionStep.SMALLER_MODEL)
    if may_wait:
        return AdmissionVerdict(AdmissionStep.QUEUED)
    return AdmissionVerdict(AdmissionStep.REFUSED, min(MAX_RETRY_S, max(MIN_RETRY_S, queue.wait_s - bound_s)))


def queue_state(load: LoadSnapshot, sent: SentSince, size: RequestSize, *, block_size: int) -> QueueState:
    """The queue of one replica as a request finds it. size: of an average request. A replica of unknown speed has no wait."""
    speed = speed_of(load)
    num_free_slots = max(0, load.max_num_seqs - load.num_running - load.num_waiting)
    depth = load.num_waiting + max(0, sent.num_requests - num_free_slots)
    return QueueState(depth, 0.0 if speed is None else wait_s(load, sent, size, speed, block_size=block_size))


def _is_busy(queue: QueueState | None, rules: AdmissionRules, bound_s: float) -> bool:
    return queue is not None and (queue.depth > rules.queue_depth or queue.wait_s > bound_s)
