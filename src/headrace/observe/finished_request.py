"""Defines a request that has ended: one value of parts, each made once by its owner.

No prompt, answer or key enters it, and no header but a client's own short x-request-id and its trace context.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from headrace.observe.timeline import REST, Span, TimedStage, flat, stages_of
from headrace.observe.trace_context import TraceContext

MAX_DETAIL_CHARS = 200
MAX_KEPT = 64


class Outcome(StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"
    """Nothing was computed for it."""
    CANCELLED = "cancelled"
    """The client left or did not read."""
    DEADLINE = "deadline"
    FAILED = "failed"


class RequestArrival(NamedTuple):
    """time: Unix seconds; at: on the clock of the request's stages"""

    request_id: str
    method: str
    path: str
    time: float = 0.0
    client: str | None = None
    client_request_id: str | None = None
    trace: TraceContext | None = None
    at: float = 0.0


class Caller(NamedTuple):
    """All fields are None before the key is checked, and on paths that need none."""

    tenant: str | None = None
    user: str | None = None
    key_id: str | None = None
    tier: str = ""


class Asked(NamedTuple):
    """requested_model: the name that the client sent, of a model, an alias or a route, or the model's own where none was sent; model: to
    which it led, of an adapter its base model; version: of the model's weights, its system_fingerprint. From `n` on: parameters that the
    client gave, perhaps not valid ones
    """

    requested_model: str | None = None
    model: str | None = None
    adapter: str | None = None
    version: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class Usage(NamedTuple):
    """estimated_tokens: of the prompt's and the completion's, those that no server counted; None: there are none"""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    estimated_tokens: int | None = None


class Charged(NamedTuple):
    """What the request cost, with what was done for it beside its answer. cost_nanos: money (`core.money.NANOS`)"""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated_tokens: int = 0
    cost_nanos: int = 0


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


class Compared(NamedTuple):
    """What a replica was compared by when one was chosen.

    lacks_blocks  the prompt would have had to wait for KV blocks
    outstanding   its requests
    fullness      share of its KV pool in use; None: a foreign server's is not known
    predicted_s   until the request would be done; None: no replica's speed is known
    cached_tokens  of the prompt, in its prefix cache, as routing knew
    """

    replica: str
    lacks_blocks: bool
    outstanding: int
    fullness: float | None
    predicted_s: float | None = None
    cached_tokens: int = 0


class ModelStep(NamedTuple):
    """A model that was chosen to answer, or passed over.

    reason  one sentence, for a person: why it was chosen, or why it did not answer
    """

    model: str
    is_chosen: bool
    reason: str


class AnswerAttempt(NamedTuple):
    """One try of a request, or of some of its sequences, at a replica or a foreign server.

    at         on the clock of the request's arrival
    reason     why it was chosen, for a person
    compared   the replicas among which it was chosen, the chosen one first; empty: there was no choice
    result     "answered", "rejected", "lost", "moved", "cancelled", "deadline" or "error"; of a foreign server as in
               headrace_upstream_attempts_total
    detail     beside a rejection or a loss: the error
    policy     that chose among replicas, by the option `routing`
    """

    replica: str
    at: float
    seconds: float
    reason: str
    compared: tuple[Compared, ...] = ()
    result: str = ""
    detail: str = ""
    num_sequences: int = 1
    policy: str = ""


class AnswerHandling(NamedTuple):
    """Where an answer was made, and where its time went.

    attempts  in the order in which they were sent
    spans     of all sequences, in any order, on the clock of the arrival
    """

    attempts: Sequence[AnswerAttempt] = ()
    spans: Sequence[Span] = ()

    @classmethod
    def joined(cls, parts: Sequence[AnswerHandling]) -> AnswerHandling:
        return cls([each for part in parts for each in part.attempts], [each for part in parts for each in part.spans])

    def bounded(self) -> AnswerHandling:
        """At most MAX_KEPT attempts, and spans that do not overlap: of a request of many sequences the later ones are one span."""
        spans = flat(self.spans)
        if len(spans) > MAX_KEPT:
            spans = [*spans[: MAX_KEPT - 1], Span(REST, spans[MAX_KEPT - 2].end, spans[-1].end)]
        return AnswerHandling(self.attempts[:MAX_KEPT], spans)


class PromptMiss(NamedTuple):
    """Where the part of the prompt ended that was in the prefix cache, and why there. part: such as "messages[3]", of the request"""

    at_token: int
    reason: str
    part: str | None = None


class LimitUse(NamedTuple):
    """used: or reserved, with this request; tokens, requests or money"""

    name: str
    used: float
    number: float


class Answered(NamedTuple):
    """cache_tier    the cache that answered instead of an engine: "response" or "idempotency"
    continued_id  request id of the stream that this request continues
    num_resumes   how often a sequence was submitted again because its engine was lost
    failure       the engine's message, for the operator, where it ended a sequence without an answer
    prompt_blocks  of a single prompt, where `log_prompt_blocks` is set (`core.hashing.recorded_blocks`)
    limits        that the request counted in
    models        that were chosen or passed over, where the model has fallbacks
    """

    model: str | None = None
    adapter: str | None = None
    version: str | None = None
    replica: str | None = None
    continued_id: str | None = None
    num_resumes: int | None = None
    cache_tier: str | None = None
    finish_reasons: tuple[str, ...] | None = None
    seed: int | None = None
    usage: Usage = Usage()
    charged: Charged = Charged()
    times: Times = Times()
    failure: str | None = None
    prompt_blocks: str | None = None
    handling: AnswerHandling = AnswerHandling()
    miss: PromptMiss | None = None
    limits: tuple[LimitUse, ...] = ()
    models: tuple[ModelStep, ...] = ()


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
    """worker: the gateway worker that answered, where there are several; entered: as `timeline.StageMarks` has them"""

    arrival: RequestArrival
    end: End
    caller: Caller = Caller()
    asked: Asked = Asked()
    answered: Answered = Answered()
    worker: int | None = None
    entered: Sequence[tuple[str, float]] = ()

    @property
    def stages(self) -> tuple[TimedStage, ...]:
        """In order; none overlaps another."""
        return stages_of(self.entered, self.answered.handling.spans, self.end.latency_s or 0.0) if self.entered else ()

    @property
    def model(self) -> str | None:
        return self.answered.model or self.asked.model

    @property
    def adapter(self) -> str | None:
        return self.answered.adapter if self.answered.model else self.asked.adapter

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
