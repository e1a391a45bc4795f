"""Orders the waiting sequences; a new policy is one file here and one row of `QUEUES`."""

from __future__ import annotations

from headrace.policy.queues.fair import FairShareQueue
from headrace.policy.queues.keyed import FcfsQueue, SjfQueue
from headrace.policy.queues.priority import PriorityQueue
from headrace.policy.queues.queue import Queue, QueueTraits

QUEUES: dict[str, type[Queue]] = {
    "fcfs": FcfsQueue,
    "priority": PriorityQueue,
    "sjf": SjfQueue,
    "fair": FairShareQueue,
}


def traits_of(policy: str) -> QueueTraits:
    return QUEUES[policy].traits if policy in QUEUES else QueueTraits()
