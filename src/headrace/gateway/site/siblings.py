"""What one gateway shows for all workers of its port (the metrics page, how many requests run), and the questions between these workers.

The only gateway of a port shows itself. One of several asks the other workers each time it is asked, over Unix sockets in the deployment's
private directory. A question is one line, its answer all that follows; `generation.kept_streams` asks with an argument after a tab. A
worker that does not answer in time, perhaps because it is being started again, has an empty answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType

from headrace.gateway.site.worker import GatewayWorker
from headrace.observe.metrics import Metrics
from headrace.observe.tenant_metrics import ShownTenants

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Seconds that a worker has to answer another one."""

MAX_ANSWER_BYTES = 64 << 20
"""Longest answer that is read."""


Handler = Callable[[str], Awaitable[bytes]]


class Siblings:
    """`async with` answers the other workers' questions until the block ends."""

    def __init__(self, worker: GatewayWorker, num_workers: int, answers: Mapping[str, Callable[[], bytes]]) -> None:
        """answers: by question, what this worker answers"""
        self._worker = worker
        self._others = [index for index in range(num_workers) if index != worker.index]
        self._answers = answers
        self._handlers: dict[str, Handler] = {}
        self._server: asyncio.Server | None = None

    def handle(self, question: str, handler: Handler) -> None:
        """Answer this question, which has an argument, by what `handler` makes of that."""
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
        """Worker -> its answer, this one's included; empty for one that did not answer."""
        answers = await asyncio.gather(*(self._ask(index, question) for index in self._others))
        return {self._worker.index: self._answers[question](), **dict(zip(self._others, answers, strict=True))}

    async def ask_others(self, question: str, argument: str) -> list[bytes]:
        """The other workers' answers to a question with an argument (one line, no tab); empty from one that did not answer."""
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
                question, tab, argument = (await reader.readline()).decode().rstrip("\n").partition("\t")
                if tab and (handler := self._handlers.get(question)) is not None:
                    writer.write(await handler(argument))
                elif not tab and (answer := self._answers.get(question)) is not None:
                    writer.write(answer())
                await writer.drain()
        writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the other end closes. Raises ValueError for more than MAX_ANSWER_BYTES."""
    parts: list[bytes] = []
    num_bytes = 0
    while part := await reader.read(1 << 20):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)


METRICS = "metrics"
OPEN_REQUESTS = "open requests"


class SiteMetrics:
    """siblings: the other workers; None: there are none"""

    def __init__(self, metrics: Metrics, num_open: Callable[[], Mapping[str, int]], siblings: Siblings | None = None) -> None:
        """num_open: tenant -> its generating requests in this process"""
        self._metrics, self._num_open, self.siblings = metrics, num_open, siblings

    async def page(self, accept: str, shown: ShownTenants) -> tuple[bytes, str]:
        """See `Metrics.page`."""
        return self._metrics.page(accept, None if self.siblings is None else await self.siblings.ask(METRICS), shown)

    async def num_open(self, shown: ShownTenants) -> int:
        """Generating requests of all workers that answer: all of them, or one tenant's where the site's series are not shown."""
        workers = [self._num_open()] if self.siblings is None else _counts(await self.siblings.ask(OPEN_REQUESTS))
        return sum(count for worker in workers for tenant, count in worker.items() if shown.has_site or shown.is_all or tenant == shown.own)


def _counts(answers: Mapping[int, bytes]) -> list[Mapping[str, int]]:
    """Tenant -> requests, of each worker that answered."""
    counts: list[Mapping[str, int]] = []
    for answer in answers.values():
        with suppress(ValueError):  # no answer, or one of a worker that is being replaced by a newer version
            counts.append(json.loads(answer))
    return counts


def answers_of(metrics: Metrics, num_open: Callable[[], Mapping[str, int]]) -> Mapping[str, Callable[[], bytes]]:
    """What a worker answers to the other ones."""
    return {METRICS: metrics.encoded, OPEN_REQUESTS: lambda: json.dumps(num_open()).encode()}
