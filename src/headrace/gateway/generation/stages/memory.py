"""The memory of a prompt and its answer: charged before the answer begins."""

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
