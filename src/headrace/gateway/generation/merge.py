"""Several calls read as one stream: the prompts of one completions request, whose sequences are numbered through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.gateway.upstream.tokens import EventStream, OutputEvent, SequenceUsage


class MergedStream:
    """Stream s's sequence i is number s * n + i. The first stream's error is everybody's: the rest is cancelled by the caller."""

    def __init__(self, streams: Sequence[EventStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self._waiting: dict[asyncio.Task[list[OutputEvent]], int] = {}
        self._is_begun = False

    @property
    def unread_bytes(self) -> int:
        return sum(stream.unread_bytes for stream in self._streams)

    async def events(self) -> list[OutputEvent]:
        """Whatever any stream has; empty once all have ended."""
        if len(self._streams) == 1:  # the common case needs no tasks
            return await self._streams[0].events()
        if not self._is_begun:
            self._is_begun = True
            for number in range(len(self._streams)):
                self._ask(number)
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            if found := self._take(done):
                return found
        return []

    def usage(self, index: int) -> SequenceUsage:
        return self._streams[index // self._n].usage(index % self._n)

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def __aenter__(self) -> MergedStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nobody reads on: no reader may stay behind."""
        tasks = list(self._waiting)
        self._waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ask(self, number: int) -> None:
        self._waiting[asyncio.create_task(self._streams[number].events())] = number

    def _take(self, done: set[asyncio.Task[list[OutputEvent]]]) -> list[OutputEvent]:
        found: list[OutputEvent] = []
        for task in done:
            number = self._waiting.pop(task)
            events = task.result()
            if events:
                found += [OutputEvent(number * self._n + event.index, event.delta) for event in events]
                self._ask(number)
        return found
