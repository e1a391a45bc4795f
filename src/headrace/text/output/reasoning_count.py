"""Counts an output's reasoning tokens: those whose text begins inside the reasoning. Its markers are not counted."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Sequence, Set

from headrace.text.output.reasoning import ReasoningSplitter
from headrace.text.tokenizer import Tokenizer


class ReasoningCount:
    """Counts the reasoning tokens of an output: those whose first character is reasoning. A token waits until that is known.

    num_tokens  counted so far
    """

    def __init__(self, splitter: ReasoningSplitter, tokenizer: Tokenizer, skipped: Set[int]) -> None:
        """skipped: ids of tokens without text"""
        self._splitter = splitter
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._next_begin = 0
        self._begins: deque[int] = deque()
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Add the output's next tokens. Their text may already be in the splitter: a character may end in a later token."""
        if self._splitter.is_passed:
            return
        for token_id in token_ids:
            spelled = b"" if token_id in self._skipped else self._token_bytes(token_id)
            if spelled:
                self._begins.append(self._next_begin)
                self._next_begin += len(self._decoder.decode(spelled))

    def update(self) -> None:
        """Count the tokens whose first character is decided."""
        splitter, begins = self._splitter, self._begins
        while begins and begins[0] < splitter.num_decided:
            at = begins.popleft()
            if splitter.begin is not None and splitter.begin <= at and (splitter.end is None or at < splitter.end):
                self.num_tokens += 1
