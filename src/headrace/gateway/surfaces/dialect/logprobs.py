"""Log-probabilities in the shapes clients know: OpenAI's of chat and of completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from headrace.core.plan import TokenLogprobs
from headrace.gateway.surfaces.dialect.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headrace.gateway.upstream.seam import PreparedPrompt
from headrace.text.assemble import TokenEntry

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


def completion_logprobs(entries: Sequence[TokenEntry], num_top: int, *, offset: int = 0) -> CompletionLogprobs:
    """Columns over tokens. offset: characters before the output (an echoed prompt)."""
    shown = [entry for entry in entries if entry.is_visible]
    return CompletionLogprobs(
        text_offset=[offset + entry.text_offset for entry in shown],
        token_logprobs=[finite(entry.logprob) for entry in shown],
        tokens=[token_name(entry.token, entry.raw) for entry in shown],
        top_logprobs=[_top_map(entry, num_top) for entry in shown],
    )


def echo_logprobs(prompt: PreparedPrompt, scores: Sequence[TokenLogprobs], num_top: int) -> CompletionLogprobs:
    """Columns over the prompt's tokens. The first one has no probability: null, as OpenAI gives it.

    scores  of positions 1.. in order
    """
    first, *scored = prompt.entries(scores)
    rest = completion_logprobs(scored, num_top)
    return CompletionLogprobs(
        text_offset=[first.text_offset, *rest.text_offset],
        token_logprobs=[None, *rest.token_logprobs],
        tokens=[token_name(first.token, first.raw), *rest.tokens],
        top_logprobs=[None, *rest.top_logprobs],
    )


def joined_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(prompt: PreparedPrompt, scores: Sequence[TokenLogprobs], num_top: int) -> PromptLogprobs:
    """vLLM's shape: one map per prompt token from token id to its log-probability; null for the first token."""
    made: PromptLogprobs = [None]
    for entry in islice(prompt.entries(scores), 1, None):
        ranked = {
            top.token_id: PromptLogprob(finite(top.logprob), rank, top.token) for rank, top in enumerate(entry.top[:num_top], start=1)
        }
        ranked[entry.token_id] = PromptLogprob(finite(entry.logprob), entry.rank, entry.token)
        made.append(ranked)
    return made


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
