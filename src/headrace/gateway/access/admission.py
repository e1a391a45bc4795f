"""Which model answers a request while the one it asked for is busy: `policy.admission.ladder` on the live load of replicas."""

from __future__ import annotations

from headrace.core.errors import HeadraceError, Overloaded
from headrace.core.request import PriorityClass
from headrace.gateway.access.principal import Principal
from headrace.gateway.upstream.served_models import ModelTable, ServedModel
from headrace.policy.admission.config import AdmissionRules
from headrace.policy.admission.ladder import AdmissionStep, decide

MODEL_HEADER, REASON_HEADER = b"x-headrace-model", b"x-headrace-reason"
"""Headers of every generating answer, a refusal too: the model that answers, and an `AdmissionStep`."""

AdmittedHeaders = tuple[tuple[bytes, bytes], ...]


class ModelBusy(Overloaded):
    """The model's queue is longer than the request may wait."""


def admitted_model(
    asked: ServedModel, models: ModelTable, principal: Principal, priority: PriorityClass, rules: AdmissionRules
) -> tuple[ServedModel, AdmissionStep]:
    """The model that answers, and why.

    models    that the caller may use
    priority  of the request, which may be lower than its key's

    Raises ModelBusy.
    """
    smaller = _smaller(asked, models)
    goal_ms = principal.tier.ttft_ms
    verdict = decide(
        asked.upstream.queue(),
        None if smaller is None else smaller.upstream.queue(),
        has_smaller=smaller is not None,
        priority=priority,
        rules=rules,
        ttft_goal_s=None if goal_ms is None else goal_ms / 1000,
    )
    if verdict.step is AdmissionStep.REFUSED:
        raise ModelBusy(f"The queue of the model {asked.name} is full; try again later.", retry_after_s=verdict.retry_after_s)
    if verdict.step is AdmissionStep.SMALLER_MODEL:
        assert smaller is not None
        return smaller, verdict.step
    return asked, verdict.step


def headers_of(model: ServedModel, step: AdmissionStep) -> AdmittedHeaders:
    return ((MODEL_HEADER, model.name.encode()), (REASON_HEADER, step.encode()))


def _smaller(model: ServedModel, models: ModelTable) -> ServedModel | None:
    try:
        return models.get(model.smaller) if model.smaller else None
    except HeadraceError:  # one that the caller may not use
        return None
