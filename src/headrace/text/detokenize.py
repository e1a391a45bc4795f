"""Tokens to text as they arrive.

Characters are never split across deltas, and text that may be the beginning of a stop string waits until it is clear. What has been
given out is never taken back: all deltas joined are the whole decode, cut at the first stop string.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """New text.

    stop_match   the stop string that ended the output, once
    keep_tokens  beside it: output tokens up to and including the one that completed the stop string; later ones do not count
    """

    text: str = ""
    stop_match: str | None = None
    keep_tokens: int | None = None


class Detokenizer:
    """Text of one output stream. O(1) amortised per token.

    skip_special_tokens  control tokens have no text
    stop                 strings that end the output, cut off unless `include_stop`
    min_tokens           a stop string completed within the first `min_tokens` tokens is ordinary text

    num_tokens    tokens read (none after a stop string)
    num_chars     characters decoded so far, held ones included
    has_partial   the last token ended within a character
    num_released  characters given out
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop)
        self._held = ""
        self.num_tokens = 0
        self.num_chars = 0
        self.num_released = 0
        self.has_stopped = False

    @property
    def has_partial(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Read tokens and give out what is certain. After a stop string everything is ignored."""
        parts: list[str] = []
        for token_id in token_ids:
            if self.has_stopped:
                break
            self.num_tokens += 1
            if self._skip_special and self._tokenizer.is_special(token_id):
                continue
            delta = self._take(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            parts.append(delta.text)
            if delta.stop_match is not None:
                return Delta("".join(parts), delta.stop_match, delta.keep_tokens)
        return Delta("".join(parts))

    def flush(self) -> Delta:
        """The end of the output: gives out what was held; an unfinished character becomes U+FFFD. Call it once."""
        if self.has_stopped:
            return Delta()
        delta = self._take(self._decoder.decode(b"", final=True))
        if delta.stop_match is not None:
            return delta
        rest, self._held = self._held, ""
        self.num_released += len(rest)
        return Delta(delta.text + rest)

    def _take(self, chars: str) -> Delta:
        """Add decoded characters; give out all but the longest suffix that may begin a stop string."""
        if not chars:
            return Delta()
        match = self._matcher.push(chars, is_armed=self.num_tokens > self._min_tokens)
        text = self._held + chars
        if match is None:
            self.num_chars += len(chars)
            certain = len(text) - self._matcher.held
            self._held = text[certain:]
            self.num_released += certain
            return Delta(text[:certain])
        end = len(self._held) + match.end
        self._held, self.has_stopped = "", True
        shown = text[: end if self._include_stop else end - len(match.text)]
        self.num_chars += match.end
        self.num_released += len(shown)
        return Delta(shown, match.text, self.num_tokens)
