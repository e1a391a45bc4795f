"""Rewrites a schema's regular expressions without look-around, which llguidance does not support.

Look-around that generators write stands between `^` and the rest of an expression. Each such condition becomes an expression of its own,
and a text matches the given expression if it matches all of them. Negative conditions are supported if they name characters: a text does
not begin or end with them, does not contain them, does not contain one twice in a row, or does not consist of them.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]|[()]|.", re.DOTALL)
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")

_ATOM = r"(\\[^a-zA-Z0-9]|\[\^?(?:\\.|[^\]\\^])(?:\\.|[^\]\\])*\]|[^\\\[\](){}.*+?|^$])"
_BEGINS = re.compile(rf"\^?{_ATOM}")
_HOLDS = re.compile(rf"\^?\.\*{_ATOM}")
_HOLDS_TWICE = re.compile(rf"\^?\.\*{_ATOM}\1")
_ENDS = re.compile(rf"\^?\.\*{_ATOM}\$")
_CONSISTS = re.compile(rf"\^?{_ATOM}\*\$")


def without_look_around(expression: str) -> list[str] | None:
    """Expressions without look-around that together match the same texts; None where these are not known."""
    if not _has_look_around(expression):
        return [expression]
    if not expression.startswith("^"):
        return None
    found: list[str] = []
    begin = 1
    while expression.startswith(("(?=", "(?!"), begin):
        end = _closing(expression, begin)
        if end is None or _has_look_around(inside := expression[begin + 3 : end]):
            return None
        said = f"^(?:{inside})" if expression[begin + 2] == "=" else _excluded(inside)
        if said is None:
            return None
        found.append(said)
        begin = end + 1
    rest = expression[begin:]
    return None if _has_look_around(rest) or _has_branches(rest) else [*found, f"^{rest}"]


def _excluded(inside: str) -> str | None:
    """An expression for the texts that do not begin with `inside`; None where it is not known."""
    if found := _BEGINS.fullmatch(inside):
        return f"^(?:{_others(found[1])}(?s:.*))?$"
    if found := _HOLDS_TWICE.fullmatch(inside):
        return f"^(?:{found[1]}?{_others(found[1])})*{found[1]}?$"
    if found := _HOLDS.fullmatch(inside):
        return f"^{_others(found[1])}*$"
    if found := _ENDS.fullmatch(inside):
        return f"^(?:(?s:.*){_others(found[1])})?$"
    if found := _CONSISTS.fullmatch(inside):
        return _others(found[1])
    return None


def _others(atom: str) -> str:
    """A character set of all characters that an atom does not match."""
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    return f"[^{atom[1:]}" if atom.startswith("[") else f"[^{atom}]"


def _has_look_around(expression: str) -> bool:
    return any(token in _LOOK_AROUND for token in _TOKEN.findall(expression))


def _has_branches(expression: str) -> bool:
    depth = 0
    for token in _TOKEN.findall(expression):
        depth += token.startswith("(") - (token == ")")
        if token == "|" and not depth:
            return True
    return False


def _closing(expression: str, begin: int) -> int | None:
    """Position of the parenthesis that closes the group at `begin`."""
    depth = 0
    for found in _TOKEN.finditer(expression, begin):
        depth += found[0].startswith("(") - (found[0] == ")")
        if not depth:
            return found.start()
    return None
