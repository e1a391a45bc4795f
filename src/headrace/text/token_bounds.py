"""Computes a lower bound on the number of tokens of a text from its bytes alone, so that a text too long for a context need not be
tokenized.

One token covers at most `max_bytes` bytes of text. That holds only where no rule of the tokenizer drops text, so the rules are read from
tokenizer.json. A tokenizer with a rule that is not known here has no bound: its texts are tokenized, whatever their length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.text.token_bytes import BYTE_OF_CHAR, METASPACE

if TYPE_CHECKING:
    from tokenizers import AddedToken

NORMAL_FORM_SHRINKS = 8
"""Bytes of text per byte of its normal form (NFC, NFD, NFKC, NFKD), more than Unicode's worst: tests/text/test_token_bounds.py counts."""

LOWERCASE_SHRINKS = 4
_KEEPS_TEXT = ("ByteLevel", "Digits", "Metaspace")


@dataclass(frozen=True, slots=True)
class TokenBound:
    """A lower bound on the tokens of a text.

    max_bytes      most bytes of text that one token covers
    counts_spaces  False if some token also covers any amount of white space beside it
    """

    max_bytes: int
    counts_spaces: bool = True

    def least_tokens(self, text: str) -> int:
        """The least number of tokens of a text. Linear: about 1 ms per MiB; 10 ms where spaces do not count, too long for an event loop."""
        if not self.counts_spaces:
            text = "".join(text.split())
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-num_bytes // self.max_bytes)


def token_bound(document: Mapping[str, object], vocab: Collection[str], added: Collection[AddedToken]) -> TokenBound | None:
    """The bound of a tokenizer; None if its rules allow none.

    document  content of tokenizer.json
    vocab     spelling of every token there, added ones included
    added     tokens that are searched for in a text before the model's own rules
    """
    shrinks = _normalizer_shrinks(document.get("normalizer"))
    if shrinks is None or not _pre_tokenizer_keeps_text(document.get("pre_tokenizer")):
        return None
    longest = _longest(document, vocab, {token.content for token in added})
    if longest is None:
        return None
    return TokenBound(longest * shrinks, counts_spaces=not any(token.lstrip or token.rstrip for token in added))


def _longest(document: Mapping[str, object], vocab: Collection[str], added: Collection[str]) -> int | None:
    """Bytes of the longest token. None if the model's rules may drop text, or cover any amount of text by one unknown token."""
    model = document.get("model")
    if not isinstance(model, Mapping) or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    own = set(vocab) - set(added)
    longest_added = max((len(token.replace(" ", METASPACE).encode()) for token in added), default=1)
    if any(part.get("type") == "ByteLevel" for part in _parts(document.get("pre_tokenizer"), "pretokenizers")):
        if model.get("type") != "BPE" or not set(BYTE_OF_CHAR) <= own:
            return None
        return max(longest_added, *map(len, vocab))  # a character of the spelling is a byte of the text
    if model.get("type") not in ("BPE", "Unigram") or not model.get("byte_fallback"):
        return None
    if not {f"<0x{byte:02X}>" for byte in range(256)} <= own:
        return None
    return max(longest_added, *(len(token.encode()) for token in vocab))


def _normalizer_shrinks(normalizer: object) -> int | None:
    """The most bytes of text that the normalizer turns into one byte; None: no bound."""
    shrinks = 1
    for part in _parts(normalizer, "normalizers"):
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
    for part in _parts(pre_tokenizer, "pretokenizers"):
        kind = part.get("type")
        is_split = kind in ("Split", "Punctuation") and part.get("behavior") not in (None, "Removed")
        if not is_split and kind not in _KEEPS_TEXT:
            return False
    return True


def _parts(section: object, inner: str) -> Iterator[Mapping[str, object]]:
    """The steps of a section of tokenizer.json. The section may be absent, one step, or a sequence. {} stands for any other value."""
    if section is None:
        return
    if not isinstance(section, Mapping):
        yield {}
    elif section.get("type") != "Sequence":
        yield section
    else:
        steps = section.get(inner)
        for part in steps if isinstance(steps, list) else [{}]:
            yield from _parts(part if part is not None else {}, inner)
