"""Reads tool calls written as JSON objects.

What the model writes for arguments goes to the client, valid or not.
"""

from __future__ import annotations

import json
from enum import Enum

from headrace.text.output.call_arguments import ARGUMENTS_OPENINGS, ArgumentsSpan, CallArguments
from headrace.text.output.format_types import ToolFormat
from headrace.text.output.literals import JsonSpan, json_of_literal
from headrace.text.output.reading import NO_ARGUMENTS, CallLog, Reading, TagChoice, first_non_space

MAX_KEY_CHARS = 256
"""Text with a longer name or key is no call."""

_ARGUMENTS = ("arguments", "parameters")
_FUNCTION = "function"
_NAMES = (_FUNCTION, "tool_name")
"""Values of these keys count only with the name of an offered function."""
_DESCRIPTION = "description"
"""Without a start marker, an object with this key is a definition that the model repeats."""
_DEFINED = "parameters"
"""A value that may be a definition's schema is held, since a description may follow."""
_SCHEMA_STARTS = ('{"type":"object"', '{"properties":{', '{"$schema":"')
_LONGEST_START = max(map(len, _SCHEMA_STARTS))


class _State(Enum):
    START = 1
    OBJECT = 2
    KEY = 3
    COLON = 4
    VALUE = 5
    SPAN = 6
    AFTER_VALUE = 7
    AFTER_OBJECT = 8
    END_MARKER = 9


class _Use(Enum):
    KEY = 1
    NAME = 2
    EARLY_ARGUMENTS = 3
    """Arguments before the name, or perhaps a schema."""
    PYTHON = 4
    """The whole object in Python's spelling."""
    OTHER = 5


class JsonCalls:
    """A `CallReader` of a list of objects, or of objects with the row's separator.

    An object has a name and arguments, in any order, perhaps under the key "function"; other keys are skipped.
    """

    def __init__(self, row: ToolFormat, log: CallLog, *, is_bare: bool = False) -> None:
        """is_bare: no start marker, so a call must name an offered function and have arguments"""
        self._row, self._log = row, log
        self._is_list, self._is_bare = False, is_bare
        self._separator = row.separator.strip()
        self._has_spaces_between = row.separator.isspace()
        self._end_marker = TagChoice(row.end)
        self._state = _State.START
        self._use, self._span = _Use.OTHER, JsonSpan("")
        self._arguments: CallArguments | None = None
        self._early_span = ArgumentsSpan("{")
        self._raw: list[str] = []
        self._num_raw = 0
        self._begin_object()
        self.reading = Reading.GOES_ON

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and self.reading is Reading.GOES_ON:
            if self._arguments is not None:
                at = self._pass_arguments(self._arguments, text, at)
            elif self._log.room <= 0:
                self.reading = Reading.FAILED
            else:
                at = self._read_form(text, at, min(len(text), at + self._log.room))
        return at

    def _begin_object(self) -> None:
        self._key = self._name = ""
        self._early: str | None = None
        self._early_start = ""
        self._is_begun = self._is_nested = False

    def _read_form(self, text: str, at: int, end: int) -> int:
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
        """1: the character was read; 0: it was only looked at."""
        match self._state, char:
            case (_State.START, "["):
                self._is_list, self._state = True, _State.OBJECT
            case (_State.START, _):
                self._state = _State.OBJECT
                return 0
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
            case (_State.KEY, "'") if not self._key:
                self._begin_span("{", _Use.PYTHON)
                self._raw.append("{")
                self._span.feed("{", 0, 1)  # it was read before the first key showed how the object is spelled
                return 0
            case (_State.VALUE, "{") if self._key == _FUNCTION and not (self._name or self._early or self._is_begun or self._is_nested):
                self._is_nested, self._state = True, _State.KEY
            case (_State.VALUE, _):
                self._begin_value(char)
                return 0
            case (_State.AFTER_OBJECT, _) if char == ("," if self._is_list else self._separator):
                self._state = _State.OBJECT
            case (_State.AFTER_OBJECT, "]") if self._is_list:
                self._state = _State.END_MARKER
            case (_State.AFTER_VALUE, _) if self._is_begun and self._end_marker.may_begin_with(char):
                self._state = _State.END_MARKER  # the model forgot the object's own brace
                return 0
            case (_State.AFTER_OBJECT, "{") if self._has_spaces_between and not self._is_list:
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
        if self._is_nested:
            self._is_nested, self._state = False, _State.AFTER_VALUE
            return
        if self._name and self._early is None and not self._is_bare:
            self._early = NO_ARGUMENTS
        if not self._is_begun:
            self._begin_whole()
        if self._is_begun:
            self._state = _State.AFTER_OBJECT

    def _begin_value(self, char: str) -> None:
        is_name = self._key == "name" or (self._key in _NAMES and char == '"' and not self._name)
        if self._is_begun or not (is_name or self._key in _ARGUMENTS):
            if char in ",:}]" or (self._is_bare and self._key == _DESCRIPTION and not self._is_begun):
                self.reading = Reading.FAILED
            self._begin_span(char, _Use.OTHER)
        elif is_name:
            self._begin_span(char, _Use.NAME)
            if char != '"':
                self.reading = Reading.FAILED
        elif char not in ARGUMENTS_OPENINGS or self._early is not None:
            self.reading = Reading.FAILED
        elif self._name and not (self._is_bare and self._key == _DEFINED and char == "{"):
            self._arguments = CallArguments(self._log, self._name, ArgumentsSpan(char))
        else:
            self._begin_span(char, _Use.EARLY_ARGUMENTS)
            self._early_span = ArgumentsSpan(char)

    def _begin_span(self, char: str, use: _Use) -> None:
        self._state, self._use, self._span = _State.SPAN, use, JsonSpan(char, is_python=use is _Use.PYTHON)
        self._raw.clear()
        self._num_raw = 0

    def _pass_arguments(self, arguments: CallArguments, text: str, at: int) -> int:
        at = arguments.feed(text, at)
        self.reading = arguments.reading
        if self.reading is Reading.DONE:
            self.reading, self._arguments, self._is_begun = Reading.GOES_ON, None, True
            self._state = _State.AFTER_VALUE
        return at

    def _read_early_arguments(self, text: str, at: int, end: int) -> int:
        after, piece = self._early_span.feed(text, at, end)
        self._log.hold(text[at:after])
        self._raw.append(piece)
        if len(self._early_start) < _LONGEST_START:
            self._early_start += "".join(piece.split())[:_LONGEST_START]
        if self._early_span.is_broken:
            self.reading = Reading.FAILED
        elif self._early_span.is_over:
            self._early, self._state = "".join(self._raw), _State.AFTER_VALUE
            self._begin_named()
        elif piece and self._name and not self._may_be_definition():
            self._arguments = CallArguments(self._log, self._name, self._early_span, begun="".join(self._raw))
            self.reading = self._arguments.reading
        return after

    def _may_be_definition(self) -> bool:
        """Whether the arguments so far may be the schema of a definition that the model repeats."""
        start = self._early_start
        return self._is_bare and any(start[: len(schema)] == schema[: len(start)] for schema in _SCHEMA_STARTS)

    def _begin_named(self) -> None:
        if self._name and self._early is not None and not self._may_be_definition():
            self._begin_whole()

    def _begin_whole(self) -> None:
        self._is_begun = bool(self._name) and self._early is not None and self._log.begin(self._name, self._early, is_whole=True)
        if not self._is_begun:
            self.reading = Reading.FAILED

    def _read_span(self, text: str, at: int, end: int) -> int:
        if self._use is _Use.EARLY_ARGUMENTS:
            return self._read_early_arguments(text, at, end)
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
        if self._use is _Use.PYTHON:
            self._read_python(raw)
        elif self._use is not _Use.OTHER:
            text = _decoded(raw)
            if self._use is _Use.KEY:
                self._key = text
            else:
                self._take_name(text)

    def _read_python(self, raw: str) -> None:
        calls = CallLog(self._log.names)
        JsonCalls(self._row, calls, is_bare=self._is_bare).feed(json_of_literal(raw) or "", 0)
        arguments = "".join([piece.arguments for piece in calls.pieces])
        if calls.pieces and self._log.begin(calls.pieces[0].name or "", arguments, is_whole=True):
            self._is_begun, self._state = True, _State.AFTER_OBJECT
        else:
            self.reading = Reading.FAILED

    def _take_name(self, written: str) -> None:
        name = self._log.meant(written)
        if self._key in _NAMES and name not in self._log.names:
            return
        if not name or (self._is_bare and name not in self._log.names) or self._name not in ("", name):
            self.reading = Reading.FAILED
            return
        self._name = name
        self._begin_named()


def _decoded(raw: str) -> str:
    try:
        text = str(json.loads(raw))
        text.encode()
    except ValueError:
        return ""
    return text
