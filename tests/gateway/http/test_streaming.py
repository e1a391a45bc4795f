"""Tests answers when something goes wrong: the client leaves or does not read, the engine dies, nothing comes for a while."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from gateway_kit import MODEL, SAID, TestBench, chat_body, dial, events_of, eventually, metric, open_bench, post, serving, token_logprobs
from uvicorn.protocols.http import httptools_impl

from headrace.core.errors import Overloaded, Unavailable
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.http import connection, sse
from headrace.gateway.http.server import DRAIN_GRACE_S
from headrace.gateway.http.sse import TICK_S
from headrace.text.folder import TextModel
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
async def port(bench: TestBench) -> AsyncIterator[int]:
    async with serving(bench.gateway) as port:
        yield port


@pytest.fixture
async def either_port(either: TestBench) -> AsyncIterator[int]:
    async with serving(either.gateway) as port:
        yield port


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_is_cancelled_at_the_engine(either: TestBench, either_port: int, stream: bool) -> None:
    either.replica.go.clear()
    async with dial(either_port) as (_, writer):
        writer.write(post("/v1/chat/completions", chat_body(stream=stream)))
        await eventually(lambda: bool(either.replica.requests))
        writer.close()
        await eventually(lambda: either.replica.cancelled == [either.replica.requests[0].request_id])
        await eventually(lambda: either.gateway.service.open_requests.num_open == 0)
        assert metric(either.gateway, "headrace_requests_total", model=MODEL, replica=either.label, outcome="cancelled") == 1


@pytest.mark.usefixtures("over")
async def test_a_client_that_leaves_is_noticed_behind_a_pause(bench: TestBench, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading was paused when the end of the body came."""
    monkeypatch.setattr(httptools_impl, "HIGH_WATER_LIMIT", 10)
    bench.replica.go.clear()
    request = post("/v1/chat/completions", chat_body())
    async with dial(port) as (_, writer):
        writer.write(request[:-40])
        await eventually(lambda: bool(bench.gateway.service.memory.prompts.held))
        writer.write(request[-40:])
        await eventually(lambda: bool(bench.replica.requests))
        writer.close()
        await eventually(lambda: bench.replica.cancelled == [bench.replica.requests[0].request_id])


@pytest.mark.socket
async def test_client_that_leaves_mid_stream_is_cancelled(either: TestBench, either_port: int) -> None:
    either.replica.token_delay_s = 0.01
    async with dial(either_port) as (reader, writer):
        writer.write(post("/v1/chat/completions", chat_body(stream=True, ignore_eos=True)))
        await reader.readuntil(b"content")
        writer.transport.abort()
        await eventually(lambda: len(either.replica.cancelled) == 1)
        await eventually(lambda: not either.gateway.service.pipeline.watch.streams)


async def test_half_closed_client_counts_as_left(either: TestBench, either_port: int) -> None:
    either.replica.go.clear()
    async with dial(either_port) as (reader, writer):
        writer.write(post("/v1/chat/completions", chat_body()))
        writer.write_eof()
        counted = {"model": MODEL, "outcome": "cancelled"}
        await eventually(
            # It may be gone before its prompt was sent to a replica.
            lambda: sum(metric(either.gateway, "headrace_requests_total", replica=name, **counted) for name in ("", either.label)) == 1
        )
        assert await reader.read() == b""


@pytest.mark.parametrize("prompts", [1, 3])
async def test_every_prompt_of_a_request_is_cancelled(either: TestBench, either_port: int, prompts: int) -> None:
    either.replica.go.clear()
    async with dial(either_port) as (_, writer):
        writer.write(post("/v1/completions", {"model": MODEL, "prompt": ["x"] * prompts, "stream": True}))
        await eventually(lambda: len(either.replica.requests) == prompts)
        writer.close()
        await eventually(lambda: len(either.replica.cancelled) == prompts)


def flood(request: EngineRequest, stream: ReplicaStream) -> None:
    """Says some megabytes within half a second: tokens with twenty alternatives each, more every millisecond."""
    words = tuple(range(40, 50))
    logprobs = tuple(token_logprobs(token_id, 20) for token_id in words)
    for number in range(500):
        update = SequenceUpdate(request_id=request.request_id, epoch=0, index=0, token_ids=words, logprobs=logprobs)
        asyncio.get_running_loop().call_later(0.001 * number, stream.put, update)


LOUD = chat_body(stream=True, logprobs=True, top_logprobs=20)


@pytest.mark.usefixtures("over")
async def test_client_that_does_not_read_is_cut_off(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded in bytes; beyond them the connection goes and the engine is told."""
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 20_000)
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        bench.replica.go.clear()
        bench.replica.on_submit = flood
        async with dial(port, limit=1024) as (_, writer):
            writer.write(post("/v1/chat/completions", LOUD))
            await eventually(lambda: bool(bench.replica.cancelled), within_s=30)
            await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
            assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="r0", outcome="cancelled") == 1


async def test_logprobs_of_a_long_prompt_reach_a_client_that_reads_slowly_but_steadily(
    text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come all at once and are far more than what may wait otherwise: that is not the client's fault."""
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 20_000)
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        body = {"model": MODEL, "prompt": [40 + i % 50 for i in range(480)], "echo": True, "logprobs": 20, "n": 4, "max_tokens": 4}
        async with dial(port, limit=1024) as (reader, writer):
            writer.write(post("/v1/completions", {**body, "stream": True}))
            received = bytearray()
            while not received.endswith(b"data: [DONE]\n\n") and (part := await reader.read(16 << 10)):
                received += part
                received = received.removesuffix(b"\r\n0\r\n\r\n") if received.endswith(b"\r\n0\r\n\r\n") else received
                await asyncio.sleep(0.01)
        assert len(received) > 300_000
        assert received.endswith(b"data: [DONE]\n\n")
        assert not bench.replica.cancelled


@pytest.mark.usefixtures("over")
async def test_client_that_does_not_catch_up_in_time_is_cut_off(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 1 << 30)
    monkeypatch.setattr(connection, "WRITE_S", 20.0)
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        bench.replica.go.clear()
        bench.replica.on_submit = flood
        async with dial(port, limit=1024) as (_, writer):
            writer.write(post("/v1/chat/completions", LOUD))
            began = now()
            await eventually(lambda: bool(bench.replica.cancelled), within_s=30)
        assert 20 <= now() - began <= 20.5, "since more waited for it than the connection takes"


LARGE = chat_body(logprobs=True, top_logprobs=20, n=3, max_tokens=400, ignore_eos=True)
"""More than a megabyte, not streamed."""


@pytest.mark.usefixtures("over")
async def test_large_answer_reaches_a_client_that_reads_slowly_but_steadily(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """WRITE_S is for the next 64 KiB, not for the whole body."""
    write_s, bytes_per_s = 1.0, 100e3
    monkeypatch.setattr(connection, "WRITE_S", write_s)
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        began = now()
        body = await read_steadily(port, bytes_per_s)
        assert body.endswith(LAST_CHUNK)
        assert now() - began > 10 * write_s, "longer than a deadline for the whole would allow"
        assert len(json.loads(dechunked(body))["choices"]) == 3


LAST_CHUNK = b"\r\n0\r\n\r\n"


async def read_steadily(port: int, bytes_per_s: float) -> bytes:
    """The body of a large answer, or what came of it before the connection was cut."""
    body = bytearray()
    async with dial(port) as (reader, writer):
        writer.write(post("/v1/chat/completions", LARGE))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head, "it is made while it is read: nobody knows how long it will be"
        with suppress(ConnectionError):
            while not body.endswith(LAST_CHUNK) and (part := await reader.read(16 << 10)):
                body += part
                await asyncio.sleep(len(part) / bytes_per_s)
    return bytes(body)


def dechunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


@pytest.mark.usefixtures("over")
async def test_client_that_does_not_read_a_large_answer_is_cut_off_and_counted(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is one of the requests that are open: what waits for it is bounded by their number."""
    log = tmp_path / "log"
    monkeypatch.setattr(connection, "WRITE_S", 20.0)
    async with open_bench(text, request_log=str(log)) as bench, serving(bench.gateway) as port:
        open_requests = bench.gateway.service.open_requests
        async with dial(port, limit=1024) as (reader, writer):
            began = now()
            writer.write(post("/v1/chat/completions", LARGE))
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(began + 20 - 0.01 - now())
            assert open_requests.num_open == 1
            await asyncio.sleep(0.02)
            assert open_requests.num_open == 0
            assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="r0", outcome="cancelled") == 1
    line = json.loads(log.read_text())
    assert (line["outcome"], line["error"]) == ("cancelled", "slow_reader")


@pytest.mark.usefixtures("over")
async def test_client_that_leaves_in_the_middle_of_a_large_answer_is_counted(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench, serving(bench.gateway) as port:
        async with dial(port, limit=1024) as (reader, writer):
            writer.write(post("/v1/chat/completions", LARGE))
            await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
    line = json.loads(log.read_text())
    assert (line["outcome"], line["error"]) == ("cancelled", "client_left")


@pytest.mark.usefixtures("over")
async def test_shutdown_drops_a_client_that_does_not_take_the_rest_of_its_answer(text: TextModel, tmp_path: Path) -> None:
    """Its request ends by itself, with the reason it was given: no task is cancelled."""
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench, AsyncExitStack() as client:
        async with serving(bench.gateway) as port:
            reader, writer = await client.enter_async_context(dial(port, limit=1024))
            writer.write(post("/v1/chat/completions", LARGE))
            await reader.readuntil(b"\r\n\r\n")
            bench.gateway.service.open_requests.cut(Unavailable("shutting down"))
            began = now()
        assert DRAIN_GRACE_S <= now() - began < DRAIN_GRACE_S + 0.2
        assert bench.gateway.service.open_requests.num_open == 0
    line = json.loads(log.read_text())
    assert (line["outcome"], line["error"]) == ("failed", "unavailable")


async def test_backlog_leaves_as_one_chunk(either: TestBench) -> None:
    """Updates that piled up while nobody looked are coalesced per sequence."""
    either.replica.go.clear()

    def say(request: EngineRequest, stream: ReplicaStream) -> None:
        words = either.replica.text.tokenizer.encode(SAID, add_special_tokens=False)
        for number, token_id in enumerate(words):
            finish = FinishReason.LENGTH if number == len(words) - 1 else None
            stream.put(SequenceUpdate(request_id=request.request_id, epoch=0, index=0, token_ids=(token_id,), finish=finish))

    either.replica.on_submit = say
    events = events_of((await either.chat(stream=True)).text)
    assert [event["choices"][0]["delta"].get("content") for event in events] == ["", SAID]


async def test_replica_lost_before_the_first_token_is_503(either: TestBench) -> None:
    either.replica.on_submit = lambda request, stream: either.replica.die()
    for stream in (False, True):
        either.replica.__post_init__()
        either.replica.state = type(either.replica.state).CONNECTED
        response = await either.chat(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "unavailable"
        assert "secret" not in response.text


async def test_replica_lost_mid_stream_is_an_error_event(either: TestBench) -> None:
    either.replica.go.clear()

    def say(request: EngineRequest, stream: ReplicaStream) -> None:
        token_id = either.replica.text.tokenizer.encode("The", add_special_tokens=False)[0]
        stream.put(SequenceUpdate(request_id=request.request_id, epoch=0, index=0, token_ids=(token_id,)))
        asyncio.get_running_loop().call_later(0.05, either.replica.die)

    either.replica.on_submit = say
    response = await either.chat(stream=True)
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    error = events_of(response.text)[-1]["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "unavailable")
    assert "secret" not in response.text
    assert metric(either.gateway, "headrace_requests_total", model=MODEL, replica=either.label, outcome="failed") == 1


async def test_rejection_of_a_stream_keeps_its_status(bench: TestBench) -> None:
    bench.replica.on_submit = lambda request, stream: stream.reject(Overloaded("The queue is full.", retry_after_s=2.5))
    response = await bench.chat(stream=True)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"] == {"message": "The queue is full.", "type": "rate_limit_error", "param": None, "code": "overloaded"}


async def test_failed_sequence_shows_no_engine_words(bench: TestBench) -> None:
    bench.replica.go.clear()

    def say(request: EngineRequest, stream: ReplicaStream) -> None:
        words = "RuntimeError at 0x7f00deadbeef in /srv/headrace/runner.py"
        stream.put(SequenceUpdate(request_id=request.request_id, epoch=0, index=0, finish=FinishReason.ERROR, error=words))

    bench.replica.on_submit = say
    response = await bench.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "sequence_failed"
    assert "0x7f" not in response.text
    assert "/srv" not in response.text


async def test_deadline_before_the_end_is_504(bench: TestBench) -> None:
    bench.replica.go.clear()

    def say(request: EngineRequest, stream: ReplicaStream) -> None:
        stream.put(SequenceUpdate(request_id=request.request_id, epoch=0, index=0, finish=FinishReason.DEADLINE))

    bench.replica.on_submit = say
    response = await bench.chat()
    assert response.status_code == 504
    assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="r0", outcome="deadline") == 1


async def test_quiet_stream_gets_headers_and_comments(text: TextModel) -> None:
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        bench.replica.go.clear()
        async with dial(port) as (reader, writer):
            began = now()
            writer.write(post("/v1/chat/completions", chat_body(stream=True)))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 OK" in head
            assert now() == began + 10, "until then an error would have its status"
            for _ in range(2):
                began = now()
                await reader.readuntil(b": ping\n\n")
                assert 10 <= now() - began <= 10 + TICK_S
            bench.replica.go.set()
            await reader.readuntil(b"data: [DONE]\n\n")


async def test_framing_survives_whatever_a_model_says(either: TestBench) -> None:
    either.replica.said = 'data: [DONE]\n\ndata: {"error": 1}\r\n\r\nevent: x\n: y </script>'
    events = events_of((await either.chat(stream=True)).text)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == either.replica.said


async def test_requests_beyond_the_cap_are_refused(text: TextModel) -> None:
    async with open_bench(text, limits={"max_requests": 1}) as bench:
        bench.replica.go.clear()
        first = asyncio.create_task(bench.chat())
        await eventually(lambda: bool(bench.replica.requests))
        refused = await bench.chat()
        assert refused.status_code == 429
        bench.replica.go.set()
        assert (await first).status_code == 200
        assert (await bench.chat()).status_code == 200


async def test_draining_refuses_new_requests_and_finishes_old_ones(either: TestBench) -> None:
    either.replica.go.clear()
    first = asyncio.create_task(either.chat())
    await eventually(lambda: bool(either.replica.requests))
    either.gateway.service.open_requests.drain()
    refused = await either.chat()
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert (await either.client.get("/ready")).json()["reason"] == "draining"
    began = now()
    assert not await either.gateway.service.open_requests.wait_empty(20)
    assert now() == began + 20
    either.replica.go.set()
    assert (await first).status_code == 200
    assert await either.gateway.service.open_requests.wait_empty(5)


async def test_the_record_of_a_request_says_where_its_time_in_the_engine_went(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        assert (await bench.chat(max_tokens=3)).status_code == 200
    record = json.loads(log.read_text())
    spent = {name: record[f"{name}_s"] for name in ("queue_time", "prefill", "decode", "preempted", "stalled")}
    assert spent == {"queue_time": 0.001, "prefill": 0.25, "decode": 0.5, "preempted": 0.0, "stalled": 0.125}
