"""Log-probabilities in the shapes clients know: OpenAI's of chat and of completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from headrace.core.plan import LogprobColumns, TokenLogprobs
from headrace.gateway.surfaces.dialect.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from headrace.gateway.upstream.seam import PreparedPrompt
from headrace.text.assemble import TokenEntry

_encode = msgspec.json.encode

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; clients of this API know this number as "never"."""


def finite(logprob: float) -> float:
    """A log-probability as JSON can say it: a token the model rules out has minus infinity."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(entries: Iterable[TokenEntry], num_top: int) -> ChatLogprobs:
    """content[].{token, logprob, bytes, top_logprobs}; a token without text in the answer (the end token) is left out."""
    return ChatLogprobs(
        [
            TokenLogprob(
                entry.token,
                finite(entry.logprob),
                list(entry.raw),
                [TopLogprob(top.token, finite(top.logprob), list(top.raw)) for top in entry.top[:num_top]],
            )
            for entry in entries
            if entry.is_visible
        ]
    )


def completion_logprobs(entries: Iterable[TokenEntry], num_top: int, *, offset: int = 0) -> CompletionLogprobs:
    """Columns over tokens. offset: characters before the output (an echoed prompt)."""
    shown = [entry for entry in entries if entry.is_visible]
    return CompletionLogprobs(
        text_offset=[offset + entry.text_offset for entry in shown],
        token_logprobs=[finite(entry.logprob) for entry in shown],
        tokens=[token_name(entry.token, entry.raw) for entry in shown],
        top_logprobs=[_top_map(entry, num_top) for entry in shown],
    )


PAGE_TOKENS = 64
"""Tokens of a prompt that are objects at a time, on their way into bytes."""


@dataclass(frozen=True, slots=True)
class EncodedLogprobs:
    """`CompletionLogprobs` as JSON, made once and shown by every choice: the same pieces are written again, none is copied.

    columns  in the order of the fields; each a list of pieces that, joined, is a JSON list without its brackets
    """

    columns: tuple[list[bytes], ...]

    def pieces(self, rest: CompletionLogprobs | None) -> list[bytes]:
        """The object, with the columns of `rest` behind."""
        found: list[bytes] = []
        for number, (name, column) in enumerate(zip(COLUMNS, self.columns, strict=True)):
            found += (b'%s"%s":[' % (b"," if number else b"{", name.encode()), *column)
            if rest is not None and (more := getattr(rest, name)):
                found += (b",", _inside(more))
            found.append(b"]")
        return [*found, b"}"]


COLUMNS = CompletionLogprobs.__struct_fields__


def echo_logprobs(prompt: PreparedPrompt, scores: Sequence[TokenLogprobs], num_top: int) -> EncodedLogprobs:
    """Columns over the prompt's tokens. The first one has no probability: null, as OpenAI gives it.

    scores  of positions 1.. in order
    """
    entries = prompt.entries(scores)
    first = next(entries)
    columns: tuple[list[bytes], ...] = ([b"%d" % first.text_offset], [b"null"], [_encode(token_name(first.token, first.raw))], [b"null"])
    while page := list(islice(entries, PAGE_TOKENS)):
        made = completion_logprobs(page, num_top)
        for name, column in zip(COLUMNS, columns, strict=True):
            column += (b",", _inside(getattr(made, name)))
    return EncodedLogprobs(columns)


def prompt_logprobs(prompt: PreparedPrompt, scores: Sequence[TokenLogprobs], num_top: int) -> list[bytes]:
    """vLLM's shape as JSON in pieces: one map per prompt token from token id to its log-probability; null for the first token."""
    entries = islice(prompt.entries(scores), 1, None)
    pieces = [b"[null"]
    while page := list(islice(entries, PAGE_TOKENS)):
        pieces += (b",", _inside([_ranked(entry, num_top) for entry in page]))
    return [*pieces, b"]"]


def _ranked(entry: TokenEntry, num_top: int) -> dict[int, PromptLogprob]:
    ranked = {top.token_id: PromptLogprob(finite(top.logprob), rank, top.token) for rank, top in enumerate(entry.top[:num_top], start=1)}
    ranked[entry.token_id] = PromptLogprob(finite(entry.logprob), entry.rank, entry.token)
    return ranked


def _inside(values: Sequence[object]) -> bytes:
    """A JSON list without its brackets."""
    return _encode(values)[1:-1]


def scores_of(columns: LogprobColumns) -> list[TokenLogprobs]:
    """Of positions that were all asked for."""
    return [score for score in columns.entries() if score is not None]


def token_name(text: str, raw: bytes) -> str:
    """A token as completions name it: its text, or `bytes:\\x..` where it is part of a character (several such share one text)."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def _top_map(entry: TokenEntry, num_top: int) -> dict[str, float]:
    """The best alternatives, and the token that was chosen."""
    named = {token_name(top.token, top.raw): finite(top.logprob) for top in reversed(entry.top[:num_top])}
    named[token_name(entry.token, entry.raw)] = finite(entry.logprob)
    return named
