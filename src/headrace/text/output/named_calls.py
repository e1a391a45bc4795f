"""Reads tool calls written as a name and its arguments: f[ARGS]{...}. Source: Mistral's tokenizers from version 11 on."""

from __future__ import annotations

import re

from headrace.text.output.call_arguments import ArgumentsSpan, CallArguments
from headrace.text.output.format_types import ARGUMENTS_MARKER, CALL_ID_MARKER
from headrace.text.output.reading import CallLog, Reading

MAX_HEADER_CHARS = 256
"""Characters between the start marker and a call's arguments. A text with more is no call."""

_OPENING = re.compile(r'[{"]')
_HEADER = re.compile(
    rf"\s*(?P<name>[^\s\[]+)\s*(?:{re.escape(CALL_ID_MARKER)}[^\s\[]*\s*)?(?:{re.escape(ARGUMENTS_MARKER)})?\s*", re.DOTALL
)


class NamedCalls:
    """Reads a section of one call, a name and arguments. A `CallReader`."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._arguments: CallArguments | None = None
        self._header = ""
        self.reading = Reading.GOES_ON

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and self.reading is Reading.GOES_ON:
            if self._arguments is None:
                at = self._read_header(text, at)
            else:
                at = self._arguments.feed(text, at)
                self.reading = self._arguments.reading
        return at

    def _read_header(self, text: str, at: int) -> int:
        end = min(len(text), at + MAX_HEADER_CHARS - len(self._header))
        opening = _OPENING.search(text, at, end)
        after = opening.start() if opening else end
        self._header += text[at:after]
        self._log.hold(text[at:after])
        if opening:
            header = _HEADER.fullmatch(self._header)
            if header is not None:
                self._arguments = CallArguments(self._log, self._log.meant(header["name"]), ArgumentsSpan(opening[0]))
            else:
                self.reading = Reading.FAILED
        elif after == at:
            self.reading = Reading.FAILED
        return after
