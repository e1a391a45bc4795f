"""Chooses the replica of a request: draws two at random, and takes the one that is expected to be done first.

A replica's load is its last snapshot plus what this gateway sent since that snapshot was made. Comparing two alone keeps several
gateways from choosing the same replica at once (Mitzenmacher 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType, Protocol, TypeVar

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, SentSince, mean_speed, num_blocks, predicted_s, speed_of

Item = TypeVar("Item")
ReplicaId = NewType("ReplicaId", str)

SIMILAR = 1.25
"""Predicted times whose ratio is at most this are equal."""

UNMEASURED_DIVISOR = 64
"""One choice in N ignores the measured speeds, so that a replica once measured as slow is measured again."""

AFFINITY = 2.0
"""A preferred replica is taken if its predicted time is at most this many times that of the choice without it."""

AFFINITY_REQUESTS = 2
"""The limit of affinity while no speed is known: the preferred replica may have this many requests more than the other choice."""

RESOLUTION = 1 << 30


EMPTY = LoadSnapshot(
    num_running=0,
    num_waiting=0,
    kv_blocks_free=0,
    kv_blocks_cached=0,
    kv_blocks_used=0,
    kv_blocks_total=0,
    counters=EngineCounters(),
)
"""The load that is assumed before the first snapshot."""


class Random(Protocol):
    def randrange(self, stop: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    replica_id: ReplicaId
    snapshot: LoadSnapshot | None = None
    sent: SentSince = NOTHING_SENT


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    """lacks_blocks  the prompt would have to wait for KV blocks (free and evictable ones, less those of requests sent since the report)
    fullness      share of the KV pool in use or needed by those requests: decides between equally busy replicas
    """

    lacks_blocks: bool
    outstanding: int
    fullness: float


class ReplicaFigures(NamedTuple):
    """What a replica was compared by. predicted_s: None where no replica's speed is known"""

    replica_id: ReplicaId
    cost: Cost
    predicted_s: float | None = None


class ReplicaChoice(NamedTuple):
    """reason: for a person; figures: of the replicas that were compared"""

    replica_id: ReplicaId
    reason: str
    figures: tuple[ReplicaFigures, ...] = ()


ONLY = "the only one that takes part now"
FASTEST = "of two drawn at random, the one expected to be done first, or the first one where they are close"
LEAST_BUSY = "the less busy of two drawn at random"
PREFERRED = "has the conversation's beginning in its prefix cache"


def choose(
    candidates: Sequence[Candidate],
    *,
    size: RequestSize,
    block_size: int,
    random: Random,
    preferred: ReplicaId | None = None,
) -> ReplicaChoice | None:
    """Draws at most three random numbers, whatever the number of replicas, and the same with and without `preferred`. A replica of unknown
    speed counts as one of mean speed.

    preferred  has the beginning of the prompt in its prefix cache: taken unless it is much slower than the choice without it
    """
    if len(candidates) < 2:
        return ReplicaChoice(candidates[0].replica_id, ONLY) if candidates else None
    speeds = [speed_of(candidate.snapshot) for candidate in candidates]
    assumed = mean_speed(speeds)
    if assumed is None or random.randrange(UNMEASURED_DIVISOR) == 0:
        known, drawn = {}, two_of(candidates, random)
    else:
        known = {candidate.replica_id: speed or assumed for candidate, speed in zip(candidates, speeds, strict=True)}
        drawn = draw_two(candidates, [1.0 / known[candidate.replica_id].idle_s(size) for candidate in candidates], random)

    def figures_of(candidate: Candidate) -> ReplicaFigures:
        figures = ReplicaFigures(candidate.replica_id, cost(candidate, prompt_tokens=size.prompt_tokens, block_size=block_size))
        if not known:
            return figures
        speed = known[candidate.replica_id]
        return figures._replace(predicted_s=predicted_s(candidate.snapshot or EMPTY, candidate.sent, size, speed, block_size=block_size))

    compared = tuple(map(figures_of, drawn))
    chosen, reason = _better(*compared)
    favourite = next((figures for figures in compared if figures.replica_id == preferred), None)
    if favourite is None and (other := next((each for each in candidates if each.replica_id == preferred), None)) is not None:
        favourite = figures_of(other)
        compared = (*compared, favourite)
    if favourite is not None and _is_close(favourite, chosen):
        chosen, reason = favourite, PREFERRED
    return ReplicaChoice(chosen.replica_id, reason, compared)


def _better(first: ReplicaFigures, second: ReplicaFigures) -> tuple[ReplicaFigures, str]:
    if first.predicted_s is None or second.predicted_s is None:
        return min(first, second, key=lambda figures: figures.cost), LEAST_BUSY
    return (second if second.predicted_s * SIMILAR < first.predicted_s else first), FASTEST


def _is_close(favourite: ReplicaFigures, chosen: ReplicaFigures) -> bool:
    if favourite.predicted_s is None or chosen.predicted_s is None:
        return _is_about_as_cheap(favourite.cost, chosen.cost)
    return favourite.predicted_s <= AFFINITY * chosen.predicted_s


def _is_about_as_cheap(favourite: Cost, chosen: Cost) -> bool:
    return favourite.lacks_blocks <= chosen.lacks_blocks and favourite.outstanding <= chosen.outstanding + AFFINITY_REQUESTS


def cheaper_of_two(choices: Sequence[Item], cost_of: Callable[[Item], Any], random: Random) -> Item:
    return choices[0] if len(choices) == 1 else min(two_of(choices, random), key=cost_of)


def two_of(choices: Sequence[Item], random: Random) -> tuple[Item, Item]:
    """choices: at least two. The first is uniform, and min() keeps it on equal costs, so that idle replicas share evenly."""
    first, second = random.randrange(len(choices)), random.randrange(len(choices) - 1)
    return choices[first], choices[second + (second >= first)]


def draw_two(choices: Sequence[Item], weights: Sequence[float], random: Random) -> tuple[Item, Item]:
    """Each by its weight (> 0) among those left. choices: at least two"""
    first = _draw(weights, random)
    rest = [*range(first), *range(first + 1, len(choices))]
    second = rest[_draw([weights[index] for index in rest], random)] if len(rest) > 1 else rest[0]
    return choices[first], choices[second]


def _draw(weights: Sequence[float], random: Random) -> int:
    point = random.randrange(RESOLUTION) / RESOLUTION * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0.0:
            return index
    return len(weights) - 1  # rounding


def cost(candidate: Candidate, *, prompt_tokens: int, block_size: int) -> Cost:
    snapshot, sent = candidate.snapshot, candidate.sent
    if snapshot is None:
        return Cost(False, sent.num_requests, 0.0)
    free = snapshot.kv_blocks_free + snapshot.kv_blocks_cached - num_blocks(sent.num_tokens, block_size)
    outstanding = snapshot.num_running + snapshot.num_waiting + sent.num_requests
    fullness = 1.0 - free / snapshot.kv_blocks_total if snapshot.kv_blocks_total else 0.0
    return Cost(free < num_blocks(prompt_tokens, block_size), outstanding, fullness)


SLOW_START_S = 10.0

FIRST_SHARE = 0.1


def started_share(ready_s: float, slow_start_s: float) -> float:
    if ready_s >= slow_start_s:
        return 1.0
    return max(FIRST_SHARE, ready_s / slow_start_s)


def started(choices: Sequence[Item], shares: Sequence[float], random: Random) -> list[Item]:
    """A replica that has just become ready gets a part: its prefix cache is empty and its speed unknown."""
    largest = max(shares, default=1.0)
    return [
        choice
        for choice, share in zip(choices, shares, strict=True)
        if share >= largest or random.randrange(RESOLUTION) < share / largest * RESOLUTION
    ]
