"""Refuses, when a grammar arrives, counted repetitions such as `maxLength` and `.{1,2000}` that need more states than a lexer has.

A lexer takes a state for each byte written inside a repetition (`limits.MAX_COUNT`). Only single counts are checked here. Where counts
multiply, as in `(a{1,500}){1,500}`, or letters take several bytes, a longer output ends with the lexer's own error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from headrace.core.errors import InvalidRequest
from headrace.engine.grammar.limits import MAX_COUNT

_COUNT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[ ]*([0-9]+)[ ]*(?:,[ ]*([0-9]*)[ ]*)?\}", re.DOTALL)
_LARK_EXPRESSION = re.compile(r'"(?:\\.|[^"\\\n])*"|/((?:\\.|[^/\\\n])+)/')
_NUM_DIGITS = len(str(MAX_COUNT))


def check_string_counts(node: Mapping[str, object]) -> None:
    """Raises InvalidRequest if a string schema has a repetition count that is too large."""
    for keyword in ("minLength", "maxLength"):
        count = node.get(keyword)
        if isinstance(count, int | float) and count > MAX_COUNT:
            raise InvalidRequest("grammar", f"{keyword} of at most {MAX_COUNT}", count, "Lower it, or leave it out.")


def check_regex_counts(expression: str) -> None:
    """Raises InvalidRequest if a regular expression has a repetition count that is too large."""
    for count in _counts(expression):
        if len(count) > _NUM_DIGITS or int(count) > MAX_COUNT:
            raise InvalidRequest("grammar", f"counts of at most {MAX_COUNT} in a regular expression", count, "Lower it, or use + or *.")


def check_lark_counts(source: str) -> None:
    """Raises InvalidRequest if a regular expression in a Lark source has a repetition count that is too large."""
    for found in _LARK_EXPRESSION.finditer(source):
        check_regex_counts(found[1] or "")


def _counts(expression: str) -> Iterator[str]:
    """The repetition counts of an expression: numbers in braces, outside character sets and escapes."""
    for found in _COUNT.finditer(expression):
        for number in found.groups():
            if number:
                yield number.lstrip("0")[: _NUM_DIGITS + 1] or "0"
