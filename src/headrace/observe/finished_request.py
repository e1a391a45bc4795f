"""Defines a request that has ended: one value of parts, each made once by its owner.

No prompt, answer or key enters it, and no header but a client's own short x-request-id and its trace context.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from headrace.observe.trace_context import TraceContext

MAX_DETAIL_CHARS = 200


class Outcome(StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"
    """Nothing was computed for it."""
    CANCELLED = "cancelled"
    """The client left or did not read."""
    DEADLINE = "deadline"
    FAILED = "failed"


class TokenPrice(Protocol):
    def cost_nanos(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int: ...


class RequestArrival(NamedTuple):
    """time               Unix seconds"""

    request_id: str
    method: str
    path: str
    time: float = 0.0
    client: str | None = None
    client_request_id: str | None = None
    trace: TraceContext | None = None


class Caller(NamedTuple):
    """All fields are None before the key is checked, and on paths that need none."""

    tenant: str | None = None
    user: str | None = None
    key_id: str | None = None
    tier: str = ""


class Asked(NamedTuple):
    """version: of the model's weights, its system_fingerprint. From `n` on: parameters that the client gave, perhaps not valid ones"""

    model: str | None = None
    version: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class Usage(NamedTuple):
    """price: of the model that answered; None: no tokens have a price"""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    price: TokenPrice | None = None


class Times(NamedTuple):
    """ttft_s: since arrival at the gateway; tpot_s: the mean over the sequences

    The stages are the first sequence's (`core.update.StageSeconds`), known at its end; one that a stop string ended has none.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    queue_time_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    preempted_s: float | None = None
    stalled_s: float | None = None


class Answered(NamedTuple):
    """cache_tier    the cache that answered instead of an engine: "response" or "idempotency"
    continued_id  request id of the stream that this request continues
    num_resumes   how often a sequence was submitted again because its engine was lost
    failure       the engine's message, for the operator, where it ended a sequence without an answer
    prompt_blocks  of a single prompt, where `log_prompt_blocks` is set (`core.hashing.recorded_blocks`)
    """

    model: str | None = None
    version: str | None = None
    replica: str | None = None
    continued_id: str | None = None
    num_resumes: int | None = None
    cache_tier: str | None = None
    finish_reasons: tuple[str, ...] | None = None
    seed: int | None = None
    usage: Usage = Usage()
    times: Times = Times()
    failure: str | None = None
    prompt_blocks: str | None = None


class End(NamedTuple):
    """param, reason  the field that an error is about, and the rule that it broke; never a value of the client's
    detail         for the operator: what failed, whether another replica could have gone on, that a shutdown ended it
    """

    outcome: Outcome
    status: int = 0
    latency_s: float | None = None
    error: str | None = None
    limit: str | None = None
    param: str | None = None
    reason: str | None = None
    detail: str | None = None


class FinishedRequest(NamedTuple):
    """worker: the gateway worker that answered, where there are several"""

    arrival: RequestArrival
    end: End
    caller: Caller = Caller()
    asked: Asked = Asked()
    answered: Answered = Answered()
    worker: int | None = None

    @property
    def model(self) -> str | None:
        return self.answered.model or self.asked.model

    @property
    def trace_id(self) -> str | None:
        return None if self.arrival.trace is None else self.arrival.trace.trace_id

    @property
    def version(self) -> str | None:
        return self.answered.version if self.answered.model else self.asked.version

    @property
    def detail(self) -> str | None:
        return self.end.detail or self.answered.failure

    @property
    def counted_outcome(self) -> str:
        """A completed answer counts as length if a sequence ended at its token limit, else as stop."""
        if self.end.outcome is not Outcome.COMPLETED:
            return self.end.outcome
        return "length" if "length" in (self.answered.finish_reasons or ()) else "stop"
