"""Finds the end of one JSON value in text that arrives in pieces, without parsing the value."""

from __future__ import annotations

import re

IN_STRING = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
"""What ends a string's plain text, by the string's quote: the quote again, or an escape."""

_SCALAR_END = re.compile(r"[,}\]\s]")
_STRUCTURE = re.compile(r'["{}\[\]<]')
_PYTHON_STRUCTURE = re.compile(r"""["'{}\[\]<]""")


class JsonSpan:
    """Finds the end of one JSON value. Brackets are counted, not matched with each other.

    is_over    the value is complete
    is_broken  a "<" is outside strings: it begins most markers and no JSON
    """

    def __init__(self, opening: str, *, is_python: bool = False) -> None:
        """
        opening    the value's first character; `feed` gets it as well
        is_python  strings may have single quotes
        """
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._is_scalar = opening not in '{["'
        self._structure = _PYTHON_STRUCTURE if is_python else _STRUCTURE
        self.is_over = False
        self.is_broken = False

    @property
    def is_in_string(self) -> bool:
        """Whether the next character is inside a string."""
        return bool(self._quote)

    def feed(self, text: str, at: int, end: int) -> int:
        """Position after the last character of `text` from `at` to `end` that belongs to the value."""
        if self._is_scalar:
            found = _SCALAR_END.search(text, at, end)
            self.is_over = found is not None
            return found.start() if found else end
        while at < end and not (self.is_over or self.is_broken):
            at = self._pass_string(text, at, end) if self._quote else self._pass_structure(text, at, end)
        return at

    def _pass_string(self, text: str, at: int, end: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = IN_STRING[self._quote].search(text, at, end)
        if found is None:
            return end
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
            self.is_over = self._depth == 0
        return found.end()

    def _pass_structure(self, text: str, at: int, end: int) -> int:
        found = self._structure.search(text, at, end)
        if found is None:
            return end
        mark = found[0]
        if mark == "<":
            self.is_broken = True
            return found.start()
        if mark in "\"'":
            self._quote = mark
        else:
            self._depth += 1 if mark in "{[" else -1
            self.is_over = self._depth == 0
        return found.end()
