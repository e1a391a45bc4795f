"""Parses the bytes of a body as a JSON object, more strictly than JSON parsers do by default.

Nesting, values and keys have caps, checked before parsing. Object keys are unique: parsers that disagree on duplicates are a way around
validation. NaN and infinities are refused, also as 1e999. Strings hold neither lone surrogates nor U+0000, on which tokenizers and C code
disagree.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from headrace.core.errors import InvalidRequest, RequestTooLarge
from headrace.gateway.http.errors import UnsupportedMediaType

# A string is skipped as a whole; no alternation per character keeps it linear.
_STRING_OR_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{},:]', re.DOTALL)
_ESCAPED = b"\\u"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""RFC 8259 (8.1) allows to leave it out."""

MAX_KEY_CHARS = 80


@dataclass(frozen=True, slots=True)
class Caps:
    """Inclusive.

    values  counted as commas
    keys    counted as colons
    """

    depth: int = 32
    values: int = 150_000
    keys: int = 16_384


CAPS = Caps()


def decode_object(body: bytes, caps: Caps = CAPS) -> dict[str, object]:
    """Raises InvalidRequest, RequestTooLarge or UnsupportedMediaType. The parser holds the GIL until its end, so a body that would take
    long is refused by a scan before.
    """
    body = body.removeprefix(BYTE_ORDER_MARK)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedMediaType(f"The body is not UTF-8 (byte {error.start}). Send JSON encoded as UTF-8.") from None
    _check_caps(body, caps)
    value = _parse(text)
    if not isinstance(value, dict):
        raise InvalidRequest("body", "a JSON object", value)
    if _ESCAPED in body:  # surrogates and U+0000 can only enter as escapes: raw ones are no valid UTF-8 or no valid JSON
        _check_strings(value)
    return value


def _check_caps(body: bytes, caps: Caps) -> None:
    """Raises InvalidRequest or RequestTooLarge."""
    is_small = body.count(b",") <= caps.values and body.count(b":") <= caps.keys
    if is_small and body.count(b"[") + body.count(b"{") <= caps.depth:
        return
    depth = num_commas = num_colons = 0
    for match in _STRING_OR_MARK.finditer(body):
        mark = body[match.start()]
        if mark == _COMMA:
            num_commas += 1
        elif mark == _COLON:
            num_colons += 1
        elif mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
        if depth > caps.depth:
            raise InvalidRequest("body", f"JSON nested at most {caps.depth} deep")
        if num_commas > caps.values or num_colons > caps.keys:
            raise RequestTooLarge("body", f"at most {caps.values} JSON values and {caps.keys} keys")


_COMMA, _COLON = b",:"


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest("body", "valid JSON", remedy=f"{error.msg} at {where}.") from None
    except ValueError:  # Python's own limit (4,300 digits): int() of a long string is quadratic
        raise InvalidRequest("body", "integers of reasonable length") from None
    except RecursionError:
        raise InvalidRequest("body", "JSON that is not nested this deep") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(key[:MAX_KEY_CHARS], "each key at most once per object", remedy="The body names it twice.")
            seen.add(key)
    return made


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest("body", "finite numbers", name, "JSON has no NaN or Infinity.")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise InvalidRequest("body", "numbers a 64-bit float can hold", digits)
    return value


def _check_strings(value: object) -> None:
    for path, text in _strings(value, ""):
        if "\x00" in text:
            raise InvalidRequest(path, "text without U+0000", remedy="Remove the NUL character.")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise InvalidRequest(path, "text without lone surrogates", remedy="Send whole characters.") from None


def _strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Keys included, with the dotted path. A path has the first MAX_KEY_CHARS of a key, since a long one would be copied for every value
    below it.
    """
    if isinstance(value, str):
        yield path or "body", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}.<key>" if path else "<key>", key
            part = key[:MAX_KEY_CHARS]
            yield from _strings(item, f"{path}.{part}" if path else part)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}[{index}]")
