"""Tests a foreign server as upstream: our own gateway as one, and scripted ones that send what no server should."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from foreign_kit import DONE, FAR, HELLO, RESERVED_TOKENS, ScriptedServer, event, far_models, head, said, scripted
from gateway_kit import MAX_MODEL_LEN, MODEL, SAID, TestBench, chat_body, dial, events_of, eventually, metric, open_bench, post, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import virtual_loop

from headrace.core.errors import ConfigError, Unavailable
from headrace.core.ids import RequestId
from headrace.core.request import PriorityClass
from headrace.core.update import FinishReason
from headrace.gateway.config import config_from
from headrace.gateway.generation.run import DEADLINE_GRACE_S
from headrace.gateway.http.content_encoding import SLICE_BYTES
from headrace.gateway.upstream.foreign import attempt as foreign_attempt
from headrace.gateway.upstream.foreign import events as foreign_events
from headrace.gateway.upstream.foreign import server as foreign_server
from headrace.gateway.upstream.foreign import stream as foreign_stream
from headrace.gateway.upstream.foreign.errors import BrokenStream
from headrace.gateway.upstream.foreign.events import EventReader, EventSink, SilenceLimit
from headrace.gateway.upstream.foreign.session import read_key
from headrace.gateway.upstream.foreign.stream import MAX_ATTEMPTS, HttpStream
from headrace.gateway.upstream.generation_request import GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.model_config import ForeignConfig
from headrace.gateway.upstream.seam import OutputEvent, TokenUsage
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop


@asynccontextmanager
async def two_hops(text: TextModel, **fields: Any) -> AsyncIterator[tuple[TestBench, TestBench]]:
    """A gateway over a gateway: the near one, and the far one with its engine."""
    async with open_bench(text) as far, serving(far.gateway) as port, open_bench(text, models=far_models(port, **fields)) as near:
        yield near, far


def comparable(response: Any) -> Any:
    """An answer without what names the server, the moment, or counts what the other one cached."""
    if response.headers["content-type"].startswith("application/json"):
        body = response.json()
        return body.get("choices"), body.get("usage")
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for each in events_of(response.text):
        usage = each.get("usage") or usage
        for choice in each["choices"]:
            seen = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None})
            seen["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            seen["logprobs"] += ((choice.get("logprobs") or {}).get("content")) or []
            seen["finish"] = (choice["finish_reason"], choice.get("stop_reason")) if choice["finish_reason"] else seen["finish"]
    return choices, usage


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": HELLO}),
    ("chat", {"messages": HELLO, "max_tokens": 5, "temperature": 0}),
    ("chat", {"messages": HELLO, "n": 3, "seed": 7, "max_tokens": 9, "top_p": 0.5, "top_k": 3, "logit_bias": {"5": 1.5}}),
    ("chat", {"messages": HELLO, "stop": ["lazy"]}),
    ("chat", {"messages": HELLO, "stop": "lazy", "include_stop_str_in_output": True}),
    ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 6}),
    (
        "chat",
        {"messages": [*HELLO, {"role": "assistant", "content": "The"}], "continue_final_message": True, "add_generation_prompt": False},
    ),
    ("completions", {"prompt": "Hello", "max_tokens": 4}),
    ("completions", {"prompt": "Hello"}),
    ("completions", {"prompt": [5, 6, 7], "max_tokens": 4, "stop_token_ids": [3]}),
    ("completions", {"prompt": ["Hello", "Bye"], "n": 2, "max_tokens": 4, "ignore_eos": True}),
    ("completions", {"prompt": "Hello", "echo": True, "max_tokens": 4}),
    ("completions", {"prompt": "Hello", "echo": True, "max_tokens": 0}),
]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("kind", "body"), BODIES)
async def test_two_hops_answer_as_one_does(text: TextModel, kind: str, body: dict[str, Any], is_streaming: bool) -> None:
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[kind]
    more = {"stream": True, "stream_options": {"include_usage": True}} if is_streaming else {}
    async with two_hops(text) as (near, far):
        one = await far.client.post(path, json={"model": MODEL, **body, **more})
        two = await near.client.post(path, json={"model": FAR, **body, **more})
        assert (one.status_code, two.status_code) == (200, 200), two.text
        assert comparable(two) == comparable(one)
        half = len(far.replica.requests) // 2
        for first, second in zip(far.replica.requests[:half], far.replica.requests[half:], strict=True):
            assert first.prompt_ids == second.prompt_ids
            seed = body.get("seed")
            assert first.params.with_(seed=seed) == second.params.with_(seed=seed)


async def test_a_foreign_model_is_listed_ready_and_keeps_its_tokenizer(text: TextModel) -> None:
    async with two_hops(text) as (near, _):
        upstream = near.gateway.service.models.get(FAR).upstream
        await eventually(lambda: upstream.max_model_len is not None)
        (card,) = (await near.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"], card["status"]) == (FAR, MAX_MODEL_LEN, "ready")
        assert (await near.client.get("/ready")).status_code == 200
        for path, field in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            error = (await near.client.post(path, json={"model": FAR, **field})).json()["error"]
            assert (error["param"], error["code"]) == ("model", "invalid_value")


async def test_what_only_the_server_knows_is_unknown_to_admission(text: TextModel) -> None:
    async with two_hops(text) as (near, _):
        upstream = near.gateway.service.models.get(FAR).upstream
        request = GenerationRequest(request_id=RequestId("r"), prompt=PlainPrompts(prompts=["a", "b"]), sampling={"n": 2, "max_tokens": 5})
        made = await upstream.prepare(request, PrincipalFacts())
        assert (made.prompt_tokens, made.max_output_tokens, made.num_sequences) == (None, 20, 4)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5], "echo": True}, "echo"),
        ("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/chat/completions", {"messages": HELLO, "functions": [{"name": "now"}]}, "functions"),
        ("/v1/chat/completions", {"messages": HELLO, "temperature": 9}, "temperature"),
    ],
)
async def test_what_does_not_carry_over_is_refused_by_name(text: TextModel, path: str, fields: dict[str, Any], param: str) -> None:
    async with two_hops(text) as (near, far):
        response = await near.client.post(path, json={"model": FAR, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert far.replica.requests == []


async def test_a_priority_is_not_sent_and_named_as_ignored(text: TextModel) -> None:
    async with two_hops(text) as (near, far):
        response = await near.client.post("/v1/completions", json={"model": "far", "prompt": "a", "max_tokens": 1, "priority": "batch"})
        assert (response.status_code, response.headers["x-headrace-ignored"]) == (200, "priority")
        assert far.replica.requests[-1].priority is PriorityClass.STANDARD


async def test_the_servers_refusals_become_ours(text: TextModel) -> None:
    async with two_hops(text) as (near, far):
        response = await near.client.post("/v1/completions", json={"model": FAR, "prompt": [5] * MAX_MODEL_LEN})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        far.gateway.service.open_requests.drain()
        response = await near.client.post("/v1/chat/completions", json={"model": FAR, "messages": HELLO})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert response.headers["retry-after"] == "5"


async def test_tenants_share_no_cached_prefix_at_the_server(text: TextModel) -> None:
    keys = [{"key": "first-key-of-acme", "tenant": "acme"}, {"key": "other-key-of-beta", "tenant": "beta"}]
    async with open_bench(text) as far, serving(far.gateway) as port, open_bench(text, models=far_models(port), api_keys=keys) as near:
        for key in keys:
            headers = {"authorization": f"Bearer {key['key']}"}
            response = await near.client.post("/v1/chat/completions", json={"model": FAR, "messages": HELLO}, headers=headers)
            assert response.status_code == 200
        first, second = far.replica.requests
        assert first.salt != second.salt


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_client_that_leaves_ends_the_servers_work(text: TextModel, is_streaming: bool) -> None:
    async with two_hops(text) as (near, far), serving(near.gateway) as port:
        far.replica.token_delay_s = 0.01
        async with dial(port) as (reader, writer):
            body = {"model": FAR, "messages": HELLO, "stream": is_streaming, "ignore_eos": True}
            writer.write(post("/v1/chat/completions", body))
            if is_streaming:
                await reader.readuntil(b'"content":"')
            else:
                await eventually(lambda: bool(far.replica.requests))
        await eventually(lambda: len(far.replica.cancelled) == 1)
        await eventually(lambda: near.gateway.service.open_requests.num_open == 0)


async def test_a_deadline_ends_the_servers_work(text: TextModel) -> None:
    timeouts = {"request_s": 0.1}
    async with (
        open_bench(text) as far,
        serving(far.gateway) as port,
        open_bench(text, models=far_models(port), timeouts=timeouts) as near,
    ):
        far.replica.go.clear()
        began = virtual_loop().time()
        response = await near.client.post("/v1/chat/completions", json={"model": FAR, "messages": HELLO})
        assert response.status_code == 504
        assert virtual_loop().time() - began == pytest.approx(0.1 + DEADLINE_GRACE_S)
        (request,) = far.replica.requests
        await eventually(lambda: far.replica.cancelled == [request.request_id])


async def test_no_more_connections_are_opened_than_were_reckoned_with(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_server, "MAX_FOREIGN_CONNECTIONS", 2)
    async with two_hops(text) as (near, far):
        far.replica.go.clear()
        held = [asyncio.create_task(near.chat(model=FAR)) for _ in range(2)]
        await eventually(lambda: len(far.replica.requests) == 2)
        assert (await near.chat(model=FAR)).status_code == 429
        far.replica.go.set()
        assert [(await each).status_code for each in held] == [200, 200]
        assert (await near.chat(model=FAR)).status_code == 200


# ---------------------------------------------------------------------------------------------------------------- scripted servers


SECRET = "secret-of-the-server at 10.0.0.7"

REFUSED = {
    "status 500": (head("500 Internal Server Error", "text/plain") + SECRET.encode(), 503, "unavailable"),
    "redirect": (head("307 Temporary Redirect", "text/html", "location: /secret-elsewhere"), 503, "unavailable"),
    "unauthorized": (head("401 Unauthorized", "text/plain") + SECRET.encode(), 503, "unavailable"),
    "not found": (head("404 Not Found", "text/plain") + SECRET.encode(), 503, "unavailable"),
    "bad request": (
        head("400 Bad Request", "application/json") + json.dumps({"error": {"message": SECRET}}).encode(),
        400,
        "invalid_value",
    ),
    "overloaded": (head("429 Too Many Requests", "text/plain", "retry-after: 7") + SECRET.encode(), 429, "overloaded"),
    "no http": (b"\x00\xff" + SECRET.encode() + b"\r\n\r\n", 503, "unavailable"),
    "no answer": (b"", 503, "unavailable"),
    "no event stream": (head("200 OK", "application/json") + json.dumps({"choices": [], "x": SECRET}).encode(), 503, "unavailable"),
    "packed": (head("200 OK", "text/event-stream", "content-encoding: gzip") + b"\x1f\x8b" + SECRET.encode(), 503, "unavailable"),
    "garbage": (head() + b"data: {" + SECRET.encode() + b"\n\n", 503, "unavailable"),
    "deep": (head() + b'data: {"x": ' + b"[" * 100_000 + b"\n\n", 503, "unavailable"),
    "wrong types": (head() + event(choices=[{"index": "0", "delta": SECRET}]), 503, "unavailable"),
    "a choice too many": (head() + said("") + said("x", index=1) + DONE, 503, "unavailable"),
    "a content that is no text": (head() + said("") + event(choices=[{"index": 0, "delta": {"content": 5}}]) + DONE, 503, "unavailable"),
    "an error": (head() + event(error={"message": SECRET, "code": 500}), 503, "unavailable"),
    "nothing": (head() + DONE, 503, "unavailable"),
}


TRIED_AGAIN = ("status 500", "no answer")


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_server_that_answers_wrongly_is_an_error_of_ours_without_its_words(
    text: TextModel, name: str, is_streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent, status, code = REFUSED[name]
    server = ScriptedServer(sent)
    async with scripted(text, server) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=is_streaming))
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert "secret" not in response.text + str(response.headers) + caplog.text
        assert len(server.heads) == (MAX_ATTEMPTS if name in TRIED_AGAIN else 1), "nothing is followed"
        if status in (429, 503):
            assert response.headers["retry-after"] == ("7" if status == 429 else "1")


BROKEN = {
    "lost": b"",
    "garbage": b"data: garbage\n\n",
    "an error": event(error={"message": SECRET}),
    "the end": DONE,
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_stream_that_breaks_after_its_first_token_ends_in_a_retryable_error(text: TextModel, name: str) -> None:
    server = ScriptedServer(head() + said("one "), BROKEN[name])
    async with scripted(text, server) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=True))
        *_, last = events_of(response.text)
        assert response.status_code == 200
        assert "[DONE]" not in response.text
        assert last["error"]["code"] == "unavailable"
        assert "sent again" in last["error"]["message"]
        assert "secret" not in response.text
        assert metric(near.gateway, "headrace_requests_total", model=FAR, replica="foreign-0", outcome="failed") == 1


async def test_a_silent_server_is_given_up(text: TextModel) -> None:
    for pieces in ((), (head(),), (head(), b": ping\n\n")):
        async with scripted(text, ScriptedServer(*pieces, hangs=True), silence_s=0.1) as near:
            began = virtual_loop().time()
            response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))
            assert response.status_code == 503
            assert virtual_loop().time() - began == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("limited", "limit", "begin", "repeat"),
    [
        ((foreign_events, "MAX_EVENT_BYTES"), 200_000, b"data: ", b"x" * 10_000),
        ((foreign_events, "MAX_EVENT_BYTES"), 200_000, b"", b"data: " + b"x" * 1000 + b"\n"),
        ((foreign_events, "MAX_EVENT_BYTES"), 200_000, b"{", b"x" * 1000 + b"\n"),
        ((foreign_events, "MAX_ANSWER_BYTES"), 300_000, b"", said("x" * 1000)),
        ((foreign_events, "MAX_ANSWER_BYTES"), 300_000, b"", b": " + b"x" * 1000 + b"\n"),
    ],
)
async def test_an_endless_answer_is_cut_off(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, limited: tuple[object, str], limit: int, begin: bytes, repeat: bytes
) -> None:
    monkeypatch.setattr(*limited, limit)
    server = ScriptedServer(head() + begin, repeat=repeat)
    async with scripted(text, server) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))
        assert response.status_code == 503


async def test_a_server_is_read_no_faster_than_its_client_reads(text: TextModel) -> None:
    server = ScriptedServer(head(), repeat=said("x" * 1000))
    async with scripted(text, server) as near:
        upstream = near.gateway.service.models.get(FAR).upstream
        request = GenerationRequest(request_id=RequestId("r"), prompt=PlainPrompts(prompts=["a"]), sampling={})
        stream = (await upstream.prepare(request, PrincipalFacts())).stream()
        assert isinstance(stream, HttpStream)
        assert await stream.events()
        num_sent = -1
        while num_sent != server.num_sent:
            num_sent = server.num_sent
            await asyncio.sleep(0.1)
        assert foreign_stream.MAX_UNREAD_BYTES < stream.unread_bytes < 8 * foreign_stream.MAX_UNREAD_BYTES
        assert await stream.events()
        await stream.close()
        assert await stream.events() == []


async def test_many_events_of_a_sequence_are_joined_once(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    num_joined, joined = 0, OutputEvent.joined

    def count(events: list[OutputEvent]) -> OutputEvent:
        nonlocal num_joined
        num_joined += len(events)
        return joined(events)

    async with scripted(text, ScriptedServer(head() + said("x") * 300 + said("", "stop") + DONE)) as near:
        upstream = near.gateway.service.models.get(FAR).upstream
        request = GenerationRequest(request_id=RequestId("r"), prompt=PlainPrompts(prompts=["a"]), sampling={})
        stream = (await upstream.prepare(request, PrincipalFacts())).stream()
        monkeypatch.setattr(OutputEvent, "joined", count)
        found = []
        while events := await stream.events():
            found += events
        assert "".join(event.text for event in found) == "x" * 300
        assert num_joined == 301
        await stream.close()


BIG = "x" * 300_000
LARGE_EVENTS: dict[str, dict[str, Any]] = {
    "text": {"delta": {"content": BIG}},
    "reasoning": {"delta": {"reasoning": BIG}},
    "arguments": {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": BIG}}]}},
    "id": {"delta": {"tool_calls": [{"index": 0, "id": BIG}]}},
    "calls": {"delta": {"tool_calls": [{"index": number, "id": f"c{number}"} for number in range(3000)]}},
    "token": {"delta": {"content": "x"}, "logprobs": {"content": [{"token": BIG, "logprob": -1}]}},
    "alternatives": {
        "delta": {"content": "x"},
        "logprobs": {"content": [{"token": "x", "logprob": -1, "top_logprobs": [{"token": "x", "logprob": -1}] * 30_000}]},
    },
    "stop reason": {"delta": {}, "finish_reason": "stop", "stop_reason": BIG},
}


@pytest.mark.parametrize("name", LARGE_EVENTS)
async def test_everything_of_an_unread_event_counts(text: TextModel, name: str) -> None:
    sent = event(choices=[{"index": 0, **LARGE_EVENTS[name]}]) + event(choices=[], usage={"prompt_tokens": 1})
    async with scripted(text, ScriptedServer(head() + sent, hangs=True)) as near:
        upstream = near.gateway.service.models.get(FAR).upstream
        request = GenerationRequest(request_id=RequestId("r"), prompt=PlainPrompts(prompts=["a"]), sampling={})
        stream = (await upstream.prepare(request, PrincipalFacts())).stream()
        reading = asyncio.create_task(stream.events())
        most = 0
        while not reading.done():
            await asyncio.sleep(0)
            most = max(most, stream.unread_bytes)
        assert most > 300_000
        assert stream.unread_bytes == 0
        await stream.close()


async def test_reasoning_and_tool_calls_of_the_server_are_passed_on(text: TextModel) -> None:
    calls = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at"'}}]
    more = [{"index": 0, "function": {"arguments": ': "me"}'}}]
    pieces = (
        head(),
        event(choices=[{"index": 0, "delta": {"role": "assistant", "reasoning_content": "Let me "}}]),
        event(choices=[{"index": 0, "delta": {"reasoning": "see."}}]),
        event(choices=[{"index": 0, "delta": {"tool_calls": calls}}]),
        event(choices=[{"index": 0, "delta": {"tool_calls": more}, "finish_reason": "tool_calls"}]),
        event(choices=[], usage={"prompt_tokens": 11, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}),
        DONE,
    )
    async with scripted(text, ScriptedServer(*pieces)) as near:
        whole = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "Let me see."
        assert choice["message"]["tool_calls"] == [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "me"}'}}
        ]
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (11, 9)
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        streamed = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=True))
        choices = [each["choices"][0] for each in events_of(streamed.text)]
        assert "".join(each["delta"].get("reasoning_content", "") for each in choices) == "Let me see."
        pieces_of_calls = [call for each in choices for call in each["delta"].get("tool_calls", [])]
        assert "".join(call["function"].get("arguments", "") for call in pieces_of_calls) == '{"at": "me"}'
        assert choices[-1]["finish_reason"] == "tool_calls"


def called(call_id: str, name: str | None, arguments: str, index: int = 0) -> bytes:
    call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return event(choices=[{"index": 0, "delta": {"tool_calls": [call]}}])


@pytest.mark.parametrize(
    "pieces",
    [
        (called("a", "look", "{}"), called("b", "listen", "[]")),
        (called("a", "look", "{"), called("other", None, "}"), called("b", "listen", "[]", 1)),
        (called("a", "look", "{", 1), called("b", "listen", "[", 3), called("a", None, "}", 1), called("b", None, "]", 3)),
    ],
    ids=["all calls have one index", "each piece has an id of its own", "indices with gaps, pieces in turn"],
)
async def test_calls_that_a_server_numbers_in_its_own_way_stay_apart(text: TextModel, pieces: tuple[bytes, ...]) -> None:
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])
    async with scripted(text, ScriptedServer(head(), *pieces, end, DONE)) as near:
        (choice,) = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()["choices"]
        found = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
        assert found == [("a", "look", "{}"), ("b", "listen", "[]")]


async def test_what_the_server_is_asked(text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name of the model, our request id, its key; what the client did not say is not said."""
    file = tmp_path / "key"
    file.write_text("key-of-the-server\n")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = ScriptedServer(head() + said("Hello", "stop") + DONE)
    async with scripted(text, server, api_key_file=str(file), cache_salt=False) as near:
        headers = {"authorization": "Bearer of-the-client", "x-request-id": "mine", "cookie": "a=b"}
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR), headers=headers)
        assert response.status_code == 200
        assert response.json()["usage"] == {
            "prompt_tokens": RESERVED_TOKENS,
            "completion_tokens": 1,
            "total_tokens": RESERVED_TOKENS + 1,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    (sent,) = server.heads
    assert sent.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"authorization: bearer key-of-the-server" in sent.lower()
    assert f"x-request-id: {response.headers['x-request-id']}".encode() in sent.lower()
    assert b"of-the-client" not in sent
    assert b"cookie" not in sent.lower()
    assert server.bodies == [{"model": MODEL, "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}]


async def test_a_connection_whose_answer_ends_soon_after_done_is_used_again(text: TextModel) -> None:
    """Many servers write the end of the body by itself."""
    asked: dict[asyncio.StreamWriter, int] = {}
    answer = said("hi", "stop") + DONE

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while not (request := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET "):
                asked[writer] = asked.get(writer, 0) + 1
                await reader.readexactly(int(request.lower().partition(b"content-length:")[2].split()[0]))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                writer.write(b"%x\r\n%s\r\n" % (len(answer), answer))
                await asyncio.sleep(0.9 * foreign_events.END_OF_BODY_S)
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with open_bench(text, models=far_models(server.sockets[0].getsockname()[1])) as near:
        for _ in range(4):
            assert (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).status_code == 200
    server.close()
    assert list(asked.values()) == [4]


@pytest.mark.parametrize("more", [{"hangs": True}, {"repeat": b": ping\n\n", "pause_s": 0.02}], ids=["never says done", "goes on"])
async def test_a_server_is_listened_to_for_a_moment_only_after_its_last_sequence(text: TextModel, more: dict[str, Any]) -> None:
    async with scripted(text, ScriptedServer(head() + said(SAID, "stop"), **more)) as near:
        began = virtual_loop().time()
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))
        assert response.json()["choices"][0]["message"]["content"] == SAID
        assert virtual_loop().time() - began == pytest.approx(foreign_events.END_OF_STREAM_S)


async def test_counts_that_come_after_done_count_and_are_waited_for_only_a_moment(text: TextModel) -> None:
    done, late = said("one two", "stop") + DONE, event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
    flood = b"data: {}\n\n" * foreign_events.PIECE_BYTES
    for after, expected, seconds in (
        (late, (7, 3), 0.0),
        (b"", (RESERVED_TOKENS, 1), 0.0),
        (b"data: {\n\n" + late, (7, 3), 0.0),
        (flood + late, (RESERVED_TOKENS, 1), 0.0),
    ):
        async with scripted(text, ScriptedServer(head() + done, after)) as near:
            began = virtual_loop().time()
            usage = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == expected
            assert virtual_loop().time() - began == seconds
    async with scripted(text, ScriptedServer(head() + done, hangs=True)) as near:
        began = virtual_loop().time()
        assert (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).status_code == 200
        assert virtual_loop().time() - began == pytest.approx(foreign_events.LATE_USAGE_S)


async def test_a_server_that_never_counted_is_not_waited_for(text: TextModel) -> None:
    """Once it has counted it always is: a charge is worth the wait."""
    silent, late = head() + said("one two", "stop") + DONE, event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
    server, at_once, moment = ScriptedServer(silent, hangs=True), foreign_events.END_OF_BODY_S, foreign_events.LATE_USAGE_S
    async with scripted(text, server) as near:
        for pieces, pause_s, seconds, num_prompt in (
            ((silent,), 0.0, moment, RESERVED_TOKENS),
            ((silent,), 0.0, at_once, RESERVED_TOKENS),
            ((silent, late), 0.0, at_once, 7),
            ((silent, late), moment / 2, moment, 7),
            ((silent,), 0.0, moment, RESERVED_TOKENS),
            ((silent, late), moment / 2, moment, 7),
        ):
            server.pieces, server.pause_s = pieces, pause_s
            began = virtual_loop().time()
            usage = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()["usage"]
            assert usage["prompt_tokens"] == num_prompt
            assert virtual_loop().time() - began == pytest.approx(seconds)


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", "Network_Error", "MALFORMED_FUNCTION_CALL", ""])
async def test_a_sequence_that_ended_for_no_good_reason_is_not_complete(text: TextModel, reason: str, is_streaming: bool) -> None:
    async with scripted(text, ScriptedServer(head(), said("one "), said("two", reason), DONE)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=is_streaming))
        error = events_of(response.text)[-1]["error"] if is_streaming else response.json()["error"]
        assert (response.status_code, error["code"]) == (200 if is_streaming else 503, "unavailable")
        assert "[DONE]" not in response.text


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        *((word, "stop") for word in ("stop", "eos", "eos_token")),
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("SAFETY", "content_filter"),
    ],
)
async def test_the_reasons_that_servers_give_for_an_end(text: TextModel, reason: str, shown: str) -> None:
    async with scripted(text, ScriptedServer(head() + said("one", reason) + DONE)) as near:
        (choice,) = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one", shown)
        streamed = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=True))
        assert events_of(streamed.text)[-1]["choices"][0]["finish_reason"] == shown
        whole = (await near.client.post("/v1/completions", json={"model": FAR, "prompt": "x"})).json()
        assert whole["choices"][0]["finish_reason"] == shown


async def test_a_retry_gets_calls_with_the_same_ids_and_the_same_end(text: TextModel) -> None:
    calls = event(choices=[{"index": 0, "delta": {"tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}}])
    async with scripted(text, ScriptedServer(head(), calls, said("", "SAFETY"), DONE)) as near:
        answers = [
            await near.client.post("/v1/chat/completions", json=chat_body(model=FAR), headers={"idempotency-key": "a"}) for _ in range(2)
        ]
        assert answers[1].headers["idempotent-replayed"] == "true"
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        assert answers[1].json()["choices"][0]["finish_reason"] == "content_filter"


async def test_what_the_server_counts_is_not_counted_again(text: TextModel) -> None:
    def counted(text: str, count: int, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        return event(choices=[choice], usage={"prompt_tokens": 7, "completion_tokens": count})

    for pieces, count in (((counted("one", 1, "stop"),), 1), ((counted("one", 2), said("two", "stop")), 2)):
        async with scripted(text, ScriptedServer(head(), *pieces, DONE)) as near:
            usage = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, count)


TOO_LONG = "This model's maximum context length is 16 tokens. However, you requested 99. " + SECRET
OVERFLOWS: dict[str, dict[str, Any]] = {
    "code": {"error": {"message": SECRET, "code": "context_length_exceeded"}},
    "message": {"error": {"message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400}},
    "older": {"object": "error", "message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400},
}


@pytest.mark.parametrize("name", OVERFLOWS)
async def test_a_prompt_too_long_is_told_from_other_errors_however_its_body_comes(text: TextModel, name: str) -> None:
    body = json.dumps(OVERFLOWS[name]).encode()
    pieces = (head("400 Bad Request", "application/json"), *(body[at : at + 20] for at in range(0, len(body), 20)))
    async with scripted(text, ScriptedServer(*pieces, pause_s=0.01)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "secret" not in response.text


@pytest.mark.parametrize("coding", ["gzip", "deflate", "x-gzip", "br"])
async def test_the_body_of_an_error_is_unpacked_within_its_bound(text: TextModel, coding: str) -> None:
    error = json.dumps(OVERFLOWS["message"]).encode()
    for body, code in ((error, "context_length_exceeded"), (b" " * (1 << 20) + error, "invalid_value"), (b"", "invalid_value")):
        packed = zlib.compress(body) if coding == "deflate" else gzip.compress(body)
        pieces = (head("400 Bad Request", "application/json", f"content-encoding: {coding}"), packed)
        async with scripted(text, ScriptedServer(*pieces)) as near:
            response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value" if coding == "br" else code)
            assert "secret" not in response.text


LONGER_THAN_CONTEXT = "The input (99 tokens) is longer than the model's context length (16 tokens)."
REFUSED_IN_STREAM = {
    "vLLM and SGLang": (event(error={"object": "error", "message": SECRET, "type": "BadRequestError", "code": 400}), 400, "invalid_value"),
    "older": (event(object="error", message=SECRET, type="BadRequestError", code=400), 400, "invalid_value"),
    "too long": (event(error={"message": LONGER_THAN_CONTEXT, "code": 400}), 400, "context_length_exceeded"),
    "too many": (event(error={"message": SECRET, "code": 429}), 429, "overloaded"),
    "a text": (event(error=SECRET), 503, "unavailable"),
}


@pytest.mark.parametrize("name", REFUSED_IN_STREAM)
async def test_an_error_before_the_first_token_means_what_its_code_means_as_a_status(text: TextModel, name: str) -> None:
    sent, status, code = REFUSED_IN_STREAM[name]
    async with scripted(text, ScriptedServer(head() + b": ping\n\n" + sent + DONE)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=True))
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert "secret" not in response.text


BOTH = event(choices=[{"index": 0, "delta": {"content": "one two"}}]) + event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
WHOLE = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "one two"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}
STREAM, PLAIN = "text/event-stream", "application/json"
BODIES_READ: dict[str, tuple[bytes, ...]] = {
    "another type": (head("200 OK", "application/octet-stream"), BOTH + DONE),
    "no type": (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", BOTH + DONE),
    "a type in upper case": (head("200 OK", "TEXT/EVENT-STREAM; CHARSET=UTF-8"), BOTH + DONE),
    "created": (head("201 Created"), BOTH + DONE),
    "a chunk in each line": (head("200 OK", "application/x-ndjson"), BOTH.replace(b"data: ", b"").replace(b"\n\n", b"\n")),
    "a whole answer": (head("200 OK", PLAIN), json.dumps(WHOLE).encode()),
    "a whole answer over lines": (head("200 OK", PLAIN), json.dumps(WHOLE, indent=2).encode()),
    "a whole answer as an event": (head(), event(**WHOLE) + DONE),
    "a whole answer in a stream's type": (head(), json.dumps(WHOLE).encode()),
    "gzip": (head("200 OK", STREAM, "content-encoding: gzip"), gzip.compress(BOTH + DONE)),
    "deflate": (head("200 OK", STREAM, "content-encoding: Deflate"), zlib.compress(BOTH + DONE)),
    "a whole answer in gzip": (head("200 OK", PLAIN, "content-encoding: gzip"), gzip.compress(json.dumps(WHOLE).encode())),
    "no last line end": (head(), (BOTH + DONE).rstrip()),
    "cut off behind the end": (head("200 OK", STREAM, "transfer-encoding: chunked"), b"%x\r\n%b\r\n" % (len(BOTH), BOTH)),
}


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("name", BODIES_READ)
async def test_an_answer_in_another_kind_of_body_is_an_answer(text: TextModel, name: str, is_streaming: bool) -> None:
    async with scripted(text, ScriptedServer(*BODIES_READ[name], pause_s=0.01)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=is_streaming))
        assert response.status_code == 200
        choices, _ = comparable(response)
        if is_streaming:
            assert (choices[0]["text"], choices[0]["finish"]) == ("one two", ("stop", None))
            assert response.text.count("[DONE]") == 1
        else:
            assert (choices[0]["message"]["content"], choices[0]["finish_reason"]) == ("one two", "stop")
        assert metric(near.gateway, "headrace_upstream_attempts_total", model=FAR, replica="foreign-0", result="ok") == 1


async def test_a_packed_answer_is_as_bounded_as_a_plain_one(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign_events, "MAX_ANSWER_BYTES", 300_000)
    packed = gzip.compress(b": ping\n" * 100_000)
    async with scripted(text, ScriptedServer(head("200 OK", STREAM, "content-encoding: gzip"), packed)) as near:
        assert (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).status_code == 503
        assert "longer than 300000 bytes" in caplog.text


ODD = (
    event(
        choices=[{"index": "0", "delta": {"content": [{"type": "text", "text": "one "}, {"type": "image"}], "reasoning": 5}}], usage="none"
    ),
    event(choices=[{"delta": {"content": "two"}, "finish_reason": "END", "logprobs": [5]}], error={}),
    event(choices=[], usage={"prompt_tokens": 7.0, "completion_tokens": -1}),
)


async def test_a_server_with_odd_answers_stays_healthy_and_what_was_left_out_is_counted(text: TextModel) -> None:
    async with scripted(text, ScriptedServer(head(), *ODD, DONE)) as near:
        for _ in range(6):
            answer = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()
            assert answer["choices"][0]["message"]["content"] == "one two"
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 2)
        labels = {"model": FAR, "replica": "foreign-0"}
        for field, count in {"content_part": 1, "reasoning": 1, "usage": 2, "logprobs": 1, "call_id": 0}.items():
            assert metric(near.gateway, "headrace_upstream_fields_left_out_total", **labels, field=field) == 6 * count
        assert metric(near.gateway, "headrace_upstream_circuit_open", **labels) == 0


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_an_unknown_word_for_the_end_is_shown_beside_stop(text: TextModel, is_streaming: bool) -> None:
    async with scripted(text, ScriptedServer(head(), said("one "), said("two", "no-such-reason"), DONE)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=is_streaming))
        (choice,) = events_of(response.text)[-1]["choices"] if is_streaming else response.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "no-such-reason")


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("word", ["stop", "tool_calls", "tool_use", "STOP"])
async def test_calls_without_ids_reach_the_client_with_one_each(text: TextModel, word: str, is_streaming: bool) -> None:
    calls = [{"function": {"name": "look", "arguments": {"at": place}}} for place in ("me", "you")]
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": word}])
    pieces = [event(choices=[{"index": 0, "delta": {"tool_calls": [call]}}]) for call in calls]
    async with scripted(text, ScriptedServer(head(), *pieces, end, DONE, pause_s=0.01)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=is_streaming))
        if is_streaming:
            choices = [each["choices"][0] for each in events_of(response.text)]
            found = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
            assert [call["index"] for call in found] == [0, 1]
            assert choices[-1]["finish_reason"] == "tool_calls"
        else:
            (choice,) = response.json()["choices"]
            found = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
        assert [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in found] == [
            ("function", "look", '{"at": "me"}'),
            ("function", "look", '{"at": "you"}'),
        ]
        assert len({call["id"] for call in found}) == 2
        assert all(call["id"].startswith("call_") for call in found)


TOLERATED = {
    "a byte order mark": (b"\xef\xbb\xbf", said("one ")),
    "an empty finish reason": (event(choices=[{"index": 0, "delta": {"content": "one "}, "finish_reason": ""}]),),
    "no choices": (event(choices=None), said("one "), event(choices=[], usage={})),
    "usage without counts": (said("one "), event(choices=[], usage={"prompt_tokens": None, "completion_tokens": None})),
    "usage that is none": (event(choices=[], usage={"prompt_tokens": -1, "completion_tokens": "many"}), said("one ")),
    "a character that is none": (b'data: {"id": "\xff", "created": NaN, "choices": [{"delta": {"content": "one "}}]}\n\n',),
    "a refusal": (event(choices=[{"index": 0, "delta": {"content": None, "refusal": "one "}}]),),
}


@pytest.mark.parametrize("name", TOLERATED)
async def test_what_some_servers_send_besides_is_no_broken_answer_and_loses_no_text(text: TextModel, name: str) -> None:
    async with scripted(text, ScriptedServer(head(), *TOLERATED[name], said("two", "stop"), DONE)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))
        assert response.json()["choices"][0]["message"]["content"] == "one two"
        assert response.json()["usage"]["completion_tokens"] == 2


async def test_an_error_whose_body_does_not_end_is_an_answer_all_the_same(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_attempt, "ERROR_BODY_S", 0.1)
    for server in (
        ScriptedServer(head("400 Bad Request", "application/json") + b"{", hangs=True),
        ScriptedServer(head("400 Bad Request", "application/json"), repeat=b" " * 10_000),
    ):
        async with scripted(text, server) as near, asyncio.timeout(10):
            response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_what_nobody_foresaw_is_logged_and_a_retryable_error(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_streaming: bool
) -> None:
    async def read(self: EventReader, response: aiohttp.ClientResponse, sink: EventSink, **limits: Any) -> None:
        events: list[OutputEvent] = []
        self.answer.read(b'{"choices": [{"delta": {"content": "one"}}]}', events)
        sink.take(events)
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(EventReader, "read", read)
    async with scripted(text, ScriptedServer(head() + DONE)) as near:
        response = await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, stream=is_streaming))
        error = events_of(response.text)[-1]["error"] if is_streaming else response.json()["error"]
        assert error["code"] == "unavailable"
        assert "sent again" in error["message"]
        assert "ZeroDivisionError" in caplog.text
        assert "secret" not in response.text + caplog.text


async def test_an_address_that_cannot_be_looked_up_is_an_error(text: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    async with open_bench(text, models=[{"name": FAR, "upstreams": [{"url": "http://a..b/v1"}]}]) as near:
        upstream = near.gateway.service.models.get(FAR).upstream
        request = GenerationRequest(request_id=RequestId("r"), prompt=PlainPrompts(prompts=["a"]), sampling={})
        stream = (await upstream.prepare(request, PrincipalFacts())).stream()
        with pytest.raises(Unavailable):
            await stream.events()
        assert f"model {FAR}" in caplog.text
        await stream.close()


# ------------------------------------------------------------------------------------------------------------------- bytes to events


class Pieces:
    """Stands for aiohttp's response: headers, and a body in the given pieces."""

    def __init__(self, pieces: list[bytes], headers: dict[str, str]) -> None:
        self.headers = {"content-type": "text/event-stream; charset=utf-8", **headers}
        self.content = self
        self._pieces = [piece for piece in pieces if piece]

    async def read(self, size: int) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def is_eof(self) -> bool:
        return not self._pieces


class FoundEvents:
    """An `EventSink` that joins the events of each sequence."""

    has_room = True

    def __init__(self) -> None:
        self.found: dict[int, OutputEvent] = {}

    async def wait_for_room(self) -> None: ...

    def take(self, events: Sequence[OutputEvent]) -> None:
        for each in events:
            self.found[each.index] = OutputEvent.joined((self.found[each.index], each)) if each.index in self.found else each


async def read_events(reader: EventReader, pieces: list[bytes], headers: dict[str, str] | None = None) -> dict[int, OutputEvent]:
    """Everything a reader makes of the pieces, by sequence."""
    sink = FoundEvents()
    async with asyncio.timeout(None) as deadline:
        await reader.read(cast(aiohttp.ClientResponse, Pieces(pieces, headers or {})), sink, silence=SilenceLimit(deadline, 60.0))
    return sink.found


async def test_an_unknown_word_ends_a_whole_document_but_not_the_first_of_several_lines() -> None:
    whole = json.dumps(WHOLE).replace('"stop"', '"no-such-word"').encode()
    (found,) = (await read_events(EventReader(range(1), "key"), [whole], {"content-type": PLAIN})).values()
    assert (found.text, found.finish, found.stop_reason) == ("one two", FinishReason.STOP, "no-such-word")
    for body in (event(**json.loads(whole) | {"usage": None}), BOTH.replace(b'"stop"', b'"no-such-word"').replace(b"data: ", b"")):
        with pytest.raises(BrokenStream):
            await read_events(EventReader(range(1), "key"), [body], {"content-type": PLAIN})


async def test_other_tasks_run_between_the_parts_of_a_packed_piece() -> None:
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    with pytest.raises(BrokenStream):
        await read_events(EventReader(range(1), "key"), [gzip.compress(b"\n" * (32 * SLICE_BYTES))], {"content-encoding": "gzip"})
    counting.cancel()
    assert num_turns > 30


ANSWER = b"".join(
    [
        b": ping\r\n\r\nevent: message\r\n",
        said("caf\u00e9 ", index=1),
        said("one ") + said("", reasoning="hm"),
        said("two", "length").replace(b"\n", b"\r\n"),
        said("end", "stop", index=1),
        event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 5}),
        DONE,
    ]
)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=20))
@pytest.mark.pure
def test_an_answer_reads_the_same_wherever_it_is_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(ANSWER)]
    whole, cut = EventReader(range(2), "key"), EventReader(range(2), "key")
    expected = asyncio.run(read_events(whole, [ANSWER]))
    assert asyncio.run(read_events(cut, [ANSWER[a:b] for a, b in pairwise(places)])) == expected
    assert cut.answer.usage == whole.answer.usage == TokenUsage(3, 5, 0)
    assert [(each.text, each.reasoning, each.finish) for each in expected.values()] == [
        ("caf\u00e9 end", "", FinishReason.STOP),
        ("one two", "hm", FinishReason.LENGTH),
    ]


@settings(deadline=None)
@given(noise=st.binary(max_size=60), place=st.integers(0, len(ANSWER)), is_inserted=st.booleans())
@pytest.mark.pure
def test_a_damaged_answer_is_an_answer_or_a_broken_stream(noise: bytes, place: int, is_inserted: bool) -> None:
    damaged = ANSWER[:place] + noise + ANSWER[place if is_inserted else place + len(noise) :]
    reader = EventReader(range(2), "key")
    try:
        found = asyncio.run(read_events(reader, [damaged]))
    except BrokenStream:
        return
    assert set(found) == {0, 1}
    assert all(each.finish is not None for each in found.values())


# ------------------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("upstream", "where"),
    [
        ({"url": "ftp://host/v1"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "/v1"}, "url"),
        ({"url": "http://user:key@host/v1"}, "url"),
        ({"url": "http://host/v1?x=1"}, "url"),
        ({"url": "http://host:99999/v1"}, "url"),
        ({"url": "http://ho st/v1"}, "url"),
        ({"url": "http://[::1/v1"}, "url"),
        ({"url": "http://host/v1", "api_key_file": "a", "api_key_env": "B"}, "api_key_file"),
        ({"url": "http://host/v1", "silence_s": 0}, "silence_s"),
        ({"url": "http://host/v1", "silence_s": -1}, "silence_s"),
        ({"url": "http://host/v1", "silence_s": 1e9}, "silence_s"),
        ({"url": "http://host/v1", "order": -1}, "order"),
        ({"url": "http://host/v1", "name": "a b"}, "name"),
        ({"url": "http://169.254.169.254/v1"}, "url"),
        ({"url": "http://[fe80::1]/v1"}, "url"),
        ({"url": "http://2852039166/v1"}, "url"),
        ({"url": "http://0251.0376.0251.0376/v1"}, "url"),
        ({"url": "http://169.254.169.254./v1"}, "url"),
        ({"url": "http://[::ffff:169.254.169.254]/v1"}, "url"),
        ({"url": "http://host/v1", "ulr": "x"}, "ulr"),
    ],
)
@pytest.mark.pure
def test_a_wrong_upstream_is_refused_by_its_place(upstream: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from({"models": [{"name": FAR, "upstreams": [upstream]}]})
    assert refused.value.where == f"models[0].upstreams[0].{where}"


@pytest.mark.parametrize("host", ["10.0.0.7", "[::1]:8000", "[::ffff:10.0.0.7]", "gpu1", "gpu-1.example.org:8000", "a2.b3c", "localhost"])
@pytest.mark.pure
def test_an_address_or_name_of_any_form_is_a_server(host: str) -> None:
    assert ForeignConfig(url=f"http://{host}/v1").checked()


@pytest.mark.parametrize(
    "url",
    [
        "http//user:hidden@host/v1",
        "http://user:hidden@host:99999/v1",
        "http://user:hidden@at@host/v1",
        "http://user:12/hidden@host/v1",
        "http:/user:hidden@host/v1",
        "user:hidden@host",
        "htp://host/v1?key=hidden",
        "htp://host/v1#hidden",
    ],
)
@pytest.mark.pure
def test_a_mistyped_address_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from({"models": [{"name": FAR, "upstreams": [{"url": url}]}]})
    assert refused.value.where == "models[0].upstreams[0].url"
    assert "hidden" not in str(refused.value)
    assert ("api_key_file" in str(refused.value)) == ("@" in url)


@pytest.mark.pure
def test_a_model_has_replicas_or_a_foreign_server() -> None:
    url = [{"url": "http://host/v1"}]
    for model in ({"folder": "/x", "upstreams": url}, {"replicas": [{"name": "r", "address": "unix:/r"}]}, {}):
        with pytest.raises(ConfigError):
            config_from({"models": [{"name": FAR, **model}]})


@pytest.mark.pure
def test_a_key_file_that_others_may_read_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    for mode, is_named in ((0o600, False), (0o644, True)):
        path.chmod(mode)
        assert read_key(ForeignConfig(url="http://h/v1", api_key_file=str(path))) == "secret"
        assert (f"api_key_file: {path} is open to other users (mode {mode:04o}); chmod 600" in caplog.text) == is_named
    assert "secret" not in caplog.text.replace(str(path), "")


@pytest.mark.pure
def test_a_key_is_where_the_configuration_says_or_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", "from-the-environment")
    assert read_key(ForeignConfig(url="http://h/v1")) == ""
    assert read_key(ForeignConfig(url="http://h/v1", api_key_env="FAR_KEY")) == "from-the-environment"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "two").write_text("secret one\nsecret two")
    wrong: list[dict[str, Any]] = [
        {"api_key_env": "NO_KEY"},
        *({"api_key_file": str(tmp_path / name)} for name in ("none", "empty", "two")),
    ]
    for fields in wrong:
        with pytest.raises(ConfigError) as refused:
            read_key(ForeignConfig(url="http://h/v1", **fields))
        assert "secret" not in str(refused.value)
