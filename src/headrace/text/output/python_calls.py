"""Reads tool calls written in Python: [f(a=1, b="x"), g()]."""

from __future__ import annotations

import re
from enum import Enum

from headrace.text.output.format_types import ToolFormat
from headrace.text.output.literals import LiteralSpan, json_of_literal
from headrace.text.output.reading import CallLog, Reading, TagChoice, first_non_space

MAX_NAME_CHARS = 128
"""Text with a longer name is no call."""

MAX_ARGUMENTS = 128

_NO_WORD = re.compile(r"[^\w.-]")


class _State(Enum):
    LIST = 1
    NAME = 2
    PARENTHESIS = 3
    ARGUMENT = 4
    EQUALS = 5
    VALUE = 6
    AFTER_VALUE = 7
    AFTER_CALL = 8
    END_MARKER = 9


class PythonCalls:
    def __init__(self, row: ToolFormat, log: CallLog, *, is_bare: bool = False) -> None:
        """is_bare: calls must name offered functions"""
        self._log, self._is_bare = log, is_bare
        self._end_marker = TagChoice(row.end)
        self._state = _State.LIST
        self._word = ""
        self._name = ""
        self._arguments: list[str] = []
        self._value: list[str] = []
        self._literal = LiteralSpan()
        self.reading = Reading.GOES_ON

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and self.reading is Reading.GOES_ON:
            if self._log.room <= 0:
                self.reading = Reading.FAILED
            else:
                at = self._read(text, at, min(len(text), at + self._log.room))
        return at

    def _read(self, text: str, at: int, end: int) -> int:
        if self._state is _State.END_MARKER:
            at, self.reading = self._end_marker.feed(self._log, text, at, end)
            if self.reading is Reading.DONE:
                self._log.forget_held()
            return at
        if self._state is _State.VALUE:
            return self._read_value(text, at, end)
        if not self._word:
            first = first_non_space(text, at, end)
            self._log.hold(text[at:first])
            at = first
        if at == end:
            return at
        if self._state in (_State.NAME, _State.ARGUMENT) and (self._word or not _NO_WORD.match(text[at])):
            return self._read_word(text, at, end)
        if not self._take(text[at]):
            self.reading = Reading.FAILED
            return at
        if self._state not in (_State.AFTER_CALL, _State.END_MARKER):
            self._log.hold(text[at])
        return at + 1

    def _read_word(self, text: str, at: int, end: int) -> int:
        match = _NO_WORD.search(text, at, min(end, at + MAX_NAME_CHARS - len(self._word)))
        after = match.start() if match else min(end, at + MAX_NAME_CHARS - len(self._word))
        self._log.hold(text[at:after])
        self._word += text[at:after]
        if match is None and after == at:
            self.reading = Reading.FAILED
        elif match is not None:
            self._end_word()
        return after

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if self._state is _State.NAME:
            self._name, self._state = self._log.meant(word), _State.PARENTHESIS
            self._arguments.clear()
            if self._is_bare and self._name not in self._log.names:
                self.reading = Reading.FAILED
        else:
            self._state = _State.EQUALS
            if word in self._arguments or len(self._arguments) == MAX_ARGUMENTS:
                self.reading = Reading.FAILED
            self._arguments.append(word)

    def _take(self, char: str) -> bool:
        match self._state, char:
            case (_State.LIST, "[") | (_State.AFTER_CALL, ","):
                self._state = _State.NAME
            case (_State.PARENTHESIS, "("):
                self._state = _State.ARGUMENT
            case (_State.EQUALS, "="):
                self._state, self._literal = _State.VALUE, LiteralSpan()
            case (_State.AFTER_VALUE, ","):
                self._state = _State.ARGUMENT
            case (_State.ARGUMENT | _State.AFTER_VALUE, ")"):
                return self._end_call()
            case (_State.AFTER_CALL, "]"):
                self._state = _State.END_MARKER
            case _:
                return False
        return True

    def _end_call(self) -> bool:
        self._state = _State.AFTER_CALL
        return self._log.end(self._name)

    def _read_value(self, text: str, at: int, end: int) -> int:
        after = self._literal.feed(text, at, end)
        self._log.hold(text[at:after])
        self._value.append(text[at:after])
        if self._literal.is_broken or (self._literal.is_over and not self._end_value()):
            self.reading = Reading.FAILED
        return after

    def _end_value(self) -> bool:
        value = json_of_literal("".join(self._value))
        self._value.clear()
        self._state = _State.AFTER_VALUE
        return value is not None and self._log.add_argument(self._name, self._arguments[-1], value)
