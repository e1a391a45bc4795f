"""Joins texts that come from foreign servers in pieces: a character may be split between two pieces, or a text be sent again as a whole.
Numbers tokens that come by their text."""

from __future__ import annotations

import codecs
import re
import zlib

from headrace.gateway.upstream.generation_request import string_bytes

_LONE = re.compile("[\ud800-\udfff]")
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not stand for a byte, as `surrogateescape` has it."""


def whole_text(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates: it can be encoded."""
    return _LONE.sub("\ufffd", text)


class SaidText:
    """Length and checksum of a text in pieces, which is not kept. They tell whether another text begins with it."""

    __slots__ = ("_checksum", "num_chars")

    def __init__(self) -> None:
        self.num_chars = self._checksum = 0

    def add(self, piece: str) -> None:
        self.num_chars += len(piece)
        self._checksum = _checksum(piece, self._checksum)

    def rest_of(self, text: str) -> str | None:
        """The rest of `text` after the text so far; None: `text` does not begin with it."""
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
        """The text that still waits, at the end."""
        return self.push("", is_last=True) if self._is_waiting else ""


NAME_BYTES = 200
"""Memory of one token name without its text and its bytes."""

MAX_NAMES_BYTES = 128 << 10
"""Most memory of one table of token names, about 600 of them; then a new table begins, so that a long stream does not grow it."""


class NamedTexts:
    """A `TokenTexts` for tokens that a server names by text alone: numbers them as they come. num_bytes: memory of the table"""

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
