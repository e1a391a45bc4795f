"""Finds the end of a tool call's arguments in streamed text and converts them to the text of a JSON object; reads calls `f[ARGS]{...}`.

{"a": true}            a JSON object: passed on as written
"{\\"a\\": true}"        an object inside a JSON string, as in OpenAI's API: unescaped
{'a': True}            a Python dict: converted to JSON when complete
null, None, "", "  "   no arguments: "{}"
"""

from __future__ import annotations

import json
import re
from string import hexdigits

from headrace.text.output.format_types import ARGUMENTS_MARKER, CALL_ID_MARKER
from headrace.text.output.literals import IN_STRING, JsonSpan, json_of_literal
from headrace.text.output.reading import NO_ARGUMENTS, CallLog, Reading, first_non_space

_NULLS = {"n": "null", "N": "None"}
ARGUMENTS_OPENINGS = frozenset({"{", '"', *_NULLS})


class CallArguments:
    """A call begins only when the text is known to be an object."""

    def __init__(self, log: CallLog, name: str, span: ArgumentsSpan, *, begun: str = "") -> None:
        self._log, self._name, self._span = log, name, span
        self._is_begun = bool(begun) and log.begin(name, begun)
        self.reading = Reading.GOES_ON if self._is_begun or not begun else Reading.FAILED

    def feed(self, text: str, at: int) -> int:
        """Returns the position after the last character read."""
        log, span = self._log, self._span
        after, piece = span.feed(text, at, len(text) if self._is_begun else min(len(text), at + log.room))
        if not self._is_begun:
            log.hold(text[at:after])
            self._is_begun = bool(piece) and log.begin(self._name)
        if self._is_begun:
            log.add(piece, is_last=span.is_over)
        if span.is_broken or (not self._is_begun and (piece or log.room <= 0)):
            self.reading = Reading.FAILED
        elif span.is_over:
            self.reading = Reading.DONE
        return after


class ArgumentsSpan:
    """is_broken: the character at the returned position cannot be part of arguments"""

    def __init__(self, opening: str) -> None:
        self._null = _NULLS.get(opening, "")
        self._is_string = opening == '"'
        self._is_open = False
        self._escape = self._word = ""
        self._object = _ObjectText(is_quoted=self._is_string)
        self.is_over = False
        self.is_broken = False

    def feed(self, text: str, at: int, end: int) -> tuple[int, str]:
        """(position after the last character of the arguments, next piece of the JSON text)."""
        if self._null:
            return self._feed_null(text, at, end)
        if self._is_string:
            return self._feed_string(text, at, end)
        after, piece = self._object.feed(text, at, end)
        self.is_over, self.is_broken = self._object.is_over, self._object.is_broken
        return after, piece

    def _feed_null(self, text: str, at: int, end: int) -> tuple[int, str]:
        while at < end and not (self.is_over or self.is_broken):
            if self._null.startswith(self._word + text[at]):
                self._word += text[at]
                self.is_over = self._word == self._null
                at += 1
            else:
                self.is_broken = True
        return at, NO_ARGUMENTS if self.is_over else ""

    def _feed_string(self, text: str, at: int, end: int) -> tuple[int, str]:
        pieces: list[str] = []
        if at < end and not self._is_open:
            self._is_open = True
            at += 1
        while at < end and not (self.is_over or self.is_broken):
            if self._escape or text[at] == "\\":
                at = self._pass_escape(text, at, pieces)
            elif text[at] == '"':
                at += 1
                self._end_string(pieces)
            else:
                match = IN_STRING['"'].search(text, at, end)
                at = self._pass_text(text, at, match.start() if match else end, pieces)
        return at, "".join(pieces)

    def _pass_escape(self, text: str, at: int, pieces: list[str]) -> int:
        is_cut = len(self._escape) > 1 and text[at] not in hexdigits
        if not is_cut:
            self._escape += text[at]
            at += 1
        if is_cut or len(self._escape) == (6 if self._escape[1:].startswith("u") else 2):
            piece = _unescaped(self._escape, is_in_string=self._object.is_in_string)
            self._escape = ""
            if self._pass_text(piece, 0, len(piece), pieces) < len(piece) and self._object.is_begun:
                pieces.append(piece)  # it was read already, so it cannot be given back
        return at

    def _pass_text(self, text: str, at: int, end: int, pieces: list[str]) -> int:
        if not self._object.is_over:
            at, piece = self._object.feed(text, at, end)
            pieces.append(piece)
            self.is_broken = self._object.is_broken
        if self._object.is_over and not self.is_broken:
            at = first_non_space(text, at, end)
            self.is_broken = at < end
        return at

    def _end_string(self, pieces: list[str]) -> None:
        self.is_over = self._object.is_begun or self._object.is_empty
        self.is_broken = not self.is_over
        if self._object.is_empty:
            pieces.append(NO_ARGUMENTS)


class _ObjectText:
    """A JSON object is returned in pieces as written; a Python dict as JSON, when complete."""

    def __init__(self, *, is_quoted: bool) -> None:
        self._is_quoted = is_quoted
        self._held: list[str] = []
        self._span: JsonSpan | None = None
        self._is_python = False
        self.is_begun = self.is_over = self.is_broken = False

    @property
    def is_empty(self) -> bool:
        return not self._held and self._span is None

    @property
    def is_in_string(self) -> bool:
        return self._span is not None and self._span.is_in_string

    def feed(self, text: str, at: int, end: int) -> tuple[int, str]:
        if self._span is None:
            at = self._find_key(text, at, end)
        if self._span is None or at == end:
            return at, ""
        after = self._span.feed(text, at, end)
        self._held.append(text[at:after])
        self.is_over, self.is_broken = self._span.is_over, self._span.is_broken
        return after, self._take_piece() if self.is_over or not self._is_python else ""

    def _find_key(self, text: str, at: int, end: int) -> int:
        if not self._held:
            at = first_non_space(text, at, end)
            if at < end and text[at] == "{":
                self._held.append("{")
                at += 1
            elif at < end:
                self.is_broken = True
        if self._held:
            first = first_non_space(text, at, end)
            self._held.append(text[at:first])
            at = first
            if at < end:
                self._begin(text[at])
        return at

    def _begin(self, char: str) -> None:
        self.is_broken = char == "<" or (self._is_quoted and char not in "\"'}")
        if not self.is_broken:
            self._is_python = char == "'"
            self._span = JsonSpan("{", is_python=self._is_python)
            self._span.feed("{", 0, 1)

    def _take_piece(self) -> str:
        piece = "".join(self._held)
        self._held.clear()
        if self._is_python:
            piece = json_of_literal(piece) or ""
            self.is_broken = not piece
        self.is_begun = self.is_begun or bool(piece)
        return piece


def _unescaped(escape: str, *, is_in_string: bool) -> str:
    """A control character or half a surrogate pair stays an escape in a string: the other half may not have arrived."""
    try:
        char = str(json.loads(f'"{escape}"'))
    except ValueError:
        return escape
    return escape if is_in_string and (char < " " or "\ud800" <= char <= "\udfff") else char


MAX_HEADER_CHARS = 256
"""Text with a longer header before a call's arguments is no call."""

_OPENING = re.compile(r'[{"]')
_HEADER = re.compile(
    rf"\s*(?P<name>[^\s\[]+)\s*(?:{re.escape(CALL_ID_MARKER)}[^\s\[]*\s*)?(?:{re.escape(ARGUMENTS_MARKER)})?\s*", re.DOTALL
)


class NamedCalls:
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
