"""The most tokens that a prompt can have at a server whose tokenizer is not known here, from its bytes alone.

A tokenizer that reads every text makes at most one token of a byte; usual text has about four bytes to a token. Not so where a normal form
makes one character into several (NFKC), which tokenizers of large models rarely have.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts

TEMPLATE_TOKENS = 64
"""Tokens that a chat template may add to a conversation, beside its messages: a system prompt of the model's own, a date."""

TOOL_TEMPLATE_TOKENS = 512
"""Tokens that it may add where functions are shown: how to call them."""


def most_prompt_tokens(prompt: Conversation | PlainPrompts, max_model_len: int | None) -> int:
    """The bound of all prompts together. max_model_len: a longer prompt is refused by the server; None: it has not said"""
    bounds = [_of_chat(prompt)] if isinstance(prompt, Conversation) else [_of_plain(given) for given in prompt.prompts]
    return sum(bound if max_model_len is None else min(bound, max_model_len) for bound in bounds)


def _of_chat(chat: Conversation) -> int:
    """JSON has more bytes around a message than a template has tokens around it."""
    num_bytes = len(msgspec.json.encode(chat.messages)) + TEMPLATE_TOKENS
    if not chat.shown_tools:
        return num_bytes
    return num_bytes + TOOL_TEMPLATE_TOKENS + len(msgspec.json.encode([tool.requested() for tool in chat.shown_tools]))


def _of_plain(prompt: str | Sequence[int]) -> int:
    """One token more may mark the beginning of a text, and one its end."""
    if isinstance(prompt, str):
        return 2 + (len(prompt) if prompt.isascii() else len(prompt.encode("utf-8", "surrogatepass")))
    return len(prompt)
