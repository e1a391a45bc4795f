"""Rewrites a pattern with look-around as several patterns without it, which llguidance does not support.

Look-around that generators write stands between `^` and the rest of an expression. Each such condition becomes an expression of its own,
and a text matches the given expression if it matches all of them. Negative conditions are supported where their opposite is known: a text
does not begin with some characters or is not these, does not contain or end with one of a set, does not contain two of a set in a row, or
does not consist of them.
"""

from __future__ import annotations

from headrace.engine.grammar.char_sets import ANY, CharSet
from headrace.engine.grammar.ecma_pattern import Anchor, Chars, Choice, Concatenation, LookAhead, Node, PatternRefused, Repeat

_START, _END = Anchor(is_start=True), Anchor(is_start=False)
_REST = Repeat(Chars(ANY))

AFTER_START = "a pattern whose look-around stands directly after ^"

MAX_EXCLUDED_CHARS = 40
"""Characters of an excluded beginning. Each takes a level of groups."""


def without_look_around(node: Node) -> list[Node]:
    """Trees that together match the texts of this one. Look-around elsewhere in it stays in them. Raises PatternRefused."""
    parts = node.parts if isinstance(node, Concatenation) else (node,)
    num_conditions = 0
    while num_conditions + 1 < len(parts) and parts[0] == _START and isinstance(parts[num_conditions + 1], LookAhead):
        num_conditions += 1
    if parts and isinstance(parts[0], LookAhead):
        raise PatternRefused(AFTER_START, "Write ^ before it.")
    if not num_conditions:
        return [node]
    found: list[Node] = []
    for condition in parts[1 : num_conditions + 1]:
        assert isinstance(condition, LookAhead)
        found += _excluded(condition.part) if condition.is_negative else [Concatenation((_START, condition.part))]
    return [*found, Concatenation((_START, *parts[num_conditions + 1 :]))]


def _excluded(node: Node) -> list[Node]:
    """Trees for the texts that do not begin with what `node` matches. Raises PatternRefused where they are not known."""
    if isinstance(node, Choice):
        return [found for part in node.parts for found in _excluded(part)]
    parts = node.parts if isinstance(node, Concatenation) else (node,)
    parts = parts[1:] if parts and parts[0] == _START else parts
    found: Node | None = None
    match parts:
        case (Repeat(Chars(passed), 0, None), Chars(chars)) if _are_listed(passed, chars):
            found = _without_any(passed, chars)
        case (Repeat(Chars(passed), 0, None), Chars(chars), Chars(again)) if chars == again and _are_listed(passed, chars):
            found = _without_two(passed, chars)
        case (Repeat(Chars(passed), 0, None), Chars(chars), end) if end == _END and _are_listed(passed, chars):
            found = _without_last(passed, chars)
        case (Repeat(Chars(chars), 0, None), end) if end == _END and _are_listed(chars):
            return [Chars(ANY.minus(chars))]
        case _:
            found = _other_beginning(parts)
    if found is None:
        limit = "a pattern whose negative look-around names characters that a text does not begin with, end with, contain or consist of"
        raise PatternRefused(limit, "Leave it out, or write what may follow.")
    return [Concatenation((_START, found, _END))]


def _are_listed(*sets: CharSet) -> bool:
    return not any(chars.properties for chars in sets)


def _maybe(*parts: Node) -> Node:
    return Repeat(Concatenation(parts), 0, 1)


def _without_any(passed: CharSet, chars: CharSet) -> Node:
    """Texts without one of `chars` up to and including the first character that is not passed over."""
    others = ANY.minus(chars)
    return Concatenation((Repeat(Chars(_common(passed, others))), _maybe(Chars(others.minus(passed)), _REST)))


def _without_two(passed: CharSet, chars: CharSet) -> Node | None:
    """Texts without two of `chars` in a row up to the first character that is not passed over; None where some of `chars` are not."""
    if chars.minus(passed).ranges:
        return None
    others, one = ANY.minus(chars), Repeat(Chars(chars), 0, 1)
    single = Repeat(Concatenation((one, Chars(_common(passed, others)))))
    return Concatenation((single, one, _maybe(Chars(others.minus(passed)), _REST)))


def _without_last(passed: CharSet, chars: CharSet) -> Node:
    """Texts that end with another character than `chars`, or hold one before their end that is not passed over."""
    another = Concatenation((_REST, Chars(ANY.minus(chars))))
    stopped = Concatenation((_REST, Chars(ANY.minus(passed)), Chars(ANY), _REST))
    return _maybe(Choice((another, stopped)))


def _other_beginning(parts: tuple[Node, ...]) -> Node | None:
    """Texts that do not begin with these characters, or that are not these where `$` follows; None for other parts than characters."""
    is_whole = parts[-1:] == (_END,)
    if len(parts) > MAX_EXCLUDED_CHARS:
        return None
    found: Node = Concatenation((Chars(ANY), _REST)) if is_whole else Chars(CharSet())
    for part in reversed(parts[: len(parts) - is_whole]):
        if not isinstance(part, Chars) or part.chars.properties:
            return None
        found = Choice((Concatenation((Chars(ANY.minus(part.chars)), _REST)), Concatenation((part, found))))
        found = Repeat(found, 0, 1)
    return found


def _common(one: CharSet, other: CharSet) -> CharSet:
    return one.minus(ANY.minus(other))
