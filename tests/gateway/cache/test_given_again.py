"""Tests that answers given again equal the first ones: tool calls, reasoning, several choices, log-probabilities; whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from gateway_kit import TestBench, chat_body, events_of, eventually, open_bench

from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

PATH = "/v1/chat/completions"
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a caf\u00e9"}}\n</tool_call>'
SAID = f"<think>\nhm, which \U0001f389?\n</think>\n\nLet me look.\n\n{CALL}\n{CALL}"
SHAPES: dict[str, dict[str, Any]] = {
    "calls": {"tools": [FIND]},
    "calls of several choices": {"tools": [FIND], "n": 3},
    "hidden reasoning": {"include_reasoning": False},
    "reasoning in the text": {"separate_reasoning": False},
    "logprobs": {"tools": [FIND], "logprobs": True, "top_logprobs": 3, "n": 2},
    "cut": {"tools": [FIND], "max_tokens": 100},
}


@pytest.fixture
async def bench(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text, cache={"enabled": True}) as opened:
        opened.replica.said = SAID
        yield opened


def shown(answer: httpx2.Response) -> Any:
    """All that a client reads, without the answer's own id and time."""
    assert answer.status_code == 200, answer.text
    parts = events_of(answer.text) if answer.headers["content-type"].startswith("text/event-stream") else [answer.json()]
    return [{name: value for name, value in part.items() if name not in ("id", "created")} for part in parts]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("reuse", ["cache", "key"])
async def test_nothing_of_an_answer_differs_when_it_is_given_again(
    bench: TestBench, reuse: str, fields: dict[str, Any], stream: bool
) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = chat_body(temperature=0 if reuse == "cache" else 1, **fields, **streamed)
    headers = {"idempotency-key": "k"} if reuse == "key" else {}
    answers = []
    for _ in range(2):
        answers.append(await bench.client.post(PATH, json=body, headers=headers))
        await eventually(
            lambda: not bench.gateway.service.stages.answer_cache.num_computing and not bench.gateway.service.stages.replays.claims
        )
        bench.replica.said = "Something else."
    assert len(bench.replica.requests) == 1
    assert shown(answers[0]) == shown(answers[1])
    for name in ('"tool_calls":[{', '"reasoning_content":'):  # the other shapes show neither
        assert (name in answers[1].text) is ("tools" in fields)


async def test_a_stream_and_a_whole_answer_of_one_entry_have_the_same_calls(bench: TestBench) -> None:
    whole = await bench.chat(temperature=0, tools=[FIND])
    stream = await bench.chat(temperature=0, tools=[FIND], stream=True)
    assert [answer.headers["x-headrace-cache"] for answer in (whole, stream)] == ["miss", "hit"]
    (choice,) = whole.json()["choices"]
    deltas = [part["choices"][0]["delta"] for part in events_of(stream.text)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == choice["message"]["reasoning_content"]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert [piece["id"] for piece in pieces if "id" in piece] == [call["id"] for call in choice["message"]["tool_calls"]]
    arguments = ["".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == number) for number in range(2)]
    assert arguments == [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
