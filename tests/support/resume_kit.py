"""Plays a client of event streams that leaves after an event and comes back with its number, straight at the application."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asgi_connection import connected
from gateway_kit import MODEL, FakeReplica, TestBench, chat_body, eventually, open_bench, snapshot

from headrace.gateway.app import Gateway
from headrace.gateway.http.sse import NO_EVENT
from headrace.text.folder import TextModel
from headrace.wire.client import SeenLoad

NUMERICS = {"weights": "ab", "kernels": "avx512"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Event:
    """id: empty where the event has none"""

    id: str
    data: str

    @property
    def number(self) -> int:
        return int(self.id.partition("/")[2])

    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class Received:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def events(self) -> list[Event]:
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
            if lines:
                found.append(Event(lines.get("id", ""), lines["data"]))
        return found

    @property
    def num_events(self) -> int:
        """Of `events`, which takes long to ask after each part of a body."""
        return self.body.count(b"\n\n") - self.body.count(b": ping\n\n")

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def streaming_body(path: str, **fields: Any) -> bytes:
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "Hello"}
    return json.dumps({**body, "seed": 1, **fields, "stream": True}).encode()


async def send(
    gateway: Gateway,
    path: str,
    body: bytes,
    *,
    last_event: str = "",
    leave_after: int | None = None,
    key: str | None = None,
    on_body: Callable[[bytes], None] = lambda _: None,
) -> Received:
    """One request.

    leave_after  events after which the client leaves; events sent later are lost on the way, as they may be
    on_body      called with every part of the body
    """
    received, left = Received(), asyncio.Event()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [(b"last-event-id", (last_event or NO_EVENT).encode("latin-1"))]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        if message["type"] == "http.response.start":
            received.status = message["status"]
            received.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif not left.is_set():
            received.body += message["body"]
            on_body(message["body"])
            if leave_after is not None and received.num_events >= leave_after:
                received.body = b"".join(part + b"\n\n" for part in received.body.split(b"\n\n")[:leave_after])
                left.set()

    await connected(gateway)({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, take)
    return received


def answer_of(events: list[Event]) -> dict[str, Any]:
    """What a client has of all events together. Fails where constants differ, or a sequence ends twice."""
    made: dict[str, Any] = {}
    for event in events:
        if event.data == "[DONE]":
            assert "done" not in made
            made["done"] = True
            continue
        data = event.json()
        assert "error" not in data, data
        constants = {key: value for key, value in data.items() if key not in ("choices", "usage")}
        assert made.setdefault("constants", constants) == constants
        if data.get("usage") and not data["choices"]:
            assert made.setdefault("usage", data["usage"]) == data["usage"]
        for choice in data["choices"]:
            _add(made.setdefault(choice["index"], {"text": "", "reasoning": "", "roles": 0, "calls": {}, "logprobs": {}}), choice)
    return made


def _add(found: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {"content": choice.get("text")})
    assert "finish" not in found, "an event after the end"
    found["text"] += delta.get("content") or ""
    found["reasoning"] += delta.get("reasoning_content") or ""
    found["roles"] += "role" in delta
    for piece in delta.get("tool_calls", ()):
        call = found["calls"].setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
        call["id"] += piece.get("id", "")
        call["name"] += piece["function"].get("name", "")
        call["arguments"] += piece["function"]["arguments"]
    for name, values in (choice["logprobs"] or {}).items():
        found["logprobs"][name] = found["logprobs"].get(name, []) + values if isinstance(values, list) else values
    if choice["finish_reason"] is not None:
        found["finish"] = choice["finish_reason"], choice["stop_reason"]


@asynccontextmanager
async def two_gateways(text: TextModel, folder: Path, **changes: Any) -> AsyncIterator[tuple[TestBench, TestBench]]:
    """Two gateways over one store, each with a replica of its own, of equal numerics."""
    state = str(folder)
    async with (
        open_bench(text, state=state, **changes) as first,
        open_bench(text, state=state, **changes) as second,
    ):
        for bench in (first, second):
            equal(bench.replica)
        yield first, second


def equal(replica: FakeReplica) -> None:
    assert replica.info is not None
    replica.info = replace(replica.info, model=replace(replica.info.model, numerics=NUMERICS))
    replica.snapshot = SeenLoad(snapshot(), time.monotonic() + 1e6)


async def kept(bench: TestBench) -> None:
    await eventually(lambda: bench.gateway.service.stages.kept_streams.num_writing == 0)
