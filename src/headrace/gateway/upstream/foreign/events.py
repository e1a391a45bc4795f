"""Turns the body of an OpenAI-compatible server's answer into output events. Its bytes are not trusted: they are bounded and read, or
refused.

`framing` splits the bytes into the data of events, `loose_chunks` reads values from the data, and `answer` makes output
events of the values. The limits of size and time are here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import aiohttp

from headrace.core.errors import HeadraceError
from headrace.gateway.http.content_encoding import BodyDecoder, decoder_of
from headrace.gateway.http.errors import BodyTooLarge
from headrace.gateway.upstream.foreign.answer import ForeignAnswer
from headrace.gateway.upstream.foreign.errors import BrokenStream, broken_by, sent_error
from headrace.gateway.upstream.foreign.framing import DONE, EventFraming, Frame
from headrace.gateway.upstream.seam import EventListener, OutputEvent

PIECE_BYTES = 64 << 10
"""Most bytes read and decoded at once: a few milliseconds of work."""

MAX_ANSWER_BYTES = 64 << 20

MAX_SIGNS_OF_LIFE = 5
"""Most times `silence_s` between two tokens of a server that sends something else meanwhile: comments, pings, empty chunks, halves."""

NEXT_CHOICE_S = 30.0
"""Seconds a server may take for its next choice, after all that began have ended. Then the rest is asked for one by one."""

END_OF_STREAM_S = 5.0
"""Seconds a server may take for usage and [DONE] together after every sequence has ended."""

END_OF_BODY_S = 0.05
"""Seconds a server may take for the end of the body after [DONE]. Then the connection can be used again: another one would cost the next
request its handshakes."""

LATE_USAGE_S = 0.5
"""The same where the server has not counted yet, unless it never did: some send usage after [DONE]."""


class EventSink(EventListener, Protocol):
    """Takes an answer's events as they come."""

    async def wait_for_room(self) -> None: ...


class SilenceLimit:
    """The deadline of an answer's next bytes, once it has begun. Before that the deadline of the first token holds unchanged."""

    def __init__(self, deadline: asyncio.Timeout, silence_s: float) -> None:
        self._deadline, self._silence_s = deadline, silence_s
        self._silent_since: float | None = None

    def heard(self, *, is_output: bool) -> None:
        """Note that bytes came. is_output: they held output of the answer"""
        now = asyncio.get_running_loop().time()
        if is_output:
            self._silent_since = now
        if self._silent_since is not None:
            last_at = self._silent_since + MAX_SIGNS_OF_LIFE * self._silence_s
            self._deadline.reschedule(min(now + self._silence_s, last_at))

    def suspend(self) -> None:
        """Wait for as long as it takes, for something else than the server."""
        self._deadline.reschedule(None)


class EventReader:
    """The reader of one answer.

    has_begun  an event was given
    is_cut     the server stayed silent where choices were missing, and was waited for no longer
    """

    def __init__(self, indices: Sequence[int], call_key: str, *, late_usage_s: float = LATE_USAGE_S) -> None:
        """
        indices, call_key  as in `ForeignAnswer`
        late_usage_s       seconds a server may take for its counts after [DONE]
        """
        self.answer = ForeignAnswer(indices, call_key)
        self.has_begun = False
        self.is_cut = False
        self._late_usage_s = late_usage_s
        self._num_bytes = 0
        self._ended_at: float | None = None

    async def read(
        self,
        response: aiohttp.ClientResponse,
        sink: EventSink,
        *,
        silence: SilenceLimit,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Give `sink` the answer's events as they come.

        silence   limit of the time between two pieces of the answer; the time in which `sink` takes nothing is not counted
        on_begun  called before the first event is given

        Raises BrokenStream for an incomplete or malformed answer, and aiohttp.ClientError or OSError when the server is lost.
        """
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        framing, decoder = EventFraming(is_event_stream=kind == "text/event-stream"), decoder_for(response, MAX_ANSWER_BYTES)
        answer = self.answer
        while piece := await self._next_piece(response):
            for part in (piece,) if decoder is None else unpacked(decoder, piece):
                self._num_bytes += len(part)
                if self._num_bytes > MAX_ANSWER_BYTES:
                    raise BrokenStream(f"it is longer than {MAX_ANSWER_BYTES} bytes")
                events: list[OutputEvent] = []
                try:
                    is_done = self._read_frames(framing, framing.push(part), events)
                finally:  # events before a broken part count
                    self._give(events, sink, on_begun)
                if events and not sink.has_room:
                    silence.suspend()
                    await sink.wait_for_room()
                if answer.is_running:
                    silence.heard(is_output=bool(events))
                else:
                    silence.suspend()  # `_next_piece` has a limit of its own
                if is_done:
                    await self._read_counts(response, framing, decoder)
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
        if not self.has_begun:
            self.has_begun = True
            on_begun()
        sink.take(events)

    def _read_frames(self, framing: EventFraming, frames: list[Frame], events: list[OutputEvent]) -> bool:
        """Add the events of the frames. True when [DONE] was among them. Raises BrokenStream, for a fault of the framing too."""
        for number, (name, data) in enumerate(frames, 1):
            if data == DONE:
                self.answer.end(events, is_marked=True)
                self._read_late(frames[number:])
                return True
            if name == b"error":
                raise broken_by(sent_error(data))
            self.answer.read(data, events)
        if framing.fault:
            raise BrokenStream(framing.fault)
        return False

    async def _read_counts(self, response: aiohttp.ClientResponse, framing: EventFraming, decoder: BodyDecoder | None) -> None:
        """Read what follows [DONE], a moment long: token counts at some servers. Whatever else comes, the answer is complete."""
        deadline_at = asyncio.get_running_loop().time() + (END_OF_BODY_S if self.answer.has_usage else self._late_usage_s)
        num_bytes = 0
        with suppress(BrokenStream):
            while not response.content.is_eof() and (piece := await _read_until(deadline_at, response)):
                for part in (piece,) if decoder is None else unpacked(decoder, piece):
                    num_bytes += len(part)
                    if num_bytes > PIECE_BYTES:
                        return
                    self._read_late(framing.push(part))

    def _read_late(self, frames: list[Frame]) -> None:
        for _, data in frames:
            self.answer.read_late_usage(data)

    async def _next_piece(self, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes; empty at the end. Once every sequence that began has ended, also empty if no more output came for too long, and
        once all have, if the server is lost."""
        if self.answer.is_running:
            self._ended_at = None
            return await response.content.read(PIECE_BYTES)
        now = asyncio.get_running_loop().time()
        if self._ended_at is None:
            self._ended_at = now
        if self.answer.num_running:
            piece = await _read_until(self._ended_at + NEXT_CHOICE_S, response, TimeoutError)
            self.is_cut = not piece and not response.content.at_eof()
            return piece
        return await _read_until(self._ended_at + END_OF_STREAM_S, response)


def decoder_for(response: aiohttp.ClientResponse, max_bytes: int) -> BodyDecoder | None:
    """The decoder of a compressed body, which some servers send although none is accepted; None: it is not compressed.

    max_bytes  most bytes of the decoded body

    Raises BrokenStream for an unknown coding.
    """
    coding = response.headers.get("content-encoding", "")
    try:
        return decoder_of([coding.encode()], max_bytes) if coding else None
    except HeadraceError:
        raise BrokenStream("its body is packed in an unknown way") from None


def unpacked(decoder: BodyDecoder, piece: bytes) -> Iterator[bytes]:
    """The decoded parts of a compressed piece. Raises BrokenStream if it cannot be decoded."""
    try:
        yield from decoder.parts(piece)
    except BodyTooLarge as error:
        raise BrokenStream(f"it is longer than {error.limit.removeprefix('at most ')}") from None
    except HeadraceError:
        raise BrokenStream("its body cannot be unpacked") from None


async def _read_until(deadline_at: float, response: aiohttp.ClientResponse, *passed_over: type[Exception]) -> bytes:
    """The next bytes of an answer whose sequences have ended; empty at the end, at the deadline, and after an error that is passed over.

    passed_over  by default also the loss of the server
    """
    if asyncio.get_running_loop().time() >= deadline_at:
        return b""  # bytes that are there already would be read without a look at the clock
    with suppress(*(passed_over or (aiohttp.ClientError, OSError))):  # TimeoutError is an OSError
        async with asyncio.timeout_at(deadline_at):
            return await response.content.read(PIECE_BYTES)
    return b""
