"""Rewrites the numbers of a JSON schema as llguidance can hold them: 64-bit floats, and 64-bit integers as bounds of an integer.

A bound that is not exact is moved inwards, so every answer within the moved bound is within the given one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from headrace.engine.grammar.places import Place, refused

EXACT = 1 << 53

MAX_INTEGER = (1 << 63) - 1

MAX_FLOAT = (1 << 63) - 1024

OPEN_LIMIT = 10**18
"""A range that is open towards infinity cannot begin here or further out in llguidance."""

NUM_DIGITS = 15
"""Digits of a fraction that llguidance keeps, if at most MAX_DECIMALS are after the point."""

MAX_DECIMALS = 22

MAX_MULTIPLE = (1 << 32) - 1

SIDES = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))

SEND_TEXT = "Send such a number as a string."


def as_read(value: float) -> float:
    """llguidance reads the digits as one float and divides by a power of ten; both steps may round."""
    if isinstance(value, int):
        return value
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)  # the schema's reader refuses infinities
    read = float(int("".join(map(str, digits))))
    if exponent < -308:
        read, exponent = read / 1e308, exponent + 308
    read = read / float(f"1e{-exponent}") if exponent < 0 else read * float(f"1e{exponent}")
    return -read if sign else read


def check_values(values: Sequence[object], keyword: str, place: Place) -> None:
    """Raises InvalidRequest if a number would be written as another one."""
    unseen = list(values)
    while unseen:
        value = unseen.pop()
        if isinstance(value, dict):
            unseen += value.values()
        elif isinstance(value, list):
            unseen += value
        elif isinstance(value, int) and abs(value) > EXACT and (abs(value) > MAX_FLOAT or int(float(value)) != value):
            raise refused((place, keyword), f"integers of at most 2^53 ({EXACT}) in {keyword}", value, SEND_TEXT)
        elif isinstance(value, float) and as_read(value) != value:
            limit = f"numbers of at most {NUM_DIGITS} digits, {MAX_DECIMALS} after the point, in {keyword}"
            raise refused((place, keyword), limit, value, f"Round it. {SEND_TEXT}")


def check_multiple(node: dict[str, Any], place: Place) -> None:
    """Raises InvalidRequest unless llguidance represents the number exactly: 32 bits over a power of ten."""
    if "multipleOf" not in node:
        return
    given = node["multipleOf"]
    if not is_number(given) or given <= 0:
        raise refused((place, "multipleOf"), "a number above 0 in multipleOf", given)
    if multiple_parts(given) is not None:
        return
    if isinstance(given, int):
        raise refused((place, "multipleOf"), f"multipleOf of at most {MAX_MULTIPLE}", given, "Leave it out.")
    limit = f"a multipleOf that a 64-bit float, multiplied by 10 again and again, turns into an integer of at most {MAX_MULTIPLE} exactly"
    raise refused((place, "multipleOf"), limit, given, "Use a power of ten, as 0.01 is, or leave it out.")


def multiple_parts(given: float) -> tuple[int, int] | None:
    """(coefficient, decimals) as in llguidance; None where the result would not be exact."""
    scaled = as_read(given)
    num_decimals = 0
    while scaled <= MAX_MULTIPLE and scaled != int(scaled):
        scaled *= 10.0
        num_decimals += 1
    is_exact = scaled <= MAX_MULTIPLE and Decimal(int(scaled)).scaleb(-num_decimals) == Decimal(repr(given))
    return (int(scaled), num_decimals) if is_exact else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_bounds(node: dict[str, Any], place: Place) -> None:
    """Draft 4's boolean bounds become numbers. Raises InvalidRequest."""
    for inclusive, exclusive in SIDES:
        _without_boolean(node, inclusive, exclusive)
        for keyword in (inclusive, exclusive):
            if keyword in node and not is_number(node[keyword]):
                raise refused((place, keyword), f"a number in {keyword}", node[keyword])


def move_bounds(node: dict[str, Any], place: Place, *, is_integer: bool) -> None:
    """Called after `read_bounds`. Raises InvalidRequest where no number is left between the bounds."""
    given = _bounds(node)
    least, most = (_moved_bound(node, side, sign, is_integer=is_integer) for side, sign in zip(SIDES, (1, -1), strict=True))
    if least is not None and least >= OPEN_LIMIT and most is None:
        most = node["maximum"] = _inwards(MAX_INTEGER, -1, is_integer=is_integer)
    if most is not None and most <= -OPEN_LIMIT and least is None:
        least = node["minimum"] = _inwards(-MAX_INTEGER, 1, is_integer=is_integer)
    if least is None or most is None or _bounds(node) == given:
        return
    if least > most or (least == most and ("exclusiveMinimum" in node or "exclusiveMaximum" in node)):
        limit = f"bounds with an exact number between them, as integers up to 2^53 and numbers of {NUM_DIGITS} digits are"
        raise refused(place, limit, given, SEND_TEXT)


def _bounds(node: dict[str, Any]) -> dict[str, float]:
    return {keyword: node[keyword] for side in SIDES for keyword in side if keyword in node}


def _without_boolean(node: dict[str, Any], inclusive: str, exclusive: str) -> None:
    if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and inclusive in node:
        node[exclusive] = node.pop(inclusive)


def _moved_bound(node: dict[str, Any], side: tuple[str, str], sign: int, *, is_integer: bool) -> float | None:
    """sign: 1 for the lower side, -1 for the upper one"""
    given = [(node[keyword], keyword == side[1]) for keyword in side if keyword in node]
    if not given:
        return None
    value: float
    value, is_exclusive = max(given, key=lambda bound: (sign * bound[0], bound[1]))
    node.pop(side[not is_exclusive], None)
    if abs(value) < EXACT and _is_held(value, is_exclusive=is_exclusive):
        return value
    node.pop(side[is_exclusive])
    if abs(value) >= EXACT:
        moved: float = _inwards(int(value) + sign * is_exclusive, sign, is_integer=is_integer)
    else:
        least = moved = math.nextafter(value, sign * math.inf) if is_exclusive else value
        while sign * as_read(moved) < sign * least:
            moved = math.nextafter(moved, sign * math.inf)
    node[side[0]] = moved
    return as_read(moved)


def _is_held(bound: float, *, is_exclusive: bool) -> bool:
    """Whether the bound is exact: llguidance may round its last digits, and an exclusive bound would be allowed itself then."""
    return as_read(bound) == bound and not (is_exclusive and float(f"{bound:.{NUM_DIGITS}g}") != bound)


def _inwards(bound: int, sign: int, *, is_integer: bool) -> int:
    """sign: 1 for a lower bound, -1 for an upper one"""
    if is_integer and sign < 0 and bound >= MAX_INTEGER:
        return MAX_INTEGER
    lower = min(max(sign * bound, -MAX_FLOAT), 1 << 1000)  # an upper bound is a lower one of the negated numbers
    if not is_integer:
        step: int = 10 ** max(0, len(str(abs(lower))) - NUM_DIGITS)
        return sign * -(-lower // step) * step
    held = float(lower)
    return sign * int(held if held >= lower else math.nextafter(held, math.inf))
