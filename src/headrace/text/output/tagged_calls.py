"""Reads tool calls written between tags: <function=f><parameter=a>1</parameter></function>, and JSON arguments behind a header of tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum

from headrace.text.output.call_arguments import ARGUMENTS_OPENINGS, ArgumentsSpan, CallArguments
from headrace.text.output.format_types import ToolFormat
from headrace.text.output.reading import CallLog, Reading, TagChoice, TextUntil, first_non_space, num_held
from headrace.text.output.value_types import TEXT, TYPES, FunctionTypes, written_value

MAX_TAG_CHARS = 256

_NO_NAME = re.compile(r"[^\w.-]")


class _State(Enum):
    CALL_START = 1
    NAME = 2
    NAME_END = 3
    BODY = 4
    KEY = 5
    VALUE_START = 6
    RAW_VALUE = 7
    TEXT_VALUE = 8
    JSON = 9
    CALL_END = 10
    AFTER_CALL = 11


class TaggedCalls:
    def __init__(self, row: ToolFormat, log: CallLog, function_types: FunctionTypes) -> None:
        assert row.tags is not None, f"{row.name} has no tags"
        self._row, self._log = row, log
        self._padding = row.tags.padding
        self._tags = row.tags.stripped()
        self._function_types = function_types
        self._types: Mapping[str, frozenset[str]] = {}
        self._has_arguments = False
        self._word = self._name = self._key = ""
        self._tail = ""
        self._is_padded = False
        self._arguments: CallArguments | None = None
        self._until = TextUntil(self._tags.key_end)
        self.reading = Reading.GOES_ON
        self._choice = TagChoice()
        self._state = _State.CALL_START
        self._enter(_State.CALL_START)

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and self.reading is Reading.GOES_ON:
            if self._state is _State.TEXT_VALUE:
                at = self._pass_text(text, at)
            elif self._arguments is not None:
                at = self._pass_arguments(self._arguments, text, at)
            elif self._log.room <= 0:
                self.reading = Reading.FAILED
            else:
                at = self._read_form(text, at, min(len(text), at + self._log.room))
        return at

    def _enter(self, state: _State) -> None:
        tags = self._tags
        match state:
            case _State.CALL_START:
                self._has_arguments = False
                self._choice = TagChoice(tags.call_start)
                state = state if tags.call_start else _State.NAME
            case _State.NAME_END:
                self._choice = TagChoice(tags.name_end)
                if not tags.name_end:
                    self._enter(_State.BODY)
                    return
            case _State.BODY if not tags.key_start:
                state = _State.JSON
            case _State.BODY:
                self._choice = TagChoice(tags.key_start, tags.call_end or self._row.end)
            case _State.KEY:
                self._until = TextUntil(tags.key_end, MAX_TAG_CHARS)
            case _State.VALUE_START:
                self._choice = TagChoice(tags.value_start)
                if not tags.value_start:
                    self._begin_value()
                    return
            case _State.CALL_END:
                self._choice = TagChoice(tags.call_end)
            case _State.AFTER_CALL:
                self._choice = TagChoice(tags.call_start, self._row.end)
        self._state = state

    def _read_form(self, text: str, at: int, end: int) -> int:
        match self._state:
            case _State.NAME:
                return self._read_name(text, at, end)
            case _State.KEY | _State.RAW_VALUE:
                return self._read_until(text, at, end)
            case _State.JSON:
                return self._begin_json(text, at, end)
        at, self.reading = self._choice.feed(self._log, text, at, end)
        if self.reading is Reading.DONE:
            self.reading = Reading.GOES_ON
            self._take_tag(self._choice.found)
        return at

    def _take_tag(self, tag: str) -> None:
        match self._state:
            case _State.CALL_START:
                self._enter(_State.NAME)
            case _State.NAME_END:
                self._enter(_State.BODY)
            case _State.BODY if tag == self._tags.key_start:
                self._enter(_State.KEY)
            case _State.BODY:
                self._end_call(is_written=self._log.end(self._name))
                if not self._tags.call_end:
                    self._end_section()
            case _State.VALUE_START:
                self._begin_value()
            case _State.CALL_END:
                if self._has_arguments:
                    self._log.forget_held()
                self._end_call(is_written=self._has_arguments or self._log.end(self._name))
            case _State.AFTER_CALL if tag == self._row.end:
                self._end_section()
            case _State.AFTER_CALL:
                self._enter(_State.CALL_START)
                self._enter(_State.NAME)

    def _end_section(self) -> None:
        if self.reading is Reading.GOES_ON:
            self._log.forget_held()
            self.reading = Reading.DONE

    def _read_name(self, text: str, at: int, end: int) -> int:
        begin = at
        while at < end and not self._word and text[at].isspace():
            at += 1
        match = _NO_NAME.search(text, at, end)
        after = match.start() if match else end
        self._log.hold(text[begin:after])
        self._word += text[at:after]
        if len(self._word) > MAX_TAG_CHARS or (match and not self._word):
            self.reading = Reading.FAILED
        elif match:
            self._name, self._word = self._log.meant(self._word), ""
            self._types = self._function_types.of(self._name)
            self._enter(_State.NAME_END)
        return after

    def _end_call(self, *, is_written: bool) -> None:
        if is_written:
            self._enter(_State.AFTER_CALL)
        else:
            self.reading = Reading.FAILED

    # -- JSON behind a header ------------------------------------------------------------------------------------------------------

    def _begin_json(self, text: str, at: int, end: int) -> int:
        first = first_non_space(text, at, end)
        self._log.hold(text[at:first])
        if first < end and text[first] in ARGUMENTS_OPENINGS:
            self._arguments = CallArguments(self._log, self._name, ArgumentsSpan(text[first]))
        elif first < end:
            self._enter(_State.CALL_END)
        return first

    def _pass_arguments(self, arguments: CallArguments, text: str, at: int) -> int:
        at = arguments.feed(text, at)
        self.reading = arguments.reading
        if self.reading is Reading.DONE:
            self.reading, self._arguments, self._has_arguments = Reading.GOES_ON, None, True
            self._enter(_State.CALL_END)
        return at

    # -- parameters between tags ---------------------------------------------------------------------------------------------------

    def _read_until(self, text: str, at: int, end: int) -> int:
        at, self.reading = self._until.feed(self._log, text, at, end)
        if self.reading is Reading.DONE:
            self.reading = Reading.GOES_ON
            if self._state is _State.KEY:
                self._key = self._until.text.strip()
                self._enter(_State.VALUE_START)
            else:
                value = self._until.text.removeprefix(self._padding).removesuffix(self._padding)
                self._add_argument(written_value(value, self._value_types()))
                self._enter(_State.BODY)
        return at

    def _begin_value(self) -> None:
        if self._value_types() == TEXT:
            self._add_argument('"')
            self._tail, self._is_padded = "", bool(self._padding)
            self._state = _State.TEXT_VALUE
        else:
            self._until = TextUntil(self._tags.value_end)
            self._state = _State.RAW_VALUE

    def _value_types(self) -> frozenset[str]:
        return self._types.get(self._key, TYPES)

    def _add_argument(self, value: str) -> None:
        if not self._log.add_argument(self._name, self._key, value):
            self.reading = Reading.FAILED

    def _pass_text(self, text: str, at: int) -> int:
        if self._tail:  # at most once per piece of the output
            joined, before = self._tail + text[at:], at - len(self._tail)
            self._tail = ""
            return before + self._pass_text(joined, 0)
        if self._is_padded:
            at += text[at] == self._padding
            self._is_padded = False
        tags, end = self._tags, text.find(self._tags.value_end, at)
        if end >= 0:
            shown = end - (end > at and text[end - 1] == self._padding)
            after = end + len(tags.value_end)
        else:
            shown = len(text) - max(num_held(text, tags.value_end, at), num_held(text, self._padding + tags.value_end, at))
            after = len(text)
            self._tail = text[shown:]
        written = json.dumps(text[at:shown], ensure_ascii=False)[1:-1] + ('"' if end >= 0 else "")
        if written:
            self._log.add(written)
        if end >= 0:
            self._enter(_State.BODY)
        return after
