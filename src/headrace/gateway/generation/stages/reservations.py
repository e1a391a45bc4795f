"""What is reserved before an answer begins: its memory and its prompt's, and the most that it may use of the caller's limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.gateway.generation.generation import Generation
from headrace.gateway.upstream.seam import Prepared


async def reserve_memory(generation: Generation, call_next: Callable[[], Awaitable[Prepared]]) -> Prepared:
    """Raises RequestTooLarge or Overloaded."""
    if (grammar := generation.parsed.grammar) is not None:
        generation.held.prompts.add(grammar.num_bytes)
    prepared = await call_next()
    generation.memory.reserve(prepared)
    return prepared


async def reserve_limits(generation: Generation, call_next: Callable[[], Awaitable[Prepared]]) -> Prepared:
    """Take the most that the answer may use, and count at its end what it has used. Raises what `Admission.reserve` raises."""
    prepared = await call_next()
    admission = generation.admission
    await admission.reserve(generation.price, prepared)
    admission.follow(generation.usage)
    generation.ends.callback(lambda: admission.count(generation.used))  # what no engine took costs nothing
    return prepared
