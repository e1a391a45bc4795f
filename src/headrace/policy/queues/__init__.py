"""Queue policies by name. A new policy is one file here and one row of `QUEUES`."""

from __future__ import annotations

from collections.abc import Callable

from headrace.policy.queues.fair import FairShareQueue
from headrace.policy.queues.keyed import FcfsQueue, SjfQueue
from headrace.policy.queues.priority import PriorityQueue
from headrace.policy.queues.queue import Queue

__all__ = ["QUEUES", "Queue", "make_queue"]

QUEUES: dict[str, Callable[[], Queue]] = {
    "fcfs": FcfsQueue,
    "priority": PriorityQueue,
    "sjf": SjfQueue,
    "fair": FairShareQueue,
}


def make_queue(policy: str) -> Queue:
    return QUEUES[policy]()
