"""Decides by the load of a model whether a request is served, queued, refused or given to the model's smaller one (admission)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.clock import Clock
from headrace.core.errors import ModelNotFound, Overloaded
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.upstream.served_models import ModelTable, ServedModel
from headrace.policy.admission import AdmissionOutcome, decide

MODEL_HEADER, REASON_HEADER = b"x-headrace-model", b"x-headrace-reason"
"""Headers of every generating answer but a continued stream, a refusal too."""

AdmittedHeaders = tuple[tuple[bytes, bytes], ...]


class ModelBusy(Overloaded):
    """The model's queue is longer than the request may wait."""


async def choose_model(call: Call, call_next: CallNext, *, clock: Clock, open_requests: OpenRequests) -> Ready:
    """A continued stream keeps its model. Raises ModelBusy."""
    return await call_next(_chosen(call, clock(), open_requests) if call.earlier is None else call)


def _chosen(call: Call, now: float, open_requests: OpenRequests) -> Call:
    asked, priority, rules = call.asked, call.parsed.priority, call.config.admission
    smaller = _smaller(asked, call.models.usable_by(call.principal))
    tenant, goal_ms = call.principal.tenant, call.principal.tier.ttft_ms
    whole = asked.upstream.queue(priority, asked.unsent)
    overload, turn = asked.overload[priority], asked.users.turn_of(tenant)
    queue = None if whole is None else overload.arrive(whole, rules, num_open=turn.num_open, now=now).at_turn(turn)
    smaller_queue = None if smaller is None else smaller.upstream.queue(priority, smaller.unsent)
    if smaller is not None and smaller_queue is not None:
        smaller_queue = smaller.overload[priority].seen(smaller_queue, now).at_turn(smaller.users.turn_of(tenant, num_new=1))
    verdict = decide(
        queue,
        smaller_queue,
        has_smaller=smaller is not None,
        rules=rules,
        priority=priority,
        ttft_goal_s=None if goal_ms is None else goal_ms / 1000,
    )
    if verdict.outcome is AdmissionOutcome.SMALLER_MODEL and smaller is not None:
        open_requests.use(call.exchange.request_id, tenant, smaller.users)
        call = call.answered_by(smaller)
    call.exchange.add_headers(*headers_of(call.model, verdict.outcome))
    if verdict.outcome is AdmissionOutcome.REFUSED and queue is not None:
        overload.refuse(queue, rules, now=now)
        raise ModelBusy(f"The queue of the model {asked.name} is full; try again later.", retry_after_s=verdict.retry_after_s)
    unsent = call.model.unsent.add(priority)
    call.ending.ends.callback(unsent.uncount)
    return call.changed(unsent=unsent)


def headers_of(model: ServedModel, outcome: AdmissionOutcome) -> AdmittedHeaders:
    return ((MODEL_HEADER, model.name.encode()), (REASON_HEADER, outcome.encode()))


def refused_headers(headers: Sequence[tuple[bytes, bytes]]) -> AdmittedHeaders:
    return tuple((name, AdmissionOutcome.REFUSED.encode() if name == REASON_HEADER else value) for name, value in headers)


def _smaller(model: ServedModel, models: ModelTable) -> ServedModel | None:
    try:
        return models.get(model.smaller) if model.smaller else None
    except ModelNotFound:  # the caller may not use it
        return None
