"""Tests clients that leave a stream and come back at another gateway over the same store: real processes, one engine, the real wire."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gateway_processes import ENGINE, GATEWAY, PATIENCE_S, Child, Site, child
from http_kit import CHAT, COMPLETIONS, Connection, ask, request_bytes
from redis_kit import RedisServer
from wire_kit import socket_dir

from headrace.bundled import bundled_path
from headrace.gateway.http.sse import NO_EVENT

pytestmark = pytest.mark.process

NUM_TOKENS = 60
NUMERICS = {"weights": "ab", "kernels": "fake"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "n": 3, "stop": ["zz", "qq"]}),
    (COMPLETIONS, {"prompt": "Once", "logprobs": 2, "stream_options": {"include_usage": True}}),
]


@dataclass
class TwoGateways:
    gateways: list[Child]
    engine: Child

    @property
    def ports(self) -> list[int]:
        return [gateway.facts["port"] for gateway in self.gateways]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with socket_dir() as folder:
        yield folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[tuple[Child, dict[str, Any]]]:
    text_folder = bundled_path("headrace-tiny")
    assert text_folder is not None
    engine = {"replica": "r0", "address": f"unix:{folder}/e0", "engine": {"model": str(text_folder)}}
    (folder / "engine.json").write_text(json.dumps({**engine, "fake": {"step_seconds": 0.01, "numerics": NUMERICS}}))
    with child(ENGINE, folder / "engine.json") as started:
        started.wait_ready()
        yield started, {"name": "tiny", "folder": str(text_folder), "replicas": [{"name": "r0", "address": engine["address"]}]}


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def two(request: pytest.FixtureRequest, folder: Path, engine: tuple[Child, dict[str, Any]]) -> Iterator[TwoGateways]:
    process, model = engine
    with ExitStack() as stack:
        where: dict[str, Any] = {"state": str(folder)}
        if request.param == "redis":
            server = RedisServer(folder)
            stack.callback(server.stop)
            server.start()
            where = {"store": {"url": server.url}}
        path = folder / f"{request.param}.json"
        options = {"port": 0, "request_log": "off", **where, "timeouts": {"drain_s": 0.01}}
        path.write_text(json.dumps({"models": [model], **options}))
        gateways = [stack.enter_context(child(GATEWAY, path)) for _ in range(2)]
        for gateway in gateways:
            url = f"http://127.0.0.1:{gateway.wait_ready()['port']}"
            Site(gateway, [], url).wait_until("/ready", 200)
        yield TwoGateways(gateways, process)


@dataclass
class Seen:
    """What a client has of an answer. last: the id of its last event"""

    text: dict[int, str] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    answer_id: str = ""
    last: str = ""
    num_events: int = 0
    is_done: bool = False

    def take(self, event: bytes) -> None:
        lines = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        if lines[b"data"] == b"[DONE]":
            self.is_done = True
            return
        data = json.loads(lines[b"data"])
        assert "error" not in data, data
        assert self.answer_id in ("", data["id"])
        self.answer_id, self.last, self.num_events = data["id"], lines[b"id"].decode(), self.num_events + 1
        self.usage = data.get("usage") or self.usage
        for choice in data["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.text[choice["index"]] = self.text.get(choice["index"], "") + text
            self.tokens += (choice["logprobs"] or {}).get("tokens", [])
            if choice["finish_reason"]:
                assert choice["index"] not in self.finish
                self.finish[choice["index"]] = choice["finish_reason"]

    @property
    def answer(self) -> object:
        return self.text, self.tokens, self.finish, self.usage


def body_of(number: int, num_tokens: int) -> tuple[str, bytes]:
    path, fields = BODIES[number % len(BODIES)]
    given = {"model": "tiny", "seed": number, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return path, json.dumps({**given, **fields}).encode()


async def read(port: int, number: int, seen: Seen, *, leave_after: int | None = None, num_tokens: int = NUM_TOKENS) -> int:
    """One connection of a client, which goes on after what it has seen. Returns the status."""
    path, body = body_of(number, num_tokens)
    headers = {"last-event-id": seen.last or NO_EVENT}
    async with asyncio.timeout(PATIENCE_S), Connection(port) as connection:
        await connection.send(request_bytes("POST", path, body, headers=headers))
        status, _ = await connection.head()
        rest = b""
        if status != 200:
            return status
        async for chunk in connection.chunks():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                if not event.startswith(b":"):
                    seen.take(event)
                if leave_after is not None and seen.num_events >= leave_after:
                    return status
    return status


async def come_back(port: int, number: int, seen: Seen, **options: Any) -> None:
    """Send the request again until it goes on: the gateway that was left writes its entry meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while (status := await read(port, number, seen, **options)) != 200:
            assert status in (404, 409), status
            await asyncio.sleep(0.02)


async def test_clients_leave_and_come_back_at_the_other_gateway(two: TwoGateways) -> None:
    first, second = two.ports

    async def one(number: int) -> None:
        whole, seen = Seen(), Seen()
        assert await read(first, number, whole) == 200
        assert whole.is_done
        assert await read(first, number, seen, leave_after=5 + number) == 200
        await come_back(second, number, seen, leave_after=25 + number)
        await come_back(first, number, seen)
        assert seen.is_done
        assert seen.answer == whole.answer

    await asyncio.gather(*(one(number) for number in range(6)))


@pytest.mark.parametrize("two", ["sqlite"], indirect=True)
async def test_the_engine_computes_nothing_for_a_client_that_is_away(two: TwoGateways) -> None:
    seen = Seen()
    await read(two.ports[0], 1, seen, leave_after=5)
    page = ""
    async with asyncio.timeout(PATIENCE_S):
        while 'headrace_requests_running{model="tiny",replica="r0"} 0.0' not in page:
            page = (await ask(two.ports[0], "GET", "/metrics")).body.decode()
    assert seen.num_events < 3 * NUM_TOKENS
    await come_back(two.ports[1], 1, seen)
    assert seen.is_done


@pytest.mark.parametrize("two", ["sqlite"], indirect=True)
async def test_a_stream_that_a_drain_cuts_goes_on_at_the_other_gateway(two: TwoGateways) -> None:
    """The last of `two`: one of them leaves in the middle of a stream and has no time for it; the engine waits meanwhile."""
    num_tokens = 2 * NUM_TOKENS
    staying, leaving = two.ports
    whole, seen = Seen(), Seen()
    assert await read(staying, 0, whole, num_tokens=num_tokens) == 200
    cut = asyncio.create_task(read(leaving, 0, seen, num_tokens=num_tokens))
    while seen.num_events < 5 and not cut.done():
        await asyncio.sleep(0.005)
    two.engine.signal(signal.SIGSTOP)
    two.gateways[1].signal(signal.SIGTERM)
    with pytest.raises(AssertionError, match="unavailable"):
        await cut
    assert await asyncio.to_thread(two.gateways[1].wait) == 75
    two.engine.signal(signal.SIGCONT)
    await come_back(staying, 0, seen, num_tokens=num_tokens)
    assert seen.answer == whole.answer
