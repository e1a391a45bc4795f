"""Matches names of modules against the regular expressions in an adapter's folder, whoever wrote them.

`re` backtracks: there are patterns of thirty characters that take it years, in which no other thread runs. Here each part of a pattern is
asked at which positions of the name it may end, given all at which it may begin, so that no position is met twice. The syntax is that of
`re`, without what cannot be answered so.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

MAX_CHARS = 512
MAX_GROUPS = 64
MAX_NESTING = 3
"""Repeats and lookaheads in one another. Each may cost another factor of a name's length."""

Positions = set[int]
Part = Callable[[str, Positions], Positions]
"""Where it may end. No position is after the name's end."""

_parser: Any = importlib.import_module("re._parser")  # no public module gives the tree of a pattern
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda char: not char.isdecimal(),
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
    "CATEGORY_NOT_WORD": lambda char: not (char.isalnum() or char == "_"),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
}


class NamePattern:
    """Raises ValueError for a pattern that cannot be matched."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_CHARS or pattern.count("(") > MAX_GROUPS:
            raise ValueError(f"a pattern has at most {MAX_CHARS} characters and {MAX_GROUPS} groups")
        try:
            tree = _parser.parse(pattern)
        except (re.error, OverflowError) as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if tree.state.flags != re.UNICODE:
            raise ValueError("flags are not known here")
        self._ends = _sequence(tree, MAX_NESTING)

    def matches(self, name: str) -> bool:
        return len(name) in self._ends(name, {0})

    def matches_end(self, name: str) -> bool:
        """The whole name, or what follows one of its dots."""
        return len(name) in self._ends(name, {0, *(found.end() for found in re.finditer(r"\.", name))})


def _sequence(tree: Any, nesting: int) -> Part:
    parts = [_part(str(kind), given, nesting) for kind, given in tree]

    def ends(name: str, starts: Positions) -> Positions:
        for part in parts:
            if not starts:
                break
            starts = part(name, starts)
        return starts

    return ends


def _part(kind: str, given: Any, nesting: int) -> Part:
    match kind:
        case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
            return _char([(kind, given)] if kind != "IN" else given)
        case "BRANCH":
            choices = [_sequence(each, nesting) for each in given[1]]
            return lambda name, starts: set().union(*(ends(name, starts) for ends in choices))
        case "SUBPATTERN" if not given[1] and not given[2]:
            return _sequence(given[3], nesting)
        case "MAX_REPEAT" | "MIN_REPEAT" if nesting > 0:
            return _repeat(given[0], given[1], _sequence(given[2], nesting - 1))
        case "ASSERT" | "ASSERT_NOT" if nesting > 0 and given[0] > 0:
            ahead = _sequence(given[1], nesting - 1)
            return lambda name, starts: {each for each in starts if bool(ahead(name, {each})) == (kind == "ASSERT")}
        case "AT" if str(given) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return lambda name, starts: starts & {0}
        case "AT" if str(given) in ("AT_END", "AT_END_STRING"):
            return lambda name, starts: starts & {len(name)}
    raise ValueError(f"{kind} is not known here, or there are more than {MAX_NESTING} repeats in one another")


def _char(items: list[tuple[Any, Any]]) -> Part:
    tests = [_char_test(str(kind), given) for kind, given in items if str(kind) != "NEGATE"]
    is_negated = len(tests) < len(items)
    return lambda name, starts: {each + 1 for each in starts if each < len(name) and any(test(name[each]) for test in tests) != is_negated}


def _char_test(kind: str, given: Any) -> Callable[[str], bool]:
    match kind:
        case "LITERAL":
            return lambda char: ord(char) == given
        case "NOT_LITERAL":
            return lambda char: ord(char) != given
        case "RANGE":
            return lambda char: given[0] <= ord(char) <= given[1]
        case "ANY":
            return lambda char: char != "\n"
    return _CATEGORIES[str(given)]


def _repeat(low: int, high: int, once: Part) -> Part:
    def ends(name: str, starts: Positions) -> Positions:
        most = len(name) + 1  # from then on a repetition can only be an empty one
        for _ in range(min(low, most)):
            starts = once(name, starts)
        reached, latest = set(starts), starts
        for _ in range(min(high - low, most)):
            latest = once(name, latest) - reached if latest else latest
            reached |= latest
        return reached

    return ends
