"""Log-probabilities of a foreign server's tokens -> columns. The server names tokens by their texts: numbers are given to them here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.core.plan import TokenLogprobs
from headrace.gateway.upstream.foreign_chunk import ChosenToken, SentToken
from headrace.gateway.upstream.generation_request import string_bytes
from headrace.text.logprobs import DecodedLogprobs

NAME_BYTES = 200
"""Memory of one token name without its text and its bytes."""

MAX_NAMES_BYTES = 128 << 10
"""Most memory of one table of token names, about 600 of them; then a new table begins, so that a long stream does not grow it."""


class NamedTexts:
    """Gives token ids to tokens that the server names by text alone. A `TokenTexts`. num_bytes: memory of the table"""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._names: list[tuple[str, bytes]] = []

    def number(self, token: str, raw: bytes) -> int:
        name = (token, raw)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
            self.num_bytes += NAME_BYTES + string_bytes(token) + len(raw)
        return number

    def token_text(self, token_id: int) -> str:
        return self._names[token_id][0]

    def token_bytes(self, token_id: int) -> bytes:
        return self._names[token_id][1]


class LogprobReader:
    """The log-probabilities of one answer."""

    def __init__(self, num_sequences: int) -> None:
        self._num_chars = [0] * num_sequences
        self._names = NamedTexts()

    def read(self, index: int, tokens: Sequence[ChosenToken]) -> tuple[DecodedLogprobs, ...]:
        """The log-probabilities of the next tokens of sequence `index`, at least one."""
        if self._names.num_bytes > MAX_NAMES_BYTES:
            self._names = NamedTexts()
        found, known_bytes = DecodedLogprobs(self._names), self._names.num_bytes
        for token in tokens:
            top = token.top_logprobs or ()
            token_id, *top_ids = [self._names.number(each.token, _raw(each)) for each in (token, *top)]
            found.columns.append(TokenLogprobs(token_id, token.logprob, 0, tuple(top_ids), tuple([each.logprob for each in top])))
            found.text_offsets.append(self._num_chars[index])
            found.visible.append(True)
            self._num_chars[index] += len(token.token)
        return (replace(found, texts_bytes=self._names.num_bytes - known_bytes),)


def _raw(token: SentToken) -> bytes:
    return bytes(token.bytes) if token.bytes is not None else token.token.encode()
