"""Reads tool calls written as a name and a JSON object: f[ARGS]{...}. Source: Mistral's tokenizers from version 11 on."""

from __future__ import annotations

import re

from headrace.text.output.format_types import ARGUMENTS_MARKER, CALL_ID_MARKER, ToolFormat
from headrace.text.output.json_calls import JsonCalls
from headrace.text.output.json_span import JsonSpan
from headrace.text.output.markers import first_non_space
from headrace.text.output.reading import CallLog, CallReader, Reading

MAX_HEADER_CHARS = 256
"""Characters between the start marker and a call's arguments. A text with more is no call."""

_HEADER = re.compile(
    rf"\s*(?P<name>[^\s\[{{]+)\s*(?:{re.escape(CALL_ID_MARKER)}[^\s\[{{]*\s*)?(?:{re.escape(ARGUMENTS_MARKER)})?\s*", re.DOTALL
)


class NamedCalls:
    """What follows a start marker: one call, or a list of JSON calls as older models of the family write it. A `CallReader`."""

    def __init__(self, row: ToolFormat, log: CallLog) -> None:
        self._row, self._log = row, log
        self._json: CallReader | None = None
        self._span: JsonSpan | None = None
        self._header = ""
        self.reading = Reading.GOES_ON

    def feed(self, text: str, at: int) -> int:
        if self._json is None and not self._header:
            first = first_non_space(text, at, min(len(text), at + self._log.room))
            self._log.hold(text[at:first])
            at = first
            if at < len(text) and text[at] in "[{":
                self._json = JsonCalls(self._row, self._log, is_list=text[at] == "[")
        if self._json is not None:
            at = self._json.feed(text, at)
            self.reading = self._json.reading
            return at
        while at < len(text) and self.reading is Reading.GOES_ON:
            at = self._read_header(text, at) if self._span is None else self._pass_arguments(self._span, text, at)
        return at

    def _read_header(self, text: str, at: int) -> int:
        end = min(len(text), at + MAX_HEADER_CHARS - len(self._header))
        brace = text.find("{", at, end)
        after = end if brace < 0 else brace
        self._header += text[at:after]
        self._log.hold(text[at:after])
        if brace >= 0:
            header = _HEADER.fullmatch(self._header)
            if header is not None and self._log.begin(header["name"]):
                self._span = JsonSpan("{")
            else:
                self.reading = Reading.FAILED
        elif after == at:
            self.reading = Reading.FAILED
        return after

    def _pass_arguments(self, span: JsonSpan, text: str, at: int) -> int:
        after = span.feed(text, at, len(text))
        if after > at:
            self._log.add(text[at:after], is_last=span.is_over)
        if span.is_over:
            self.reading = Reading.DONE
        elif span.is_broken:
            self.reading = Reading.FAILED
        return after
