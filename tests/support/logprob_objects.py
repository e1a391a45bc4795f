"""Encodes log-probabilities whole, from objects: the reference implementation of the columns in `surfaces.dialect.logprobs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headrace.gateway.surfaces.dialect.logprobs import LOWEST_LOGPROB, token_name
from headrace.gateway.surfaces.dialect.schemas import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from headrace.text.logprobs import TokenEntry


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def chat(entries: Iterable[TokenEntry], num_top: int) -> bytes:
    content = [
        TokenLogprob(
            entry.token,
            finite(entry.logprob),
            list(entry.raw),
            [TopLogprob(top.token, finite(top.logprob), list(top.raw)) for top in entry.top[:num_top]],
        )
        for entry in entries
        if entry.is_visible
    ]
    return msgspec.json.encode(ChatLogprobs(content))


def completion(entries: Iterable[TokenEntry], num_top: int, *, offset: int = 0, prompt: Sequence[TokenEntry] = ()) -> bytes:
    """prompt: an echoed one's, whose first has no probability."""
    shown = [*prompt, *[entry for entry in entries if entry.is_visible]]
    offsets = [0] * len(prompt) + [offset] * (len(shown) - len(prompt))
    made = CompletionLogprobs(
        text_offset=[entry.text_offset + before for entry, before in zip(shown, offsets, strict=True)],
        token_logprobs=[finite(entry.logprob) for entry in shown],
        tokens=[token_name(entry.token, entry.raw) for entry in shown],
        top_logprobs=[_top_map(entry, num_top) for entry in shown],
    )
    if prompt:
        made.token_logprobs[0] = made.top_logprobs[0] = None
    return msgspec.json.encode(made)


def prompt(entries: Sequence[TokenEntry], num_top: int) -> bytes:
    """vLLM's `prompt_logprobs`; the first entry has no probability."""
    return msgspec.json.encode([None, *[_ranked(entry, num_top) for entry in entries[1:]]])


def _top_map(entry: TokenEntry, num_top: int) -> dict[str, float]:
    named = {token_name(top.token, top.raw): finite(top.logprob) for top in reversed(entry.top[:num_top])}
    named[token_name(entry.token, entry.raw)] = finite(entry.logprob)
    return named


def _ranked(entry: TokenEntry, num_top: int) -> dict[int, PromptLogprob]:
    ranked = {top.token_id: PromptLogprob(finite(top.logprob), rank, top.token) for rank, top in enumerate(entry.top[:num_top], start=1)}
    ranked[entry.token_id] = PromptLogprob(finite(entry.logprob), entry.rank, entry.token)
    return ranked
