"""Scales a simulated deployment: what a policy sees of it, and how long a replica takes to serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.errors import counted
from headrace.core.load import LoadSnapshot
from headrace.policy.scaling.autoscaler import ScalingDecision, ScalingFacts

TICK_S = 5.0


class ScalingPolicy(Protocol):
    def decide(self, facts: ScalingFacts, now: float) -> ScalingDecision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """
    load_s  from the decision until a new replica serves
    hold_s  the longest wait of a request, where no replica serves or all have queues: more replicas may come
    blind   spans of time, in seconds, in which no report of the load comes
    """

    policy: ScalingPolicy
    load_s: float
    hold_s: float
    blind: Sequence[tuple[float, float]] = ()

    def age_s(self, now: float) -> float:
        """The age of the last report."""
        return next((now - begin for begin, end in self.blind if begin <= now < end), 0.0)


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests and output tokens until now."""

    arrived: int
    finished: int
    tokens: int


def scaling_facts(reports: Sequence[LoadSnapshot], counts: Counts, *, num_held: int, wait_s: float) -> ScalingFacts:
    """reports: of the replicas that serve; wait_s: at the shortest queue"""
    return ScalingFacts(
        num_serving=len(reports),
        num_arrived=counts.arrived,
        num_finished=counts.finished,
        num_tokens=counts.tokens,
        num_running=sum(report.num_running for report in reports),
        num_full=sum(report.num_waiting > 0 for report in reports),
        num_waiting=num_held + sum(report.num_waiting for report in reports),
        wait_s=wait_s,
        fill=sum(report.fill for report in reports),
    )


@dataclass(frozen=True, slots=True)
class ScalingChange:
    """reason: the policy's"""

    at_s: float
    num_replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """replica_hours: loading and draining included"""

    replica_hours: float
    changes: Sequence[ScalingChange]


def scaling_lines(report: ScalingReport) -> Iterator[str]:
    yield f"Autoscaling: {report.replica_hours:.2f} replica-hours"
    for change in report.changes:
        yield f"{change.at_s:9.0f} s  {counted(change.num_replicas, 'replica')}: {change.reason}"
