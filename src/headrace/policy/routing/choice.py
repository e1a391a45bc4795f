"""Defines what a policy of `routing.replicas` chooses a replica by, and what it says of its choice.

A replica's load is its last snapshot plus what this gateway sent since that snapshot was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Generic, NamedTuple, NewType, Protocol, TypeVar

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, SentSince, mean_speed, num_blocks, predicted_s, speed_of

Item = TypeVar("Item")
ReplicaId = NewType("ReplicaId", str)

SIMILAR = 1.25
"""Predicted times whose ratio is at most this are equal."""

UNMEASURED_DIVISOR = 64
"""One choice in N ignores the measured speeds, so that a replica once measured as slow is measured again."""

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


class Candidate(NamedTuple):
    """cached_tokens: of the request's prompt, that it was sent before; adapter_s: until the request's adapter is in its memory"""

    replica_id: ReplicaId
    snapshot: LoadSnapshot | None = None
    sent: SentSince = NOTHING_SENT
    cached_tokens: int = 0
    adapter_s: float = 0.0


class Decision(NamedTuple):
    """session     the same in every gateway; empty: the request is of no session
    number      decisions before this one
    is_blind    measured speeds are ignored
    """

    size: RequestSize
    block_size: int
    random: Random
    session: str = ""
    number: int = 0
    is_blind: bool = False


class Cost(NamedTuple):
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
    cached_tokens: int = 0


class ReplicaChoice(NamedTuple):
    """reason: for a person; policy: empty where there was no choice; figures: of the replicas that were compared"""

    replica_id: ReplicaId
    reason: str
    policy: str = ""
    figures: tuple[ReplicaFigures, ...] = ()


Ranked = tuple[Sequence[ReplicaFigures], str]
"""What was compared, the chosen one first, and the reason."""

ONLY = "the only one that takes part now"
LEAST_BUSY = "the less busy of two drawn at random"


def figures_of(candidates: Sequence[Candidate], decision: Decision) -> tuple[ReplicaFigures, ...]:
    """A replica of unknown speed counts as one of mean speed."""
    size, block_size = decision.size, decision.block_size
    speeds = [None if decision.is_blind else speed_of(candidate.snapshot) for candidate in candidates]
    assumed, found = mean_speed(speeds) if None in speeds else None, []
    for candidate, speed in zip(candidates, speeds, strict=True):
        took_s, cached = None, candidate.cached_tokens
        if (known := speed or assumed) is not None:
            left = RequestSize(size.prompt_tokens, size.output_tokens, min(cached, size.prompt_tokens - 1)) if cached else size
            took_s = predicted_s(candidate.snapshot or EMPTY, candidate.sent, left, known, block_size=block_size) + candidate.adapter_s
        costs = cost(candidate, prompt_tokens=size.prompt_tokens, block_size=block_size)
        found.append(ReplicaFigures(candidate.replica_id, costs, took_s, cached))
    return tuple(found)


def best_first(figures: Sequence[ReplicaFigures]) -> Sequence[ReplicaFigures]:
    seconds = [each.predicted_s for each in figures if each.predicted_s is not None]
    if len(seconds) < len(figures):
        best = min(figures, key=lambda each: (each.cost.lacks_blocks, each.cost.outstanding, -each.cached_tokens, each.cost.fullness))
    else:
        limit_s, pairs = SIMILAR * min(seconds), zip(figures, seconds, strict=True)
        best = max([each for each, took_s in pairs if took_s <= limit_s], key=lambda each: each.cached_tokens)
    return [best, *[each for each in figures if each is not best]]


def cheaper_of_two(choices: Sequence[Item], cost_of: Callable[[Item], Any], random: Random) -> Item:
    return choices[0] if len(choices) == 1 else min(two_of(choices, random), key=cost_of)


def two_of(choices: Sequence[Item], random: Random) -> tuple[Item, Item]:
    """choices: at least two. The first is uniform, and min() keeps it on equal costs, so that idle replicas share evenly."""
    first, second = random.randrange(len(choices)), random.randrange(len(choices) - 1)
    return choices[first], choices[second + (second >= first)]


def draw_weights(loads: Sequence[LoadSnapshot | None], size: RequestSize) -> list[float]:
    """Speeds, so that a faster replica is drawn more often; one of unknown speed counts as one of mean speed."""
    speeds = [speed_of(load) for load in loads]
    if (assumed := mean_speed(speeds)) is None:
        return [1.0] * len(speeds)
    return [1.0 / (speed or assumed).idle_s(size) for speed in speeds]


class WeightedDraw(Generic[Item]):
    """Draws two of at least two items, each by its weight (> 0) among those left. A draw takes the logarithm of their number."""

    def __init__(self, items: Sequence[Item], weights: Sequence[float]) -> None:
        self.items = items
        self._ends = list(accumulate(weights))

    def two(self, random: Random) -> tuple[Item, Item]:
        total, last = self._ends[-1], len(self._ends) - 1
        first = min(last, bisect_right(self._ends, random.randrange(RESOLUTION) / RESOLUTION * total))
        begin, end = self._ends[first - 1] if first else 0.0, self._ends[first]
        point = random.randrange(RESOLUTION) / RESOLUTION * (total - end + begin)
        second = min(last, bisect_right(self._ends, point if point < begin else point + end - begin))
        if second == first:  # rounding
            second = first - 1 if first else 1
        return self.items[first], self.items[second]


def seed_of(replica_id: ReplicaId) -> int:
    return int.from_bytes(blake2b(replica_id.encode(), digest_size=4).digest()) % RESOLUTION | 1


def home_of(key: int, seeds: Sequence[int]) -> int:
    """The place of the replica that `key` belongs to, in every gateway alike: a replica that is added or lost moves only its own keys
    (rendezvous hashing).
    """
    short, mask = key % RESOLUTION, RESOLUTION - 1
    ranks = [short * seed & mask for seed in seeds]
    return ranks.index(max(ranks))


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
