"""Lets a request wait while its model has no replica that takes it."""

from __future__ import annotations

import asyncio

from headrace.core.clock import Clock
from headrace.core.errors import DeadlineBeforeStart, Unavailable
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.stages.model_choice import REASON_HEADER, with_outcome
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.upstream.seam import Hold
from headrace.policy.admission import AdmissionOutcome
from headrace.policy.holding import FULL_RETRY_S, HeldTerms


async def hold(call: Call, call_next: CallNext, *, clock: Clock, watch: StreamWatch) -> Ready:
    """A continued stream does not wait here. Raises Unavailable where the wait is over or too many wait, and DeadlineBeforeStart."""
    if call.model is not call.asked:
        call.asked.upstream.note_wanted()
    held = None
    if call.has_fallback or call.earlier is not None:
        call.model.upstream.note_wanted()
    else:
        held = call.model.upstream.hold(lambda: _terms(call), call.unsent, call.parsed.routing)
    if held is not None:
        try:
            await _wait(call, held, clock, watch)
        finally:
            held.leave()
    return await call_next(call)


def _terms(call: Call) -> HeldTerms:
    principal, max_tokens = call.principal, call.params.max_tokens
    tier = principal.tier.terms(principal.tier_name)
    max_output_tokens = None if max_tokens is None else max_tokens * call.params.n
    return HeldTerms(principal.tenant, call.parsed.priority, tier, call.charges.prompts.num_bytes, max_output_tokens)


async def _wait(call: Call, held: Hold, clock: Clock, watch: StreamWatch) -> None:
    """A stream begins after `ping_s` with comments, so that no proxy gives it up."""
    exchange, remaining_s = call.exchange, call.remaining_s(clock)
    if (REASON_HEADER, AdmissionOutcome.SERVED.encode()) in exchange.more_headers:
        exchange.more_headers = with_outcome(exchange.more_headers, AdmissionOutcome.QUEUED)
    limit_s = held.limit_s if remaining_s is None else min(held.limit_s, remaining_s)
    quiet_s = min(limit_s, watch.ping_s) if call.parsed.is_streaming else limit_s
    await asyncio.wait((held.released,), timeout=quiet_s)
    if quiet_s < limit_s and not held.released.done():
        async with watch.open(exchange, lambda: 0):
            await asyncio.wait((held.released,), timeout=limit_s - quiet_s)
    if held.released.done():
        held.released.result()
    elif limit_s == remaining_s:
        raise DeadlineBeforeStart(f"The request's deadline of {call.config.timeouts.request_s:g} s passed before it began.")
    else:
        raise Unavailable(f"No replica of {call.model.name} took the request within {limit_s:g} s.", retry_after_s=FULL_RETRY_S)
