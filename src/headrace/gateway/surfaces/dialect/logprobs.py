"""Log-probabilities in the shapes clients know: OpenAI's of chat and of completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.core.plan import TokenLogprobs
from headrace.gateway.surfaces.dialect.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headrace.text.assemble import TokenEntry, token_entry
from headrace.text.detokenize import Detokenizer
from headrace.text.tokenizer import Tokenizer

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


def echo_logprobs(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], num_top: int
) -> CompletionLogprobs:
    """Columns over the prompt's tokens. The first one has no probability: null, as OpenAI gives it.

    text    the prompt as it is echoed; offsets count in it (a begin token the tokenizer added has no text there)
    scores  of positions 1.. in order
    """
    offsets = prompt_offsets(tokenizer, text, token_ids)
    entries = [token_entry(tokenizer, score, offset) for score, offset in zip(scores, offsets[1:], strict=False)]
    rest = completion_logprobs(entries, num_top)
    first = token_ids[0]
    return CompletionLogprobs(
        text_offset=[offsets[0], *rest.text_offset],
        token_logprobs=[None, *rest.token_logprobs],
        tokens=[token_name(tokenizer.token_text(first), tokenizer.token_bytes(first)), *rest.tokens],
        top_logprobs=[None, *rest.top_logprobs],
    )


def prompt_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Characters of `text` before each token. A space some tokenizers put before the first word is not in the text: offsets shift by it."""
    reader = Detokenizer(tokenizer)
    offsets: list[int] = []
    for token_id in token_ids:
        offsets.append(reader.num_chars)
        reader.push((token_id,))
    shift = max(0, reader.num_chars - len(text))
    return [max(0, offset - shift) for offset in offsets]


def joined_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> PromptLogprobs:
    """vLLM's shape: one map per prompt token from token id to its log-probability; null for the first token."""
    made: PromptLogprobs = [None]
    for entry in entries:
        ranked = {
            token_id: PromptLogprob(finite(logprob), rank, tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False), start=1)
        }
        ranked[entry.token_id] = PromptLogprob(finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))
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
