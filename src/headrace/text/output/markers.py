"""Finds markers in text that arrives in pieces, and holds back text that may still become one."""

from __future__ import annotations

import re

_NO_SPACE = re.compile(r"\S")


def num_held(text: str, marker: str, begin: int = 0) -> int:
    """Length of the longest end of `text`, from `begin` on, that is a proper beginning of `marker`. O(length of the marker)."""
    if not marker:
        return 0
    at = text.find(marker[0], max(begin, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


def first_non_space(text: str, at: int = 0, end: int | None = None) -> int:
    """Position of the first character from `at` on that is no white space, or `end` (without it, the text's length) if there is none."""
    end = len(text) if end is None else end
    found = _NO_SPACE.search(text, at, end)
    return found.start() if found else end
