"""Tests that chunks written while the request's task sleeps are those that the task would have written: behind one switch, the room in the
socket.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from foreign_kit import DONE, FAR, ScriptedServer, head, said, scripted
from foreign_kit import event as sent_event
from gateway_kit import MODEL, TestBench, chat_body, dial, events_of, eventually, metric, open_bench, post, say, serving

from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.http import sse
from headrace.gateway.http.exchange import Exchange
from headrace.text.folder import TextModel
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

SAID = 'na\u00efve caf\u00e9 \U0001f389 stop \u65e5\u672c\u8a9e "quoted" \\ and\nlines. The quick brown fox jumps over the lazy dog.'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat n": (CHAT, {"n": 3, "max_tokens": 40}),
    "chat logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 20}),
    "chat stop": (CHAT, {"stop": ["stop"]}),
    "chat stop, several": (CHAT, {"stop": ["jumps", "fox j"], "n": 2, "include_stop_str_in_output": True}),
    "chat usage": (CHAT, {"stream_options": {"include_usage": True}}),
    "chat length": (CHAT, {"max_tokens": 7, "ignore_eos": True}),
    "completion": (COMPLETIONS, {"prompt": "Hello"}),
    "completion n": (COMPLETIONS, {"prompt": "Hello", "n": 2, "stop": ["lazy"]}),
    "completion echo": (COMPLETIONS, {"prompt": "Hello", "echo": True, "max_tokens": 12}),
    "completion echo, logprobs": (COMPLETIONS, {"prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 12}),
    "completion prompts": (COMPLETIONS, {"prompt": ["Hello", "world"], "n": 2, "max_tokens": 20}),
    "completion min tokens": (COMPLETIONS, {"prompt": "Hello", "stop": ["a"], "min_tokens": 10}),
}


class DirectWrites:
    """Counts them; `is_off` sends everything through the task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.is_off = False
        has_room, write_now = Exchange.has_room, Exchange.write_now

        def counted(exchange: Exchange, body: bytes) -> None:
            self.count += 1
            write_now(exchange, body)

        monkeypatch.setattr(Exchange, "write_now", counted)
        monkeypatch.setattr(Exchange, "has_room", property(lambda exchange: not self.is_off and has_room.__get__(exchange)))


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> DirectWrites:
    return DirectWrites(monkeypatch)


async def answer(port: int, path: str, fields: dict[str, Any]) -> str:
    """The event stream of one request, chunked framing undone."""
    body = {**(chat_body() if path == CHAT else {"model": MODEL}), "seed": 1, **fields, "stream": True}
    async with dial(port) as (reader, writer):
        writer.write(post(path, body, "connection: close"))
        data = await reader.read(-1)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), data
    assert rest.endswith(b"\r\n0\r\n\r\n")
    return b"".join(unframed(rest)).decode()


def unframed(rest: bytes) -> list[bytes]:
    """The HTTP chunks of a body. Fails where a length is wrong."""
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]
    return parts


def whole(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client has at the end: by choice the text, the log-probabilities and how it ended; the usage; the constants of every chunk."""
    made: dict[str, Any] = {}
    for event in events:
        constants = {key: value for key, value in event.items() if key not in ("choices", "usage", "id", "created")}
        assert made.setdefault("constants", constants) == constants
        made["usage"] = event.get("usage")
        for choice in event["choices"]:
            found = made.setdefault(choice["index"], {"text": "", "roles": [], "logprobs": [], "ends": []})
            delta = choice.get("delta", {})
            found["text"] += choice.get("text", delta.get("content", ""))
            found["roles"] += [delta["role"]] if "role" in delta else []
            found["logprobs"] += [choice["logprobs"]] if choice["logprobs"] else []
            found["ends"] += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
            assert len(found["ends"]) <= 1
    return made


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_is_the_same_written_directly_and_by_its_task(bench: TestBench, direct: DirectWrites, name: str) -> None:
    path, fields = REQUESTS[name]
    bench.replica.said = SAID
    async with serving(bench.gateway) as port:
        found = events_of(await answer(port, path, fields))
        num_direct, direct.is_off = direct.count, True
        expected = events_of(await answer(port, path, fields))
    assert whole(found) == whole(expected)
    assert direct.count == num_direct
    if not ({"logprobs", "prompts"} & {*name.replace(",", "").split()}):
        assert num_direct > 3, "ordinary tokens take the short way"


async def test_a_stream_of_a_foreign_server_is_the_same_written_directly_and_by_its_task(text: TextModel, direct: DirectWrites) -> None:
    words = [said(f"{number} ") for number in range(20)]
    usage = sent_event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 20})
    server = ScriptedServer(head(), *words, said("end", "stop"), usage, DONE, pause_s=0.005)
    async with scripted(text, server) as near, serving(near.gateway) as port:
        fields = {"model": FAR, "stream_options": {"include_usage": True}}
        found = events_of(await answer(port, CHAT, fields))
        num_direct, direct.is_off = direct.count, True
        expected = events_of(await answer(port, CHAT, fields))
        num_finished = metric(near.gateway, "headrace_time_per_output_token_seconds_count", model=FAR, replica="foreign-0")
    assert whole(found) == whole(expected)
    assert dict[Any, Any](whole(found))[0]["text"] == "".join(f"{number} " for number in range(20)) + "end"
    assert direct.count == num_direct
    assert num_direct > 10, "ordinary tokens take the short way"
    assert num_finished == 2, "tokens written directly count as all do"


async def test_tokens_are_counted_and_timed_on_the_short_way_too(bench: TestBench, direct: DirectWrites) -> None:
    names = [f"headrace_{what}_seconds_count" for what in ("time_to_first_token", "inter_token_latency", "time_per_output_token")]
    seen = []
    async with serving(bench.gateway) as port:
        for direct.is_off in (False, True):
            before = [metric(bench.gateway, name, model=MODEL, replica="r0") for name in names]
            await answer(port, CHAT, {"max_tokens": 9, "ignore_eos": True})
            seen.append([metric(bench.gateway, name, model=MODEL, replica="r0") - was for name, was in zip(names, before, strict=True)])
    assert seen == [[1, 8, 1], [1, 8, 1]]


async def test_the_engine_is_told_of_a_stop_string_found_on_the_short_way(bench: TestBench, direct: DirectWrites) -> None:
    bench.replica.said = SAID
    async with serving(bench.gateway) as port:
        await answer(port, CHAT, {"stop": ["quick"]})
    assert direct.count > 3
    [(_, index, keep_tokens, reason)] = bench.replica.finished
    ids = bench.replica.text.tokenizer.encode(SAID, add_special_tokens=False)
    assert (index, reason) == (0, FinishReason.STOP)
    assert bench.replica.text.tokenizer.decode(ids[:keep_tokens]).endswith("quick")


async def test_an_engine_that_fails_after_direct_chunks_ends_the_stream_with_its_error(bench: TestBench, direct: DirectWrites) -> None:
    def broken(request: EngineRequest, stream: ReplicaStream) -> None:
        async def run() -> None:
            for token_id in (40, 41, 42, 43):
                say(stream, SequenceUpdate(request_id=request.request_id, epoch=0, index=0, token_ids=(token_id,)))
                await asyncio.sleep(0.005)
            bench.replica.die()

        bench.replica.tasks.add(asyncio.create_task(run()))

    bench.replica.go.clear()
    bench.replica.on_submit = broken
    async with serving(bench.gateway) as port:
        events = await answer(port, COMPLETIONS, {"prompt": "x", "max_tokens": 50})
    assert direct.count >= 2
    assert "[DONE]" not in events
    *chunks, error = events_of(events)
    said = bench.replica.text.tokenizer.decode([40, 41, 42, 43])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said
    assert error["error"]["type"]


async def test_a_client_that_leaves_between_direct_chunks_is_cancelled(bench: TestBench, direct: DirectWrites) -> None:
    bench.replica.token_delay_s = 0.002
    async with serving(bench.gateway) as port, dial(port) as (_, writer):
        writer.write(post(CHAT, chat_body(stream=True, ignore_eos=True)))
        await eventually(lambda: direct.count > 3)
        writer.transport.abort()
        await eventually(lambda: len(bench.replica.cancelled) == 1)
        await eventually(lambda: not bench.gateway.service.pipeline.watch.streams)


async def test_a_client_that_does_not_read_plain_tokens_is_cut_off(
    text: TextModel, direct: DirectWrites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way ends where the socket has no room: what the engine goes on to say is bounded as ever."""
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 100_000)

    def flood(request: EngineRequest, stream: ReplicaStream) -> None:
        async def run() -> None:
            while not stream.is_ended:
                stream.put_plain_row(0, tuple(range(40, 90)) * 20)
                await asyncio.sleep(0.001)

        bench.replica.tasks.add(asyncio.create_task(run()))

    async with open_bench(text) as bench, serving(bench.gateway) as port:
        bench.replica.go.clear()
        bench.replica.on_submit = flood
        async with dial(port, limit=1024) as (_, writer):
            writer.write(post(CHAT, chat_body(stream=True, ignore_eos=True)))
            await eventually(lambda: bool(bench.replica.cancelled))
            await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
            assert direct.count > 0


async def test_pipelined_streams_are_answered_one_after_the_other(bench: TestBench, direct: DirectWrites) -> None:
    """The connection knows only of the last request; an earlier one, still being answered, is written by its task."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 12, "ignore_eos": True, "stream": True, "seed": 1}
    async with serving(bench.gateway) as port, dial(port) as (reader, writer):
        writer.write(post(COMPLETIONS, body) + post(COMPLETIONS, body, "connection: close"))
        data = (await reader.read(-1)).decode()
    first, second = data.split("HTTP/1.1 200 OK")[1:]
    streams = [b"".join(unframed(part.partition("\r\n\r\n")[2].encode())).decode() for part in (first, second)]
    assert whole(events_of(streams[0])) == whole(events_of(streams[1]))
    assert direct.count > 3


async def test_a_fault_of_ours_on_the_short_way_ends_one_request(bench: TestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens on the connection's way from the engine: the neighbours must not feel it."""
    bench.replica.token_delay_s = 0.002

    def broken(exchange: Exchange, body: bytes) -> None:
        if b'"index":1' in body:
            raise ZeroDivisionError
        exchange.connection.write_chunk(body)

    monkeypatch.setattr(Exchange, "write_now", broken)
    async with serving(bench.gateway) as port:
        good, bad = await asyncio.gather(answer(port, CHAT, {"max_tokens": 30}), answer(port, CHAT, {"max_tokens": 30, "n": 2}))
    assert good.endswith("data: [DONE]\n\n")
    assert "[DONE]" not in bad
    assert events_of(bad)[-1]["error"]
    assert len(bench.replica.cancelled) == 1


async def test_pings_keep_their_place_between_direct_chunks(text: TextModel, direct: DirectWrites) -> None:
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        bench.gateway.service.pipeline.watch.ping_s = 0.3
        bench.replica.token_delay_s = 0.7
        said = await answer(port, COMPLETIONS, {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert said.count(": ping\n\n") == 2, "one before the second token and one before the third"
    assert said.endswith("data: [DONE]\n\n")
    assert direct.count >= 1
    assert len(events_of("\n\n".join(part for part in said.split("\n\n") if part != ": ping"))) == 3
