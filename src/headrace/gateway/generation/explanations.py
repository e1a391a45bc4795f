"""Explains each generating request: where its time went, and which replica answered it and why. Keeps the last explanations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from headrace.core.money import NANOS
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.kept_streams import OtherWorkers
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.record import UsageRecord
from headrace.observe.finished_request import AnswerAttempt, AnswerHandling, End, FinishedRequest, LimitUse, ModelStep, PromptMiss
from headrace.observe.timeline import stages_of

MAX_BYTES = 16 << 20
"""What one process keeps: of about 10,000 requests."""

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
    """outstanding: its requests; fullness: share of its KV pool in use; predicted_s: time to answer, where speeds are known; cached_tokens:
    of the prompt, in its prefix cache, as the gateway knew
    """

    replica: str
    outstanding: int
    fullness: float | None = None
    lacks_blocks: bool = False
    predicted_s: float | None = None
    cached_tokens: int = 0


class ExplainedAttempt(Struct, omit_defaults=True):
    """One try of the request, or of num_sequences of its sequences, at a replica or a foreign server. policy: that chose the replica"""

    replica: str
    start_s: float
    seconds: float
    reason: str
    result: str
    detail: str = ""
    num_sequences: int = 1
    compared: list[ComparedReplica] = []
    policy: str = ""


class ExplainedModel(Struct, frozen=True, omit_defaults=True):
    """A model that was chosen to answer, or passed over, and why."""

    model: str
    reason: str
    is_chosen: bool = False


class ExplainedRoute(Struct, omit_defaults=True):
    """models: in the order in which they were looked at, where the model has fallbacks; replica: of the first sequence at its end;
    cache_tier: the cache that answered instead"""

    replica: str | None = None
    cache_tier: str | None = None
    num_resumes: int | None = None
    attempts: list[ExplainedAttempt] = []
    models: list[ExplainedModel] = []


class ExplainedMiss(Struct, frozen=True, omit_defaults=True):
    """Why no more of the prompt was in the prefix cache: docs/caches.md has the reasons. at_token: the first that was not; part: of the
    conversation as the model got it, a session's history included"""

    at_token: int
    reason: str
    part: str | None = None


class ExplainedTokens(Struct, frozen=True, omit_defaults=True):
    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    miss: ExplainedMiss | None = None


class ExplainedLimit(Struct):
    """used: or reserved, with this request; tokens, requests or money"""

    name: str
    used: float
    limit: float


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
    adapter: str | None = None
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


class KeptRequest(NamedTuple):
    """What is kept of a finished request to explain it later, as a JSON array. New fields go to the end: an older gateway
    finds no explanation where it does not know one.
    """

    request_id: str
    time: float
    arrived_at: float
    path: str
    tenant: str | None
    model: str | None
    end: End
    detail: str | None
    entered: Sequence[tuple[str, float]]
    handling: AnswerHandling
    replica: str | None
    cache_tier: str | None
    num_resumes: int | None
    continued_id: str | None
    finish_reasons: Sequence[str] | None
    ttft_s: float | None
    tpot_s: float | None
    tokens: tuple[int | None, int | None, int | None]
    miss: PromptMiss | None
    limits: Sequence[LimitUse]
    cost_nanos: int
    is_in_ledger: bool
    adapter: str | None = None
    models: Sequence[ModelStep] = ()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(KeptRequest).decode


def kept(request: FinishedRequest, usage: UsageRecord | None, *, is_in_ledger: bool) -> bytes:
    """A `KeptRequest`. usage: None for a request that used nothing"""
    arrival, answered, used = request.arrival, request.answered, request.answered.usage
    return _encode(
        KeptRequest(
            arrival.request_id,
            arrival.time,
            arrival.at,
            arrival.path,
            request.caller.tenant,
            request.model,
            request.end,
            request.detail,
            request.entered,
            answered.handling,
            answered.replica,
            answered.cache_tier,
            answered.num_resumes,
            answered.continued_id,
            answered.finish_reasons,
            answered.times.ttft_s,
            answered.times.tpot_s,
            (used.prompt_tokens, used.cached_tokens, used.completion_tokens),
            answered.miss,
            answered.limits,
            0 if usage is None else usage.cost_nanos,
            is_in_ledger,
            request.adapter,
            answered.models,
        )
    )


def explained(request: KeptRequest) -> Explanation:
    end = request.end
    wall_s = round(end.latency_s or 0.0, 6)
    timed = stages_of(request.entered, request.handling.spans, end.latency_s or 0.0)
    stages = [ExplainedStage(name, round(start_s, 6), round(seconds, 6)) for name, start_s, seconds in timed]
    return Explanation(
        request_id=request.request_id,
        wall_s=wall_s,
        stages=stages,
        unattributed_s=round(wall_s - sum([stage.seconds for stage in stages]), 6),
        route=ExplainedRoute(
            request.replica,
            request.cache_tier,
            request.num_resumes,
            [_attempt(each, request.arrived_at) for each in request.handling.attempts],
            [ExplainedModel(each.model, each.reason, each.is_chosen) for each in request.models],
        ),
        time=round(request.time, 3),
        path=request.path,
        kept_in="ledger" if request.is_in_ledger else "memory",
        outcome=end.outcome.value,
        status=end.status,
        model=request.model,
        adapter=request.adapter,
        tenant=request.tenant,
        error=end.error,
        param=end.param,
        reason=end.reason,
        detail=request.detail,
        limit=end.limit,
        finish_reasons=request.finish_reasons,
        continued_id=request.continued_id,
        ttft_s=_rounded(request.ttft_s),
        tpot_s=_rounded(request.tpot_s),
        tokens=ExplainedTokens(*request.tokens, None if request.miss is None else ExplainedMiss(*request.miss)),
        limits=[ExplainedLimit(*each) for each in request.limits],
        cost=request.cost_nanos / NANOS if request.cost_nanos else None,
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
            ComparedReplica(
                each.replica, each.outstanding, _rounded(each.fullness), each.lacks_blocks, _rounded(each.predicted_s), each.cached_tokens
            )
            for each in attempt.compared
        ],
        attempt.policy,
    )


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)


class Explanations:
    """Keeps what explains this process's last requests, at most `max_bytes` of it, and gives the ledger that of requests that used
    something. An explanation is made when one is asked for. ledger: None: usage is not kept
    """

    def __init__(self, ledger: Ledger | None, max_bytes: int = MAX_BYTES) -> None:
        self.ledger, self._max_bytes = ledger, max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._siblings: OtherWorkers | None = None
        self.num_bytes = 0

    def join(self, siblings: OtherWorkers) -> None:
        self._siblings = siblings
        siblings.handle(EXPLAIN, self._for_sibling)

    def keep(self, request: FinishedRequest, usage: UsageRecord | None) -> None:
        """usage: None for a request that used nothing"""
        encoded = kept(request, usage, is_in_ledger=self.ledger is not None and usage is not None)
        self._kept[request.arrival.request_id] = encoded
        self.num_bytes += len(encoded) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= len(dropped) + ENTRY_BYTES
        if self.ledger is not None and usage is not None:
            self.ledger.write(msgspec.structs.replace(usage, explain=encoded.decode()))

    async def find(self, request_id: str, reader: Principal, *, sees_site: bool) -> bytes | None:
        """JSON of an `Explanation` that the caller may read. Raises Unavailable or Overloaded where the ledger cannot be asked.

        sees_site  the caller may know of others' use, and what is for the operator: the load of replicas, texts of errors
        """
        encoded = self._kept.get(request_id) or b"".join(await self._others(request_id))
        if not encoded and self.ledger is not None:
            encoded = (await self.ledger.explanation(request_id, None if reader.reads_all else reader.tenant) or "").encode()
        try:
            request = _decode(encoded) if encoded else None
        except msgspec.MsgspecError:  # of a newer version
            return None
        if request is None or not _may_read(reader, request):
            return None
        return _encode(explained(request if sees_site else _without_site(request)))

    async def _others(self, request_id: str) -> list[bytes]:
        return [] if self._siblings is None else await self._siblings.ask_others(EXPLAIN, request_id)

    async def _for_sibling(self, request_id: str) -> bytes:
        return self._kept.get(request_id, b"")


def _without_site(request: KeptRequest) -> KeptRequest:
    attempts = [each._replace(compared=(), detail="") for each in request.handling.attempts]
    return request._replace(detail=None, handling=request.handling._replace(attempts=attempts))


def _may_read(reader: Principal, request: KeptRequest) -> bool:
    is_own = request.tenant == reader.tenant and request.time >= reader.tenant_since
    return reader.reads_all or is_own
