"""The caller's limits: the most that an answer may use is taken before it begins, what it has used is counted at its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.gateway.generation.generation import Generation
from headrace.gateway.upstream.seam import Prepared


async def reserve_limits(generation: Generation, call_next: Callable[[], Awaitable[Prepared]]) -> Prepared:
    """Raises what `Admission.reserve` raises."""
    prepared = await call_next()
    admission = generation.admission
    await admission.reserve(generation.price, prepared)
    admission.follow(generation.usage)
    generation.ends.callback(lambda: admission.count(generation.used))  # what no engine took costs nothing
    return prepared
