"""Matches the regular expressions by which quantized checkpoints name linears, in bounded time.

`re` backtracks: the author of a file can write a pattern that takes it years, such as `(.|.)` thirty times. Here a part of a pattern turns
the places of a name where it may begin into the set of places where it may end, so that no place is tried twice. Syntax and meaning are
those of `re.match`: characters, classes, groups, alternatives, repetitions, `^`, `$`, `\\b` and lookahead. What else `re` has is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from headrace.core.errors import CheckpointError, shorten

MAX_PATTERNS = 2048
MAX_PATTERN_CHARS = 1024
MAX_DEPTH = 32
MAX_REPEATS = 1000
MAX_STEPS = 1 << 16
"""Places that all patterns together may look at for one name: 50 ms. Patterns of real files need a few hundred each."""
_TOKEN = re.compile(
    r"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDsSwW]|\\[^\w\s]|\.|[^\\()\[|*+?{}^$])"
    r"|(?P<edge>\^|\$|\\[bBAZ])|(?P<open>\((?:\?(?::|=|!))?(?!\?))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<count>[*+?]|\{\d{1,4}(?:,\d{0,4})?\}|\{,\d{1,4}\})(?P<lazy>\??)(?![*+?])"
)
_SET_OPERATION = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*?(?:\[|--|&&|~~|\|\|)")
"""What a class may mean in a later Python, of which `re` warns."""


@dataclass(slots=True)
class Name:
    """A linear's, to be matched with all patterns of a checkpoint. steps: how many they may still take."""

    text: str
    steps: int = MAX_STEPS

    def spend(self, count: int) -> None:
        self.steps -= count
        if self.steps < 0:
            raise ValueError(f"and those before it take more than {MAX_STEPS} steps with {shorten(self.text)}")


_Places = set[int]
_Part = Callable[[Name, _Places], _Places]


@dataclass(frozen=True, slots=True)
class Pattern:
    file: str
    text: str
    part: _Part

    def matches(self, name: Name) -> bool:
        """As `re.match`. Raises CheckpointError for a pattern that takes too long."""
        try:
            return bool(self.part(name, {0}))
        except ValueError as error:
            raise _refused(self.file, self.text, error) from error


def read_patterns(file: str, texts: Iterable[str]) -> dict[str, Pattern]:
    """Raises CheckpointError naming the file for no regular expression, an unsupported one, and too many."""
    found: dict[str, Pattern] = {}
    for text in dict.fromkeys(texts):
        if len(found) == MAX_PATTERNS:
            raise CheckpointError(file, f"more than {MAX_PATTERNS} patterns name linears", "Write fewer patterns, or names.")
        try:
            found[text] = Pattern(file, text, _compiled(text))
        except ValueError as error:
            raise _refused(file, text, error) from error
    return found


def _refused(file: str, text: str, error: ValueError) -> CheckpointError:
    return CheckpointError(file, f"the pattern {shorten(text)} {error}", "Write the names that are meant, or a simpler pattern.")


def _compiled(text: str) -> _Part:
    if len(text) > MAX_PATTERN_CHARS:
        raise ValueError(f"has more than {MAX_PATTERN_CHARS} characters")
    if found := _SET_OPERATION.search(text):
        raise ValueError(f"has {found[0][-16:]!r}, which is not supported")
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError("is no regular expression") from error
    part, end = _alternatives(text, 0, 0)
    if end != len(text):
        raise ValueError(f"has {text[end : end + 4]!r}, which is not supported")
    return part


def _alternatives(pattern: str, position: int, depth: int) -> tuple[_Part, int]:
    if depth > MAX_DEPTH:
        raise ValueError(f"nests more than {MAX_DEPTH} groups")
    options: list[list[_Part]] = [[]]
    while found := _TOKEN.match(pattern, position):
        kind = found.lastgroup
        if kind == "close":
            break
        position = found.end()
        if kind == "bar":
            options.append([])
        elif kind == "lazy":  # the last group of a repetition; greedy or lazy, the places are the same
            options[-1][-1] = partial(_repeat, options[-1][-1], *_counts(found["count"]))
        elif kind == "open":
            inner, position = _alternatives(pattern, position, depth + 1)
            position += 1  # the parenthesis: `re` has found one for each
            wanted = {"(?=": True, "(?!": False}.get(found[0])
            options[-1].append(inner if wanted is None else partial(_ahead, inner, wanted))
        else:
            options[-1].append(partial(_at_edge if kind == "edge" else _character, re.compile(found[0])))
    return partial(_either, options), position


def _counts(text: str) -> tuple[int, int | None]:
    if text in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    low, comma, high = text[1:-1].partition(",")
    least, most = int(low or 0), int(high) if high else None if comma else int(low)
    if max(least, most or 0) > MAX_REPEATS:
        raise ValueError(f"repeats more than {MAX_REPEATS} times")
    return least, most


def _character(atom: re.Pattern[str], name: Name, places: _Places) -> _Places:
    name.spend(len(places) + 1)
    return {place + 1 for place in places if atom.fullmatch(name.text, place, place + 1)}


def _at_edge(edge: re.Pattern[str], name: Name, places: _Places) -> _Places:
    name.spend(len(places) + 1)
    return {place for place in places if edge.match(name.text, place)}


def _ahead(inner: _Part, wanted: bool, name: Name, places: _Places) -> _Places:
    return {place for place in places if bool(inner(name, {place})) is wanted}


def _either(options: list[list[_Part]], name: Name, places: _Places) -> _Places:
    found: _Places = set()
    for parts in options:
        name.spend(1)
        ends = places
        for part in parts:
            ends = part(name, ends) if ends else ends
        found |= ends
    return found


def _repeat(part: _Part, least: int, most: int | None, name: Name, places: _Places) -> _Places:
    for _ in range(least):
        name.spend(1)
        before, places = places, part(name, places)
        if places == before:
            break
    found = new = places
    for _ in range(len(name.text) + 1 if most is None else most - least):
        new = part(name, new) - found
        if not new:
            break
        found = found | new
    return found
