"""Finds the bytes that each token stands for, and from them a lower bound on the tokens of a text.

Text is bytes joined and decoded as UTF-8: one rule for whole and incremental decoding. tokenizer.json's `decoder` section says how a
token's spelling maps to bytes:

  byte level     every character stands for one byte (GPT-2's table): Llama 3, Qwen, GPT-2, the bundled models
  metaspace      text with U+2581 for a space; `<0xNN>` is one byte: Llama 2, Mistral, Mixtral, Phi-3, Gemma
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import AddedToken

METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, U+0100 onwards for all other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()


@dataclass(frozen=True, slots=True)
class Spelling:
    """is_byte_level  True: GPT-2's byte table; False: U+2581 is a space
    strip_left     spaces that a metaspace tokenizer put before the first word
    """

    is_byte_level: bool
    has_bytes: bool = False
    strip_left: int = 0

    def to_bytes(self, token: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode()
        if self.has_bytes and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match[1])
        return token.replace(METASPACE, " ").encode()


def spelling_of(decoder: object) -> Spelling:
    """Raises CheckpointError."""
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


NORMAL_FORM_SHRINKS = 8
"""Bytes of text per byte of its normal form: more than Unicode's worst."""

LOWERCASE_SHRINKS = 4
_KEEPS_TEXT = ("ByteLevel", "Digits", "Metaspace")


@dataclass(frozen=True, slots=True)
class TokenBound:
    """counts_spaces: False if a token may cover any amount of white space"""

    max_bytes: int
    counts_spaces: bool = True

    def least_tokens(self, text: str) -> int:
        """Takes 1 ms per MiB; 10 ms where spaces do not count, too long for an event loop."""
        if not self.counts_spaces:
            text = "".join(text.split())
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-num_bytes // self.max_bytes)


def token_bound(document: Mapping[str, object], vocab: Collection[str], added: Collection[AddedToken]) -> TokenBound | None:
    """None if the tokenizer's rules allow none."""
    shrinks = _normalizer_shrinks(document.get("normalizer"))
    if shrinks is None or not _pre_tokenizer_keeps_text(document.get("pre_tokenizer")):
        return None
    longest = _longest(document, vocab, {token.content for token in added})
    if longest is None:
        return None
    return TokenBound(longest * shrinks, counts_spaces=not any(token.lstrip or token.rstrip for token in added))


def _longest(document: Mapping[str, object], vocab: Collection[str], added: Collection[str]) -> int | None:
    """None if the model's rules may drop text, or cover any amount of it by one unknown token."""
    model = document.get("model")
    if not isinstance(model, Mapping) or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    own = set(vocab) - set(added)
    longest_added = max((len(token.replace(" ", METASPACE).encode()) for token in added), default=1)
    if any(part.get("type") == "ByteLevel" for part in _steps(document.get("pre_tokenizer"), "pretokenizers")):
        if model.get("type") != "BPE" or not set(BYTE_OF_CHAR) <= own:
            return None
        return max(longest_added, *map(len, vocab))  # a character of the spelling is a byte of the text
    if model.get("type") not in ("BPE", "Unigram") or not model.get("byte_fallback"):
        return None
    if not {f"<0x{byte:02X}>" for byte in range(256)} <= own:
        return None
    return max(longest_added, *(len(token.encode()) for token in vocab))


def _normalizer_shrinks(normalizer: object) -> int | None:
    shrinks = 1
    for part in _steps(normalizer, "normalizers"):
        match part:
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
                shrinks *= NORMAL_FORM_SHRINKS
            case {"type": "Lowercase"}:
                shrinks *= LOWERCASE_SHRINKS
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
                shrinks *= max(1, -(-len(old.encode()) // len(new.encode())))
            case _:
                return None
    return shrinks


def _pre_tokenizer_keeps_text(pre_tokenizer: object) -> bool:
    for part in _steps(pre_tokenizer, "pretokenizers"):
        kind = part.get("type")
        is_split = kind in ("Split", "Punctuation") and part.get("behavior") not in (None, "Removed")
        if not is_split and kind not in _KEEPS_TEXT:
            return False
    return True


def _steps(section: object, inner: str) -> Iterator[Mapping[str, object]]:
    if section is None:
        return
    if not isinstance(section, Mapping):
        yield {}
    elif section.get("type") != "Sequence":
        yield section
    else:
        steps = section.get(inner)
        for part in steps if isinstance(steps, list) else [{}]:
            yield from _steps(part if part is not None else {}, inner)
