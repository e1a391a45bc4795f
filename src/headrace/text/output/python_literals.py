"""Converts Python literals to JSON without evaluating anything: strings, numbers, True, False, None, lists and dictionaries with string
keys.
"""

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
    """A Python literal as JSON; None if the text is no literal, or has no JSON: tuples, sets, calls, names, prefixed or joined strings."""
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


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] in "01234567":
        return chr(int(code, 8))
    return _LETTERS.get(code, found[0])


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
