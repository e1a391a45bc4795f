"""Decides by the load of a model whether a request is served, queued, refused or given to the model's smaller one (admission)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import HeadraceError, Overloaded
from headrace.gateway.generation.generation import CallNext, Generation
from headrace.gateway.upstream.seam import Prepared
from headrace.gateway.upstream.served_models import ModelTable, ServedModel
from headrace.policy.admission.decision import AdmissionOutcome, decide

MODEL_HEADER, REASON_HEADER = b"x-headrace-model", b"x-headrace-reason"
"""Headers of every generating answer but a continued stream, a refusal too: the model that answers, and the `AdmissionOutcome`."""

AdmittedHeaders = tuple[tuple[bytes, bytes], ...]


class ModelBusy(Overloaded):
    """The model's queue is longer than the request may wait."""


async def choose_model(generation: Generation, call_next: CallNext) -> Prepared:
    """Choose the model that answers. A continued stream keeps its model. Raises ModelBusy."""
    if generation.earlier is None:
        _choose(generation)
    return await call_next()


def _choose(generation: Generation) -> None:
    service, exchange, asked, priority = generation.service, generation.exchange, generation.asked, generation.parsed.priority
    rules, now = service.config.admission, service.clock()
    smaller = _smaller(asked, service.models.usable_by(exchange.principal))
    tenant, goal_ms = exchange.principal.tenant, exchange.principal.tier.ttft_ms
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
        generation.model = smaller
        exchange.use(smaller.users)
        exchange.record.model = smaller.name
    exchange.add_headers(*headers_of(generation.model, verdict.outcome))
    if verdict.outcome is AdmissionOutcome.REFUSED and queue is not None:
        overload.refuse(queue, rules, now=now)
        raise ModelBusy(f"The queue of the model {asked.name} is full; try again later.", retry_after_s=verdict.retry_after_s)
    generation.unsent = generation.model.unsent.add(priority)
    exchange.count_unsent(generation.unsent)


def headers_of(model: ServedModel, outcome: AdmissionOutcome) -> AdmittedHeaders:
    return ((MODEL_HEADER, model.name.encode()), (REASON_HEADER, outcome.encode()))


def refused_headers(headers: Sequence[tuple[bytes, bytes]]) -> AdmittedHeaders:
    """The headers with the reason `refused`, for a request that was admitted and then refused by its engine."""
    return tuple((name, AdmissionOutcome.REFUSED.encode() if name == REASON_HEADER else value) for name, value in headers)


def _smaller(model: ServedModel, models: ModelTable) -> ServedModel | None:
    try:
        return models.get(model.smaller) if model.smaller else None
    except HeadraceError:  # the caller may not use the smaller model
        return None
