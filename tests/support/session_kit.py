"""Builds gateways that share a store of sessions, and asks for turns of a session as a client does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from gateway_kit import MODEL, FakeReplica, TestBench, events_of, eventually, open_bench

from headrace.core.request import EngineRequest
from headrace.text.folder import TextModel

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def benches(text: TextModel, store: Mapping[str, Any], **changes: Any) -> AsyncIterator[tuple[TestBench, TestBench]]:
    """Two gateways of one store. store: a part of a configuration, `state` or `store`"""
    async with open_bench(text, **store, **changes) as first, open_bench(text, **store, **changes) as second:
        yield first, second


async def turn(bench: TestBench, session: str, *said: str, key: str | None = None, **fields: Any) -> httpx2.Response:
    headers = {"x-session-id": session} | ({} if key is None else {"authorization": f"Bearer {key}"})
    body = {"model": MODEL, "messages": [user(text) for text in said], **fields}
    return await bench.client.post(CHAT, json=body, headers=headers)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def history(bench: TestBench, session: str) -> list[dict[str, Any]]:
    found = await bench.client.get(f"/v1/sessions/{session}")
    assert found.status_code == 200, found.text
    messages: list[dict[str, Any]] = found.json()["messages"]
    return messages


def text_of(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        deltas = [choice["delta"].get("content", "") for event in events_of(response.text) for choice in event["choices"]]
        return "".join(deltas)
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


def prompt_of(bench: TestBench, replica: FakeReplica | None = None) -> str:
    request: EngineRequest = (replica or bench.replica).requests[-1]
    return bench.replica.text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


async def idle(*opened: TestBench) -> None:
    """Until no claim is on its way back."""
    for bench in opened:
        await eventually(lambda bench=bench: bench.gateway.service.stages.sessions.num_pending == 0)  # type: ignore[misc]


def roles(messages: Sequence[Mapping[str, Any]]) -> str:
    """The first letters of the messages' roles."""
    return "".join(message["role"][0] for message in messages)
