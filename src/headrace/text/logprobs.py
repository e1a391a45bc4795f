"""Holds the log-probabilities of one sequence's tokens as columns, from the wire to the response.

As columns, alternatives take 12 bytes each; objects (`TokenEntry`) are made only by iteration.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from headrace.core.plan import LogprobColumns, wide_columns


class TokenTexts(Protocol):
    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TopToken:
    token_id: int
    token: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """text_offset  characters before it in the output (for prompt entries: in the prompt)
    is_visible   False when none of its text is in the answer: the token that ended it, or one wholly within a cut-off stop string
    """

    token_id: int
    token: str
    raw: bytes
    logprob: float
    rank: int
    top: tuple[TopToken, ...]
    text_offset: int
    is_visible: bool = True


@dataclass(frozen=True, slots=True)
class DecodedLogprobs:
    """texts_bytes  memory of these tokens' `texts` alone"""

    texts: TokenTexts
    columns: LogprobColumns = field(default_factory=wide_columns)
    text_offsets: array[int] = field(default_factory=lambda: array("q"))
    visible: bytearray = field(default_factory=bytearray)
    texts_bytes: int = 0

    def __len__(self) -> int:
        return len(self.visible)

    def __iter__(self) -> Iterator[TokenEntry]:
        text, raw = self.texts.token_text, self.texts.token_bytes
        for at, offset, is_visible in zip(self.columns, self.text_offsets, self.visible, strict=True):
            top = tuple([TopToken(i, text(i), raw(i), logprob) for i, logprob in zip(at.top_ids, at.top_logprobs, strict=True)])
            yield TokenEntry(at.token_id, text(at.token_id), raw(at.token_id), at.logprob, at.rank, top, offset, bool(is_visible))

    def add(self, columns: LogprobColumns, text_offsets: Iterable[int], visible: Iterable[int]) -> None:
        self.columns.extend(columns)
        self.text_offsets.extend(text_offsets)
        self.visible.extend(visible)

    def extend(self, other: DecodedLogprobs) -> None:
        """Both must have the same `texts`."""
        assert other.texts is self.texts, "ids mean the same"
        self.add(other.columns, other.text_offsets, other.visible)

    def joined(self, later: DecodedLogprobs) -> DecodedLogprobs:
        both = DecodedLogprobs(self.texts)
        both.extend(self)
        both.extend(later)
        return both

    def part(self, begin: int, end: int) -> DecodedLogprobs:
        span = slice(begin, end)
        return DecodedLogprobs(self.texts, self.columns[span], self.text_offsets[span], self.visible[span])

    def pages(self, size: int) -> Iterator[DecodedLogprobs]:
        begin = 0
        for columns in self.columns.pages(size):
            span = slice(begin, begin := begin + len(columns))
            yield DecodedLogprobs(self.texts, columns, self.text_offsets[span], self.visible[span])

    def shown(self) -> DecodedLogprobs:
        if 0 not in self.visible:
            return self
        shown, end = DecodedLogprobs(self.texts), 0
        for is_visible, run in groupby(self.visible):
            begin, end = end, end + len(list(run))
            if is_visible:
                shown.extend(self.part(begin, end))
        return shown

    @property
    def num_bytes(self) -> int:
        return DECODED_LOGPROBS_BYTES + self.columns.num_bytes + 9 * len(self) + self.texts_bytes


DECODED_LOGPROBS_BYTES = 250
