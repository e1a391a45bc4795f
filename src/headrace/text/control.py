"""Keeps control tokens in users' text apart from the template's own while a conversation is rendered to one string.

A control token inside a user's string is put between two private-use characters that occur nowhere in the request, so the marks cannot
be forged. Source: `mark_control_tokens` in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from headrace.core.errors import InvalidRequest
from headrace.text.tokenizer import any_of, check_text

MAX_DEPTH = 64
"""Deeper nesting would exhaust Python's stack."""
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD


@dataclass(frozen=True, slots=True)
class Marks:
    start: str
    end: str

    @classmethod
    def absent_from(cls, strings: Iterable[str]) -> Marks:
        seen = {char for text in strings for char in text if char >= chr(_FIRST_MARK)}
        free = (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in seen)
        start, end = next(free, ""), next(free, "")
        if not end:
            raise InvalidRequest("messages", "fewer different private-use characters", len(seen))
        return cls(start, end)

    def mark(self, value: object, pattern: re.Pattern[str]) -> object:
        if isinstance(value, str):
            return pattern.sub(f"{self.start}\\1{self.end}", value)
        if isinstance(value, Mapping):
            return {self.mark(key, pattern): self.mark(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, pattern) for item in value]
        return value

    def split(self, rendered: str, tokens: tuple[str, ...]) -> list[tuple[str, bool]]:
        """(piece, is_plain) parts of a rendered text, with marks removed.

        Lone marks are dropped but still cut the text: no control token joins across them.
        """
        pair = re.compile(f"{self.start}{any_of(tokens).pattern}{self.end}|[{self.start}{self.end}]")
        parts: list[str | None] = pair.split(rendered)
        return [(part, number % 2 == 1) for number, part in enumerate(parts) if part]


def strings_in(value: object, path: str, depth: int = 0) -> Iterator[str]:
    """Strings of keys included. Raises InvalidRequest for a lone surrogate, nesting beyond MAX_DEPTH, or a value that is not JSON."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(path[:200], f"at most {MAX_DEPTH} levels of nesting")
    if isinstance(value, str):
        check_text(value, path)
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidRequest(path, "an object with string keys", key)
            yield from strings_in(key, path, depth + 1)
            yield from strings_in(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from strings_in(item, f"{path}[{number}]", depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise InvalidRequest(path, "JSON values only", type(value).__name__)


def marked_objects(marks: Marks, items: Sequence[Mapping[str, object]], patterns: Sequence[re.Pattern[str]]) -> list[dict[str, object]]:
    return [cast("dict[str, object]", marks.mark(item, pattern)) for item, pattern in zip(items, patterns, strict=True)]
