"""Sends requests to any OpenAI-compatible server: at scheduled times, whatever the server does (an open loop), or in a closed loop."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from headrace.core.clock import Clock
from headrace.lab.datasets import LoadRequest
from headrace.lab.metrics import LoadRecord

READ_BUFFER_BYTES = 1 << 20
MAX_DETAIL_CHARS = 300
SPIN_S = 0.002
"""A sender wakes this early and then yields: an event loop's timers are about a millisecond late."""


WHOLE_ANSWERS: dict[str, float | int | bool] = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
"""Answers then have all tokens asked for, and a text for each: without it the first chunk would come tens of tokens late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """max_concurrency  None: a true open loop. Waiting for a place is latency and not the client's lag"""

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0
    max_concurrency: int | None = None
    sampling: dict[str, float | int | bool] = field(default_factory=lambda: dict(WHOLE_ANSWERS))


class ConcurrencyLimit:
    """None: no limit."""

    def __init__(self, count: int | None, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._places = None if count is None else asyncio.Semaphore(count)
        self._freed_s: deque[float] = deque()

    async def acquire(self) -> float:
        """When the place became free, which is before this task resumes; -inf for a place never used."""
        if self._places is not None:
            await self._places.acquire()
        return self._freed_s.popleft() if self._freed_s else -math.inf

    def release(self) -> None:
        if self._places is not None:
            self._freed_s.append(self._clock())
            self._places.release()


@dataclass(frozen=True, slots=True)
class SendTimes:
    intended_s: float
    sendable_s: float
    due_s: float


@dataclass(slots=True)
class _Trace:
    clock: Clock
    sent_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    status: int | None = None
    usage: dict[str, int] = field(default_factory=dict)
    detail: str = ""
    retry_after_s: float | None = None


async def run_load(
    target: LoadTarget,
    requests: Sequence[LoadRequest],
    send_times_s: Sequence[float] | None,
    *,
    on_end: Callable[[LoadRecord], None] = lambda record: None,
    clock: Clock = time.monotonic,
) -> list[LoadRecord]:
    """Sends each request at its time. Returns records in the order of `requests`; failures are records too.

    send_times_s  None: a closed loop, where a request is intended when it gets one of `max_concurrency` places
    """
    offsets_s = [0.0] * len(requests) if send_times_s is None else send_times_s
    if len(requests) != len(offsets_s):
        raise ValueError(f"{len(requests)} requests for {len(offsets_s)} send times")
    limit = ConcurrencyLimit(target.max_concurrency, clock=clock)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    # One pool without a limit: a client that queues for connections would be a closed loop.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=target.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, read_bufsize=READ_BUFFER_BYTES) as session:
        begin_s = clock() + 2 * SPIN_S
        last_sent_s: dict[float, float] = {}  # intended time -> when the last request of that time was sent

        async def one(request: LoadRequest, offset_s: float) -> LoadRecord:
            intended_s = begin_s + offset_s
            await _sleep_until(intended_s, clock)
            freed_s = await limit.acquire()
            try:
                sendable_s = max(intended_s, freed_s)
                if send_times_s is None:
                    intended_s = sendable_s
                due_s = max(sendable_s, last_sent_s.get(intended_s, intended_s))
                last_sent_s[intended_s] = clock()
                record = await _measure(session, target, request, SendTimes(intended_s, sendable_s, due_s), clock)
            finally:
                limit.release()
            on_end(record)
            return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request, offset)) for request, offset in zip(requests, offsets_s, strict=True)]
    return [task.result() for task in tasks]


async def _sleep_until(moment_s: float, clock: Clock) -> None:
    while (left_s := moment_s - clock()) > 0:
        await asyncio.sleep(left_s - SPIN_S if left_s > SPIN_S else 0)


async def _measure(session: aiohttp.ClientSession, target: LoadTarget, request: LoadRequest, times: SendTimes, clock: Clock) -> LoadRecord:
    trace = _Trace(clock)
    error: str | None = None
    left_s = target.timeout_s - (clock() - times.intended_s)
    try:
        if left_s <= 0:  # it waited for a place until its time was over, and is not sent any more
            raise TimeoutError
        async with asyncio.timeout(left_s):
            error = await _stream(session, target, request, trace)
    except TimeoutError:
        error = "timeout"
    except (aiohttp.ClientError, OSError) as failure:
        error = f"connection: {type(failure).__name__}"
        trace.detail = str(failure)
    except (ValueError, RecursionError, LineTooLong) as failure:  # after ClientError: aiohttp's InvalidURL is a ValueError, too
        error = "broken stream"
        trace.detail = f"{type(failure).__name__}: {failure}"
    return LoadRecord(
        intended_s=times.intended_s,
        sendable_s=times.sendable_s,
        due_s=times.due_s,
        sent_s=trace.sent_s,
        chunk_s=tuple(trace.chunk_s),
        end_s=clock(),
        prompt_tokens=trace.usage.get("prompt_tokens", len(request.prompt_ids)),
        cached_tokens=trace.usage.get("cached_tokens", 0),
        output_tokens=trace.usage.get("completion_tokens", len(trace.chunk_s)),
        status=trace.status,
        error=error,
        detail=trace.detail[:MAX_DETAIL_CHARS],
        retry_after_s=trace.retry_after_s,
    )


async def _stream(session: aiohttp.ClientSession, target: LoadTarget, request: LoadRequest, trace: _Trace) -> str | None:
    """The kind of failure; None if the answer arrived whole."""
    body = {
        "model": target.model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.sampling,
    }
    trace.sent_s = trace.clock()
    async with session.post(f"{target.url.rstrip('/')}/v1/completions", json=body) as response:
        trace.status = response.status
        if response.status != 200:
            trace.retry_after_s = _seconds(response.headers.get("Retry-After", ""))
            text = await response.text(errors="replace")
            return f"{response.status} {_reason(text, trace)}"
        async for data in events(response.content):
            if data == "[DONE]":
                return None
            if failure := _add_chunk(json.loads(data), trace):
                return failure
    return "stream ended early"


def _add_chunk(chunk: object, trace: _Trace) -> str | None:
    """The kind of error if the chunk is one. Raises ValueError."""
    if not isinstance(chunk, dict):
        raise ValueError(f"a chunk is {type(chunk).__name__}, not an object")
    if "error" in chunk:
        return f"in-band {_reason(json.dumps(chunk), trace)}"
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError("the choices of a chunk are not a list of objects")
    if any(choice.get("text") for choice in choices):
        trace.chunk_s.append(trace.clock())
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        trace.usage = {name: value for name, value in usage.items() if isinstance(value, int)}
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            trace.usage["cached_tokens"] = details["cached_tokens"]
    return None


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


def _reason(body: str, trace: _Trace) -> str:
    trace.detail = body.strip()
    try:
        error = json.loads(body)["error"]
        trace.detail = str(error.get("message") or trace.detail)
        return str(error.get("code") or error.get("type") or "error")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "error"


async def events(stream: aiohttp.StreamReader) -> AsyncIterator[str]:
    async for line in stream:
        text = line.decode("utf-8").rstrip("\r\n")
        if text.startswith("data:"):
            yield text[5:].lstrip(" ")
