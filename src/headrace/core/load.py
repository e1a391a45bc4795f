"""A replica's load and counters: plain integers and floats, sent to gateways in snapshots, which export them as metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import add, sub
from typing import NamedTuple

from headrace.core.request import PriorityClass

STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the step duration histogram, in seconds, inclusive. A last bucket holds longer steps."""


class FailureKind(Enum):
    """What raised inside an engine. Each is logged there with its traceback (`engine.failures`)."""

    STEP = "step"
    """A step: undone, and repeated in parts."""
    PLAN = "plan"
    """The making of a plan: tried again."""
    MESSAGE = "message"
    """The handling of a request, a cancel or another message: that request ends."""
    PREREQUISITE = "prerequisite"
    """The making of what a request waits for: that request ends."""
    COMMIT = "commit"
    """The commit of one sequence's row: that sequence ends."""


@dataclass(slots=True)
class EngineCounters:
    """Counters since the engine process started. They only grow, so a reader that is late or reads twice misses and repeats nothing.

    step_seconds  sum over the steps' durations
    step_buckets  how many steps fell between two of STEP_BOUNDS_S, below the first and above the last
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prefix_cache_query_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    finished: dict[str, int] = field(default_factory=dict)
    """FinishReason value -> sequences."""
    failures: dict[str, int] = field(default_factory=dict)
    """FailureKind value -> how often."""

    def note_step(self, seconds: float) -> None:
        self.steps += 1
        self.step_seconds += seconds
        self.step_buckets[bisect_left(STEP_BOUNDS_S, seconds)] += 1

    def note_finished(self, reason: str) -> None:
        """reason: a FinishReason's value."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def note_failure(self, kind: FailureKind) -> None:
        self.failures[kind.value] = self.failures.get(kind.value, 0) + 1

    def copy(self) -> EngineCounters:
        """A snapshot: the same numbers, independent of later steps."""
        return replace(self, step_buckets=list(self.step_buckets), finished=dict(self.finished), failures=dict(self.failures))


class ClassLoad(NamedTuple):
    """The part of a load that one priority class has; the numbers are as in `LoadSnapshot`."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0


ClassLoads = tuple[ClassLoad, ...]
"""One for each PriorityClass, in its order."""

NO_CLASS_LOADS: ClassLoads = (ClassLoad(),) * len(PriorityClass)


def summed(classes: ClassLoads) -> ClassLoad:
    """The sums over these classes."""
    return ClassLoad(*map(sum, zip(*classes, strict=True)))


def plus(classes: ClassLoads, others: ClassLoads) -> ClassLoads:
    """The sums of two loads, class by class."""
    return tuple(ClassLoad(*map(add, one, other)) for one, other in zip(classes, others, strict=True))


def minus(classes: ClassLoads, others: ClassLoads) -> ClassLoads:
    """As `plus`, the differences."""
    return tuple(ClassLoad(*map(sub, one, other)) for one, other in zip(classes, others, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """A replica at one moment.

    num_running, num_waiting  sequences; num_waiting includes the sequences of requests that are still in the inbox
    num_queued_tokens  tokens known and not planned yet: of waiting sequences, and what is left of prompts that are computed in chunks
    max_num_seqs       sequences that may run at once: as configured, or fewer where goals of those that run allow no more;
                       0: not known, from an engine of an earlier version
    kv_blocks_*        summed over KV groups; free + cached + used == total
    step_age_s         seconds the running step has taken so far; None when idle
    step_predicted_s   duration that the loop predicted for the running step
    step_fixed_s, step_token_s  a step of N tokens takes step_fixed_s + N * step_token_s, as fitted to recent steps; both 0: not known
    step_prompt_tokens  most prompt tokens of a step beside the sequences that run now and their goals; 0: not known
    classes            the parts of num_running, num_waiting and num_queued_tokens that each priority class has; empty: not known, from an
                       engine of an earlier version
    loop_age_s         seconds since the loop last turned or woke (idle loops wake regularly)
    """

    num_running: int
    num_waiting: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_blocks_used: int
    kv_blocks_total: int
    counters: EngineCounters
    step_age_s: float | None = None
    step_predicted_s: float = 0.0
    loop_age_s: float = 0.0
    num_queued_tokens: int = 0
    max_num_seqs: int = 0
    step_fixed_s: float = 0.0
    step_token_s: float = 0.0
    step_prompt_tokens: int = 0
    classes: ClassLoads = ()
