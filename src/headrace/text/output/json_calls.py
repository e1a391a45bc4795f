"""Reads tool calls written as JSON objects. Linear in the text, whatever its splits.

Only as much of JSON is understood as finds a call's name and where its arguments end. What the arguments hold is the client's to check: if
the model writes no valid JSON there, the client gets what it wrote. Text that is no call at all is given back as text.
"""

from __future__ import annotations

import json
from enum import Enum

from headrace.text.output.format_types import ToolFormat
from headrace.text.output.json_span import JsonSpan
from headrace.text.output.markers import first_non_space
from headrace.text.output.reading import CallLog, Reading, TagChoice

MAX_KEY_CHARS = 256
"""Characters of a name or a key as written, quotes and escapes included. Text with a longer one is no call."""

_ARGUMENTS = ("arguments", "parameters")


class _State(Enum):
    """What is read next. White space may come before all but a SPAN."""

    LIST = 1
    OBJECT = 2
    KEY = 3
    COLON = 4
    VALUE = 5
    SPAN = 6
    AFTER_VALUE = 7
    AFTER_OBJECT = 8
    END_MARKER = 9


class _Use(Enum):
    """What the present span is."""

    KEY = 1
    NAME = 2
    ARGUMENTS = 3
    EARLY_ARGUMENTS = 4
    """Arguments before the name: they wait for it."""
    OTHER = 5


class JsonCalls:
    """What follows a start marker: one object or several, by the format's row, and its end marker. A `CallReader`.

    An object has a name and arguments, themselves an object, in any order; other keys are skipped. A call without arguments has "{}".
    """

    def __init__(self, row: ToolFormat, log: CallLog, *, is_list: bool, is_bare: bool = False) -> None:
        """is_bare: no marker says that this is a call, so the name must be one that the request offers, and the arguments be written"""
        self._log = log
        self._is_list, self._is_bare = is_list, is_bare
        self._separator = "," if is_list else row.separator.strip()
        self._has_spaces_between = row.separator.isspace()
        self._end_marker = TagChoice(row.end)
        self._state = _State.LIST if is_list else _State.OBJECT
        self._use, self._span = _Use.OTHER, JsonSpan("")
        self._raw: list[str] = []
        self._num_raw = 0
        self._begin_object()
        self.reading = Reading.GOES_ON

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and self.reading is Reading.GOES_ON:
            if self._use is _Use.ARGUMENTS:
                at = self._pass_arguments(text, at)
            elif self._log.room <= 0:
                self.reading = Reading.FAILED
            else:
                at = self._read_form(text, at, min(len(text), at + self._log.room))
        return at

    def _begin_object(self) -> None:
        self._key = self._name = ""
        self._early: str | None = None
        self._is_begun = False

    def _read_form(self, text: str, at: int, end: int) -> int:
        """Read the next piece of what stands around arguments, up to `end` at most. It is held until a call is known to be one."""
        if self._state is _State.SPAN:
            return self._read_span(text, at, end)
        if self._state is _State.END_MARKER:
            at, self.reading = self._end_marker.feed(self._log, text, at, end)
            if self.reading is Reading.DONE:
                self._log.forget_held()
            return at
        first = first_non_space(text, at, end)
        self._log.hold(text[at:first])
        if first == end:
            return end
        at = first + self._take(text[first])
        self._log.hold(text[first:at])
        if self._state in (_State.AFTER_OBJECT, _State.END_MARKER) and at > first:
            self._log.forget_held()
        return at

    def _take(self, char: str) -> int:
        """Go on by one character of the form: 1 if it was read, 0 if it was only looked at."""
        match self._state, char:
            case (_State.LIST, "["):
                self._state = _State.OBJECT
            case (_State.OBJECT, "{"):
                self._begin_object()
                self._state = _State.KEY
            case (_State.COLON, ":"):
                self._state = _State.VALUE
            case (_State.AFTER_VALUE, ","):
                self._state = _State.KEY
            case (_State.KEY | _State.AFTER_VALUE, "}"):
                self._end_object()
            case (_State.KEY, '"'):
                self._begin_span(char, _Use.KEY)
                return 0
            case (_State.VALUE, _):
                self._begin_value(char)
                return 0
            case (_State.AFTER_OBJECT, _) if char == self._separator:
                self._state = _State.OBJECT
            case (_State.AFTER_OBJECT, "]") if self._is_list:
                self._state = _State.END_MARKER
            case (_State.AFTER_VALUE, _) if self._is_begun and self._end_marker.may_begin_with(char):
                self._state = _State.END_MARKER  # the model forgot the object's own brace
                return 0
            case (_State.AFTER_OBJECT, "{") if self._has_spaces_between:
                self._state = _State.OBJECT
                return 0
            case (_State.AFTER_OBJECT, _) if not self._is_list:
                self._state = _State.END_MARKER
                return 0
            case _:
                self.reading = Reading.FAILED
                return 0
        return 1

    def _end_object(self) -> None:
        """A call that has begun is complete; one with a name alone has no arguments, one with early arguments has these."""
        may_begin = self._early is not None or not self._is_bare
        if self._is_begun or (self._name and may_begin and self._log.begin(self._name, self._early or "{}", is_whole=True)):
            self._is_begun = True
            self._state = _State.AFTER_OBJECT
        else:
            self.reading = Reading.FAILED

    def _begin_value(self, char: str) -> None:
        if self._is_begun or self._key not in ("name", *_ARGUMENTS):
            if char in ",:}]":
                self.reading = Reading.FAILED
            self._begin_span(char, _Use.OTHER)
        elif self._key == "name":
            self._begin_span(char, _Use.NAME)
            if char != '"' or self._name:
                self.reading = Reading.FAILED
        elif char != "{" or self._early is not None:
            self.reading = Reading.FAILED
        elif not self._name:
            self._begin_span(char, _Use.EARLY_ARGUMENTS)
        elif self._log.begin(self._name):
            self._is_begun = True
            self._begin_span(char, _Use.ARGUMENTS)
        else:
            self.reading = Reading.FAILED

    def _begin_span(self, char: str, use: _Use) -> None:
        self._state, self._use, self._span = _State.SPAN, use, JsonSpan(char)
        self._raw.clear()
        self._num_raw = 0

    def _pass_arguments(self, text: str, at: int) -> int:
        after = self._span.feed(text, at, len(text))
        if after > at:
            self._log.add(text[at:after], is_last=self._span.is_over)
        if self._span.is_over:
            self._state, self._use = _State.AFTER_VALUE, _Use.OTHER
        elif self._span.is_broken:
            self.reading = Reading.FAILED
        return after

    def _read_span(self, text: str, at: int, end: int) -> int:
        if self._use in (_Use.KEY, _Use.NAME):
            end = min(end, at + MAX_KEY_CHARS - self._num_raw)
        after = self._span.feed(text, at, end)
        self._log.hold(text[at:after])
        if self._use is not _Use.OTHER:
            self._raw.append(text[at:after])
            self._num_raw += after - at
        if self._span.is_over:
            self._end_span("".join(self._raw))
        elif self._span.is_broken or after == at:
            self.reading = Reading.FAILED
        return after

    def _end_span(self, raw: str) -> None:
        self._state = _State.COLON if self._use is _Use.KEY else _State.AFTER_VALUE
        if self._use is _Use.EARLY_ARGUMENTS:
            self._early = raw
        elif self._use is not _Use.OTHER:
            text = _decoded(raw)
            if not text and self._use is _Use.NAME:
                self.reading = Reading.FAILED
            elif self._use is _Use.KEY:
                self._key = text
            else:
                self._take_name(text)

    def _take_name(self, name: str) -> None:
        self._name = name
        if self._is_bare and name not in self._log.names:
            self.reading = Reading.FAILED
        elif self._early is not None:
            self._is_begun = self._log.begin(name, self._early, is_whole=True)
            if not self._is_begun:
                self.reading = Reading.FAILED


def _decoded(raw: str) -> str:
    """A JSON string's text; empty for what is no string or no Unicode, as an unpaired surrogate is not."""
    try:
        text = str(json.loads(raw))
        text.encode()
    except ValueError:
        return ""
    return text
