"""Splits the body of a foreign server's answer into server-sent events, as servers write them.

Event streams are read as their standard has them, and without the space, without blank lines between events, with any line ends, in upper
case. A body of bare JSON is read too: a whole answer in one document, or a chunk in each line. What the data of an event means is for
`loose_chunks` and `answer`.
"""

from __future__ import annotations

import re

from headrace.gateway.upstream.foreign.values import BYTE_ORDER_MARK

MAX_EVENT_BYTES = 1 << 20
"""Most bytes of one event, and of a whole answer in one document."""

DONE = b"[DONE]"

NOTHING = (b"ping", b"heartbeat", b"keepalive", b"keep-alive", b"keep_alive")
"""Names of events that only keep a connection open. Some servers send such a word as data."""

_COMMENTS = re.compile(rb"^(?::[^\n]*+\n)++", re.MULTILINE)
_BLANK_LINES = re.compile(rb"\n{3,}+")

Frame = tuple[bytes, bytes]
"""An event: its name, in lower case and empty for most, and its data: DONE, or anything."""


class EventFraming:
    """Splits one body into server-sent events.

    fault            why the rest of the body cannot be read; empty: it can
    is_one_document  valid at the end: the body was one JSON text and nothing else
    """

    def __init__(self, *, is_event_stream: bool) -> None:
        """is_event_stream: the Content-Type is an event stream's; otherwise a line that is neither an event's field nor JSON is a fault"""
        self.fault = ""
        self.is_one_document = False
        self._is_event_stream = is_event_stream
        self._line = bytearray()
        self._data = bytearray()
        self._name = b""
        self._has_begun = self._has_events = self._is_document = self._ends_in_brace = self._ends_in_return = False

    def push(self, piece: bytes) -> list[Frame]:
        """The events that end in `piece`."""
        if not (self._line or self._data or self._name or self._is_document or self._ends_in_return or self.fault):
            usual = _usual_events(piece)
            if usual is not None:
                self._has_begun = self._has_events = True
                return usual
        found: list[Frame] = []
        if b"\r" in piece or self._ends_in_return:
            piece = self._with_line_feeds(piece)
        complete, mark, rest = piece.rpartition(b"\n")
        if mark:
            if self._line:
                complete = bytes(self._line) + complete
                self._line.clear()
            for line in _without_silence(complete).split(b"\n"):
                self._read_line(line, found)
        self._line += rest
        if len(self._line) + len(self._data) > MAX_EVENT_BYTES:
            self.fault = self.fault or f"an event is longer than {MAX_EVENT_BYTES} bytes"
        return found

    def end(self) -> list[Frame]:
        """The last event, if the body ends without a line end after it."""
        found: list[Frame] = []
        self._read_line(bytes(self._line), found)
        self.is_one_document = self._is_document and not self._has_events
        self._end_event(found)
        return found

    def _with_line_feeds(self, piece: bytes) -> bytes:
        """The piece with all line ends as line feeds. A CR LF pair may be split between two pieces."""
        if self._ends_in_return:
            piece = piece.removeprefix(b"\n")
        self._ends_in_return = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _read_line(self, line: bytes, found: list[Frame]) -> None:
        if self.fault:
            return
        if not self._has_begun:
            self._has_begun, line = True, line.removeprefix(BYTE_ORDER_MARK)
        if line.startswith(b"data:"):
            self._read_data(line[5:], found)
        elif not line or line.isspace():
            if not self._is_document:
                self._end_event(found)
        elif line[:1] != b":":  # a comment
            self._read_field(line, found)

    def _read_field(self, line: bytes, found: list[Frame]) -> None:
        field, _, value = line.partition(b":")
        field = field.strip().lower()
        if field == b"data":
            self._read_data(value, found)
        elif self._is_document or (not self._data and line.lstrip()[:1] in (b"{", b"[")):
            self._add(line, found, is_document=True)
        elif field == b"event":
            self._name = value.strip().lower()
        elif field not in (b"", b"id", b"retry") and not self._is_event_stream:
            self.fault = "it is no event stream"

    def _read_data(self, value: bytes, found: list[Frame]) -> None:
        value = value.removeprefix(b" ")
        if value.startswith(b"data:"):  # wrapped twice
            value = value[5:].lstrip()
        if self._is_document:
            self._end_event(found)
        self._add(value, found, is_document=False)

    def _add(self, value: bytes, found: list[Frame], *, is_document: bool) -> None:
        """Add a line of data. A line that begins with `{`, after one that ends with `}`, begins another event."""
        if value[:1] != b"{" and value.strip(b" \t\"'").upper() == DONE:
            self._end_event(found)
            self._has_events = True
            found.append((b"", DONE))
            return
        if self._data:
            if self._ends_in_brace and value.lstrip()[:1] == b"{":
                self._end_event(found)
            self._data += b"\n"
        self._is_document, self._ends_in_brace = is_document, value.rstrip()[-1:] == b"}"
        self._data += value
        if len(self._data) > MAX_EVENT_BYTES:
            self.fault = f"an event is longer than {MAX_EVENT_BYTES} bytes"

    def _end_event(self, found: list[Frame]) -> None:
        data, name = bytes(self._data).strip(), self._name
        self._data.clear()
        self._name, self._is_document = b"", False
        if data and name not in NOTHING and (data[:1] == b"{" or data.strip(b" \t\"':").lower() not in (b"", *NOTHING)):
            self._has_events = True
            found.append((name, data))


def _usual_events(piece: bytes) -> list[Frame] | None:
    """The events of a piece in the form of nearly all: each one a line of JSON with a blank line behind it. None: it has another form."""
    if len(piece) > MAX_EVENT_BYTES or piece[:7] != b"data: {" or piece[-3:] != b"}\n\n" or b"\r" in piece:
        return None
    found = []
    for event in piece[:-2].split(b"\n\n"):
        if event[:7] != b"data: {" or event[-1:] != b"}" or b"\n" in event:
            return None
        found.append((b"", event[6:]))
    return found


def _without_silence(lines: bytes) -> bytes:
    """The lines without comments and without more than one blank line after another: a body may have millions of either."""
    if lines[:1] == b":" or b"\n:" in lines:
        lines = _COMMENTS.sub(b"", lines)
    return _BLANK_LINES.sub(b"\n\n", lines) if b"\n\n\n" in lines else lines
