"""Several streams read as one: the prompts of one completions request, whose sequences are numbered through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.gateway.upstream.earlier_output import joined_states
from headrace.gateway.upstream.seam import EventListener, EventStream, OutputEvent, SequenceFacts, TokenUsage


class MergedStream:
    """Streams of n sequences each, numbered over all of them. One stream's error is the request's: closing cancels the rest."""

    def __init__(self, streams: Sequence[EventStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self._waiting: dict[asyncio.Task[list[OutputEvent]], int] = {}
        self._is_begun = False

    @property
    def unread_bytes(self) -> int:
        return sum(stream.unread_bytes for stream in self._streams)

    @property
    def num_resumes(self) -> int:
        return sum(stream.num_resumes for stream in self._streams)

    async def events(self) -> list[OutputEvent]:
        """Events of any of the streams; empty once all have ended."""
        if not self._is_begun:
            self._is_begun = True
            for number in range(len(self._streams)):
                self._ask(number)
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            if found := self._take(done):
                return found
        return []

    def listen(self, listener: EventListener | None) -> None:
        """Ignored: several streams that wrote directly would interleave their events."""

    def usage(self) -> TokenUsage:
        parts = [stream.usage() for stream in self._streams]
        return TokenUsage(*[sum(column) for column in zip(*parts, strict=True)])

    def facts(self, index: int) -> SequenceFacts:
        return self._streams[index // self._n].facts(index)

    def saved_state(self) -> bytes | None:
        return joined_states([stream.saved_state() for stream in self._streams])

    def replay(self, index: int, place: int) -> OutputEvent:
        return self._streams[index // self._n].replay(index, place)

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def close(self) -> None:
        """Cancel the streams and every task that waits for their events."""
        self.cancel()
        tasks = list(self._waiting)
        self._waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in self._streams:
            await stream.close()

    def _ask(self, number: int) -> None:
        self._waiting[asyncio.create_task(self._streams[number].events())] = number

    def _take(self, done: set[asyncio.Task[list[OutputEvent]]]) -> list[OutputEvent]:
        found: list[OutputEvent] = []
        for task in done:
            number = self._waiting.pop(task)
            events = task.result()
            if events:
                found += events
                self._ask(number)
        return found
