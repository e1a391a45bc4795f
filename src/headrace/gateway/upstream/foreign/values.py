"""Reads JSON as foreign servers write it, and the numbers in it and in their headers.

A typed decoder decodes most answers. `read_json_texts` reads what that decoder refuses: NaN and Infinity as Python prints them, control
characters in strings, halves of surrogate pairs, bytes that are not UTF-8.
"""

from __future__ import annotations

import json
import math
import re

MAX_COUNT = 2**53

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Left out at the beginning of JSON, and of an event stream, as its standard says."""

_MAX_DIGITS = 1000
"""Longest integer that is read exactly. Python takes time quadratic in the digits, and refuses more than 4300 of them."""

_SPACE = re.compile(r"\s*")


def read_json(data: bytes) -> object:
    """The value of a JSON text. Its strings may hold lone surrogates: halves of pairs, and bytes that are not UTF-8 (`surrogateescape`).

    Raises ValueError for what is no JSON, or nested too deeply.
    """
    (value,) = read_json_texts(data, max_texts=1)
    return value


def read_json_texts(data: bytes, *, max_texts: int) -> list[object]:
    """The values of one JSON text or of several, one after the other. As `read_json`; raises ValueError for more than max_texts too."""
    text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "surrogateescape").strip()
    values: list[object] = []
    place = 0
    while place < len(text) or not values:
        if len(values) == max_texts:
            raise ValueError("too many JSON texts")
        try:
            value, place = _JSON.raw_decode(text, place)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        values.append(value)
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing too
    return values


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else -math.inf if digits.startswith("-") else math.inf


_JSON = json.JSONDecoder(strict=False, parse_int=_integer)


def number_of(value: object) -> float | None:
    """A finite number, minus infinity, or the text of either; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value) if len(value) <= 32 and value.isascii() else None
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if number < math.inf else None


def integer_of(value: object) -> int | None:
    """A whole number in any of its forms: 12, 12.0, "12". None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = number_of(value)
    return int(number) if number is not None and math.isfinite(number) and number.is_integer() else None


def count_of(value: object) -> int | None:
    """A whole number of things, in any form of `integer_of`; None for anything else."""
    number = integer_of(value)
    return number if number is not None and 0 <= number <= MAX_COUNT else None


def number_in(text: str) -> float:
    """The finite number that a header or a metrics page has as this text; -1 for what is none."""
    text = text.strip()
    if not text.isascii() or len(text) > 32 or not text[:1].isdigit():
        return -1.0
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0
