"""Counts what waits in one engine, holds the bounds of the waiting queue, and chooses the requests that leave a full one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace.core.errors import QueueFull, RequestTooLarge
from headrace.core.request import EngineRequest, PriorityClass, check_bytes, request_bytes, sequence_bytes
from headrace.policy.config import SchedulerConfig
from headrace.policy.queues.queue import QueueTraits
from headrace.policy.sequence import RUNNING, Sequence


class QueuePartKey(NamedTuple):
    priority: PriorityClass
    tier: str
    tenant: str

    @classmethod
    def of(cls, request: EngineRequest) -> QueuePartKey:
        return cls(request.priority, request.tier.name, request.tenant)


@dataclass(slots=True)
class QueuePart:
    """weight: of the tier, as its last request said"""

    num_sequences: int = 0
    num_bytes: int = 0
    weight: float = field(default=1.0, compare=False)


class WaitingWork:
    """Sums of the waiting sequences, one for each class, and their bounds.

    num_sequences  of them
    num_tokens     that they have to compute, as if the prefix cache held none
    num_bytes      of memory that they hold. A request's own bytes are its first sequence's
    parts          sequences and bytes by tenant and class

    A class has its bounds to itself and the higher ones: a queue full of batch requests refuses no premium one.
    """

    def __init__(self, config: SchedulerConfig, traits: QueueTraits) -> None:
        self._config = config
        self._traits = traits
        self.parts: dict[QueuePartKey, QueuePart] = {}
        self.num_sequences, self.num_tokens, self.num_bytes = ([0] * len(PriorityClass) for _ in range(3))

    def refuse_too_large(self, request: EngineRequest, num_bytes: int) -> None:
        n, most = request.params.n, self._config.max_waiting
        if n > most:
            raise RequestTooLarge("n", f"n <= max_waiting ({most})", n, "Send several requests.")
        check_bytes(0, num_bytes, self._config.max_waiting_bytes)

    def refuse_while_full(self, request: EngineRequest, num_bytes: int) -> None:
        (num_sequences, bytes_waiting), most = self.counted_with(request), self._config.max_waiting
        if num_sequences + request.params.n > most:
            raise QueueFull(f"the engine's waiting queue is full ({num_sequences} of {most})")
        check_bytes(bytes_waiting, num_bytes, self._config.max_waiting_bytes)

    def counted_with(self, request: EngineRequest) -> tuple[int, int]:
        counted = slice(self._traits.lowest_before(request.priority) + 1)
        return sum(self.num_sequences[counted]), sum(self.num_bytes[counted])

    def add(self, seq: Sequence, num_tokens: int) -> None:
        seq.num_queued = num_tokens
        seq.num_waiting_bytes = sequence_bytes(len(seq.tokens)) + (request_bytes(seq.request) if seq.is_first else 0)
        priority = seq.request.priority
        self.num_sequences[priority] += 1
        self.num_tokens[priority] += seq.num_queued
        self.num_bytes[priority] += seq.num_waiting_bytes
        part = self.parts.setdefault(QueuePartKey.of(seq.request), QueuePart())
        part.num_sequences += 1
        part.num_bytes += seq.num_waiting_bytes
        part.weight = seq.request.tier.weight

    def remove(self, seq: Sequence) -> None:
        if not seq.num_queued:
            return
        priority = seq.request.priority
        self.num_sequences[priority] -= 1
        self.num_tokens[priority] -= seq.num_queued
        self.num_bytes[priority] -= seq.num_waiting_bytes
        part = self.parts[key := QueuePartKey.of(seq.request)]
        part.num_sequences -= 1
        part.num_bytes -= seq.num_waiting_bytes
        if not part.num_sequences:
            del self.parts[key]
        seq.num_queued = seq.num_waiting_bytes = 0

    def check(self, waiting: Iterable[Sequence]) -> None:
        among = list(waiting)
        for priority in PriorityClass:
            same = [seq for seq in among if seq.request.priority == priority]
            assert self.num_sequences[priority] == len(same), "waiting sequences are miscounted"
            assert self.num_tokens[priority] == sum(seq.num_queued for seq in same), "waiting tokens are miscounted"
            assert self.num_bytes[priority] == sum(seq.num_waiting_bytes for seq in same), "bytes of waiting sequences are miscounted"
        parts: dict[QueuePartKey, QueuePart] = {}
        for seq in among:
            part = parts.setdefault(QueuePartKey.of(seq.request), QueuePart())
            part.num_sequences, part.num_bytes = part.num_sequences + 1, part.num_bytes + seq.num_waiting_bytes
        assert self.parts == parts, "a tenant's part of the queue is miscounted"
        for seq in among:
            assert seq.num_queued > 0, "a waiting sequence is not counted"
            own = seq.num_waiting_bytes - (request_bytes(seq.request) if seq.is_first else 0)
            not_counted = sequence_bytes(len(seq.tokens)) - own  # tokens that were in flight when it was preempted
            assert not_counted == 0 or (seq.plan_epoch and not_counted > 0), "a waiting sequence's bytes are not what it holds"


Family = list[Sequence]


def displaced(
    request: EngineRequest, request_bytes: int, work: WaitingWork, families: Iterable[Family], config: SchedulerConfig, traits: QueueTraits
) -> list[Family]:
    """The requests to displace for `request`, whose tenant has less than its part of a full queue; empty: it may not wait.

    A request that has begun, at any engine, is never displaced: its client may have read a part of the answer.

    families       of every request in the engine, the oldest first; read only where a tenant has more than its part
    """
    num_sequences, num_bytes = work.counted_with(request)
    num_sequences, num_bytes = num_sequences + request.params.n, num_bytes + request_bytes
    is_full = num_sequences > config.max_waiting or num_bytes > config.max_waiting_bytes
    if not (is_full and traits.has_tenants):
        return []
    parts = {key: replace(part) for key, part in work.parts.items()}
    own = parts.get(QueuePartKey.of(request), QueuePart())
    wanted = QueuePart(own.num_sequences + request.params.n, own.num_bytes + request_bytes, request.tier.weight)
    due = _share(wanted, config)
    candidates: dict[QueuePartKey, list[Family]] | None = None
    chosen: list[Family] = []
    while num_sequences > config.max_waiting or num_bytes > config.max_waiting_bytes:
        above = _above(parts, request, due, config, traits)
        if candidates is None:
            candidates = _by_part(families) if above else {}
        key = next((key for key in above if candidates.get(key)), None)
        if key is None:
            return []
        family = candidates[key].pop()
        chosen.append(family)
        held = sum(seq.num_waiting_bytes for seq in family)
        parts[key].num_sequences -= len(family)
        parts[key].num_bytes -= held
        num_sequences, num_bytes = num_sequences - len(family), num_bytes - held
    return chosen


def _above(
    parts: Mapping[QueuePartKey, QueuePart], request: EngineRequest, due: float, config: SchedulerConfig, traits: QueueTraits
) -> list[QueuePartKey]:
    same_class = [(key, _share(part, config)) for key, part in parts.items() if key.priority == request.priority or not traits.has_classes]
    larger = [(share, key) for key, share in same_class if share > due and key[1:] != QueuePartKey.of(request)[1:]]
    return [key for _, key in sorted(larger, reverse=True)]


def _share(part: QueuePart, config: SchedulerConfig) -> float:
    return max(part.num_sequences / config.max_waiting, part.num_bytes / config.max_waiting_bytes) / part.weight


def _by_part(families: Iterable[Family]) -> dict[QueuePartKey, list[Family]]:
    by_part: dict[QueuePartKey, list[Family]] = {}
    for family in _that_may_leave(families):
        by_part.setdefault(QueuePartKey.of(family[0].request), []).append(family)
    return by_part


def _that_may_leave(families: Iterable[Family]) -> Iterator[Family]:
    for family in families:
        request = family[0].request
        is_new = len(family) == request.params.n and not request.output_ids and not request.numerics_digest
        if is_new and all(seq.num_queued and seq.plan_epoch == 0 and seq.state is not RUNNING for seq in family):
            yield family
