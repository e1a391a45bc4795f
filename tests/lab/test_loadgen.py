"""Tests the load generator against small servers that answer, refuse, stall and break: on virtual time, but for one test."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from virtual_time import VirtualTimeLoop

from headrace.lab import loadgen
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.loadgen import READ_BUFFER_BYTES, ConcurrencyLimit, LoadTarget, run_load
from headrace.lab.metrics import LoadRecord, summarize

pytestmark = pytest.mark.loop

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SHAPE = WorkloadShape(input_tokens=8, output_tokens=5)
TICK_S = 1e-5
"""What a look at the clock takes, where a test says so."""


@pytest.fixture(autouse=True)
def no_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop on virtual time wakes a sender at its time, and none passes while it spins."""
    monkeypatch.setattr(loadgen, "SPIN_S", 0.0)


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """An HTTP server at a loopback port. Yields its root URL."""
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


async def stream(request: web.Request, chunks: list[dict[str, object] | str], *, gap_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await asyncio.sleep(gap_s)
        text = chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
        await response.write(text.encode())
    return response


def answering(chunks: list[dict[str, object] | str], *, gap_s: float = 0.0) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, chunks, gap_s=gap_s)

    return handler


def text_chunk(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text}]}


USAGE: dict[str, object] = {
    "choices": [],
    "usage": {"prompt_tokens": 8, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}},
}
DONE = "data: [DONE]\n\n"
ANSWER: list[dict[str, object] | str] = [": keep-alive\n\n", text_chunk(""), text_chunk("a"), text_chunk("bc"), USAGE, DONE]


async def load(
    handler: Handler,
    count: int = 4,
    *,
    every_s: float = 0.01,
    timeout_s: float = 60.0,
    max_concurrency: int | None = None,
) -> list[LoadRecord]:
    async with serving(handler) as url:
        target = LoadTarget(url=url, model="m", timeout_s=timeout_s, max_concurrency=max_concurrency, api_key="secret")
        times = [every_s * number for number in range(count)]
        return await run_load(target, make_requests(count, SHAPE), times, clock=asyncio.get_running_loop().time)


def offsets_s(records: list[LoadRecord], moments: list[float | None]) -> list[float]:
    """Seconds after the first intended time."""
    assert None not in moments
    return [moment - records[0].intended_s for moment in moments if moment is not None]


@pytest.mark.socket
async def test_streams_over_a_socket_are_counted_by_the_servers_usage() -> None:
    seen: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append({**await request.json(), "key": request.headers["Authorization"]})
        return await stream(request, ANSWER)

    records = await load(handler)
    assert all(record.error is None and record.status == 200 for record in records)
    assert [len(record.chunk_s) for record in records] == [2, 2, 2, 2]  # the empty chunk is no first token
    assert {(record.prompt_tokens, record.cached_tokens, record.output_tokens) for record in records} == {(8, 6, 5)}
    assert all(record.sent_s is not None and record.intended_s <= record.sent_s <= record.chunk_s[0] <= record.end_s for record in records)
    assert seen[0]["key"] == "Bearer secret"
    assert (seen[0]["max_tokens"], seen[0]["ignore_eos"], seen[0]["stream"]) == (5, True, True)


async def test_requests_are_sent_at_their_times_and_every_chunk_with_text_is_stamped_as_it_comes() -> None:
    records = await load(answering(ANSWER, gap_s=0.25), every_s=0.5)
    assert offsets_s(records, [record.sent_s for record in records]) == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert all(record.chunk_s == pytest.approx([record.intended_s + 0.75, record.intended_s + 1.0]) for record in records)
    assert [record.end_s - record.intended_s for record in records] == pytest.approx([1.5] * 4)
    report = summarize(records)
    assert report.client_lag_s.max == pytest.approx(0.0, abs=1e-9)
    assert report.is_valid


async def test_schedule_does_not_wait_for_a_slow_server() -> None:
    """A closed loop would send a request every ten seconds."""
    records = await load(answering([text_chunk("a"), DONE], gap_s=5.0), 8, every_s=1.0)
    assert offsets_s(records, [record.sent_s for record in records]) == pytest.approx(range(8))
    report = summarize(records)
    assert (report.finished, report.peak_concurrency) == (8, 8)
    assert report.ttft_s.max == pytest.approx(5.0)


async def test_a_client_that_stands_still_sends_late_and_says_by_how_much() -> None:
    """Its latencies count from the intended time, so that it hides no slow server; and the run is void."""
    loop = virtual_loop()
    loop.call_later(0.9, loop.be_late, 3.0)
    records = await load(answering([text_chunk("a"), DONE], gap_s=0.1), 3, every_s=1.0)
    assert [record.client_lag_s for record in records] == pytest.approx([0.0, 2.9, 1.9])
    assert [record.ttft_s for record in records] == pytest.approx([0.1, 3.0, 2.0])
    assert not summarize(records).is_valid


async def test_a_sender_wakes_early_and_meets_its_time_although_timers_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event loop's timers are about a millisecond late, by which every such run would be void."""
    loop = virtual_loop()
    monkeypatch.setattr(loadgen, "SPIN_S", 0.002)
    jump = loop._selector._jump  # type: ignore[attr-defined]
    monkeypatch.setattr(loop._selector, "_jump", lambda seconds: jump(seconds + 0.001))  # type: ignore[attr-defined]

    def clock() -> float:
        loop.be_late(TICK_S)
        return loop.time()

    async with serving(answering(ANSWER)) as url:
        records = await run_load(LoadTarget(url=url, model="m"), make_requests(4, SHAPE), [0.1 * n for n in range(4)], clock=clock)
    assert all(0.0 <= (record.client_lag_s or 0.0) < 10 * TICK_S for record in records)
    assert summarize(records).is_valid


async def test_limited_concurrency_counts_waiting_from_the_intended_time() -> None:
    """Waiting for a place is not the client's lag: it made every such run void."""
    records = await load(answering([text_chunk("a"), DONE], gap_s=1.0), every_s=0.5, max_concurrency=1)
    assert summarize(records).peak_concurrency == 1
    assert offsets_s(records, [record.due_s for record in records]) == pytest.approx([0.0, 2.0, 4.0, 6.0])
    assert [record.ttft_s for record in records] == pytest.approx([1.0, 2.5, 4.0, 5.5])
    assert [record.client_lag_s for record in records] == pytest.approx([0.0] * 4, abs=1e-9)


async def test_a_closed_loop_counts_from_the_place_that_became_free() -> None:
    """Timeouts too: the last request waits six seconds for its place."""
    async with serving(answering([text_chunk("a"), DONE], gap_s=1.0)) as url:
        target = LoadTarget(url=url, model="m", timeout_s=3.0, max_concurrency=2)
        records = await run_load(target, make_requests(8, SHAPE), None, clock=asyncio.get_running_loop().time)
    assert offsets_s(records, [record.sent_s for record in records]) == pytest.approx([0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0])
    assert [record.ttft_s for record in records] == pytest.approx([1.0] * 8)
    report = summarize(records)
    assert (report.finished, report.peak_concurrency) == (8, 2)
    assert report.duration_s == pytest.approx(8.0)


async def test_a_burst_is_sent_one_by_one_which_is_not_the_clients_lag() -> None:
    """With --request-rate inf, the default, the last of a hundred requests was "late" by what sending ninety-nine takes: a void run."""
    loop = virtual_loop()

    def clock() -> float:
        loop.be_late(TICK_S)
        return loop.time()

    async with serving(answering([text_chunk("a"), DONE])) as url:
        records = await run_load(LoadTarget(url=url, model="m"), make_requests(20, SHAPE), [0.0] * 20, clock=clock)
    ordered = sorted(records, key=lambda record: record.sent_s or math.inf)
    for before, record in pairwise(ordered):
        assert record.intended_s == before.intended_s
        assert before.sent_s is not None
        assert before.due_s is not None
        assert record.due_s is not None
        assert before.due_s < record.due_s <= before.sent_s, "it was due when the one before it was sent"
    last_s = ordered[-1].send_delay_s
    assert last_s is not None
    assert summarize(records).burst_send_s == last_s > 20 * TICK_S
    assert all((record.client_lag_s or 0.0) < last_s / 4 for record in records)


async def test_places_are_handed_on_in_turn_and_not_to_cancelled_tasks() -> None:
    loop = virtual_loop()
    limit = ConcurrencyLimit(1, clock=loop.time)
    assert await limit.acquire() == -math.inf
    first, gone, last = (asyncio.create_task(limit.acquire()) for _ in range(3))
    await asyncio.sleep(1)
    gone.cancel()
    freed_s = loop.time()
    limit.release()
    loop.be_late(1)
    assert await first == freed_s, "the time of the release, not that of the task"
    assert not last.done()
    limit.release()
    assert await last == freed_s + 1
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

    records = await load(handler, 2, every_s=0.0, timeout_s=0.5, max_concurrency=1)
    assert [record.error for record in records] == ["timeout", "timeout"]
    assert num_requests == [record.sent_s is None for record in records].count(True) == 1
    assert [record.end_s - record.intended_s for record in records] == pytest.approx([0.5, 0.5])


async def test_every_way_to_fail_is_a_record() -> None:
    number = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal number
        number += 1
        if number == 1:
            error = {"error": {"code": "overloaded", "type": "rate_limit_error", "message": "9 wait already"}}
            return web.json_response(error, status=429, headers={"Retry-After": "7"})
        if number == 2:
            return await stream(request, [text_chunk("a")])
        if number == 3:
            return await stream(request, [text_chunk("a"), {"error": {"code": "replica_lost"}}, DONE])
        await asyncio.sleep(60)
        raise AssertionError("the client should have left")

    records = await load(handler, timeout_s=0.5)
    assert [record.error for record in records] == ["429 overloaded", "stream ended early", "in-band replica_lost", "timeout"]
    assert [record.retry_after_s for record in records] == [7.0, None, None, None]
    assert records[-1].end_s - records[-1].intended_s == pytest.approx(0.5)
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
        return await stream(request, [broken if number == 1 else text_chunk("a"), DONE])

    records = await load(handler, 3)
    assert [record.error for record in records] == ["broken stream", None, None]
    assert records[0].detail


async def test_bytes_that_are_not_utf8_are_a_broken_stream() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await stream(request, [])
        await response.write(b'data: {"choices": "\xff"}\n\n')
        return response

    assert [record.error for record in await load(handler, 1)] == ["broken stream"]


@pytest.mark.socket
async def test_a_port_without_a_server_is_a_failure_and_no_exception() -> None:
    (record,) = await run_load(LoadTarget(url="http://127.0.0.1:9", model="m"), make_requests(1, SHAPE), [0.0])
    assert record.error is not None
    assert record.error.startswith("connection")
    assert "127.0.0.1:9" in record.detail
