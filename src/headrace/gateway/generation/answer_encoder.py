"""Turns the events of an answer into bytes: the protocols of encoders and recorders, and a writer that needs no task of its own.

`generation.run` calls an encoder in the request's own task. `DirectChunkWriter` calls it while the request's task waits, from the task that
reads from the upstream.

Answers with many log-probabilities are encoded in slices of about SLICE_S: one slice at a time over all requests, and only as clients read.
The event loop encodes them itself: a thread would block it through the GIL all the same. It makes one slice per round, however many answers
wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Protocol

from headrace.core.clock import Clock
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.http.asgi import PIECE_BYTES
from headrace.gateway.http.sse import SseStream
from headrace.gateway.upstream.seam import OutputEvent, TokenUsage

SLICE_S = 0.001
"""A slice ends with the piece that passes this many seconds. One piece takes less than a millisecond (`surfaces.dialect.logprobs`)."""


class AnswerEncoder(Protocol):
    """Turns the events of one request into the bytes of its answer. Streamed: `encode_events`, then `encode_end`. Otherwise: `add` for all
    events, then `encode_body`.
    """

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        """Pieces of server-sent events, each encoded on demand in less than a millisecond; a piece may be empty, so that long work can
        pause. Content shared by several choices is yielded as the same object, so do not join large answers.
        """
        ...

    def encode_end(self, usage: TokenUsage) -> bytes:
        """The caller writes the framing's `end`."""
        ...

    def add(self, events: Sequence[OutputEvent]) -> None: ...

    def encode_body(self, usage: TokenUsage) -> Iterator[bytes]:
        """Pieces as in `encode_events`."""
        ...


class EventRecorder(Protocol):
    """Receives every event once, also when the client has left."""

    def add(self, events: Sequence[OutputEvent]) -> None: ...


RecordEvents = Callable[[Sequence[OutputEvent]], None]


class DirectChunkWriter:
    """An `EventListener` that writes chunks at once, while the consumer task waits and the socket has room."""

    __slots__ = ("_clock", "_encoder", "_progress", "_record", "_sse")

    def __init__(
        self,
        encoder: AnswerEncoder,
        progress: RequestProgress,
        sse: SseStream,
        clock: Clock,
        record: RecordEvents | None,
    ) -> None:
        self._encoder, self._progress, self._sse, self._clock, self._record = encoder, progress, sse, clock, record

    @property
    def has_room(self) -> bool:
        return self._sse.has_room

    def take(self, events: Sequence[OutputEvent]) -> None:
        now = self._clock()
        self._progress.record(events, now)
        if self._record is not None:
            self._record(events)
        if made := b"".join(self._encoder.encode_events(events)):
            self._sse.write_now(made, now)


class EncodingTurns:
    """Encodes large answers in turns, one slice at a time. num_pending: answers queued or being encoded"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self.num_pending = 0

    async def slices(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """Slices have at most about PIECE_BYTES. A slice is encoded when the iterator reaches it."""
        self.num_pending += 1
        try:
            is_over = False
            while not is_over:
                async with self._turn:  # first come, first served
                    made, is_over = self._slice(pieces)
                    await asyncio.sleep(0)  # the next slice, of any answer, is made in the next round
                if made:
                    yield made
        finally:
            self.num_pending -= 1

    def _slice(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        made: list[bytes] = []
        size, ends_s = 0, self._clock() + SLICE_S
        for piece in pieces:
            made.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES or self._clock() > ends_s:
                return b"".join(made), False
        return b"".join(made), True
