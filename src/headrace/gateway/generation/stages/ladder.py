"""Admission by load: which model answers while the one that was asked for is busy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.gateway.access.admission import ModelBusy, admitted_model, headers_of
from headrace.gateway.generation.generation import Generation
from headrace.gateway.upstream.seam import Prepared
from headrace.policy.admission.ladder import AdmissionStep


async def choose_model(generation: Generation, call_next: Callable[[], Awaitable[Prepared]]) -> Prepared:
    """A stream that goes on is answered by its own model. Raises ModelBusy."""
    if generation.earlier is None:
        _choose(generation)
    return await call_next()


def _choose(generation: Generation) -> None:
    service, exchange, asked, priority = generation.service, generation.exchange, generation.asked, generation.parsed.priority
    models = service.models.usable_by(exchange.principal)
    try:
        turn = service.open_requests.turn_of(exchange.principal.tenant)
        model, step = admitted_model(asked, models, exchange.principal, priority, service.config.admission, turn)
    except ModelBusy:
        exchange.more_headers = (*exchange.more_headers, *headers_of(asked, AdmissionStep.REFUSED))
        raise
    exchange.more_headers = (*exchange.more_headers, *headers_of(model, step))
    if model is not asked:
        generation.model = model
        exchange.use(model.users)
        exchange.record.model = model.name
    generation.joining = model.joining.join(priority)
    exchange.join(generation.joining)
