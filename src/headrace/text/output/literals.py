"""Finds the ends of JSON values and Python literals in text that arrives in pieces, and converts such literals to JSON."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>-?\d[\d.eE+-]*)|(?P<word>[A-Za-z]+)|(?P<mark>[][{},:])""",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}


def json_of_literal(source: str) -> str | None:
    """None if the text is no literal, or has no JSON: tuples, sets, calls, names."""
    made: list[str] = []
    at = 0
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            return None
        at = token.end()
        piece = _json_of_token(token)
        if piece is None:
            return None
        if piece in ("]", "}") and made and made[-1] == ", ":
            made.pop()
        if piece:
            made.append(piece)
    return _checked("".join(made))


def _json_of_token(token: re.Match[str]) -> str | None:
    match token.lastgroup:
        case "space":
            return ""
        case "string":
            return _json_string(token[0][1:-1])
        case "word":
            return _WORDS.get(token[0])
        case "mark":
            return {",": ", ", ":": ": "}.get(token[0], token[0])
    return token[0]


def _json_string(body: str) -> str | None:
    try:
        text = _ESCAPE.sub(_unescaped, body) if "\\" in body else body
    except (ValueError, OverflowError):
        return None
    return json.dumps(text, ensure_ascii=False) if _is_unicode(text) else json.dumps(text)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] in "01234567":
        return chr(int(code, 8))
    return _LETTERS.get(code, match[0])


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(made: str) -> str | None:
    try:
        json.loads(made)
    except (ValueError, RecursionError):
        return None
    return made


MAX_LITERAL_DEPTH = 64
"""Text with deeper arguments is no call."""

IN_STRING = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}

_SCALAR_END = re.compile(r"[,}\]\s]")
_STRUCTURE = re.compile(r'["{}\[\]<]')
_ARGUMENT_STRUCTURE = re.compile(r"""['"()\[\]{},]""")
_PYTHON_STRUCTURE = re.compile(r"""["'{}\[\]<]""")


class _Span:
    """Brackets are counted, not matched with each other."""

    _may_be_string = False

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self.is_over = False
        self.is_broken = False

    def feed(self, text: str, at: int, end: int) -> int:
        while at < end and not (self.is_over or self.is_broken):
            at = self._pass_string(text, at, end) if self._quote else self._pass_structure(text, at, end)
        return at

    def _pass_string(self, text: str, at: int, end: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        match = IN_STRING[self._quote].search(text, at, end)
        if match is None:
            return end
        if match[0] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
            self.is_over = self._may_be_string and self._depth == 0
        return match.end()

    def _pass_structure(self, text: str, at: int, end: int) -> int:
        raise NotImplementedError


class JsonSpan(_Span):
    """Broken by a "<" outside strings, which begins most markers."""

    _may_be_string = True

    def __init__(self, opening: str, *, is_python: bool = False) -> None:
        """opening: the first character; `feed` gets it as well"""
        super().__init__()
        self._is_scalar = opening not in '{["'
        self._structure = _PYTHON_STRUCTURE if is_python else _STRUCTURE

    @property
    def is_in_string(self) -> bool:
        return bool(self._quote)

    def feed(self, text: str, at: int, end: int) -> int:
        if not self._is_scalar:
            return super().feed(text, at, end)
        match = _SCALAR_END.search(text, at, end)
        self.is_over = match is not None
        return match.start() if match else end

    def _pass_structure(self, text: str, at: int, end: int) -> int:
        match = self._structure.search(text, at, end)
        if match is None:
            return end
        mark = match[0]
        if mark == "<":
            self.is_broken = True
            return match.start()
        if mark in "\"'":
            self._quote = mark
        else:
            self._depth += 1 if mark in "{[" else -1
            self.is_over = self._depth == 0
        return match.end()


class LiteralSpan(_Span):
    def _pass_structure(self, text: str, at: int, end: int) -> int:
        match = _ARGUMENT_STRUCTURE.search(text, at, end)
        if match is None:
            return end
        mark = match[0]
        if mark in "'\"":
            self._quote = mark
        elif mark in "([{":
            self._depth += 1
            self.is_broken = self._depth > MAX_LITERAL_DEPTH
        elif self._depth == 0:
            self.is_over, self.is_broken = mark in ",)", mark in "]}"
            return match.start()
        elif mark != ",":
            self._depth -= 1
        return match.end()
