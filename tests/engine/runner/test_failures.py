"""Tests that a step that raises commits nothing: repeated, it gives what an unbroken run gives."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
import torch
from failpoint_kit import Injected, armed, sites
from patience import PATIENCE_S
from plain_masks import PlainMasks
from runner_kit import VOCAB, Planner, make_runner, row_tokens
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.core.grammar import Grammar
from headrace.core.plan import Plan, Result
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.batch import UnknownToken
from headrace.engine.runner.model_runner import Model, ModelRunner, OverlappedRunner
from headrace.tensor.batch import ForwardBatch, KvCache
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

PARAMS = SamplingParams(seed=3, temperature=0.8, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, prompt_logprobs=0)
PROMPT, STEPS = [5, 6, 7, 8, 9], 8
RUNNER_SITES = [name for name in sites() if name.startswith("runner.")]


def language(outputs: list[int]) -> range:
    """Only what is near the last output may follow."""
    return range(max(0, outputs[-1] - 20), min(VOCAB, outputs[-1] + 20)) if outputs else range(VOCAB)


def masking_runner(decoder: DecoderModel, model: Model | None = None) -> ModelRunner:
    return make_runner(decoder, model=model, masks=PlainMasks(language, VOCAB))


def sequence_of_plans() -> list[Plan]:
    """Prefill in two chunks, then decode, with a grammar."""
    planner = Planner()
    planner.start(0, PROMPT, PARAMS, grammar=Grammar.json_object())
    return [planner.plan((0, 0, 3, 0)), planner.plan((0, 3, 2, 1)), *(planner.plan((0, 5 + i, 1, 1)) for i in range(STEPS))]


def unbroken(decoder: DecoderModel) -> list[list[list[int]]]:
    runner = masking_runner(decoder)
    return [row_tokens(runner.submit(plan).result()) for plan in sequence_of_plans()]


def changes_of(plan: Plan) -> Plan:
    """The plan without its rows: what the loop sends again after a failure."""
    return Plan(
        step_id=1000 + plan.step_id,
        table_groups=plan.table_groups,
        table_slots=plan.table_slots,
        table_indices=plan.table_indices,
        table_blocks=plan.table_blocks,
        started=plan.started,
        ended=plan.ended,
    )


@pytest.mark.parametrize(
    ("site", "resend"), [(site, resend) for site in RUNNER_SITES for resend in (False, True) if resend or site != "runner.apply"]
)
def test_a_step_that_raised_anywhere_can_be_repeated(decoder: DecoderModel, site: str, resend: bool) -> None:
    """Every place inside the runner fails once in every step that passes it. Changes that were not applied have to be sent again;
    those that were may be."""
    runner, tokens, hits = masking_runner(decoder), [], 0
    for plan in sequence_of_plans():
        with armed(site) as fault:
            try:
                result = runner.submit(plan).result()
            except Injected:
                if resend:
                    runner.submit(changes_of(plan)).result()
                result = runner.submit(plan).result()
        hits += fault.hits
        tokens.append(row_tokens(result))
    assert hits > 0
    assert tokens == unbroken(decoder)


def test_every_site_of_the_runner_is_listed() -> None:
    assert {"runner.apply", "runner.batch", "runner.masks", "runner.forward", "runner.logits", "runner.sample", "runner.commit"} <= set(
        RUNNER_SITES
    )


def test_a_plan_made_on_a_failed_ones_promise_raises(decoder: DecoderModel) -> None:
    runner, plans = masking_runner(decoder), sequence_of_plans()
    runner.submit(plans[0]).result()
    with armed("runner.forward"):
        failed = runner.submit(plans[1])
        later = runner.submit(plans[2])
    with pytest.raises(Injected):
        failed.result()
    with pytest.raises(UnknownToken, match="slot 0 has 5 known ids, the plan computes up to 6"):
        later.result()
    assert [row_tokens(runner.submit(plan).result()) for plan in plans[1:]] == unbroken(decoder)[1:]


def test_a_later_plan_that_succeeded_is_rewound_when_planned_again(decoder: DecoderModel) -> None:
    """The loop takes every plan after a failed one back: its tokens must not be counted twice by the penalties."""
    runner, plans = masking_runner(decoder), sequence_of_plans()
    for plan in plans[:5]:
        runner.submit(plan).result()
    tokens = [row_tokens(runner.submit(plan).result()) for plan in plans[3:]]
    assert tokens == unbroken(decoder)[3:]


class Gate:
    """The model, waiting inside forward until told to go on."""

    def __init__(self, decoder: DecoderModel) -> None:
        self.decoder, self.vocab_size = decoder, decoder.vocab_size
        self.entered, self.opened = threading.Event(), threading.Event()

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        self.entered.set()
        assert self.opened.wait(timeout=PATIENCE_S)
        return self.decoder.forward(ids, batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


@pytest.mark.socket
def test_overlapped_runner_returns_at_once_and_gives_the_same_tokens(decoder: DecoderModel) -> None:
    gate = Gate(decoder)
    runner = OverlappedRunner(masking_runner(decoder, gate))
    try:
        tickets = [runner.submit(plan) for plan in sequence_of_plans()]
        assert gate.entered.wait(timeout=PATIENCE_S)
        assert not any(ticket.done() for ticket in tickets)
        gate.opened.set()
        assert [row_tokens(ticket.result(timeout=PATIENCE_S)) for ticket in tickets] == unbroken(decoder)
    finally:
        gate.opened.set()
        runner.close()


@pytest.mark.socket
def test_overlapped_runner_hands_the_exception_to_whoever_waits(decoder: DecoderModel) -> None:
    runner = OverlappedRunner(masking_runner(decoder))
    plans = sequence_of_plans()
    try:
        with armed("runner.sample", lambda: MemoryError("no room for logits")):
            tickets = [runner.submit(plan) for plan in plans[:3]]
            tickets[0].result(timeout=PATIENCE_S)
            with pytest.raises(MemoryError, match="no room"):
                tickets[1].result(timeout=PATIENCE_S)
            with pytest.raises(UnknownToken):
                tickets[2].result(timeout=PATIENCE_S)
        assert [row_tokens(runner.submit(plan).result(timeout=PATIENCE_S)) for plan in plans[1:]] == unbroken(decoder)[1:]
    finally:
        runner.close()


@pytest.mark.socket
def test_closing_finishes_the_step_in_progress_and_drops_the_rest(decoder: DecoderModel) -> None:
    gate = Gate(decoder)
    runner = OverlappedRunner(masking_runner(decoder, gate))
    first, second = (runner.submit(plan) for plan in sequence_of_plans()[:2])
    assert gate.entered.wait(timeout=PATIENCE_S)
    closing = threading.Thread(target=runner.close)
    closing.start()
    with pytest.raises(CancelledError):
        second.result(timeout=PATIENCE_S)
    gate.opened.set()
    closing.join(timeout=PATIENCE_S)
    assert not closing.is_alive()
    assert isinstance(first.result(), Result)


def test_a_device_that_failed_ends_the_engine(decoder: DecoderModel) -> None:
    runner: ModelRunner = masking_runner(decoder)
    with armed("runner.forward", lambda: torch.AcceleratorError("illegal memory access")):
        ticket = runner.submit(sequence_of_plans()[0])
    with pytest.raises(EngineFatal, match="the cpu device failed"):
        ticket.result()


def test_plain_submission_never_raises(decoder: DecoderModel) -> None:
    runner: ModelRunner = masking_runner(decoder)
    plan = sequence_of_plans()[0]
    with armed("runner.apply"):
        ticket = runner.submit(plan)
    with pytest.raises(Injected):
        ticket.result()


@pytest.mark.socket
def test_closing_leaves_a_step_that_hangs_behind(decoder: DecoderModel, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(decoder)
    runner = OverlappedRunner(masking_runner(decoder, gate), close_timeout_s=0.05)
    ticket = runner.submit(sequence_of_plans()[0])
    assert gate.entered.wait(timeout=PATIENCE_S)
    runner.close()
    assert "a step has not ended" in caplog.text
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(sequence_of_plans()[1])
    gate.opened.set()
    assert isinstance(ticket.result(timeout=PATIENCE_S), Result)
