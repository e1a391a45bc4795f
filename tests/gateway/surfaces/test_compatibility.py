"""Tests requests of well-known clients, as they send them, and what they read in our answers.

Shapes and patterns were read in the sources of the versions named beside them. OpenAI's own client is asked for its fields, the others are
not needed here.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, events_of, open_bench, serving
from openai.types import completion_create_params as completion_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params

from headrace.gateway.surfaces.dialect.field_table import CHAT, COMPLETIONS, RULES, Inside
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

GUIDELLM = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None,
    "ignore_eos": True,
}
"""guidellm 0.8, backends/openai/request_handlers.py: what every text request has."""


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 6}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 6}),
    ],
    ids=["chat", "completions"],
)
async def test_usage_grows_with_every_chunk(either: TestBench, path: str, fields: dict[str, Any]) -> None:
    """guidellm counts tokens by the usage of the last chunk it read."""
    events = events_of((await either.client.post(path, json={"model": MODEL, **fields, **GUIDELLM})).text)
    *chunks, last = events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] > 0
    assert last["choices"] == []
    if either.label != "foreign-0":  # a foreign server says at the end how many tokens its prompt has
        assert {chunk["usage"]["prompt_tokens"] for chunk in events} == {len(either.replica.requests[0].prompt_ids)}
    assert all(chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"] for chunk in events)


async def test_usage_of_a_chunk_is_its_choices(bench: TestBench) -> None:
    """vLLM's meaning: of the choice and its prompt. The last chunk counts all of them."""
    response = await bench.complete(prompt=["Hello", "Hello fox"], n=2, max_tokens=3, **GUIDELLM)
    *chunks, last = events_of(response.text)
    latest = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    lengths = [len(request.prompt_ids) for request in bench.replica.requests]
    assert {index: usage["prompt_tokens"] for index, usage in latest.items()} == {index: lengths[index // 2] for index in range(4)}
    assert [usage["completion_tokens"] for usage in latest.values()] == [3] * 4
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (sum(lengths), 12)


async def test_nothing_is_counted_where_only_the_prompt_is_shown(bench: TestBench) -> None:
    events = events_of((await bench.complete(echo=True, max_tokens=0, **GUIDELLM)).text)
    assert {event["usage"]["completion_tokens"] for event in events} == {0}


async def test_usage_in_every_chunk_needs_usage(bench: TestBench) -> None:
    response = await bench.chat(stream=True, stream_options={"continuous_usage_stats": True})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "stream_options.continuous_usage_stats")
    assert "include_usage = true beside it" in error["message"]


def recognised_by_litellm(message: str) -> bool:
    """litellm 1.106, litellm_core_utils/exception_mapping_utils.py: ExceptionCheckers.is_error_str_context_window_exceeded. What it
    recognises becomes ContextWindowExceededError, which `context_window_fallbacks` of its router wait for."""
    return "this model's maximum context length is" in message.lower()


def recognised_by_langchain(code: str, message: str) -> bool:
    """langchain-openai 1.7, chat_models/base.py: _handle_openai_bad_request reads the error as openai prints it, code included. What it
    recognises becomes ContextOverflowError, which summarizing and trimming wait for."""
    return "context_length_exceeded" in f"Error code: 400 - {{'code': '{code}', 'message': '{message}'}}"


def counted(message: str) -> tuple[int, ...]:
    """openai-python's cookbook, Continue and others read the numbers by a pattern like this one."""
    pattern = r"maximum context length is (\d+) tokens\. However, you requested (\d+) tokens \((\d+) in the \w+, (\d+) in the completion\)"
    found = re.search(pattern, message)
    assert found, message
    return tuple(map(int, found.groups()))


LONG = "fox " * 300
SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("path", "fields", "param", "part"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages", "messages"),
        ("/v1/chat/completions", {**SHORT, "max_tokens": 600}, "max_tokens", "messages"),
        ("/v1/chat/completions", {**SHORT, "max_completion_tokens": 600}, "max_completion_tokens", "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt", "prompt"),
        ("/v1/completions", {"prompt": [5] * 600, "max_tokens": 7, "echo": True}, "prompt", "prompt"),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 600}, "max_tokens", "prompt"),
    ],
)
async def test_context_overflow_is_recognised(bench: TestBench, path: str, fields: dict[str, Any], param: str, part: str) -> None:
    response = await bench.client.post(path, json={"model": MODEL, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert recognised_by_litellm(error["message"])
    assert recognised_by_langchain(error["code"], error["message"])
    length, requested, prompt, completion = counted(error["message"])
    assert (length, requested) == (512, prompt + completion)
    assert completion == (fields.get("max_tokens") or fields.get("max_completion_tokens") or (16 if part == "prompt" else 1))
    assert error["message"].endswith(f"Please reduce the length of the {part} or completion.")
    assert not bench.replica.requests


async def test_overflow_that_is_seen_without_tokenizing_is_recognised(bench: TestBench) -> None:
    error = (await bench.chat(messages=[{"role": "user", "content": "fox " * 4000}])).json()["error"]
    assert recognised_by_litellm(error["message"])
    assert "you requested at least" in error["message"]
    assert error["code"] == "context_length_exceeded"


async def test_a_foreign_servers_overflow_is_recognised(text: TextModel) -> None:
    async with open_bench(text) as far, serving(far.gateway) as port:
        models = [{"name": MODEL, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]
        async with open_bench(text, models=models) as near:
            error = (await near.chat(max_tokens=600)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert recognised_by_litellm(error["message"])


@pytest.mark.parametrize(
    ("surface", "params"),
    [(CHAT, chat_params.CompletionCreateParamsStreaming), (COMPLETIONS, completion_params.CompletionCreateParamsStreaming)],
)
@pytest.mark.pure
def test_every_field_of_openais_own_client_has_a_row(surface: str, params: type) -> None:
    assert set(params.__annotations__) <= set(RULES[surface])


@pytest.mark.pure
def test_every_field_of_openais_messages_has_a_row() -> None:
    assert set(ChatCompletionAssistantMessageParam.__annotations__) <= set(RULES[Inside.MESSAGE])
    assert set(ChatCompletionUserMessageParam.__annotations__) <= set(RULES[Inside.MESSAGE])
    assert set(ChatCompletionContentPartTextParam.__annotations__) <= set(RULES[Inside.PART])
    assert set(ChatCompletionStreamOptionsParam.__annotations__) <= set(RULES[Inside.STREAM_OPTIONS])
