"""Defines the usage record and the protocol of its sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Protocol, get_type_hints

import msgspec
from msgspec import Struct

from headrace.core.errors import HeadraceError
from headrace.observe.finished_request import Charged, FinishedRequest, Outcome

MAX_PROMPT_BYTES = 64 << 10


class ColumnKind(NamedTuple):
    """A column that an older table gains has the default in its earlier rows."""

    sqlite: str
    clickhouse: str


Word = Annotated[str, ColumnKind("TEXT DEFAULT ''", "String")]
Text = Annotated[str | None, ColumnKind("TEXT", "Nullable(String)")]
Count = Annotated[int, ColumnKind("INTEGER NOT NULL DEFAULT 0", "UInt32")]
Whole = Annotated[int, ColumnKind("INTEGER NOT NULL DEFAULT 0", "Int64")]
Duration = Annotated[float | None, ColumnKind("REAL", "Nullable(Float64)")]

_OF_KEY = "of the key"
_TOKENS = "that were charged, those of a summary included; cached ones are part of the prompt's"
_STAGE = (
    "stages of the first sequence in its engine, which says them at the sequence's end: null where the client left before, or a stop "
    "string ended it"
)


class UsageRecord(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The table of columns of every sink and of docs/usage.md (`make derived`), whose rows have the texts below.

    Tokens and money are whole numbers, durations are milliseconds; None: not known, or none. A new field needs a default: tables that are
    there gain its column.
    """

    request_id: Annotated[Word, "the id of the answer's `x-request-id`"]
    time_ms: Annotated[Whole, "when the request came, in Unix milliseconds"]
    tenant: Annotated[Word, _OF_KEY]
    user: Annotated[Word, _OF_KEY] = ""
    key_id: Annotated[Word, _OF_KEY] = ""
    tier: Annotated[Word, _OF_KEY] = ""
    model: Annotated[Word, "name of the model; of an adapter, its base model's"]
    requested_model: Annotated[
        Word, "the name that the client sent: of the model, or of an alias or a route that led to it; the model's own where none was sent"
    ] = ""
    version: Annotated[Word, "`system_fingerprint` of the model's weights"] = ""
    adapter_id: Annotated[Word, "name of the LoRA adapter; empty: none"] = ""
    endpoint: Annotated[Word, "path of the request"] = ""
    route: Annotated[Word, "the replica or foreign server that answered"] = ""
    cache_tier: Annotated[
        Word,
        'the cache that answered: "response", "idempotency", "prefix" where an engine found part of the prompt; empty: none',
    ] = ""
    outcome: Annotated[Word, "as in the request log"]
    finish_reason: Annotated[Word, "the finish reasons of the sequences, each once, in order"] = ""
    prompt_tokens: Annotated[Count, _TOKENS]
    cached_tokens: Annotated[Count, _TOKENS]
    completion_tokens: Annotated[Count, _TOKENS]
    estimated_tokens: Annotated[Count, "of the prompt's and the completion's, those that a foreign server did not count"] = 0
    cost_nanos: Annotated[Whole, "money in billionths of the currency's unit, by the prices that held when the request began"]
    ttft_ms: Annotated[Duration, "from arrival to the first token"] = None
    tpot_ms: Annotated[Duration, "mean time of each token after the first"] = None
    queue_ms: Annotated[Duration, "in the engine's queue"] = None
    total_latency_ms: Annotated[Duration, "from arrival to the end"] = None
    prefill_ms: Annotated[Duration, _STAGE] = None
    decode_ms: Annotated[Duration, _STAGE] = None
    preempted_ms: Annotated[Duration, _STAGE] = None
    stalled_ms: Annotated[Duration, _STAGE] = None
    explain: Annotated[Text, "what `headrace explain` reads of the request, as a JSON array"] = None
    prompt: Annotated[Text, "of tenants with the option `log_prompts` alone: the messages or prompts as JSON, cut at 64 KiB"] = None


class Column(NamedTuple):
    name: str
    kind: ColumnKind
    meaning: str


COLUMNS = tuple(Column(name, *hint.__metadata__) for name, hint in get_type_hints(UsageRecord, include_extras=True).items())

NOTHING_CHARGED = Charged()

encode_record = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(UsageRecord).decode
"""Raises msgspec.DecodeError or msgspec.ValidationError, both of which are MsgspecErrors."""


def is_recorded(request: FinishedRequest) -> bool:
    answered = request.answered
    has_begun = answered.usage.completion_tokens is not None and request.end.outcome is not Outcome.REFUSED
    return has_begun or answered.cache_tier is not None or answered.charged != NOTHING_CHARGED


def usage_record(request: FinishedRequest, *, prompt: str | None = None) -> UsageRecord:
    """prompt: of tenants that opted in"""
    arrival, end, caller, answered, times = request.arrival, request.end, request.caller, request.answered, request.answered.times
    charged = answered.charged
    return UsageRecord(
        request_id=arrival.request_id,
        time_ms=int(arrival.time * 1000),
        tenant=caller.tenant or "",
        user=caller.user or "",
        key_id=caller.key_id or "",
        tier=caller.tier,
        model=request.model or "",
        requested_model=request.asked.requested_model or "",
        version=request.version or "",
        adapter_id=request.adapter or "",
        endpoint=arrival.path,
        route=answered.replica or "",
        cache_tier=answered.cache_tier or ("prefix" if charged.cached_tokens else ""),
        outcome=end.outcome.value,
        finish_reason=",".join(dict.fromkeys(answered.finish_reasons or ())),
        prompt_tokens=charged.prompt_tokens,
        cached_tokens=charged.cached_tokens,
        completion_tokens=charged.completion_tokens,
        estimated_tokens=charged.estimated_tokens,
        cost_nanos=charged.cost_nanos,
        ttft_ms=_ms(times.ttft_s),
        tpot_ms=_ms(times.tpot_s),
        queue_ms=_ms(times.queue_time_s),
        total_latency_ms=_ms(end.latency_s),
        prefill_ms=_ms(times.prefill_s),
        decode_ms=_ms(times.decode_s),
        preempted_ms=_ms(times.preempted_s),
        stalled_ms=_ms(times.stalled_s),
        prompt=prompt,
    )


def prompt_json(prompt: Sequence[object]) -> str:
    return msgspec.json.encode(prompt)[:MAX_PROMPT_BYTES].decode("utf-8", "ignore")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


FIRST_RETRY_S, LAST_RETRY_S = 0.2, 10.0
"""Doubled from the first to the last."""


class SinkFailed(HeadraceError):
    """The message is for the log; the records stay in the spool and are sent again."""


class Sink(Protocol):
    """A destination of usage records. Used by one thread. name: folder in the spool, and label in metrics"""

    name: str

    def ship(self, payloads: Sequence[bytes]) -> None:
        """Records may have been shipped before. Raises SinkFailed unless all are stored."""
        ...

    def idle(self) -> None:
        """Called often while no record waits. Raises SinkFailed."""
        ...

    def interrupt(self) -> None:
        """Has a `ship` that waits raise SinkFailed soon. From any thread."""
        ...

    def close(self) -> None: ...
