"""Separates the reasoning at the beginning of an output from the answer."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Sequence, Set
from enum import Enum

from headrace.text.output.format_types import ReasoningFormat
from headrace.text.output.reading import first_non_space, num_held
from headrace.text.tokenizer import Tokenizer

MAX_LEADING_SPACE = 1024
"""After more white space, the output has no reasoning."""


class _State(Enum):
    BEGINNING = 1
    AFTER_START = 2
    INSIDE = 3
    AFTER_END = 4
    PASSED = 5


class ReasoningSplitter:
    """White space directly after a marker belongs to the format and is dropped.

    begin, end   in characters of the output; None until known. `begin` stays None without reasoning
    """

    def __init__(self, row: ReasoningFormat, *, is_open: bool) -> None:
        self._row = row
        self._held = ""
        self.num_chars = 0
        self.begin: int | None = None
        self.end: int | None = None
        if is_open:
            self._state, self.begin = _State.AFTER_START, 0
        else:
            self._state = _State.BEGINNING

    @property
    def is_passed(self) -> bool:
        return self._state is _State.PASSED

    @property
    def num_decided(self) -> int:
        return self.num_chars - len(self._held)

    def push(self, text: str) -> tuple[str, str]:
        self.num_chars += len(text)
        if self._state is _State.PASSED:
            return "", text
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state is _State.BEGINNING:
            text = self._begin(text)
        if self._state is _State.AFTER_START:
            text = self._without_space(text, _State.INSIDE)
        if self._state is _State.INSIDE:
            reasoning, text = self._inside(text)
        if self._state is _State.AFTER_END:
            text = self._without_space(text, _State.PASSED)
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held, "") if self._state is _State.INSIDE else ("", held)

    def _begin(self, text: str) -> str:
        first = first_non_space(text)
        if first > MAX_LEADING_SPACE:
            self._state = _State.PASSED
        elif text.startswith(self._row.start, first):
            text = text[first + len(self._row.start) :]
            self.begin = self.num_chars - len(text)
            self._state = _State.AFTER_START
        elif self._row.start.startswith(text[first:]):
            self._held, text = text, ""
        else:
            self._state = _State.PASSED
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        at = text.find(self._row.end)
        if at >= 0:
            reasoning, text = text[:at], text[at + len(self._row.end) :]
            self.end = self.num_chars - len(text) - len(self._row.end)
            self._state = _State.AFTER_END
            return reasoning, text
        shown = len(text) - num_held(text, self._row.end)
        self._held = text[shown:]
        return text[:shown], ""

    def _without_space(self, text: str, then: _State) -> str:
        text = text[first_non_space(text) :]
        if text:
            self._state = then
        return text


class ReasoningCount:
    """Counts the tokens whose first character is reasoning."""

    def __init__(self, splitter: ReasoningSplitter, tokenizer: Tokenizer, skipped: Set[int]) -> None:
        self._splitter = splitter
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._next_begin = 0
        self._begins: deque[int] = deque()
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """A character may end in a later token, so a token's text may be known already."""
        if self._splitter.is_passed:
            return
        for token_id in token_ids:
            spelled = b"" if token_id in self._skipped else self._token_bytes(token_id)
            if spelled:
                self._begins.append(self._next_begin)
                self._next_begin += len(self._decoder.decode(spelled))

    def update(self) -> None:
        splitter, begins = self._splitter, self._begins
        while begins and begins[0] < splitter.num_decided:
            at = begins.popleft()
            if splitter.begin is not None and splitter.begin <= at and (splitter.end is None or at < splitter.end):
                self.num_tokens += 1
