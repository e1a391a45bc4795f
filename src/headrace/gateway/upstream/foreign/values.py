"""Reads values as foreign servers write them: JSON, numbers, and texts that come in pieces.

`read_json_texts` reads what the typed decoder refuses: NaN and Infinity as Python prints them, control characters in strings, halves of
surrogate pairs, bytes that are not UTF-8.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib

from headrace.gateway.upstream.generation_request import string_bytes

MAX_COUNT = 2**53

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_MAX_DIGITS = 1000
"""Longest integer that is read exactly. Python takes time quadratic in the digits, and refuses more than 4300 of them."""

_SPACE = re.compile(r"\s*")


def read_json(data: bytes) -> object:
    """Strings may hold lone surrogates: halves of pairs, and bytes that are not UTF-8 (`surrogateescape`).

    Raises ValueError, also for too deep nesting.
    """
    (value,) = read_json_texts(data, max_texts=1)
    return value


def read_json_texts(data: bytes, *, max_texts: int) -> list[object]:
    """Raises ValueError for more than max_texts too."""
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
    """Also of a text; infinity gives None, minus infinity does not."""
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
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = number_of(value)
    return int(number) if number is not None and math.isfinite(number) and number.is_integer() else None


def count_of(value: object) -> int | None:
    number = integer_of(value)
    return number if number is not None and 0 <= number <= MAX_COUNT else None


def number_in(text: str) -> float:
    text = text.strip()
    if not text.isascii() or len(text) > 32 or not text[:1].isdigit():
        return -1.0
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0


_LONE = re.compile("[\ud800-\udfff]")
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not stand for a byte, as `surrogateescape` has it."""


def whole_text(text: str) -> str:
    return _LONE.sub("\ufffd", text)


class SaidText:
    __slots__ = ("_checksum", "num_chars")

    def __init__(self) -> None:
        self.num_chars = self._checksum = 0

    def add(self, piece: str) -> None:
        self.num_chars += len(piece)
        self._checksum = _checksum(piece, self._checksum)

    def rest_of(self, text: str) -> str | None:
        begin = text[: self.num_chars]
        return text[self.num_chars :] if len(begin) == self.num_chars and _checksum(begin, 0) == self._checksum else None


def _checksum(text: str, before: int) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


class SplitText:
    """A text that comes in pieces, between which a server may have split characters.

    Half of a surrogate pair, or some of the UTF-8 bytes of a character, waits for the rest. What becomes no character is U+FFFD.
    """

    __slots__ = ("_decoder", "_half", "_is_waiting")

    def __init__(self) -> None:
        self._half = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_waiting = False

    def push(self, piece: str, *, is_last: bool = False) -> str:
        if not self._is_waiting and (piece.isascii() or _LONE.search(piece) is None):
            return piece
        text = (self._half + piece).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        self._half = text[-1] if not is_last and "\ud800" <= text[-1:] <= "\udbff" else ""
        raw = _NO_BYTE.sub("\ufffd", text[: len(text) - len(self._half)]).encode("utf-8", "surrogateescape")
        text = self._decoder.decode(raw, final=is_last)
        self._is_waiting = bool(self._half or self._decoder.getstate()[0])
        return text

    def rest(self) -> str:
        return self.push("", is_last=True) if self._is_waiting else ""


NAME_BYTES = 200

MAX_NAMES_BYTES = 128 << 10
"""About 600 names; then a new table begins."""


class NamedTexts:
    """A `TokenTexts` for tokens that a server names by text alone."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._names: list[tuple[str, bytes]] = []

    def number(self, token: str, raw: bytes) -> int:
        name = (token, raw)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
            self.num_bytes += NAME_BYTES + string_bytes(token) + len(raw)
        return number

    def token_text(self, token_id: int) -> str:
        return self._names[token_id][0]

    def token_bytes(self, token_id: int) -> bytes:
        return self._names[token_id][1]
