"""Prepares a request at its upstream, behind all stages, and makes its conversation fit the context where the request asks for that.

A conversation that does not fit is shortened, or the model that answers summarises it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.gateway.generation.generation import Generation
from headrace.gateway.sessions.fitting import ContextFitter
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.upstream.seam import EventStream, Prepared, added


async def prepare(generation: Generation) -> Prepared:
    """Prepare the request at its upstream, after the last stage. To fit a conversation, several prompts may be prepared.

    Raises InvalidRequest for a request that the model cannot take (ContextLengthExceeded if it is too long), Unavailable and Overloaded
    when the upstream cannot prepare it, and RateLimitExceeded or QuotaExhausted when the caller's limits refuse a summary.
    """
    fitting = generation.parsed.fitting
    if fitting is ContextFitting.REFUSE:
        return await generation.model.upstream.prepare(generation.request(), generation.facts())
    fitter = ContextFitter(
        generation.model.upstream,
        generation.facts(),
        fitting,
        generation.history,
        max_context_tokens=generation.exchange.principal.tier.max_context_tokens,
        open_stream=lambda prepared: _side_stream(generation, prepared),
    )
    prepared, generation.fitted = await fitter.prepared(generation.request())
    if generation.fitted is not None:
        generation.exchange.add_headers((b"x-headrace-context", f"{fitting}; dropped={generation.fitted.num_dropped}".encode()))
    elif prepared.prompt_tokens is None:  # only the server that answers can count them
        generation.exchange.ignored.append("context_fitting")
    return prepared


@asynccontextmanager
async def _side_stream(generation: Generation, prepared: Prepared) -> AsyncIterator[EventStream]:
    """The event stream of a summary, whose tokens are reserved and charged with the answer's.

    Raises RateLimitExceeded or QuotaExhausted where the caller's limits have no room for the summary, Unavailable where the store fails.
    """
    reservation = generation.reservation
    await reservation.reserve(generation.price, prepared)
    stream = prepared.stream()
    reservation.follow(stream.usage)
    try:
        yield stream
    finally:
        await stream.close()
        _count(generation, stream)


def _count(generation: Generation, stream: EventStream) -> None:
    """Count a summary's usage. A summary that no engine has begun costs nothing."""
    usage, record = stream.usage(), generation.exchange.record
    if not usage.completion_tokens and generation.exchange.end_reason is None:
        generation.reservation.count(None)
        return
    generation.reservation.count(usage)
    generation.side_usage = usage = usage if generation.side_usage is None else added(generation.side_usage, usage)
    record.prompt_tokens, record.completion_tokens, record.cached_tokens = usage[:3]
