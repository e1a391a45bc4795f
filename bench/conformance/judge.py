"""Judges values by a compiled schema, token by token: whether any text of a value is taken, and why a valid value is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from llguidance import LLMatcher

MAX_PERMUTED_KEYS = 5
"""Keys of an object whose orders are all tried, where the suite gives a value without an order."""

Number = Callable[[float], str]


class Judge:
    """One compiled schema. encode: a text's token ids"""

    def __init__(self, matcher: LLMatcher, encode: Callable[[str], list[int]]) -> None:
        self._matcher = matcher
        self._encode = encode

    def takes(self, text: str) -> bool:
        """Whether every token of the text is allowed in its place, and then an end token."""
        self._matcher.reset()
        ids = self._encode(text)
        return bool(self._matcher.try_consume_tokens(ids) == len(ids) and self._matcher.is_accepting())

    def takes_in_some_order(self, value: Any) -> bool:
        return any(self.takes(json_text(each)) for each in _orders(value))

    def why_refused(self, value: Any) -> str:
        """What has to be written otherwise for this valid value to be taken; empty: no other way is known."""
        if any(self.takes(json_text(each, _as_integer)) for each in _orders(value)):
            return "an integer is written with a fraction"
        if any(self.takes(json_text(each, _with_zero)) for each in _orders(value)):
            return "a fraction is a bound without its last digits"
        return ""


def json_text(value: Any, number: Number = repr, *, comma: str = ",", colon: str = ":") -> str:
    """A value as JSON, its keys as they stand. number: how a float is written"""
    if isinstance(value, dict):
        pairs = [f"{json_text(key)}{colon}{json_text(item, number, comma=comma, colon=colon)}" for key, item in value.items()]
        return "{" + comma.join(pairs) + "}"
    if isinstance(value, list):
        return "[" + comma.join([json_text(item, number, comma=comma, colon=colon) for item in value]) + "]"
    return number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def spellings(value: Any) -> tuple[str, ...]:
    """A value compact, in the usual spacing, and indented."""
    return json_text(value), json_text(value, comma=", ", colon=": "), json.dumps(value, ensure_ascii=False, indent=2)


def _as_integer(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)


def _with_zero(number: float) -> str:
    return repr(number) if number.is_integer() else f"{number!r}0"


def _orders(value: Any) -> Iterator[Any]:
    """The value as it is, then with the keys of its outermost object in every other order."""
    if not isinstance(value, dict) or not 1 < len(value) <= MAX_PERMUTED_KEYS:
        yield value
        return
    for keys in permutations(value):
        yield {key: value[key] for key in keys}
