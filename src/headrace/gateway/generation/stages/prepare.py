"""Prepares a request at its upstream and reserves what the answer may use.

A conversation that does not fit the context is shortened, or the model that answers summarises it, where the request asks for that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from headrace.core.clock import Clock
from headrace.core.errors import DeadlineExceeded, HeadraceError
from headrace.gateway.generation.call import Call, Ready
from headrace.gateway.generation.progress import is_charged
from headrace.gateway.generation.stages.model_choice import CONTEXT_HEADER
from headrace.gateway.sessions.fitting import ContextFitter, Fitted
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.upstream.seam import EventStream, Prepared, TokenUsage


async def prepare(call: Call, *, clock: Clock) -> Ready:
    """Raises what `Upstream.prepare`, `LimitReservation` and `AnswerMemory` raise, and DeadlineBeforeStart."""
    if (grammar := call.parsed.grammar) is not None:
        call.charges.prompts.add(grammar.num_bytes)
    ready, ending = await _ready(call, clock), call.ending
    call.reservation.follow(ending.usage)
    ending.ends.callback(lambda: call.reservation.count(ending.used))  # a request that no engine began costs nothing
    return ready


async def _ready(call: Call, clock: Clock) -> Ready:
    """At the call's model, or at the first one after it that can take the request."""
    exchange, ending = call.exchange, call.ending
    while True:
        call.remaining_s(clock)
        try:
            prepared, fitted = await _prepared(call)
            break
        except HeadraceError as error:
            if call.after is None:
                raise
            call = call.after(error)
    ending.prepared = prepared
    exchange.ignored = [name for name in exchange.ignored if name not in prepared.taken] + list(prepared.ignored)
    await call.reservation.reserve(call.price, prepared, highest=call.highest_price)
    call.memory.reserve(prepared)
    return Ready(call=call, prepared=prepared, fitted=fitted, following=None if call.after is None else partial(_after, call, clock))


async def _after(call: Call, clock: Clock, error: HeadraceError) -> Ready:
    assert call.after is not None
    ready = await _ready(call.after(error), clock)
    call.reservation.follow(call.ending.usage)  # a summary's tokens were counted meanwhile
    return ready


async def _prepared(call: Call) -> tuple[Prepared, Fitted | None]:
    fitting = call.parsed.fitting
    if fitting is ContextFitting.REFUSE:
        return await call.model.upstream.prepare(call.request(), call.facts()), None
    fitter = ContextFitter(
        call.model.upstream,
        call.facts(),
        fitting,
        call.history,
        max_context_tokens=call.principal.tier.max_context_tokens,
        open_stream=lambda prepared: _side_stream(call, prepared),
    )
    prepared, fitted = await fitter.prepared(call.request())
    if fitted is not None:
        call.exchange.add_headers((CONTEXT_HEADER, f"{fitting}; dropped={fitted.num_dropped}".encode()))
    elif prepared.prompt_tokens is None:  # only the server that answers can count them
        call.exchange.ignored.append("context_fitting")
    return prepared, fitted


@asynccontextmanager
async def _side_stream(call: Call, prepared: Prepared) -> AsyncIterator[EventStream]:
    """A summary's tokens are reserved and charged with the answer's, at the price of the model that makes it.

    Raises RateLimitExceeded, QuotaExhausted or Unavailable.
    """
    await call.reservation.reserve(call.price, prepared, highest=call.highest_price)
    stream = prepared.stream()
    call.reservation.follow(lambda: prepared.counted(stream.usage()))
    has_run = False
    try:
        yield stream
        has_run = True
    except DeadlineExceeded:
        has_run = True
        raise
    finally:
        await stream.close()
        usage = prepared.counted(stream.usage())
        _count(call, usage, has_run=has_run or usage.completion_tokens > 0)


def _count(call: Call, usage: TokenUsage, *, has_run: bool) -> None:
    if not is_charged(call.exchange.end_reason, has_run=has_run):
        call.reservation.count(None)
        return
    call.reservation.count(usage)
    call.ending.has_summary = True
