"""Orders and bounds the requests of one model that wait for a replica, in the order of an engine's queue (`policy.queues`)."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from typing import NamedTuple

from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId, SeqId
from headrace.core.plan import UNKNOWN_COSTS
from headrace.core.request import NO_TIER, EngineRequest, PriorityClass, TierTerms
from headrace.core.sampling import SamplingParams
from headrace.policy.queues.priority import PriorityQueue
from headrace.policy.routing.predicted_time import UNKNOWN_OUTPUT_TOKENS
from headrace.policy.sequence import Sequence

MAX_HELD, MAX_HELD_BYTES = 1024, 64 << 20
"""One model's."""

MAX_ALL_HELD, MAX_ALL_HELD_BYTES = 2048, 128 << 20
"""All models' of one gateway process."""

MAX_DISPLACED = 8
"""For one request. Each is searched for among all held ones."""

FULL_RETRY_S = 10.0

BYTES_PER_TOKEN = 4


FULL = "Too many requests wait for a replica of this model; try again later."


class HeldTerms(NamedTuple):
    """num_bytes: of its body; max_output_tokens: of all its sequences, None: not given"""

    tenant: str = ""
    priority: PriorityClass = PriorityClass.STANDARD
    tier: TierTerms = NO_TIER
    num_bytes: int = 0
    max_output_tokens: int | None = None

    @classmethod
    def of(cls, request: EngineRequest, max_output_tokens: int) -> HeldTerms:
        """max_output_tokens: of each sequence"""
        num_bytes = BYTES_PER_TOKEN * len(request.prompt_ids)
        return cls(request.tenant, request.priority, request.tier, num_bytes, max_output_tokens * request.params.n)

    @property
    def num_tokens(self) -> int:
        """An estimate."""
        return self.num_bytes // BYTES_PER_TOKEN + (self.max_output_tokens or UNKNOWN_OUTPUT_TOKENS)


class HeldTotals:
    """What the models of one gateway process hold together."""

    def __init__(self) -> None:
        self.num_requests = self.num_bytes = 0


class HeldQueue:
    def __init__(self, totals: HeldTotals) -> None:
        self._totals = totals
        self._queue = PriorityQueue()
        self._held: dict[SeqId, tuple[Sequence, HeldTerms]] = {}
        self._num_by_class = [0] * len(PriorityClass)
        self._num_bytes = self._num_added = 0

    def __len__(self) -> int:
        return len(self._held)

    def num_requests(self, lowest: PriorityClass) -> int:
        return sum(self._num_by_class[: lowest + 1])

    def add(self, terms: HeldTerms, now: float) -> tuple[SeqId, list[SeqId]]:
        """The request's number, and the requests that leave for it. Raises Unavailable where it does not fit.

        A full queue loses requests of lower classes first, then the newest ones of the tenants with more of its class, by weight.
        """
        displaced = self._displaced(terms)
        for number in displaced:
            self.remove(number)
        self._num_added += 1
        seq_id = SeqId(self._num_added)
        request = EngineRequest(
            request_id=RequestId(""), prompt_ids=(), params=SamplingParams(), tenant=terms.tenant, priority=terms.priority, tier=terms.tier
        )
        seq = Sequence(seq_id, request, 0, now, array("i"), 0, 0, stage_since=now)
        self._held[seq_id] = seq, terms
        self._queue.push(seq, terms.num_tokens)
        self._count(1, terms)
        return seq_id, displaced

    def head(self, now: float) -> SeqId | None:
        seq = self._queue.head(now, UNKNOWN_COSTS)
        return None if seq is None else seq.seq_id

    def release(self, number: SeqId, now: float) -> None:
        seq, terms = self._held[number]
        self._queue.start(seq, now)
        seq.num_planned = terms.num_tokens
        self._queue.charge([seq])
        self._forget(number)

    def remove(self, number: SeqId) -> None:
        self._queue.remove(self._held[number][0])
        self._forget(number)

    def _forget(self, number: SeqId) -> None:
        _, terms = self._held.pop(number)
        self._count(-1, terms)

    def _count(self, change: int, terms: HeldTerms) -> None:
        self._num_by_class[terms.priority] += change
        self._num_bytes += change * terms.num_bytes
        self._totals.num_requests += change
        self._totals.num_bytes += change * terms.num_bytes

    def _displaced(self, new: HeldTerms) -> list[SeqId]:
        if self._has_place(0, -new.num_bytes):
            return []
        left = {number: terms for number, (_, terms) in self._held.items()}
        shares = defaultdict[tuple[PriorityClass, str], float](float)
        for terms in left.values():
            shares[terms.priority, terms.tenant] += 1 / terms.tier.weight
        own, num_freed, chosen = shares[new.priority, new.tenant] + 1 / new.tier.weight, 0, list[SeqId]()
        while not self._has_place(len(chosen), num_freed - new.num_bytes):
            above = [
                (terms.priority, shares[terms.priority, terms.tenant], number)
                for number, terms in left.items()
                if terms.priority > new.priority or (terms.priority == new.priority and shares[terms.priority, terms.tenant] > own)
            ]
            if not above or len(chosen) == MAX_DISPLACED:
                raise Unavailable(FULL, retry_after_s=FULL_RETRY_S)
            number = max(above)[2]
            terms = left.pop(number)
            shares[terms.priority, terms.tenant] -= 1 / terms.tier.weight
            num_freed += terms.num_bytes
            chosen.append(number)
        return chosen

    def _has_place(self, num_left: int, num_bytes: int) -> bool:
        """num_left: requests that leave before the new one comes; num_bytes: freed by both together"""
        totals = self._totals
        return (
            len(self) - num_left < MAX_HELD
            and self._num_bytes - num_bytes <= MAX_HELD_BYTES
            and totals.num_requests - num_left < MAX_ALL_HELD
            and totals.num_bytes - num_bytes <= MAX_ALL_HELD_BYTES
        )

    def check(self) -> None:
        classes = Counter(terms.priority for _, terms in self._held.values())
        assert len(self._queue) == len(self._held)
        assert self._num_by_class == [classes[each] for each in PriorityClass]
        assert self._num_bytes == sum(terms.num_bytes for _, terms in self._held.values()) <= MAX_HELD_BYTES
        assert len(self._held) <= min(MAX_HELD, self._totals.num_requests)
        assert self._num_bytes <= self._totals.num_bytes <= MAX_ALL_HELD_BYTES
