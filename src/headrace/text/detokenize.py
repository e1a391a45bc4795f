"""Turns tokens into text as they arrive, and finds stop strings.

All deltas joined are the whole decode, cut at the stop string whose last character comes first; of several ending there the longest.
"""

from __future__ import annotations

from array import array
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """end: characters of the pushed chunk, the stop string's included"""

    text: str
    end: int


class StopMatcher:
    def __init__(self, stops: Iterable[str]) -> None:
        # Longest first: of two strings ending at one character the longer is found.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._borders = _all_borders(self._stops)
        self._states = [0] * len(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)

    @property
    def held(self) -> int:
        return max(self._states, default=0)

    def ignores(self, text: str) -> bool:
        return self._first_chars.isdisjoint(text) and not any(self._states)

    def push(self, text: str, *, is_armed: bool = True) -> StopMatch | None:
        """Not `is_armed`: completed stop strings are ignored."""
        if self.ignores(text):
            return None
        for position, char in enumerate(text):
            completed = self._step(char)
            if completed is not None and is_armed:
                return StopMatch(completed, position + 1)
        return None

    def _step(self, char: str) -> str | None:
        completed = None
        for number, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[number]
            while state and stop[state] != char:
                state = borders[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                completed = completed or stop
                state = borders[state - 1]
            self._states[number] = state
        return completed


@lru_cache(maxsize=8)
def _all_borders(stops: tuple[str, ...]) -> tuple[array[int], ...]:
    return tuple(array("I", _borders(stop)) for stop in stops)


def _borders(text: str) -> list[int]:
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders


@dataclass(frozen=True, slots=True)
class Delta:
    """keep_tokens: up to and including the token that completed the stop string"""

    text: str = ""
    stop_match: str | None = None
    keep_tokens: int | None = None


class Detokenizer:
    """min_tokens    a stop string completed within the first `min_tokens` tokens is ordinary text
    has_partial   the last token ended within a character
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_skipped",
        "_stop_match",
        "_token_bytes",
        "_whole_texts",
        "has_partial",
        "num_chars",
        "num_released",
        "num_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_ids: Set[int] = frozenset(),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._whole_texts = tokenizer.whole_texts
        self._skipped = tokenizer.special_ids - kept_ids if skip_special_tokens else frozenset()
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._held = ""
        self._stop_match: str | None = None
        self.has_partial = False
        self.num_tokens = 0
        self.num_chars = 0
        self.num_released = 0

    def push_whole(self, token_ids: Sequence[int]) -> str | None:
        """The fast path of `push`; None: nothing was read, use `push`."""
        if self.has_partial or self._held or self._stop_match is not None:
            return None
        whole_texts, skipped = self._whole_texts, self._skipped
        text = ""
        for token_id in token_ids:
            chars = whole_texts[token_id]
            if not chars or token_id in skipped:
                return None
            text += chars
        if self._matcher is not None and not self._matcher.ignores(text):
            return None
        self.num_tokens += len(token_ids)
        self.num_chars += len(text)
        self.num_released = self.num_chars
        return text

    def push(self, token_ids: Sequence[int]) -> Delta:
        if self._stop_match is not None:
            return _NOTHING
        parts: list[str] = []
        for token_id in token_ids:
            self.num_tokens += 1
            if token_id in self._skipped:
                continue
            chars = self._decoder.decode(self._token_bytes(token_id))
            self.has_partial = bool(self._decoder.getstate()[0])
            if chars:
                parts.append(self._take(chars))
                if self._stop_match is not None:
                    return Delta("".join(parts), self._stop_match, self.num_tokens)
        return Delta("".join(parts))

    def flush(self) -> Delta:
        """Gives U+FFFD for an unfinished character. Call it once, at the end."""
        if self._stop_match is not None:
            return _NOTHING
        chars, self.has_partial = self._decoder.decode(b"", final=True), False
        text = self._take(chars) if chars else ""
        if self._stop_match is not None:
            return Delta(text, self._stop_match, self.num_tokens)
        rest, self._held = self._held, ""
        self.num_released += len(rest)
        return Delta(text + rest)

    def _take(self, chars: str) -> str:
        matcher = self._matcher
        if matcher is None:
            self.num_chars += len(chars)
            self.num_released = self.num_chars
            return chars
        match = matcher.push(chars, is_armed=self.num_tokens > self._min_tokens)
        text = self._held + chars
        if match is None:
            self.num_chars += len(chars)
            shown = text[: len(text) - matcher.held]
            self._held = text[len(shown) :]
        else:
            self.num_chars += match.end
            end = len(self._held) + match.end
            shown = text[: end if self._include_stop else end - len(match.text)]
            self._held, self._stop_match = "", match.text
        self.num_released += len(shown)
        return shown


_NOTHING = Delta()
