"""Refuses prompts that cannot fit a model's context, by their bytes, before they are tokenized."""

from __future__ import annotations

from headrace.gateway.http.errors import context_overflow
from headrace.text.token_bounds import TokenBound


def check_fits(field: str, text: str, bound: TokenBound | None, max_model_len: int | None) -> None:
    """Raise ContextLengthExceeded for a text that has too many tokens however it is tokenized.

    bound          None: the tokenizer allows no bound; nothing is refused
    max_model_len  None: no limit
    """
    if bound is None or max_model_len is None or 4 * len(text) < max_model_len:
        return
    least = bound.least_tokens(text)
    if least >= max_model_len:
        raise context_overflow(field, max_model_len, part=field, prompt_tokens=least, max_tokens=None, is_least=True)
