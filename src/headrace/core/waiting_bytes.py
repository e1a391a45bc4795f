"""Memory that a request holds while it waits in an engine, in bytes, and its bound.

Estimates by constants that were measured on CPython 3.11; a test compares them with what is allocated. What is counted, and when:
`policy.schedule.waiting` (the queue) and `engine.inbox` (what is handed in during a step).
"""

from __future__ import annotations

from headrace.core.errors import QueueFull, RequestTooLarge
from headrace.core.request import EngineRequest

REQUEST_BYTES = 1024
"""Memory in bytes of a request without its tokens and texts."""

SEQUENCE_BYTES = 1400
"""Memory in bytes of a waiting sequence without its tokens."""

TOKEN_BYTES = 36
"""Memory in bytes of one token id of a request: a reference in a tuple, and the integer object."""

SEQUENCE_TOKEN_BYTES = 8
"""Memory in bytes of one token of a waiting sequence: its own copy of the id, and its part of the block's hash."""

ENTRY_BYTES = 88
"""Memory in bytes of one entry of `logit_bias`: its place in the dict, the token id and the number. A stop token is counted as one, too."""


def request_bytes(request: EngineRequest) -> int:
    """Memory that a request holds apart from its sequences: token ids, its grammar's source, stop strings, and entries of `logit_bias`."""
    params = request.params
    texts = params.stop if request.grammar is None else (*params.stop, request.grammar.source)
    num_entries = len(params.logit_bias) + len(params.stop_token_ids)
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    return REQUEST_BYTES + TOKEN_BYTES * num_tokens + ENTRY_BYTES * num_entries + sum(text.__sizeof__() for text in texts)


def submitted_bytes(request: EngineRequest) -> int:
    """Memory that a request holds when all of its sequences wait."""
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    return request_bytes(request) + request.params.n * sequence_bytes(num_tokens)


def sequence_bytes(num_tokens: int) -> int:
    """Memory that one waiting sequence of `num_tokens` tokens holds beside its request's."""
    return SEQUENCE_BYTES + SEQUENCE_TOKEN_BYTES * num_tokens


def check_bytes(num_waiting: int, num_bytes: int, most: int) -> None:
    """Whether a request of `num_bytes` may join requests of `num_waiting` bytes where `most` may wait.

    Raises: RequestTooLarge for one that may not wait even alone, QueueFull for one that has to come back.
    """
    if num_bytes > most:
        limit = f"a request that holds at most {most} bytes while it waits"
        raise RequestTooLarge("prompt", limit, num_bytes, "Shorten the prompt or the grammar, or lower n.")
    if num_waiting + num_bytes > most:
        held = f"waiting requests hold {num_waiting} of {most} bytes, and this one would add {num_bytes}"
        raise QueueFull(f"the engine's waiting queue is full ({held}); send it again later")
