"""Finds the end of one JSON value in text that arrives in pieces, without parsing the value."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_STRUCTURE = re.compile(r'["{}\[\]<]')


class JsonSpan:
    """One value. Brackets are counted, not matched with each other.

    is_over    the value is complete
    is_broken  a "<" stands outside strings: it begins most markers and no JSON
    """

    def __init__(self, opening: str) -> None:
        """opening: the value's first character, which `feed` is given as well"""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = opening not in '{["'
        self.is_over = False
        self.is_broken = False

    def feed(self, text: str, at: int, end: int) -> int:
        """Position after the last character of `text` from `at` to `end` that belongs to the value."""
        if self._is_scalar:
            found = _SCALAR_END.search(text, at, end)
            self.is_over = found is not None
            return found.start() if found else end
        while at < end and not (self.is_over or self.is_broken):
            at = self._string(text, at, end) if self._in_string else self._structure(text, at, end)
        return at

    def _string(self, text: str, at: int, end: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = _IN_STRING.search(text, at, end)
        if found is None:
            return end
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_over = self._depth == 0
        return found.end()

    def _structure(self, text: str, at: int, end: int) -> int:
        found = _STRUCTURE.search(text, at, end)
        if found is None:
            return end
        mark = found[0]
        if mark == "<":
            self.is_broken = True
            return found.start()
        if mark == '"':
            self._in_string = True
        else:
            self._depth += 1 if mark in "{[" else -1
            self.is_over = self._depth == 0
        return found.end()
