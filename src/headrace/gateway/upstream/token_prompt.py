"""A prompt as token ids, with what its log-probabilities need: the tokens' texts and their places in the text."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from headrace.core.plan import PAGE_TOKENS, LogprobColumns, TokenLogprobs, columns_of
from headrace.text.detokenize import Detokenizer
from headrace.text.logprobs import DecodedLogprobs
from headrace.text.tokenizer import Tokenizer

OFFSET_TOKENS = 512
"""Tokens between two empty pages while offsets are counted: half a millisecond, as a page of log-probabilities."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """text: as echo shows it; empty where it is not shown"""

    token_ids: tuple[int, ...]
    text: str
    tokenizer: Tokenizer

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def decoded_logprobs(self, logprobs: LogprobColumns) -> Iterator[DecodedLogprobs]:
        """See `seam.PreparedPrompt.decoded_logprobs`."""
        offsets = yield from self._offsets()
        first = columns_of([TokenLogprobs(self.token_ids[0], 0.0, 0)])
        yield DecodedLogprobs(self.tokenizer, first, offsets[:1], bytearray(b"\1"))
        end = 1
        for page in logprobs.pages(PAGE_TOKENS):
            begin, end = end, end + len(page)
            yield DecodedLogprobs(self.tokenizer, page, offsets[begin:end], bytearray(b"\1" * len(page)))

    def _offsets(self) -> Generator[DecodedLogprobs, None, array[int]]:
        """Number of characters of `text` before each token; yields empty pages to pause. A space that some tokenizers put before the first
        word is not in the text: offsets shift by it. All zero where the text is not shown.
        """
        if not self.text:
            return array("q", bytes(8 * len(self.token_ids)))
        offsets, reader = array("q"), Detokenizer(self.tokenizer)
        for begin in range(0, len(self.token_ids), OFFSET_TOKENS):
            for token_id in self.token_ids[begin : begin + OFFSET_TOKENS]:
                offsets.append(reader.num_chars)
                reader.push((token_id,))
            yield DecodedLogprobs(self.tokenizer)
        shift = max(0, reader.num_chars - len(self.text))
        return array("q", [max(0, offset - shift) for offset in offsets]) if shift else offsets
