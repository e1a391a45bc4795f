"""JSON as foreign servers write it, also where it is not quite JSON, and readings of single values. Pure; nothing is kept.

Most answers are decoded by a typed decoder and never come here. What it refuses is read by this module: NaN and Infinity as Python prints
them, control characters in strings, halves of surrogate pairs, bytes that are not UTF-8.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib

MAX_COUNT = 2**53

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Left out at the beginning of JSON, and of an event stream, as its standard says."""

_MAX_DIGITS = 1000
"""Longest integer that is read exactly. Python takes time quadratic in the digits, and refuses more than 4300 of them."""

_SPACE = re.compile(r"\s*")
_LONE = re.compile("[\ud800-\udfff]")
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not stand for a byte, as `surrogateescape` has it."""


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


def whole_text(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates: it can be encoded."""
    return _LONE.sub("\ufffd", text)


class SaidText:
    """Length and checksum of a text that comes in pieces: they tell whether another text begins with it, and it is not kept."""

    __slots__ = ("_checksum", "num_chars")

    def __init__(self) -> None:
        self.num_chars = self._checksum = 0

    def add(self, piece: str) -> None:
        self.num_chars += len(piece)
        self._checksum = _checksum(piece, self._checksum)

    def rest_of(self, text: str) -> str | None:
        """What `text` has behind it; None where `text` does not begin with it."""
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
        """The text that is complete with this piece."""
        if not self._is_waiting and (piece.isascii() or _LONE.search(piece) is None):
            return piece
        text = (self._half + piece).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        self._half = text[-1] if not is_last and "\ud800" <= text[-1:] <= "\udbff" else ""
        raw = _NO_BYTE.sub("\ufffd", text[: len(text) - len(self._half)]).encode("utf-8", "surrogateescape")
        text = self._decoder.decode(raw, final=is_last)
        self._is_waiting = bool(self._half or self._decoder.getstate()[0])
        return text

    def rest(self) -> str:
        """What still waits, at the end of the text."""
        return self.push("", is_last=True) if self._is_waiting else ""
