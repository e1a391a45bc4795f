"""Chooses the waiting requests that leave a full queue for a new request whose tenant has less than its part of the queue.

Otherwise one tenant could fill the whole queue, and the queue policy (`policy.queues`) would never see another tenant's request. A class
displaces no higher one (`WaitingWork`). A request that has begun, at any engine, is never displaced: its client may have read a part of the
answer. The rule: docs/fairness.md, "How much may wait".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from headrace.core.request import EngineRequest
from headrace.policy.config import SchedulerConfig
from headrace.policy.queues.queue import QueueTraits
from headrace.policy.schedule.waiting import QueuePart, QueuePartKey, WaitingWork
from headrace.policy.sequence import RUNNING, Sequence

Family = list[Sequence]
"""The sequences of one request."""


def displaced(
    request: EngineRequest, request_bytes: int, work: WaitingWork, families: Iterable[Family], config: SchedulerConfig, traits: QueueTraits
) -> list[Family]:
    """The requests to displace for `request`, each with all its sequences. Empty: `request` may not wait.

    request_bytes  `submitted_bytes` of the request
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
    """The parts of the request's class that are larger than `due`, the share that its tenant would have; the largest first."""
    same_class = [(key, _share(part, config)) for key, part in parts.items() if key.priority == request.priority or not traits.has_classes]
    larger = [(share, key) for key, share in same_class if share > due and key[1:] != QueuePartKey.of(request)[1:]]
    return [key for _, key in sorted(larger, reverse=True)]


def _share(part: QueuePart, config: SchedulerConfig) -> float:
    """How much of the queue a part takes, by count or by bytes, whichever is more, divided by its tier's weight."""
    return max(part.num_sequences / config.max_waiting, part.num_bytes / config.max_waiting_bytes) / part.weight


def _by_part(families: Iterable[Family]) -> dict[QueuePartKey, list[Family]]:
    """The requests that may leave; each part's list ends with the newest."""
    found: dict[QueuePartKey, list[Family]] = {}
    for family in _that_may_leave(families):
        found.setdefault(QueuePartKey.of(family[0].request), []).append(family)
    return found


def _that_may_leave(families: Iterable[Family]) -> Iterator[Family]:
    """The requests that nothing was computed for yet, here or at another replica."""
    for family in families:
        request = family[0].request
        is_new = len(family) == request.params.n and not request.output_ids and not request.numerics_digest
        if is_new and all(seq.num_queued and seq.incarnation == 0 and seq.state is not RUNNING for seq in family):
            yield family
