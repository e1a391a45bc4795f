"""Finds the exact bytes that each token stands for.

Text is bytes joined and decoded as UTF-8: one rule for whole and incremental decoding, so that a stream always adds up to the whole.
The `decoder` section of tokenizer.json says how a token's spelling maps to bytes. Two families exist among language models:

  byte level     every character of the spelling stands for one byte (GPT-2's table): Llama 3, Qwen, GPT-2, the bundled models
  metaspace      the spelling is text with U+2581 for a space; `<0xNN>` is one byte: Llama 2, Mistral, Mixtral, Phi-3, Gemma

Any other decoder is refused by name, because guessing would lose bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.core.errors import CheckpointError

METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table of bytes: printable Latin-1 characters stand for themselves, U+0100 onwards for all other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a tokenizer spells bytes.

    is_byte_level  True: GPT-2's byte table; False: U+2581 is a space
    has_bytes      `<0xNN>` tokens are single bytes
    strip_left     spaces removed from the start of a whole text (the space a metaspace tokenizer put before the first word)
    """

    is_byte_level: bool
    has_bytes: bool = False
    strip_left: int = 0

    def to_bytes(self, token: str) -> bytes:
        """The bytes of a token of the model's vocabulary. spelling: the token as written there"""
        if self.is_byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode()
        if self.has_bytes and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match[1])
        return token.replace(METASPACE, " ").encode()


def spelling_of(decoder: object) -> Spelling:
    """The spelling that a tokenizer.json's `decoder` section describes. Raises CheckpointError for an unknown one."""
    is_byte_level = has_bytes = is_metaspace = False
    strip_left = 0
    for part in _parts(decoder):
        match part:
            case {"type": "ByteLevel"}:
                is_byte_level = True
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                is_metaspace = True
            case {"type": "Metaspace", "replacement": "\u2581"}:
                is_metaspace = True
                strip_left = 0 if part.get("prepend_scheme") == "never" or part.get("add_prefix_space") is False else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip_left = start
            case {"type": "Fuse"}:
                pass
            case _:
                raise _unsupported(part.get("type"))
    if is_byte_level == is_metaspace:
        raise _unsupported("none" if not is_byte_level else "ByteLevel together with a metaspace")
    return Spelling(is_byte_level, has_bytes, strip_left)


def _parts(decoder: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        raise _unsupported(None)
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    inner = decoder.get("decoders")
    for part in inner if isinstance(inner, list) else []:
        yield from _parts(part)


def _unsupported(kind: object) -> CheckpointError:
    return CheckpointError(
        "tokenizer.json",
        f"decoder {kind!r} is not supported",
        "Supported: ByteLevel, and Metaspace or Replace with ByteFallback (the decoders of language models).",
    )
