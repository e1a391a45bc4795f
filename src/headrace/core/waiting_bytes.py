"""Estimates the memory in bytes of a request that waits in an engine, and refuses a request when waiting requests would hold too much.

The constants were measured on CPython 3.11; a test compares the estimates with the memory that is really allocated.
"""

from __future__ import annotations

from headrace.core.errors import QueueFull, RequestTooLarge
from headrace.core.request import EngineRequest

REQUEST_BYTES = 1024
SEQUENCE_BYTES = 1400
TOKEN_BYTES = 36
"""A reference in a tuple, and the integer object."""

SEQUENCE_TOKEN_BYTES = 8
"""A waiting sequence's own copy of the token id, and a part of the block's hash."""

ENTRY_BYTES = 88
"""A dict's entry, the token id and the number. A stop token id is counted alike."""


def request_bytes(request: EngineRequest) -> int:
    """Without its sequences: token ids, grammar source, stop strings, stop token ids, and entries of `logit_bias`."""
    params = request.params
    texts = params.stop if request.grammar is None else (*params.stop, request.grammar.source)
    num_entries = len(params.logit_bias) + len(params.stop_token_ids)
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    return REQUEST_BYTES + TOKEN_BYTES * num_tokens + ENTRY_BYTES * num_entries + sum(text.__sizeof__() for text in texts)


def submitted_bytes(request: EngineRequest) -> int:
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    return request_bytes(request) + request.params.n * sequence_bytes(num_tokens)


def sequence_bytes(num_tokens: int) -> int:
    return SEQUENCE_BYTES + SEQUENCE_TOKEN_BYTES * num_tokens


def check_bytes(num_waiting: int, num_bytes: int, most: int) -> None:
    """Raises RequestTooLarge when `num_bytes` alone exceeds `most`, and QueueFull when its sum with `num_waiting` bytes does."""
    if num_bytes > most:
        limit = f"a request that holds at most {most} bytes while it waits"
        raise RequestTooLarge("prompt", limit, num_bytes, "Shorten the prompt or the grammar, or lower n.")
    if num_waiting + num_bytes > most:
        held = f"waiting requests hold {num_waiting} of {most} bytes, and this one would add {num_bytes}"
        raise QueueFull(f"the engine's waiting queue is full ({held}); send it again later")
