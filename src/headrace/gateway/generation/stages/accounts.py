"""Accounts for a request: keeps its prompt for the usage record, charges its memory, reserves the caller's limits, and fills its record."""

from __future__ import annotations

from headrace.gateway.generation.generation import CallNext, Generation
from headrace.gateway.ledger.record import prompt_json
from headrace.gateway.upstream.generation_request import Conversation
from headrace.gateway.upstream.seam import Prepared


async def log_prompt(generation: Generation, call_next: CallNext) -> Prepared:
    """Keep the prompt for the usage record, for a tenant that has chosen it."""
    exchange = generation.exchange
    if exchange.principal.logs_prompts:
        prompt = generation.parsed.prompt
        exchange.logged_prompt = prompt_json(prompt.messages if isinstance(prompt, Conversation) else prompt.prompts)
    return await call_next()


async def reserve_memory(generation: Generation, call_next: CallNext) -> Prepared:
    """Charge the memory that the request needs in any case. Raises RequestTooLarge or Overloaded."""
    if (grammar := generation.parsed.grammar) is not None:
        generation.charges.prompts.add(grammar.num_bytes)
    prepared = await call_next()
    generation.memory.reserve(prepared)
    return prepared


async def reserve_limits(generation: Generation, call_next: CallNext) -> Prepared:
    """Reserve the most that the answer may use, and count its real usage at the end.

    Raises RateLimitExceeded or QuotaExhausted when a limit is reached, and Unavailable when the store of limits fails.
    """
    prepared = await call_next()
    reservation = generation.reservation
    await reservation.reserve(generation.price, prepared)
    reservation.follow(generation.usage)
    generation.ends.callback(lambda: reservation.count(generation.used))  # a request that no engine began costs nothing
    return prepared


async def record_prepared(generation: Generation, call_next: CallNext) -> Prepared:
    prepared = await call_next()
    exchange = generation.exchange
    exchange.ignored = [name for name in exchange.ignored if name not in prepared.taken] + list(prepared.ignored)
    exchange.record.seed = prepared.seed
    if generation.side_usage is None:  # with a summary, the record has its tokens already
        exchange.record.prompt_tokens = prepared.prompt_tokens
    return prepared
