"""What well-known clients send, as they send it, and what they read in our answers.

Shapes and patterns were read in the sources of the versions named beside them; the clients themselves are not needed here.
"""

from __future__ import annotations

from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, events_of

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
    if either.label != "foreign":  # a foreign server says at the end how many tokens its prompt has
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
