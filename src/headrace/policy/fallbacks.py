"""Decides which model answers a request: the one that it asks for, or a fallback of that one, and why.

    facts about the models, reasons met so far -> the model to ask now, and a sentence for each model that was looked at

It is decided before tokens are counted, and again after each model that could not answer. See docs/routing.md, "Fallbacks".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headrace.core.option import option
from headrace.core.request import PriorityClass
from headrace.policy.admission import AdmissionOutcome, AdmissionVerdict, QueueState, decide
from headrace.policy.config import AdmissionRules

MAX_FALLBACKS = 8
"""Most models that one names, for each reason."""


class FallbackReason(StrEnum):
    """Why a model does not answer a request. A value is a key of `models[N].fallbacks`."""

    FAILED = "failed"
    BUSY = "busy"
    CONTEXT_WINDOW = "context_window"
    CONTENT_POLICY = "content_policy"


FAILED, BUSY, CONTEXT_WINDOW, CONTENT_POLICY = FallbackReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallbacks:
    """Names of the models that may answer in the place of one, by reason, in the order in which they are asked."""

    failed: tuple[str, ...] = option(
        (),
        "Other served models, by name or alias, that answer in this order where no replica or server of this one does "
        "([routing.md](routing.md#fallbacks)).",
    )
    busy: tuple[str, ...] = option((), "The same while this model is busy ([tenancy.md](tenancy.md#busy-models)) and they are not.")
    context_window: tuple[str, ...] = option((), "The same where the request is longer than this model's context.")
    content_policy: tuple[str, ...] = option((), "The same where the content filter of a foreign server refuses the request.")

    def named(self) -> Iterator[tuple[FallbackReason, str]]:
        for reason in FallbackReason:
            for name in getattr(self, reason):
                yield reason, name


NO_FALLBACKS = Fallbacks()


class ModelFacts(NamedTuple):
    """
    is_alive       a replica or a foreign server is connected
    max_model_len  None: not known
    queue          what is before the request; None: not known
    """

    name: str
    is_alive: bool
    max_model_len: int | None
    queue: QueueState | None


class ChoiceTerms(NamedTuple):
    """least_tokens: a lower bound of prompt and output"""

    least_tokens: int
    priority: PriorityClass
    rules: AdmissionRules
    ttft_goal_s: float | None = None


class ChoiceStep(NamedTuple):
    model: str
    is_chosen: bool
    reason: str


class NextModel(NamedTuple):
    """
    model          to ask now; None: none may be asked
    reason         of a fallback
    retry_after_s  of a refusal by the queue of the model that the request asks for
    """

    model: str | None
    outcome: AdmissionOutcome
    steps: Sequence[ChoiceStep]
    reason: FallbackReason | None = None
    retry_after_s: float = 0.0


SENTENCES = {
    FAILED: "No replica or server of it answers the request.",
    BUSY: "It is busy.",
    CONTEXT_WINDOW: "The request is longer than its context.",
    CONTENT_POLICY: "The content filter of its server refuses the request.",
}


def next_model(
    asked: ModelFacts | None,
    fallbacks: Sequence[tuple[FallbackReason | None, str]],
    met: Sequence[FallbackReason],
    terms: ChoiceTerms,
    facts: Callable[[str], ModelFacts],
) -> NextModel:
    """A premium request leaves a busy model only where it would be refused. A busy fallback is no help to a busy model.

    asked      None: it was asked, and could not answer
    fallbacks  of `asked` that were not asked yet, in order; reason None: for every reason
    met        why the models asked so far did not answer, the latest first
    facts      of a fallback, by its name
    """
    steps: list[ChoiceStep] = []
    reasons, verdict = tuple(met), AdmissionVerdict(AdmissionOutcome.REFUSED)
    if asked is not None:
        obstacles, verdict = _look(asked, terms)
        is_queued = verdict.outcome is AdmissionOutcome.QUEUED
        if not obstacles or (is_queued and terms.priority is PriorityClass.PREMIUM):
            return NextModel(asked.name, verdict.outcome, [ChoiceStep(asked.name, True, "It is the first choice.")])
        reasons = (*obstacles, *reasons)
        steps.append(ChoiceStep(asked.name, False, SENTENCES[obstacles[0]]))
    for reason in dict.fromkeys(reasons):
        for given, name in fallbacks:
            if given not in (None, reason):
                continue
            obstacles, _ = _look(facts(name), terms)
            if not obstacles or (obstacles == (BUSY,) and reason is not BUSY):
                step = ChoiceStep(name, True, f"It is the first fallback for {reason} that can answer.")
                return NextModel(name, AdmissionOutcome.FALLBACK, [*steps, step], reason, verdict.retry_after_s)
            if all(name != step.model for step in steps):
                steps.append(ChoiceStep(name, False, SENTENCES[obstacles[0]]))
    if asked is None or verdict.outcome is AdmissionOutcome.REFUSED:
        return NextModel(None, AdmissionOutcome.REFUSED, steps, retry_after_s=verdict.retry_after_s)
    return NextModel(
        asked.name, verdict.outcome, [*steps, ChoiceStep(asked.name, True, "It is the first choice, and no fallback can answer.")]
    )


def _look(model: ModelFacts, terms: ChoiceTerms) -> tuple[tuple[FallbackReason, ...], AdmissionVerdict]:
    """A queue that refuses the request is a failure, too."""
    verdict = AdmissionVerdict(AdmissionOutcome.SERVED)
    if not model.is_alive:
        return (FAILED,), verdict
    if model.max_model_len is not None and terms.least_tokens > model.max_model_len:
        return (CONTEXT_WINDOW,), verdict
    verdict = decide(model.queue, rules=terms.rules, ttft_goal_s=terms.ttft_goal_s)
    if verdict.outcome is AdmissionOutcome.SERVED:
        return (), verdict
    return (BUSY,) if verdict.outcome is AdmissionOutcome.QUEUED else (BUSY, FAILED), verdict
