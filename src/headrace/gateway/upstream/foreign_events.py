"""The body of an OpenAI-compatible server's answer -> output events. Its bytes are not trusted: they are bounded and read, or refused.

Bytes become events in `foreign_framing`, these become values in `foreign_loose`, and these become output events in `foreign_answer`. Here
are the limits of size and time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

import aiohttp

from headrace.core.errors import HeadraceError
from headrace.gateway.http.content_encoding import BodyDecoder, decoder_of
from headrace.gateway.http.errors import BodyTooLarge
from headrace.gateway.upstream.foreign_answer import ForeignAnswer
from headrace.gateway.upstream.foreign_errors import BrokenStream, sent_error
from headrace.gateway.upstream.foreign_framing import DONE, EventFraming, Frame
from headrace.gateway.upstream.seam import OutputEvent, TokenUsage

PIECE_BYTES = 64 << 10
"""Most bytes read and decoded at once: a few milliseconds of work."""

MAX_ANSWER_BYTES = 64 << 20

END_OF_STREAM_S = 5.0
"""Seconds a server may take for usage and [DONE] together after every sequence has ended."""

END_OF_BODY_S = 0.05
"""Seconds a server may take for the end of the body after [DONE]. Then the connection can be used again: another one would cost the next
request its handshakes."""


class EventSink(Protocol):
    """Takes an answer's events as they come."""

    @property
    def has_room(self) -> bool:
        """Whether more may be given now."""
        ...

    async def wait_for_room(self) -> None: ...

    def put(self, events: list[OutputEvent]) -> None: ...


class EventReader:
    """The reader of one answer."""

    def __init__(self, num_sequences: int, call_key: str) -> None:
        """call_key: as in `ForeignAnswer`"""
        self.answer = ForeignAnswer(num_sequences, call_key)
        self._num_bytes = 0
        self._has_events = False
        self._deadline_at: float | None = None

    @property
    def usage(self) -> TokenUsage:
        return self.answer.usage

    async def read(
        self,
        response: aiohttp.ClientResponse,
        sink: EventSink,
        *,
        deadline: asyncio.Timeout,
        inter_chunk_s: float,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Give `sink` the answer's events as they come.

        deadline       of the first event; moved with each event, to which comments and empty events do not belong
        inter_chunk_s  seconds between two events, without the time that `sink` takes
        on_begun       called before the first event is given

        Raises BrokenStream for anything that is no complete answer, and what reading raises.
        """
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        framing, decoder = EventFraming(is_event_stream=kind == "text/event-stream"), decoder_for(response, MAX_ANSWER_BYTES)
        answer, now = self.answer, asyncio.get_running_loop().time
        while piece := await self._next_piece(response):
            for part in (piece,) if decoder is None else unpacked(decoder, piece):
                self._num_bytes += len(part)
                if self._num_bytes > MAX_ANSWER_BYTES:
                    raise BrokenStream(f"it is longer than {MAX_ANSWER_BYTES} bytes")
                events: list[OutputEvent] = []
                try:
                    is_done = self._read_frames(framing, framing.push(part), events)
                finally:  # what came before a broken part counts
                    self._give(events, sink, on_begun)
                if events and not sink.has_room:
                    deadline.reschedule(None)
                    await sink.wait_for_room()
                if events or not answer.num_running:
                    deadline.reschedule(now() + inter_chunk_s if answer.num_running else None)
                if is_done:
                    await _read_end(response)
                    return
                if decoder is not None:
                    await asyncio.sleep(0)  # a packed piece may have a thousand parts
        events = []
        try:
            if not self._read_frames(framing, framing.end(), events):
                answer.end(events, is_marked=False, is_document=framing.is_one_document)
        finally:
            self._give(events, sink, on_begun)

    def _give(self, events: list[OutputEvent], sink: EventSink, on_begun: Callable[[], None]) -> None:
        if not events:
            return
        if not self._has_events:
            self._has_events = True
            on_begun()
        sink.put(events)

    def _read_frames(self, framing: EventFraming, frames: list[Frame], events: list[OutputEvent]) -> bool:
        """Add the events of the frames. True when [DONE] was among them. Raises BrokenStream, for a fault of the framing too."""
        for name, data in frames:
            if data == DONE:
                self.answer.end(events, is_marked=True)
                return True
            if name == b"error":
                raise sent_error(data)
            self.answer.read(data, events)
        if framing.fault:
            raise BrokenStream(framing.fault)
        return False

    async def _next_piece(self, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes; empty at the end, and after the end of every sequence when the server is silent for too long or is lost."""
        if self.answer.num_running:
            self._deadline_at = None
            return await response.content.read(PIECE_BYTES)
        now = asyncio.get_running_loop().time()
        if self._deadline_at is None:
            self._deadline_at = now + END_OF_STREAM_S
        if now >= self._deadline_at:
            return b""  # bytes that are there already would be read without a look at the clock
        with suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            async with asyncio.timeout_at(self._deadline_at):
                return await response.content.read(PIECE_BYTES)
        return b""


def decoder_for(response: aiohttp.ClientResponse, max_bytes: int) -> BodyDecoder | None:
    """What unpacks the body, for some servers pack one although none is wanted; None: it is not packed. Raises BrokenStream.

    max_bytes: of the unpacked body
    """
    coding = response.headers.get("content-encoding", "")
    try:
        return decoder_of([coding.encode()], max_bytes) if coding else None
    except HeadraceError:
        raise BrokenStream("its body is packed in an unknown way") from None


def unpacked(decoder: BodyDecoder, piece: bytes) -> Iterator[bytes]:
    """The parts of a packed piece. Raises BrokenStream where it cannot be unpacked."""
    try:
        yield from decoder.parts(piece)
    except BodyTooLarge as error:
        raise BrokenStream(f"it is longer than {error.limit.removeprefix('at most ')}") from None
    except HeadraceError:
        raise BrokenStream("its body cannot be unpacked") from None


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Wait for the end of the body for a moment. Whatever comes instead, the answer is complete."""
    if response.content.is_eof():
        return
    with suppress(aiohttp.ClientError, OSError):
        async with asyncio.timeout(END_OF_BODY_S):
            await response.content.read(1)
