"""Decides which waiting requests move from queues to a replica that has become ready since they were sent.

A request that began somewhere stays there. docs/failover.md, "A replica that comes", has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.core.load import ClassLoad
from headrace.policy.routing.choice import EMPTY, Candidate, ReplicaId
from headrace.policy.routing.predicted_time import RequestSize, StepSpeed, speed_of, wait_and_output_s

MOVES_EVERY_S = 0.5
"""Loads are reported anew meanwhile."""

MAX_MOVES = 16
"""At a time."""

LEAST_GAIN_S, GAIN_SHARE = 1.0, 0.25
"""A request moves for no shorter gain than this, and for this part of its wait."""


def moving(
    waiting: Sequence[ReplicaId], queues: Mapping[ReplicaId, Candidate], new: Candidate, size: RequestSize, *, block_size: int
) -> list[int]:
    """Places in `waiting` of the requests that move to `new`.

    waiting  where each request waits that the new replica could take, those first that wait longest
    queues   the replicas of `waiting`
    size     of a mean request; nothing is cached for it at the new replica
    """
    own, num_kept = Counter(waiting), Counter[ReplicaId]()
    moved: list[int] = []
    for place, name in enumerate(waiting):
        queue = queues[name]
        speed = speed_of(queue.snapshot)
        if speed is None:
            continue
        num_ahead = num_kept[name] * max(1.0, _num_waiting(queue) / own[name])  # requests of other gateways wait between these
        here_s = _wait_s(queue, num_ahead, size, speed, block_size)
        new_speed = speed_of(new.snapshot) or speed
        there_s = _wait_s(new, _num_waiting(new) + len(moved), size, new_speed, block_size) + new_speed.step_s(size.prompt_tokens)
        if here_s - there_s <= max(LEAST_GAIN_S, GAIN_SHARE * here_s):
            num_kept[name] += 1
        elif len(moved) == MAX_MOVES:
            break
        else:
            moved.append(place)
    return moved


def _num_waiting(candidate: Candidate) -> int:
    return (candidate.snapshot or EMPTY).num_waiting + candidate.sent.num_requests


def _wait_s(candidate: Candidate, num_ahead: float, size: RequestSize, speed: StepSpeed, block_size: int) -> float:
    load, num_waiting = candidate.snapshot or EMPTY, _num_waiting(candidate)
    each_tokens = (load.num_queued_tokens + candidate.sent.num_tokens) / num_waiting if num_waiting else size.prompt_tokens
    ahead = ClassLoad(load.num_running, round(num_ahead), round(num_ahead * each_tokens))
    return wait_and_output_s(load, ahead, size, speed, block_size=block_size)[0]
