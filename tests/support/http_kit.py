"""Speaks HTTP/1.1 by hand: sends exact bytes, reads answers and event streams, and leaves whenever a test wants to leave."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from patience import PATIENCE_S

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_LINE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, which has exactly these keys. Raises AssertionError for anything else."""
        found: dict[str, Any] = self.json()["error"]
        assert set(found) == {"message", "type", "param", "code"}, found
        return found


def request_bytes(
    method: str, path: str, body: object = None, *, key: str | None = None, headers: Mapping[str, str] | None = None, close: bool = True
) -> bytes:
    """A request. body: bytes as they are, anything else as JSON. A header whose value is "" is left out."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = {"host": "localhost", "connection": "close" if close else "keep-alive"}
    if body is not None:
        lines |= {"content-type": "application/json", "content-length": str(len(data))}
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    lines |= dict(headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


class Connection:
    """One connection, aborted when the block is left: nothing is waited for."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=MAX_LINE_BYTES)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.writer.transport.abort()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer. Raises IncompleteReadError when the server closed instead."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        return int(lines[0].split()[1]), headers

    async def reply(self) -> Reply:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(status, headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self.reader.readline()).strip() or b"0", 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def events(self) -> AsyncIterator[str]:
        """`data:` payloads of an event stream, [DONE] included; comments are skipped."""
        rest = b""
        async for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                for line in event.split(b"\n"):
                    if line.startswith(b"data: "):
                        yield line[6:].decode()


async def ask(port: int, method: str, path: str, body: object = None, *, key: str | None = None, **more: Any) -> Reply:
    async with asyncio.timeout(PATIENCE_S), Connection(port) as connection:
        await connection.send(request_bytes(method, path, body, key=key, **more))
        return await connection.reply()


@dataclass(slots=True)
class Answer:
    """What a stream told until it ended, per choice.

    tokens   bytes of each token, where log-probabilities were asked for
    error    the in-band error body
    is_done  [DONE] came
    """

    status: int = 0
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_done: bool = False
    num_chunks: int = 0

    def take(self, event: str) -> None:
        assert not self.is_done, "an event after [DONE]"
        if event == "[DONE]":
            self.is_done = True
            return
        data = json.loads(event)
        self.num_chunks += 1
        if "error" in data:
            self.error = data["error"]
            return
        self.usage = data.get("usage") or self.usage
        for choice in data["choices"]:
            self._take_choice(choice["index"], choice)

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        assert index not in self.finish, "an event after the end"
        self.text[index] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            self.tokens[index].append(bytes(entry["bytes"]))
        if choice["finish_reason"] is not None:
            self.finish[index] = choice["finish_reason"]


async def stream(
    port: int,
    path: str,
    body: Mapping[str, Any],
    *,
    key: str | None = None,
    leave_after: int | None = None,
    patience_s: float = PATIENCE_S,
) -> Answer:
    """A streamed answer.

    leave_after  hang up after so many events; 0: as soon as the request is sent
    """
    answer = Answer()
    async with asyncio.timeout(patience_s), Connection(port) as connection:
        await connection.send(request_bytes("POST", path, {**body, "stream": True}, key=key))
        if leave_after == 0:
            return answer
        answer.status, headers = await connection.head()
        if headers.get("transfer-encoding") != "chunked":
            answer.error = json.loads(await connection.reader.readexactly(int(headers["content-length"])))["error"]
            return answer
        async for event in connection.events():
            answer.take(event)
            if leave_after is not None and answer.num_chunks >= leave_after:
                break
    return answer
