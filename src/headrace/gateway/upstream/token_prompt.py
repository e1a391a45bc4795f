"""A prompt as token ids, with what its log-probabilities need: the tokens' texts and their places in the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.core.plan import TokenLogprobs
from headrace.text.assemble import TokenEntry, token_entry
from headrace.text.detokenize import Detokenizer
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """text: as echo shows it; empty when nobody will read it"""

    token_ids: tuple[int, ...]
    text: str
    tokenizer: Tokenizer

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def entries(self, scores: Sequence[TokenLogprobs]) -> Iterator[TokenEntry]:
        """See `seam.PreparedPrompt.entries`."""
        offsets = prompt_offsets(self.tokenizer, self.text, self.token_ids)
        first = self.token_ids[0]
        yield TokenEntry(first, self.tokenizer.token_text(first), self.tokenizer.token_bytes(first), 0.0, 0, (), offsets[0])
        for score, offset in zip(scores, offsets[1:], strict=False):
            yield token_entry(self.tokenizer, score, offset)


def prompt_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Characters of `text` before each token. A space some tokenizers put before the first word is not in the text: offsets shift by it."""
    reader = Detokenizer(tokenizer)
    offsets: list[int] = []
    for token_id in token_ids:
        offsets.append(reader.num_chars)
        reader.push((token_id,))
    shift = max(0, reader.num_chars - len(text))
    return [max(0, offset - shift) for offset in offsets]
