"""Tests which model is asked for a request, first and after each model that could not answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.request import PriorityClass
from headrace.policy.admission import AdmissionOutcome, QueueState
from headrace.policy.config import AdmissionRules
from headrace.policy.fallbacks import (
    BUSY,
    CONTENT_POLICY,
    CONTEXT_WINDOW,
    FAILED,
    ChoiceTerms,
    FallbackReason,
    Fallbacks,
    ModelFacts,
    NextModel,
    next_model,
)

pytestmark = pytest.mark.pure

RULES = AdmissionRules(max_wait_s=8.0)
IDLE, DEEP, LONG = QueueState(0, 0.0), QueueState(11, 1.0), QueueState(3, 100.0)
STANDARD, PREMIUM = PriorityClass.STANDARD, PriorityClass.PREMIUM
TOKENS = 100


def facts(name: str, queue: QueueState | None = IDLE, *, is_alive: bool = True, max_model_len: int | None = None) -> ModelFacts:
    return ModelFacts(name, is_alive, max_model_len, queue)


def chosen(
    asked: ModelFacts | None,
    *fallbacks: tuple[FallbackReason | None, ModelFacts],
    met: Sequence[FallbackReason] = (),
    priority: PriorityClass = STANDARD,
) -> NextModel:
    models = {model.name: model for _, model in fallbacks}
    named = [(reason, model.name) for reason, model in fallbacks]
    return next_model(asked, named, met, ChoiceTerms(TOKENS, priority, RULES), models.__getitem__)


def test_the_model_that_is_asked_for_answers_where_it_can() -> None:
    found = chosen(facts("big"), (None, facts("small")))
    assert (found.model, found.outcome, found.reason) == ("big", AdmissionOutcome.SERVED, None)
    assert found.steps == [("big", True, "It is the first choice.")]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (facts("big", is_alive=False), FAILED),
        (facts("big", DEEP), BUSY),
        (facts("big", LONG), BUSY),
        (facts("big", LONG), FAILED),
        (facts("big", max_model_len=TOKENS - 1), CONTEXT_WINDOW),
    ],
)
def test_a_model_that_cannot_answer_has_a_fallback_for_that_reason_alone(asked: ModelFacts, reason: FallbackReason) -> None:
    others = [(each, facts(each)) for each in FallbackReason if each is not reason and {each, reason} != {BUSY, FAILED}]
    found = chosen(asked, *others, (reason, facts("small")))
    assert (found.model, found.outcome, found.reason) == ("small", AdmissionOutcome.FALLBACK, reason)
    assert [(step.model, step.is_chosen) for step in found.steps] == [("big", False), ("small", True)]
    assert chosen(asked, *others).model == (None if asked.queue is LONG else "big")


def test_a_busy_fallback_is_no_help_to_a_busy_model_and_some_to_a_dead_one() -> None:
    assert chosen(facts("big", DEEP), (BUSY, facts("small", DEEP))).outcome is AdmissionOutcome.QUEUED
    assert chosen(facts("big", LONG), (BUSY, facts("small", DEEP))).outcome is AdmissionOutcome.REFUSED
    assert chosen(facts("big", is_alive=False), (FAILED, facts("small", DEEP))).model == "small"
    assert chosen(facts("big", is_alive=False), (FAILED, facts("small", LONG))).model == "big", "it may be there again"
    assert chosen(facts("big", DEEP), (BUSY, facts("small", is_alive=False)), (BUSY, facts("next"))).model == "next"


def test_a_premium_request_leaves_its_model_only_where_it_would_be_refused() -> None:
    assert chosen(facts("big", DEEP), (BUSY, facts("small")), priority=PREMIUM).outcome is AdmissionOutcome.QUEUED
    assert chosen(facts("big", LONG), (BUSY, facts("small")), priority=PREMIUM).model == "small"


def test_what_fails_for_another_reason_goes_on_in_the_list_of_that_reason_first() -> None:
    chain = ((FAILED, facts("second")), (CONTEXT_WINDOW, facts("long")))
    assert chosen(None, *chain, met=[CONTEXT_WINDOW, FAILED]).model == "long"
    assert chosen(None, chain[0], met=[CONTEXT_WINDOW, FAILED]).model == "second"
    assert chosen(None, *chain, met=[CONTENT_POLICY]).model is None


def test_a_fallback_of_the_client_answers_for_every_reason() -> None:
    for reason in FallbackReason:
        assert chosen(None, (None, facts("wished")), (reason, facts("configured")), met=[reason]).model == "wished"


def test_a_model_that_was_passed_over_for_its_queue_is_asked_after_its_fallbacks() -> None:
    found = chosen(facts("big", DEEP), met=[FAILED])
    assert (found.model, found.outcome) == ("big", AdmissionOutcome.QUEUED)


def test_fallbacks_are_listed_by_reason_in_their_order() -> None:
    assert list(Fallbacks(busy=("b", "a"), failed=("a",)).named()) == [(FAILED, "a"), (BUSY, "b"), (BUSY, "a")]


queues = st.none() | st.builds(QueueState, st.integers(0, 20), st.floats(0, 30))
models = st.builds(ModelFacts, st.sampled_from("abcde"), st.booleans(), st.none() | st.sampled_from([TOKENS - 1, TOKENS]), queues)


@given(
    st.none() | models,
    st.lists(st.tuples(st.none() | st.sampled_from(FallbackReason), models), unique_by=lambda each: each[1].name),
    st.lists(st.sampled_from(FallbackReason), min_size=1),
    st.sampled_from(PriorityClass),
)
def test_a_chosen_model_is_able_allowed_and_the_only_one(
    asked: ModelFacts | None,
    fallbacks: list[tuple[FallbackReason | None, ModelFacts]],
    met: list[FallbackReason],
    priority: PriorityClass,
) -> None:
    fallbacks = [(reason, model) for reason, model in fallbacks if asked is None or model.name != asked.name]
    found = chosen(asked, *fallbacks, met=met if asked is None else [], priority=priority)
    assert [step.model for step in found.steps if step.is_chosen] == ([] if found.model is None else [found.model])
    assert (found.reason is not None) == (found.outcome is AdmissionOutcome.FALLBACK)
    if found.outcome is AdmissionOutcome.FALLBACK:
        ((allowed, model),) = [(reason, model) for reason, model in fallbacks if model.name == found.model]
        assert model.is_alive
        assert (model.max_model_len or TOKENS) >= TOKENS
        assert allowed in (None, found.reason)
    elif found.model is None:
        assert asked is None or (asked.queue is not None and asked.queue.wait_s > RULES.max_wait_s)
