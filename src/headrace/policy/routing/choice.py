"""Which replica gets a request: two random choices, then the cheaper one.

A pure decision: no socket, no clock, no state, and the random numbers are the caller's. A replica's load is its last snapshot plus what
this gateway sent since that snapshot was made; without the second part a burst would all go to the replica that looked idle a moment
ago. Sampling two and taking the cheaper one keeps several gateways from herding as well, and costs O(1) (Mitzenmacher 2001, "The power
of two choices").

Not here: health (an unhealthy replica is not a candidate), retries (the caller leaves out what it tried).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol, TypeVar

from headrace.core.load import LoadSnapshot

Choice = TypeVar("Choice")
ReplicaId = NewType("ReplicaId", str)
"""Name of a replica within one model, as the configuration gives it."""


class Random(Protocol):
    """The part of `random.Random` used here: an integer in [0, stop)."""

    def randrange(self, stop: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica that could take the request.

    snapshot         the last one; None before the first
    num_sent         requests sent since, which it cannot know of
    num_sent_tokens  their prompt tokens
    """

    replica_id: ReplicaId
    snapshot: LoadSnapshot | None = None
    num_sent: int = 0
    num_sent_tokens: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    """Compared field by field, lower is better.

    lacks_blocks  the prompt would have to wait for KV blocks (free and evictable ones, less what was sent)
    outstanding   requests running, waiting and on their way
    fullness      share of the KV pool that is spoken for: decides between equally busy replicas
    """

    lacks_blocks: bool
    outstanding: int
    fullness: float


def choose(candidates: Sequence[Candidate], *, prompt_tokens: int, block_size: int, random: Random) -> Candidate | None:
    """The replica to try, or None without candidates. Draws at most three random numbers, whatever the number of replicas."""
    if not candidates:
        return None
    return cheaper_of_two(candidates, lambda candidate: cost(candidate, prompt_tokens=prompt_tokens, block_size=block_size), random)


def cheaper_of_two(choices: Sequence[Choice], cost_of: Callable[[Choice], Any], random: Random) -> Choice:
    """Draw two choices at random and return the cheaper one. choices: at least one; cost_of: a value that can be compared"""
    count = len(choices)
    first = random.randrange(count)
    if count == 1:
        return choices[first]
    second = random.randrange(count - 1)
    pair = (choices[first], choices[second + (second >= first)])
    # `first` is uniform and min() keeps it on equal costs, so idle replicas share evenly.
    return min(pair, key=cost_of)


def cost(candidate: Candidate, *, prompt_tokens: int, block_size: int) -> Cost:
    """What it would cost to send a prompt of `prompt_tokens` there. A replica without a snapshot counts as empty."""
    snapshot = candidate.snapshot
    if snapshot is None:
        return Cost(False, candidate.num_sent, 0.0)
    free = snapshot.kv_blocks_free + snapshot.kv_blocks_cached - num_blocks(candidate.num_sent_tokens, block_size)
    outstanding = snapshot.num_running + snapshot.num_waiting + candidate.num_sent
    fullness = 1.0 - free / snapshot.kv_blocks_total if snapshot.kv_blocks_total else 0.0
    return Cost(free < num_blocks(prompt_tokens, block_size), outstanding, fullness)


def num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
