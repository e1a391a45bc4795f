"""What the request's record and its line of the log have of it before the answer begins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.gateway.generation.generation import Generation
from headrace.gateway.ledger.record import prompt_json
from headrace.gateway.upstream.generation_request import Conversation
from headrace.gateway.upstream.seam import NO_USAGE, Prepared


async def log_prompt(generation: Generation, call_next: Callable[[], Awaitable[Prepared]]) -> Prepared:
    """For tenants that have their prompts logged."""
    exchange = generation.exchange
    if exchange.principal.logs_prompts:
        prompt = generation.parsed.prompt
        exchange.logged_prompt = prompt_json(prompt.messages if isinstance(prompt, Conversation) else prompt.prompts)
    return await call_next()


async def record_prepared(generation: Generation, call_next: Callable[[], Awaitable[Prepared]]) -> Prepared:
    prepared = await call_next()
    exchange = generation.exchange
    exchange.ignored += prepared.ignored
    exchange.record.seed = prepared.seed
    if generation.side_usage is NO_USAGE:  # else the record has the tokens of what ran already
        exchange.record.prompt_tokens = prepared.prompt_tokens
    return prepared
