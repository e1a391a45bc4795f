"""Explains each generating request: where its time went, and which replica answered it and why. Keeps the last explanations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headrace.core.money import NANOS
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.kept_streams import OtherWorkers
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.record import UsageRecord
from headrace.observe.finished_request import AnswerAttempt, FinishedRequest

MAX_BYTES = 16 << 20
"""The explanations that one process keeps: of about 10,000 requests."""

ENTRY_BYTES = 256
"""What each takes beside its JSON."""


EXPLAIN = "explain"
"""What the workers of a port ask one another."""


class ExplainedStage(Struct):
    """start_s: after the request's arrival"""

    name: str
    start_s: float
    seconds: float


class ComparedReplica(Struct, omit_defaults=True):
    """outstanding: its requests; fullness: share of its KV pool in use; predicted_s: time to answer, where speeds are known"""

    replica: str
    outstanding: int
    fullness: float
    lacks_blocks: bool = False
    predicted_s: float | None = None


class ExplainedAttempt(Struct, omit_defaults=True):
    """One try of the request, or of num_sequences of its sequences, at a replica or a foreign server."""

    replica: str
    start_s: float
    seconds: float
    reason: str
    result: str
    detail: str = ""
    num_sequences: int = 1
    compared: list[ComparedReplica] = []


class ExplainedRoute(Struct, omit_defaults=True):
    """replica: of the first sequence at its end; cache_tier: the cache that answered instead"""

    replica: str | None = None
    cache_tier: str | None = None
    num_resumes: int | None = None
    attempts: list[ExplainedAttempt] = []


class ExplainedMiss(Struct, frozen=True, omit_defaults=True):
    """Why no more of the prompt was in the prefix cache: docs/caches.md has the reasons. at_token: the first that was not; part: of the
    request, in which it stands"""

    at_token: int
    reason: str
    part: str | None = None


class ExplainedTokens(Struct, frozen=True, omit_defaults=True):
    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    miss: ExplainedMiss | None = None


class ExplainedLimit(Struct):
    """used: with this request; money in billionths of the currency's unit"""

    name: str
    used: int
    limit: int


class Explanation(Struct, omit_defaults=True, kw_only=True):
    """stages  in order; none overlaps another, and with `unattributed_s` they make `wall_s`
    kept_in  "memory": of the gateway process that answered; "ledger": where usage is kept, too
    limit    the limit that refused the request
    """

    request_id: str
    wall_s: float
    stages: list[ExplainedStage]
    unattributed_s: float
    route: ExplainedRoute
    time: float
    path: str
    kept_in: str
    outcome: str
    status: int
    model: str | None = None
    tenant: str | None = None
    error: str | None = None
    param: str | None = None
    reason: str | None = None
    detail: str | None = None
    limit: str | None = None
    finish_reasons: Sequence[str] | None = None
    continued_id: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens: ExplainedTokens = ExplainedTokens()
    limits: list[ExplainedLimit] = []
    cost: float | None = None


def explanation_of(answer: object) -> Explanation:
    """answer: decoded JSON. Raises msgspec.ValidationError."""
    return msgspec.convert(answer, Explanation)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Explanation).decode


def explained(request: FinishedRequest, usage: UsageRecord | None, *, is_in_ledger: bool) -> bytes:
    """JSON of an `Explanation`. usage: None for a request that used nothing"""
    arrival, end, answered, times = request.arrival, request.end, request.answered, request.answered.times
    wall_s = round(end.latency_s or 0.0, 6)
    stages = [ExplainedStage(name, round(start_s, 6), round(seconds, 6)) for name, start_s, seconds in request.stages]
    return _encode(
        Explanation(
            request_id=arrival.request_id,
            wall_s=wall_s,
            stages=stages,
            unattributed_s=round(wall_s - sum([stage.seconds for stage in stages]), 6),
            route=ExplainedRoute(
                answered.replica,
                answered.cache_tier,
                answered.num_resumes,
                [_attempt(each, arrival.at) for each in answered.handling.attempts],
            ),
            time=round(arrival.time, 3),
            path=arrival.path,
            kept_in="ledger" if is_in_ledger else "memory",
            outcome=end.outcome.value,
            status=end.status,
            model=request.model,
            tenant=request.caller.tenant,
            error=end.error,
            param=end.param,
            reason=end.reason,
            detail=request.detail,
            limit=end.limit,
            finish_reasons=answered.finish_reasons,
            continued_id=answered.continued_id,
            ttft_s=_rounded(times.ttft_s),
            tpot_s=_rounded(times.tpot_s),
            tokens=ExplainedTokens(
                answered.usage.prompt_tokens,
                answered.usage.cached_tokens,
                answered.usage.completion_tokens,
                None if answered.miss is None else ExplainedMiss(*answered.miss),
            ),
            limits=[ExplainedLimit(*each) for each in answered.limits],
            cost=usage.cost_nanos / NANOS if usage is not None and usage.cost_nanos else None,
        )
    )


def _attempt(attempt: AnswerAttempt, arrived_at: float) -> ExplainedAttempt:
    return ExplainedAttempt(
        attempt.replica,
        round(attempt.at - arrived_at, 6),
        round(attempt.seconds, 6),
        attempt.reason,
        attempt.result,
        attempt.detail,
        attempt.num_sequences,
        [
            ComparedReplica(each.replica, each.outstanding, round(each.fullness, 4), each.lacks_blocks, _rounded(each.predicted_s))
            for each in attempt.compared
        ],
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


class Explanations:
    """Keeps the explanations of this process's last requests, at most `max_bytes` of them, and gives those that used something to the
    ledger."""

    def __init__(self, ledger: Ledger | None, max_bytes: int = MAX_BYTES) -> None:
        self._ledger, self._max_bytes = ledger, max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._siblings: OtherWorkers | None = None
        self.num_bytes = 0

    def join(self, siblings: OtherWorkers) -> None:
        self._siblings = siblings
        siblings.handle(EXPLAIN, self._for_sibling)

    def keep(self, request: FinishedRequest, usage: UsageRecord | None) -> None:
        """usage: None for a request that used nothing"""
        explanation = explained(request, usage, is_in_ledger=self._ledger is not None and usage is not None)
        self._kept[request.arrival.request_id] = explanation
        self.num_bytes += len(explanation) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= len(dropped) + ENTRY_BYTES
        if self._ledger is not None and usage is not None:
            self._ledger.write(msgspec.structs.replace(usage, explain=explanation.decode()))

    async def find(self, request_id: str, reader: Principal) -> bytes | None:
        """JSON of an `Explanation` that the caller may read. Raises Unavailable where the ledger cannot be asked."""
        found = self._kept.get(request_id) or b"".join(await self._others(request_id))
        if not found and self._ledger is not None:
            found = (await self._ledger.explanation(request_id, None if reader.reads_all else reader.tenant) or "").encode()
        try:
            return found if found and _may_read(reader, _decode(found)) else None
        except msgspec.MsgspecError:  # of a newer version
            return None

    async def _others(self, request_id: str) -> list[bytes]:
        return [] if self._siblings is None else await self._siblings.ask_others(EXPLAIN, request_id)

    async def _for_sibling(self, request_id: str) -> bytes:
        return self._kept.get(request_id, b"")


def _may_read(reader: Principal, explanation: Explanation) -> bool:
    is_own = explanation.tenant == reader.tenant and explanation.time >= reader.tenant_since
    return reader.reads_all or is_own
