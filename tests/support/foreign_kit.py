"""Provides scripted OpenAI-compatible servers, which send what a test says, and gateways over them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway_kit import MODEL, TestBench, open_bench

from headrace.gateway.upstream.foreign.upstream import TEMPLATE_TOKENS
from headrace.text.folder import TextModel

FAR = "far"
HELLO = [{"role": "user", "content": "Hello"}]
RESERVED_TOKENS = len(json.dumps(HELLO, separators=(",", ":"))) + TEMPLATE_TOKENS
"""For that prompt, and what it costs where no server counts it."""

DONE = b"data: [DONE]\n\n"


def far_models(*ports: int, **fields: Any) -> list[dict[str, Any]]:
    """A model whose servers listen at these ports of loopback, in this order; fields: of each."""
    return [{"name": FAR, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1", "model": MODEL, **fields} for port in ports]}]


class ScriptedServer:
    """Answers every request with the same bytes.

    answer   the body of a request -> the bytes of its whole answer, instead of `pieces`
    before   whole answers to the first requests, one each
    pages    path -> bytes of the whole answer to a GET; a GET of any other path gets 404
    gets     paths that were asked for by GET; polls: the heads of these requests
    pause_get_s  before the answer to a GET
    hangs    the connection stays open afterwards
    repeat   sent for ever afterwards
    pause_s  after each piece
    """

    def __init__(
        self,
        *pieces: bytes,
        hangs: bool = False,
        repeat: bytes = b"",
        pause_s: float = 0.0,
        pages: dict[str, bytes] | None = None,
        before: tuple[bytes, ...] = (),
        pause_get_s: float = 0.0,
        answer: Callable[[dict[str, Any]], bytes] | None = None,
    ) -> None:
        self.answer = answer
        self.before = list(before)
        self.pages = pages or {}
        self.gets: list[str] = []
        self.polls: list[bytes] = []
        self.pause_get_s = pause_get_s
        self.pieces = pieces
        self.hangs = hangs
        self.repeat = repeat
        self.pause_s = pause_s
        self.heads: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_sent = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await reader.readuntil(b"\r\n\r\n")
            if asked.startswith(b"GET "):
                self.gets.append(asked.split(b" ")[1].decode())
                self.polls.append(asked)
                await asyncio.sleep(self.pause_get_s)
                writer.write(self.pages.get(self.gets[-1], head("404 Not Found", "text/plain")))
                await writer.drain()
                return
            self.heads.append(asked)
            length = next(int(line.split(b":")[1]) for line in asked.lower().split(b"\r\n") if line.startswith(b"content-length"))
            self.bodies.append(json.loads(await reader.readexactly(length)))
            if self.before:
                writer.write(self.before.pop(0))
                await writer.drain()
                return
            for piece in self.pieces if self.answer is None else (self.answer(self.bodies[-1]),):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self.pause_s)
            while self.repeat:
                writer.write(self.repeat)
                await writer.drain()
                self.num_sent += len(self.repeat)
                await asyncio.sleep(self.pause_s)
            if self.hangs:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(*servers: ScriptedServer) -> AsyncIterator[list[int]]:
    opened = [await asyncio.start_server(server, "127.0.0.1", 0) for server in servers]
    try:
        yield [each.sockets[0].getsockname()[1] for each in opened]
    finally:
        for each in opened:
            each.close()


@asynccontextmanager
async def scripted(text: TextModel, *servers: ScriptedServer, **fields: Any) -> AsyncIterator[TestBench]:
    async with listening(*servers) as ports, open_bench(text, models=far_models(*ports, **fields)) as near:
        yield near


def head(status: str = "200 OK", kind: str = "text/event-stream", *more: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"content-type: {kind}", "connection: close", *more, "", ""]).encode()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str, finish: str | None = None, index: int = 0, **delta: Any) -> bytes:
    return event(choices=[{"index": index, "delta": {"content": text, **delta}, "finish_reason": finish}])


def page(body: bytes, kind: str = "application/json") -> bytes:
    return head("200 OK", kind, f"content-length: {len(body)}") + body
