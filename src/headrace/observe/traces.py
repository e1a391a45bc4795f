"""Sends a trace of each generating request to an OpenTelemetry collector: OTLP over HTTP, as JSON.

A trace is the request's own span, and below it one for each of its stages. It is made of the finished request, so that no prompt, answer or
key is in it. Names: OpenTelemetry's conventions for generative AI; `headrace.*` where they have none. A collector that is down or slow
costs traces, which are counted, never a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from operator import attrgetter
from typing import Any, NamedTuple

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry

from headrace import __version__
from headrace.core.errors import counted
from headrace.observe.finished_request import FinishedRequest, Outcome
from headrace.observe.tally import CountCollector
from headrace.observe.timeline import TimedStage
from headrace.observe.trace_context import TraceContext

log = logging.getLogger("headrace.traces")

MAX_WAITING_BYTES = 8 << 20
MAX_POST_BYTES = 512 << 10
"""A single trace may be larger."""

INTERVAL_S = 1.0
LAST_RETRY_S = 30.0
"""Pauses between two attempts are doubled, from INTERVAL_S to this one."""

POST_S = 10.0
CLOSE_S = 2.0
MAX_ANSWER_BYTES = 64 << 10

RETRIED = (429, 502, 503, 504)

SERVER, INTERNAL = 2, 1
"""Kinds of span."""

STATUS_ERROR = 2

ATTRIBUTES = {
    "gen_ai.request.model": "asked.requested_model",
    "gen_ai.request.stream": "asked.stream",
    "gen_ai.request.choice.count": "asked.n",
    "gen_ai.request.max_tokens": "asked.max_tokens",
    "gen_ai.request.temperature": "asked.temperature",
    "gen_ai.request.top_p": "asked.top_p",
    "gen_ai.request.top_k": "asked.top_k",
    "gen_ai.request.seed": "asked.seed",
    "gen_ai.response.model": "answered.model",
    "gen_ai.response.finish_reasons": "answered.finish_reasons",
    "gen_ai.response.time_to_first_chunk": "answered.times.ttft_s",
    "gen_ai.usage.input_tokens": "answered.usage.prompt_tokens",
    "gen_ai.usage.output_tokens": "answered.usage.completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "answered.usage.cached_tokens",
    "http.request.method": "arrival.method",
    "http.route": "arrival.path",
    "http.response.status_code": "end.status",
    "headrace.request_id": "arrival.request_id",
    "headrace.outcome": "end.outcome",
    "headrace.adapter": "adapter",
    "headrace.tenant": "caller.tenant",
    "headrace.replica": "answered.replica",
    "headrace.cache_tier": "answered.cache_tier",
    "headrace.num_resumes": "answered.num_resumes",
}
"""Attribute of the request's span -> where `FinishedRequest` has it."""

_values_of = attrgetter(*ATTRIBUTES.values())
_encode = msgspec.json.Encoder().encode


def spans_of(request: FinishedRequest, trace: TraceContext) -> list[dict[str, Any]]:
    """The request's span and those of its stages, in OTLP's JSON: ids in hex, 64-bit integers as strings."""
    end = request.end
    operation = "text_completion" if request.arrival.path == "/v1/completions" else "chat"
    known = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "headrace"}
    known |= {name: value for name, value in zip(ATTRIBUTES, _values_of(request), strict=True) if value is not None}
    if end.outcome is not Outcome.COMPLETED:
        known["error.type"] = end.error or end.outcome.value
    arrived_ns = int(request.arrival.time * 1e9)
    name = f"{operation} {request.model or ''}".strip()
    root = _span(trace, trace.span_id, trace.parent_id, name, SERVER, arrived_ns, end.latency_s or 0.0)
    root |= {"attributes": _attributes(known), "events": _attempt_events(request, arrived_ns)}
    if end.outcome in (Outcome.FAILED, Outcome.DEADLINE):
        root["status"] = {"code": STATUS_ERROR}
    return [root, *_stage_spans(trace, arrived_ns, request.stages)]


def _stage_spans(trace: TraceContext, arrived_ns: int, stages: Sequence[TimedStage]) -> Iterable[dict[str, Any]]:
    ids = os.urandom(8 * len(stages)).hex()
    for number, (name, start_s, seconds) in enumerate(stages):
        span_id = ids[16 * number : 16 * number + 16]
        yield _span(trace, span_id, trace.span_id, name, INTERNAL, arrived_ns + round(start_s * 1e9), seconds)


def _attempt_events(request: FinishedRequest, arrived_ns: int) -> list[dict[str, Any]]:
    return [
        {
            "timeUnixNano": str(arrived_ns + round((attempt.at - request.arrival.at) * 1e9)),
            "name": "attempt",
            "attributes": _attributes(
                {
                    "headrace.replica": attempt.replica,
                    "headrace.attempt.result": attempt.result,
                    "headrace.attempt.reason": attempt.reason,
                    "headrace.attempt.seconds": attempt.seconds,
                }
            ),
        }
        for attempt in request.answered.handling.attempts
    ]


def _span(trace: TraceContext, span_id: str, parent_id: str, name: str, kind: int, start_ns: int, seconds: float) -> dict[str, Any]:
    return {
        "traceId": trace.trace_id,
        "spanId": span_id,
        "parentSpanId": parent_id,
        "traceState": trace.state,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + round(seconds * 1e9)),
    }


def _attributes(values: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: object) -> dict[str, Any]:
    """A number that OTLP cannot hold becomes a string: one such value would make a collector refuse the traces beside it."""
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return {"intValue": str(value)}
    if isinstance(value, float) and isfinite(value):
        return {"doubleValue": value}
    if isinstance(value, tuple):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}


_RESOURCE = _encode(
    {"attributes": [{"key": "service.name", "value": _value("headrace")}, {"key": "service.version", "value": _value(__version__)}]}
)
_BEGIN = b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":{"name":"headrace"},"spans":[' % _RESOURCE
_END = b"]}]}]}"


class _Encoded(NamedTuple):
    spans: bytes
    num_spans: int


class TraceExporter:
    """Sends traces in the background, from the moment it is made; its loop runs until `close`."""

    def __init__(self, url: str, registry: CollectorRegistry) -> None:
        self._url = url
        self._waiting: deque[_Encoded] = deque()
        self._waiting_bytes = 0
        self._fault = ""
        self._closing = asyncio.Event()
        exported = CountCollector("headrace_trace_spans_exported", "Spans that the collector took.")
        self._dropped = CountCollector("headrace_trace_spans_dropped", "Spans that were lost, by reason.", ("reason",))
        registry.register(exported)
        registry.register(self._dropped)
        self._exported = exported.labels()
        for reason in ("queue", "refused"):
            self._dropped.labels(reason)
        self._task = asyncio.create_task(self._run(), name="traces")

    def write(self, request: FinishedRequest) -> None:
        """Never waits; a full queue drops the trace and counts its spans."""
        trace = request.arrival.trace
        if trace is None or not trace.is_sampled:
            return
        spans = spans_of(request, trace)
        encoded = _Encoded(_encode(spans)[1:-1], len(spans))
        if self._waiting_bytes + len(encoded.spans) > MAX_WAITING_BYTES:
            self._dropped.labels("queue").inc(len(spans))
            return
        self._waiting.append(encoded)
        self._waiting_bytes += len(encoded.spans)

    async def close(self) -> None:
        """Tries once to send what waits, for at most CLOSE_S."""
        self._closing.set()
        await asyncio.wait([self._task], timeout=CLOSE_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if num_left := sum(each.num_spans for each in self._waiting):
            log.warning("traces: %s were not sent before the end", counted(num_left, "span"))

    async def _run(self) -> None:
        pause_s = INTERVAL_S
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=POST_S),
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as session:
            while not self._closing.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._closing.wait()
                is_sent = await self._send_waiting(session)
                pause_s = INTERVAL_S if is_sent else min(2 * pause_s, LAST_RETRY_S)

    async def _send_waiting(self, session: aiohttp.ClientSession) -> bool:
        """False: the collector does not answer or has no room, and what waits is to be sent later."""
        while self._waiting:
            batch = self._next_batch()
            num_spans = sum(each.num_spans for each in batch)
            body = _BEGIN + b",".join(each.spans for each in batch) + _END
            try:
                async with session.post(self._url, data=body, allow_redirects=False) as response:
                    status, answer = response.status, await response.content.read(MAX_ANSWER_BYTES)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._note_fault(f"does not take spans now: {type(error).__name__}")
                return False
            if status in RETRIED:
                self._note_fault(f"does not take spans now: status {status}")
                return False
            num_refused = min(_num_rejected(answer), num_spans) if 200 <= status < 300 else num_spans
            self._note_fault(f"refuses spans: status {status}" if num_refused else "")
            self._dropped.labels("refused").inc(num_refused)
            self._exported.inc(num_spans - num_refused)
            for _ in batch:
                self._waiting_bytes -= len(self._waiting.popleft().spans)
        return True

    def _note_fault(self, fault: str) -> None:
        """The same one again is not logged."""
        if fault and fault != self._fault:
            log.warning("traces: %s %s", self._url, fault)
        self._fault = fault

    def _next_batch(self) -> list[_Encoded]:
        """The beginning of what waits. It stays there until the collector has answered."""
        batch: list[_Encoded] = []
        num_bytes = 0
        for each in self._waiting:
            num_bytes += len(each.spans)
            if batch and num_bytes > MAX_POST_BYTES:
                break
            batch.append(each)
        return batch


def _num_rejected(answer: bytes) -> int:
    try:
        return max(0, int(json.loads(answer)["partialSuccess"]["rejectedSpans"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0
