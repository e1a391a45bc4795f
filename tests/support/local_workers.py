"""Does the jobs and frames of the worker processes in the process of a test: their reference implementation."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from functools import partial

from headrace.core.errors import CheckpointError
from headrace.gateway.text_host import TextContext
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.frames import Owner, Worker


class LocalWorkers:
    """Jobs are done on the event loop itself, bounded by nothing."""

    def __init__(self, context: TextContext, failures: Mapping[str, CheckpointError] | None = None) -> None:
        self._context = context
        self.failures = failures or {}

    @property
    def reason(self) -> str:
        return ""

    async def start(self) -> None:
        return

    async def add(self, owner: Owner) -> Worker:
        return LocalWorker(self._context, owner)

    async def close(self) -> None:
        return


class HeldWorkers(LocalWorkers):
    """Workers that begin a job when the test calls what is in `held`."""

    def __init__(self, context: TextContext) -> None:
        super().__init__(context)
        self.held: list[Callable[[], None]] = []

    async def add(self, owner: Owner) -> Worker:
        return HeldWorker(self._context, owner, self.held)


class LocalWorker:
    def __init__(self, context: TextContext, owner: Owner) -> None:
        self._context = context
        self._owner = owner
        self._is_killed = False

    def send(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._work, data)

    def kill(self) -> None:
        self._is_killed = True
        asyncio.get_running_loop().call_soon(self._owner.ended, self, int(signal.SIGKILL))

    def _work(self, data: bytes) -> None:
        if self._is_killed:
            return
        size = frames.SIZES.size
        num_head, _ = frames.SIZES.unpack_from(data)
        answer, tail = self._context.answer(data[size : size + num_head], data[size + num_head :])
        self._owner.answered(self, answer, memoryview(tail))


class HeldWorker(LocalWorker):
    def __init__(self, context: TextContext, owner: Owner, held: list[Callable[[], None]]) -> None:
        super().__init__(context, owner)
        self._held = held

    def send(self, data: bytes) -> None:
        self._held.append(partial(super().send, data))
