"""Turns the body of an OpenAI-compatible server's answer into output events. Its bytes are not trusted: they are bounded and read, or
refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import aiohttp

from headrace.core.errors import HeadraceError
from headrace.gateway.http.content_encoding import BodyDecoder, decoder_of
from headrace.gateway.http.errors import BodyTooLarge
from headrace.gateway.upstream.foreign.answer import ForeignAnswer
from headrace.gateway.upstream.foreign.errors import BrokenStream, broken_by, sent_error
from headrace.gateway.upstream.foreign.values import BYTE_ORDER_MARK
from headrace.gateway.upstream.seam import EventListener, OutputEvent

MAX_EVENT_BYTES = 1 << 20

DONE = b"[DONE]"

NOTHING = (b"ping", b"heartbeat", b"keepalive", b"keep-alive", b"keep_alive")

_COMMENTS = re.compile(rb"^(?::[^\n]*+\n)++", re.MULTILINE)
_BLANK_LINES = re.compile(rb"\n{3,}+")

Frame = tuple[bytes, bytes]


class EventFraming:
    """fault            why the rest of the body cannot be read; empty: it can
    is_one_document  valid at the end: the body was one JSON text and nothing else
    """

    def __init__(self, *, is_event_stream: bool) -> None:
        """is_event_stream: otherwise a line that is neither an event's field nor JSON is a fault"""
        self.fault = ""
        self.is_one_document = False
        self._is_event_stream = is_event_stream
        self._line = bytearray()
        self._data = bytearray()
        self._name = b""
        self._has_begun = self._has_events = self._is_document = self._ends_in_brace = self._ends_in_return = False

    def push(self, piece: bytes) -> list[Frame]:
        if not (self._line or self._data or self._name or self._is_document or self._ends_in_return or self.fault):
            usual = _usual_events(piece)
            if usual is not None:
                self._has_begun = self._has_events = True
                return usual
        frames: list[Frame] = []
        if b"\r" in piece or self._ends_in_return:
            piece = self._with_line_feeds(piece)
        complete, mark, rest = piece.rpartition(b"\n")
        if mark:
            if self._line:
                complete = bytes(self._line) + complete
                self._line.clear()
            for line in _without_silence(complete).split(b"\n"):
                self._read_line(line, frames)
        self._line += rest
        if len(self._line) + len(self._data) > MAX_EVENT_BYTES:
            self.fault = self.fault or f"an event is longer than {MAX_EVENT_BYTES} bytes"
        return frames

    def end(self) -> list[Frame]:
        frames: list[Frame] = []
        self._read_line(bytes(self._line), frames)
        self.is_one_document = self._is_document and not self._has_events
        self._end_event(frames)
        return frames

    def _with_line_feeds(self, piece: bytes) -> bytes:
        if self._ends_in_return:
            piece = piece.removeprefix(b"\n")
        self._ends_in_return = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _read_line(self, line: bytes, frames: list[Frame]) -> None:
        if self.fault:
            return
        if not self._has_begun:
            self._has_begun, line = True, line.removeprefix(BYTE_ORDER_MARK)
        if line.startswith(b"data:"):
            self._read_data(line[5:], frames)
        elif not line or line.isspace():
            if not self._is_document:
                self._end_event(frames)
        elif line[:1] != b":":  # a comment
            self._read_field(line, frames)

    def _read_field(self, line: bytes, frames: list[Frame]) -> None:
        field, _, value = line.partition(b":")
        field = field.strip().lower()
        if field == b"data":
            self._read_data(value, frames)
        elif self._is_document or (not self._data and line.lstrip()[:1] in (b"{", b"[")):
            self._add(line, frames, is_document=True)
        elif field == b"event":
            self._name = value.strip().lower()
        elif field not in (b"", b"id", b"retry") and not self._is_event_stream:
            self.fault = "it is no event stream"

    def _read_data(self, value: bytes, frames: list[Frame]) -> None:
        value = value.removeprefix(b" ")
        if value.startswith(b"data:"):  # wrapped twice
            value = value[5:].lstrip()
        if self._is_document:
            self._end_event(frames)
        self._add(value, frames, is_document=False)

    def _add(self, value: bytes, frames: list[Frame], *, is_document: bool) -> None:
        """A line that begins with `{`, after one that ends with `}`, begins another event."""
        if value[:1] != b"{" and value.strip(b" \t\"'").upper() == DONE:
            self._end_event(frames)
            self._has_events = True
            frames.append((b"", DONE))
            return
        if self._data:
            if self._ends_in_brace and value.lstrip()[:1] == b"{":
                self._end_event(frames)
            self._data += b"\n"
        self._is_document, self._ends_in_brace = is_document, value.rstrip()[-1:] == b"}"
        self._data += value
        if len(self._data) > MAX_EVENT_BYTES:
            self.fault = f"an event is longer than {MAX_EVENT_BYTES} bytes"

    def _end_event(self, frames: list[Frame]) -> None:
        data, name = bytes(self._data).strip(), self._name
        self._data.clear()
        self._name, self._is_document = b"", False
        if data and name not in NOTHING and (data[:1] == b"{" or data.strip(b" \t\"':").lower() not in (b"", *NOTHING)):
            self._has_events = True
            frames.append((name, data))


def _usual_events(piece: bytes) -> list[Frame] | None:
    """Nearly all bodies: each event a line of JSON with a blank line behind it."""
    if len(piece) > MAX_EVENT_BYTES or piece[:7] != b"data: {" or piece[-3:] != b"}\n\n" or b"\r" in piece:
        return None
    frames = []
    for event in piece[:-2].split(b"\n\n"):
        if event[:7] != b"data: {" or event[-1:] != b"}" or b"\n" in event:
            return None
        frames.append((b"", event[6:]))
    return frames


def _without_silence(lines: bytes) -> bytes:
    if lines[:1] == b":" or b"\n:" in lines:
        lines = _COMMENTS.sub(b"", lines)
    return _BLANK_LINES.sub(b"\n\n", lines) if b"\n\n\n" in lines else lines


PIECE_BYTES = 64 << 10

MAX_ANSWER_BYTES = 64 << 20

MAX_SIGNS_OF_LIFE = 5
"""Times `silence_s` between two tokens of a server that sends comments, pings or empty chunks meanwhile."""

NEXT_CHOICE_S = 30.0
"""After all that began have ended. Then the rest is asked for one by one."""

END_OF_STREAM_S = 5.0
"""For usage and [DONE] together."""

END_OF_BODY_S = 0.05
"""After [DONE]. Then the connection can be used again: another one would cost the next request its handshakes."""

LATE_USAGE_S = 0.5
"""Where the server has not counted yet, unless it never did: some send usage after [DONE]."""


class EventSink(EventListener, Protocol):
    async def wait_for_room(self) -> None: ...


class SilenceLimit:
    def __init__(self, deadline: asyncio.Timeout, silence_s: float) -> None:
        self._deadline, self._silence_s = deadline, silence_s
        self._silent_since: float | None = None

    def heard(self, *, is_output: bool) -> None:
        now = asyncio.get_running_loop().time()
        if is_output:
            self._silent_since = now
        if self._silent_since is not None:
            last_at = self._silent_since + MAX_SIGNS_OF_LIFE * self._silence_s
            self._deadline.reschedule(min(now + self._silence_s, last_at))

    def suspend(self) -> None:
        self._deadline.reschedule(None)


class EventReader:
    """is_cut: the server stayed silent where choices were missing, and was waited for no longer"""

    def __init__(self, indices: Sequence[int], call_key: str, *, late_usage_s: float = LATE_USAGE_S) -> None:
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
        """on_begun is called before the first event is given. The time in which `sink` takes nothing is not counted.

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
        """Empty at the end, and after the ends of all sequences that began also on silence or a lost server."""
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
    """Some servers compress although no coding is accepted. Raises BrokenStream for an unknown coding."""
    coding = response.headers.get("content-encoding", "")
    try:
        return decoder_of([coding.encode()], max_bytes) if coding else None
    except HeadraceError:
        raise BrokenStream("its body is packed in an unknown way") from None


def unpacked(decoder: BodyDecoder, piece: bytes) -> Iterator[bytes]:
    """Raises BrokenStream."""
    try:
        yield from decoder.parts(piece)
    except BodyTooLarge as error:
        raise BrokenStream(f"it is longer than {error.limit.removeprefix('at most ')}") from None
    except HeadraceError:
        raise BrokenStream("its body cannot be unpacked") from None


async def _read_until(deadline_at: float, response: aiohttp.ClientResponse, *passed_over: type[Exception]) -> bytes:
    if asyncio.get_running_loop().time() >= deadline_at:
        return b""  # bytes that are there already would be read without a look at the clock
    with suppress(*(passed_over or (aiohttp.ClientError, OSError))):  # TimeoutError is an OSError
        async with asyncio.timeout_at(deadline_at):
            return await response.content.read(PIECE_BYTES)
    return b""
