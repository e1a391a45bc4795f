"""Sends questions between the gateway workers of one port, over Unix sockets. A question is one line, with its argument after a tab;
a worker that does not answer in time has an empty answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType

from headrace.gateway.site.worker import GatewayWorker

log = logging.getLogger(__name__)

ANSWER_S = 1.0

MAX_ANSWER_BYTES = 64 << 20

Handler = Callable[[str], Awaitable[bytes]]


class Siblings:
    def __init__(self, worker: GatewayWorker, num_workers: int) -> None:
        self._worker = worker
        self._others = [index for index in range(num_workers) if index != worker.index]
        self._handlers: dict[str, Handler] = {}
        self._server: asyncio.Server | None = None

    def handle(self, question: str, handler: Handler) -> None:
        self._handlers[question] = handler

    async def __aenter__(self) -> Siblings:
        path = self._worker.socket(self._worker.index)
        path.unlink(missing_ok=True)  # of the process that was this worker before
        self._server = await asyncio.start_unix_server(self._serve, str(path))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()

    async def ask(self, question: str) -> dict[int, bytes]:
        """Worker -> its answer, this worker included."""
        answers = await asyncio.gather(*(self._ask(index, question) for index in self._others))
        return {self._worker.index: await self._handlers[question](""), **dict(zip(self._others, answers, strict=True))}

    async def ask_others(self, question: str, argument: str) -> list[bytes]:
        """argument: one line, no tab"""
        return await asyncio.gather(*(self._ask(index, f"{question}\t{argument}") for index in self._others))

    async def _ask(self, index: int, question: str) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(self._worker.socket(index)))
                try:
                    writer.write(question.encode() + b"\n")
                    return await _read_all(reader)
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            log.info("gateway worker %d does not answer: %r", index, error)
            return b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError):  # the other worker was killed, or asks what this one does not know
            async with asyncio.timeout(ANSWER_S):
                question, _, argument = (await reader.readline()).decode().rstrip("\n").partition("\t")
                if (handler := self._handlers.get(question)) is not None:
                    writer.write(await handler(argument))
                await writer.drain()
        writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while part := await reader.read(1 << 20):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)
