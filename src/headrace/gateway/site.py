"""Coordinates the gateway workers of one port: the number and part of each, questions between them, and the metrics page of all. Computes
the limits of memory charges and a tenant's share of every bound, and gives free memory back once no request runs.

Each takes its part of a limit on all requests of the site, and none borrows from another; a limit on one request is the same in each. A
question goes over a Unix socket as one line, with its argument after a tab; a worker that does not answer in time has an empty answer.

Reference cycles of a request wait for a garbage collection, which an idle process never starts, and the C library keeps freed memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from headrace.core.option import options
from headrace.gateway.access.memory_charges import ChargeLimits, MemoryLimits, RequestMemory
from headrace.gateway.http.config import Limits
from headrace.machine.resources import trim_heap
from headrace.observe.metrics import Metrics
from headrace.observe.tenant_metrics import ShownTenants

log = logging.getLogger(__name__)

ANSWER_S = 1.0
MAX_ANSWER_BYTES = 64 << 20
METRICS = "metrics"
OPEN_REQUESTS = "open requests"

SHARED_LIMITS = tuple(name for name, described in options(Limits) if described.is_shared)


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """index: from 0; a restarted worker keeps it"""

    index: int
    folder: Path

    @property
    def name(self) -> str:
        return f"gateway-{self.index}"

    def socket(self, index: int) -> Path:
        return self.folder / f"w{index}.sock"


def part_of(limits: Limits, num_workers: int, machine_bytes: int) -> Limits:
    if limits.max_prompt_bytes is None:
        limits = replace(limits, max_prompt_bytes=default_prompt_bytes(machine_bytes))
    return divided(limits, num_workers)


def divided(limits: Limits, num_workers: int) -> Limits:
    parts = {name: -(-getattr(limits, name) // num_workers) for name in SHARED_LIMITS if getattr(limits, name) is not None}
    return replace(limits, **parts)


Handler = Callable[[str], Awaitable[bytes]]


class Siblings:
    """The gateway workers of this port: asks the others and answers them."""

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


class SiteMetrics:
    """The metrics of all gateway workers of the port. Before `join`, of this worker alone."""

    def __init__(self, metrics: Metrics, num_open: Callable[[], Mapping[str, int]], share: TenantShare) -> None:
        """num_open: tenant -> its generating requests in this process; share: knows whether there are several tenants"""
        self._metrics, self._num_open, self.share = metrics, num_open, share
        self._siblings: Siblings | None = None

    def join(self, siblings: Siblings) -> None:
        self._siblings = siblings
        siblings.handle(METRICS, self._encoded_metrics)
        siblings.handle(OPEN_REQUESTS, self._encoded_num_open)

    async def page(self, accept: str, shown: ShownTenants) -> tuple[bytes, str]:
        return self._metrics.page(accept, None if self._siblings is None else await self._siblings.ask(METRICS), shown)

    async def num_open(self, shown: ShownTenants) -> int:
        """All workers that answer count; only one tenant's requests if `shown` excludes the site's series."""
        workers = [self._num_open()] if self._siblings is None else _counts(await self._siblings.ask(OPEN_REQUESTS))
        return sum(count for worker in workers for tenant, count in worker.items() if shown.has_site or shown.is_all or tenant == shown.own)

    async def _encoded_metrics(self, _argument: str) -> bytes:
        return self._metrics.encoded()

    async def _encoded_num_open(self, _argument: str) -> bytes:
        return json.dumps(self._num_open()).encode()


def _counts(answers: Mapping[int, bytes]) -> list[Mapping[str, int]]:
    counts: list[Mapping[str, int]] = []
    for answer in answers.values():
        with suppress(ValueError):  # no answer, or one of a worker that is being replaced by a newer version
            counts.append(json.loads(answer))
    return counts


CHECK_S = 1.0
MIN_PROMPT_BYTES = 40 << 20

MAX_REQUEST_BYTES = 32 << 20
"""For prompts, and for answers; a request with more is refused with 413."""

PROMPT_SHARE = 16
"""Prompts may take 1/N of the machine's memory."""

SEVERAL_TENANTS_SHARE = 0.25
"""Where `limits.max_tenant_share` is not set."""


def memory_limits(limits: Limits, machine_bytes: int, tenant_share: Callable[[], float]) -> MemoryLimits:
    prompts = limits.max_prompt_bytes or default_prompt_bytes(machine_bytes)
    return MemoryLimits(
        prompts=ChargeLimits(MAX_REQUEST_BYTES, prompts, tenant_share),
        answers=ChargeLimits(MAX_REQUEST_BYTES, limits.max_answer_bytes, tenant_share, keeps_reserve=True),
    )


def default_prompt_bytes(machine_bytes: int) -> int:
    return max(MIN_PROMPT_BYTES, machine_bytes // PROMPT_SHARE)


async def give_back_when_idle(memory: RequestMemory) -> None:
    """Until cancelled. Waits for two idle checks in a row: connections free some memory only after their request."""
    num_seen, num_left = memory.num_closed, 0
    while True:
        await asyncio.sleep(CHECK_S)
        if memory.num_closed != num_seen:
            num_seen, num_left = memory.num_closed, 2
        if num_left and memory.num_open == 0:
            num_left -= 1
            give_back()


def give_back() -> None:
    gc.collect()
    trim_heap()


class TenantShare:
    """The share of every bound that one tenant may fill. Changes with the configuration, and with the first stored key: from then on keys
    may be of several tenants.
    """

    def __init__(self, max_share: float | None, num_tenants: int) -> None:
        self._has_stored_keys = False
        self.change(max_share, num_tenants)

    def change(self, max_share: float | None, num_tenants: int) -> None:
        self._max_share, self._num_tenants = max_share, num_tenants

    def note_stored_keys(self) -> None:
        self._has_stored_keys = True

    def __call__(self) -> float:
        return self._max_share or (SEVERAL_TENANTS_SHARE if self.has_several else 1.0)

    @property
    def has_several(self) -> bool:
        """True with any stored key, since later ones may be of others."""
        return self._has_stored_keys or self._num_tenants > 1
