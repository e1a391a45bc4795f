"""Names the place of a keyword in a JSON schema, and makes the refusals that mention it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal

from headrace.core.errors import InvalidRequest, ShownValue

Place = str | tuple["Place", str | int]

ROOT: Place = "#"
MAX_POINTER_CHARS = 120

LONG_INTEGER = 10**40

_NOTHING = object()


def refused(place: Place, limit: str, given: object = _NOTHING, remedy: str = "") -> InvalidRequest:
    """given: the value, None as null"""
    shown = None if given is _NOTHING else ShownValue("null") if given is None else given
    if isinstance(given, int) and abs(given) >= LONG_INTEGER:
        shown = ShownValue(f"{Decimal(given).normalize():e}")
    return InvalidRequest("grammar", limit, shown, f"{remedy} See {pointer(place)}.".lstrip())


def unsupported(place: Place, keywords: Iterable[str]) -> InvalidRequest:
    return refused(place, "keywords of JSON Schema that are supported", ", ".join(keywords), "Leave them out.")


def pointer(place: Place) -> str:
    keys: list[str] = []
    num_chars = 0
    while isinstance(place, tuple) and num_chars <= MAX_POINTER_CHARS:
        place, key = place
        text = json.dumps(str(key)[-MAX_POINTER_CHARS:])[1:-1]
        keys.append(text.replace("~", "~0").replace("/", "~1"))
        num_chars += 1 + len(keys[-1])
    start = "..." if isinstance(place, tuple) else json.dumps(place)[1:-1]
    whole = "/".join([start, *reversed(keys)])
    return whole if len(whole) <= MAX_POINTER_CHARS else "..." + whole[3 - MAX_POINTER_CHARS :]
