"""Tests that a stream that its client leaves after any event, and continues at another gateway, is the unbroken one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from resume_kit import CHAT, COMPLETIONS, Event, answer_of, kept, send, streaming_body, two_gateways

from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

TEXT = 'na\u00efve \U0001f389 stop \u65e5 "q" \\\nIt jumps, lazy.'
"""Short, because nearly every event is left once, and each of these has two streams of up to as many events."""
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
CALLS = '<think>\n\U0001f389?\n</think>\n\nA.\n\n<tool_call>\n{"name": "find", "arguments": {"q": "f\u00e9"}}\n</tool_call>'
AT_ONCE = re.compile(r"(\d+) at once")
USAGE = {"stream_options": {"include_usage": True}}
EVERY_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, USAGE),
    "chat, n": (CHAT, {"n": 3, "max_tokens": 12, **USAGE}),
    "chat, usage in every event": (CHAT, {"n": 2, "max_tokens": 12, **EVERY_USAGE}),
    "chat, length": (CHAT, {"max_tokens": 7, "ignore_eos": True}),
    "chat, logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 16, **USAGE}),
    "chat, logprobs, n, stop": (CHAT, {"logprobs": True, "n": 2, "stop": ["stop"], **EVERY_USAGE}),
    "chat, stop": (CHAT, {"stop": ["jumps", "jum p"], **USAGE}),
    "chat, stop, included, n": (CHAT, {"stop": ["stop"], "n": 2, "include_stop_str_in_output": True}),
    "chat, schema": (CHAT, {"guided_regex": "(?s).*", "max_tokens": 12}),
    "chat, tools": (CHAT, {"tools": [FIND], **USAGE}),
    "chat, tools, n, logprobs": (CHAT, {"tools": [FIND], "n": 2, "logprobs": True}),
    "chat, tools, 7 at once": (CHAT, {"tools": [FIND], **EVERY_USAGE}),
    "chat, tools, 1000 at once": (CHAT, {"tools": [FIND], **USAGE}),
    "chat, tools, n, logprobs, 7 at once": (CHAT, {"tools": [FIND], "n": 2, "logprobs": True}),
    "chat, tools, n, logprobs, 1000 at once": (CHAT, {"tools": [FIND], "n": 2, "logprobs": True, **USAGE}),
    "chat, reasoning": (CHAT, USAGE),
    "chat, reasoning hidden": (CHAT, {"include_reasoning": False}),
    "completion": (COMPLETIONS, USAGE),
    "completion, n, stop": (COMPLETIONS, {"n": 2, "stop": ["lazy"]}),
    "completion, echo": (COMPLETIONS, {"echo": True, "max_tokens": 12, **EVERY_USAGE}),
    "completion, logprobs": (COMPLETIONS, {"logprobs": 2, "max_tokens": 12, **USAGE}),
    "completion, logprobs, stop": (COMPLETIONS, {"logprobs": 1, "stop": ["stop"]}),
    "completion, prompts": (COMPLETIONS, {"prompt": ["Hello", "world"], "n": 2, "max_tokens": 6, **USAGE}),
    "completion, stop tokens": (COMPLETIONS, {"stop_token_ids": [70, 71, 72, 73], "min_tokens": 2}),
}


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_left_after_any_event_goes_on_at_another_gateway(text: TextModel, tmp_path: Path, mode: str) -> None:
    path, fields = MODES[mode]
    body = streaming_body(path, **fields)
    is_parsed = "tools" in mode or "reasoning" in mode
    async with two_gateways(text, tmp_path) as (first, second):
        for bench in (first, second):
            bench.replica.said = CALLS if is_parsed else TEXT
            if at_once := AT_ONCE.search(mode):
                bench.replica.updates_at_once = int(at_once[1])
        unbroken = (await send(first.gateway, path, body)).events
        numbered = [event for event in unbroken if event.id]
        assert [event.number for event in numbered] == list(range(1, len(unbroken)))
        expected = answer_of(unbroken)
        for leave_after in cut_points(numbered):
            left = await send(first.gateway, path, body, leave_after=leave_after)
            begun = left.events
            assert len(begun) == leave_after
            await kept(first)
            continued = await send(second.gateway, path, body, last_event=begun[-1].id)
            assert continued.status == 200, continued.body
            rest = continued.events
            assert [event.number for event in rest if event.id] == list(range(leave_after + 1, leave_after + len(rest)))
            found = answer_of([*begun, *rest])
            assert found["constants"].pop("id") == begun[0].json()["id"]
            assert without_ids(found) == without_ids(expected), f"after event {leave_after}"
            await kept(second)
        continuations = second.replica.requests
        goes_on = any(request.output_ids for request in continuations)
        assert goes_on is ("1000 at once" not in mode), "the engine goes on after the ids that were read, where they are not all"
        assert all(request.numerics_digest for request in continuations if request.output_ids)
        assert all(bool(request.grammar) is ("guided_regex" in fields) for request in continuations)


MAX_CUTS = 40
"""Streams of at most so many events are left after each of them."""

EVERY = 5
"""A longer stream is left around every event of another form than the one before it, and after every fifth one of those in between."""


def cut_points(events: Sequence[Event]) -> list[int]:
    """Numbers of events after which a client leaves: a longer stream's events of one form differ in their text alone."""
    if len(events) <= MAX_CUTS:
        return list(range(1, len(events) + 1))
    forms = [form_of(event) for event in events]
    changes = {number for number in range(1, len(events)) if forms[number] != forms[number - 1]}
    return sorted({1, len(events) - 1, len(events), *changes, *(number + 1 for number in changes), *range(EVERY, len(events), EVERY)})


def form_of(event: Event) -> tuple[str, ...]:
    """The fields that an event gives of its sequences."""
    found: list[str] = []
    for choice in event.json()["choices"]:
        delta = choice.get("delta", {})
        found += [name for name, value in delta.items() if value is not None]
        found += [f"{name} {key}" for name, value in delta.items() if name == "tool_calls" for key in (*value[0], *value[0]["function"])]
        found.append(str(choice["finish_reason"]))
    return tuple(found)


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Ids of answers and of calls differ between two requests."""
    constants = {key: value for key, value in answer["constants"].items() if key not in ("id", "created")}
    choices = {
        index: {**choice, "calls": {number: {**call, "id": ""} for number, call in choice["calls"].items()}}
        for index, choice in answer.items()
        if isinstance(index, int)
    }
    return {**answer, "constants": constants, **choices}
