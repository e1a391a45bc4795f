"""The load generator against small real servers on loopback that answer, refuse, stall and break."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from lateness import tries_while_late

from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.loadgen import READ_BUFFER_BYTES, ConcurrencyLimit, LoadTarget, run_load
from headrace.lab.metrics import LoadRecord, summarize

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """An HTTP server on an ephemeral loopback port. Yields its root URL."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def stream(request: web.Request, chunks: list[dict[str, object] | str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        text = chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
        await response.write(text.encode())
    return response


def text_chunk(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text}]}


USAGE: dict[str, object] = {
    "choices": [],
    "usage": {"prompt_tokens": 8, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}},
}


async def load(handler: Handler, count: int = 4, *, timeout_s: float = 30.0, max_concurrency: int | None = None) -> list[LoadRecord]:
    requests = make_requests(count, WorkloadShape(input_tokens=8, output_tokens=5))
    async with serving(handler) as url:
        target = LoadTarget(url=url, model="m", timeout_s=timeout_s, max_concurrency=max_concurrency, api_key="secret")
        return await run_load(target, requests, [0.01 * n for n in range(count)])


async def test_streams_are_timed_and_counted_by_the_servers_usage() -> None:
    seen: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append({**await request.json(), "key": request.headers["Authorization"]})
        return await stream(request, [": keep-alive\n\n", text_chunk(""), text_chunk("a"), text_chunk("bc"), USAGE, "data: [DONE]\n\n"])

    records = await load(handler)
    assert all(record.error is None and record.status == 200 for record in records)
    assert [len(record.chunk_s) for record in records] == [2, 2, 2, 2]  # the empty chunk is no first token
    assert {(record.prompt_tokens, record.cached_tokens, record.output_tokens) for record in records} == {(8, 6, 5)}
    assert all(record.sent_s is not None and record.intended_s <= record.sent_s <= record.chunk_s[0] <= record.end_s for record in records)
    assert seen[0]["key"] == "Bearer secret"
    assert (seen[0]["max_tokens"], seen[0]["ignore_eos"], seen[0]["stream"]) == (5, True, True)


async def test_schedule_does_not_wait_for_a_slow_server() -> None:
    arrived = 0
    all_there = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        if arrived == 8:
            all_there.set()
        await all_there.wait()  # no answer until every request is in flight: a closed loop would hang here
        return await stream(request, [text_chunk("a"), "data: [DONE]\n\n"])

    report = summarize(await load(handler, 8))
    assert (report.finished, report.peak_concurrency) == (8, 8)


async def test_limited_concurrency_counts_waiting_from_the_intended_time() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await stream(request, [text_chunk("a"), "data: [DONE]\n\n"])

    records = await load(handler, 4, max_concurrency=1)
    assert summarize(records).peak_concurrency == 1
    assert records[-1].ttft_s >= 4 * 0.05 - 3 * 0.01
    for before, record in pairwise(records):
        assert record.due_s is not None
        assert record.intended_s < before.end_s <= record.due_s, "it was due when the one before it ended"
        lag_s, waited_s = record.client_lag_s, record.due_s - record.intended_s
        assert lag_s is not None
        assert lag_s < waited_s / 2, "waiting for a place is not the client's lag: it made every such run void"


async def test_a_burst_is_sent_one_by_one_which_is_not_the_clients_lag() -> None:
    """With --request-rate inf, the default, the last of a hundred requests was "late" by what sending ninety-nine takes: a void run."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, [text_chunk("a"), "data: [DONE]\n\n"])

    async with serving(handler) as url:
        requests = make_requests(20, WorkloadShape(input_tokens=8, output_tokens=5))
        records = await run_load(LoadTarget(url=url, model="m"), requests, [0.0] * 20)
    ordered = sorted(records, key=lambda record: record.sent_s or math.inf)
    for before, record in pairwise(ordered):
        assert record.intended_s == before.intended_s
        assert before.sent_s is not None
        assert before.due_s is not None
        assert record.due_s is not None
        assert before.due_s < record.due_s <= before.sent_s, "it was due when the one before it was sent"
    last_s = ordered[-1].send_delay_s
    assert last_s is not None
    assert summarize(records).burst_send_s == last_s > sum(record.client_lag_s or 0.0 for record in records) / 20


async def test_places_are_handed_on_in_turn_and_not_to_cancelled_tasks() -> None:
    limit = ConcurrencyLimit(1)
    assert await limit.acquire() == -math.inf
    first, gone, last = (asyncio.create_task(limit.acquire()) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    before = time.monotonic()
    limit.release()
    after = time.monotonic()
    assert before <= await first <= after, "the time of the release, not that of the task"
    assert not last.done()
    limit.release()
    assert await last >= after
    assert all([await ConcurrencyLimit(None).acquire() == -math.inf for _ in range(3)])


async def test_a_place_handed_to_a_task_that_is_cancelled_before_it_resumes_is_handed_on() -> None:
    """It was lost: of two places one was left, and with one place the load test hung."""
    limit = ConcurrencyLimit(1)
    await limit.acquire()
    gone, last = (asyncio.create_task(limit.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    limit.release()
    gone.cancel()
    async with asyncio.timeout(5):
        await last
    limit.release()
    async with asyncio.timeout(5):
        await limit.acquire()


async def test_a_request_whose_time_is_over_before_it_gets_a_place_is_not_sent() -> None:
    num_requests = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal num_requests
        num_requests += 1
        await asyncio.sleep(60)
        raise AssertionError("the client should have left")

    async with serving(handler) as url:
        target = LoadTarget(url=url, model="m", timeout_s=0.5, max_concurrency=1)
        for _ in tries_while_late(5):
            num_requests = 0
            records = await run_load(target, make_requests(2, WorkloadShape(input_tokens=8, output_tokens=5)), [0.0, 0.0])
            if num_requests == 1:
                break
    assert [record.error for record in records] == ["timeout", "timeout"]
    assert num_requests == [record.sent_s is None for record in records].count(True) == 1


async def test_every_way_to_fail_is_a_record() -> None:
    number = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal number
        number += 1
        if number == 1:
            return web.json_response({"error": {"code": "overloaded", "type": "rate_limit_error", "message": "9 wait already"}}, status=429)
        if number == 2:
            return await stream(request, [text_chunk("a")])
        if number == 3:
            return await stream(request, [text_chunk("a"), {"error": {"code": "replica_lost"}}, "data: [DONE]\n\n"])
        await asyncio.sleep(60)
        raise AssertionError("the client should have left")

    expected = ["429 overloaded", "stream ended early", "in-band replica_lost", "timeout"]
    for _ in tries_while_late(5):
        number = 0
        records = await load(handler, 4, timeout_s=0.5)
        if [record.error for record in records] == expected:
            break
    assert [record.error for record in records] == expected
    report = summarize(records)
    assert (report.offered, report.admitted, report.finished) == (4, 3, 0)
    assert report.first_error == "429 overloaded: 9 wait already"
    assert math.isinf(report.ttft_s.quantiles["p50"])


@pytest.mark.parametrize(
    "broken",
    [
        "data: {bad\n\n",
        "data: [1]\n\n",
        'data: {"choices": [1]}\n\n',
        f"data: {'[' * 100_000}\n\n",
        f"data: {'x' * (2 * READ_BUFFER_BYTES)}\n\n",
    ],
    ids=["no JSON", "no object", "no choice", "too deep", "too long"],
)
async def test_a_broken_stream_is_one_failed_request(broken: str) -> None:
    """One such line ended the run with an exception and cancelled the other requests."""
    number = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal number
        number += 1
        return await stream(request, [broken if number == 1 else text_chunk("a"), "data: [DONE]\n\n"])

    records = await load(handler, 3)
    assert [record.error for record in records] == ["broken stream", None, None]
    assert records[0].detail


async def test_bytes_that_are_not_utf8_are_a_broken_stream() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await stream(request, [])
        await response.write(b'data: {"choices": "\xff"}\n\n')
        return response

    assert [record.error for record in await load(handler, 1)] == ["broken stream"]


async def test_a_port_without_a_server_is_a_failure_and_no_exception() -> None:
    requests = make_requests(1, WorkloadShape(input_tokens=2, output_tokens=1))
    (record,) = await run_load(LoadTarget(url="http://127.0.0.1:9", model="m"), requests, [0.0])
    assert record.error is not None
    assert record.error.startswith("connection")
    assert "127.0.0.1:9" in record.detail
