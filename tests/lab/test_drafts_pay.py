"""Tests on virtual time that drafts are computed where they pay: answers are the same, and no mix of sequences, pace and accuracy takes
three percent longer than without.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest

from headrace.core.ids import RequestId
from headrace.core.plan import Plan, StepCosts
from headrace.core.request import EngineRequest, TierTerms
from headrace.core.sampling import SamplingParams
from headrace.core.speculation import DRAFT_MODEL, NGRAM, SpeculativeConfig
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_engine

pytestmark = pytest.mark.pure

LARGE = FakeOptions(verify=False, num_blocks=8000, max_model_len=2048, step_seconds=0.010, free_tokens=16, token_seconds=0.0003)
"""Reads weights for 10 ms; beyond 16 tokens computing takes longer."""

SMALL = replace(LARGE, step_seconds=0.002, free_tokens=0, token_seconds=0.001)
"""Each token takes half as long as reading the weights."""

STAIRS = replace(
    LARGE,
    paces=tuple((tokens, ms / 1000) for tokens, ms in ((2, 33), (4, 42), (5, 50), (8, 52), (16, 77), (24, 102), (32, 119), (40, 144))),
    token_seconds=0.003,
    noise=0.05,
)
"""A CPU's, whose kernels compute eight rows as one: a step of 9 tokens takes as long as one of 16."""

PLAN_S = 0.0003

METHODS = {
    NGRAM: SpeculativeConfig(method=NGRAM, num_speculative_tokens=5),
    DRAFT_MODEL: SpeculativeConfig(method=DRAFT_MODEL, num_speculative_tokens=5, model="headrace-draft"),
}


@dataclass
class Timed:
    """An engine whose clock moves by what steps and plans take."""

    options: FakeOptions
    method: str | None = None
    depth: int = 2
    max_num_seqs: int = 32
    now: float = 0.0
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(
            model="fake",
            device="cpu",
            depth=self.depth,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=512,
            block_size=16,
            speculative_config=None if self.method is None else METHODS[self.method],
        )
        self.engine = fake_engine(self.take, self.options, config, clock=lambda: self.now, wait=self.wait)
        scheduler = self.engine.scheduler
        plan = scheduler.plan

        def plan_slowly(now: float, costs: StepCosts) -> Plan | None:
            if (made := plan(now, costs)) is not None:
                self.now += PLAN_S
                self.plans.append(made)
            return made

        scheduler.plan = plan_slowly  # type: ignore[method-assign, assignment]

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate)
            self.tokens[update.request_id, update.index] += update.token_ids

    def submit(self, name: str, length: int, max_tokens: int, seed: int, tier: TierTerms | None = None) -> None:
        prompt = tuple((seed * 31 + place * 7) % 999 for place in range(length))
        request = EngineRequest(request_id=RequestId(name), prompt_ids=prompt, params=SamplingParams(seed=seed, max_tokens=max_tokens))
        self.engine.submit(request if tier is None else replace(request, tier=tier))

    def run(self) -> Timed:
        while self.engine.turn() or self.engine.scheduler.sequences.has_work:
            pass
        self.engine.scheduler.check()
        return self


def served(
    options: FakeOptions, method: str | None, depth: int, num_sequences: int, num_prompts: int, length: int = 20, least: int = 160
) -> Timed:
    timed = Timed(options, method, depth, max_num_seqs=num_sequences + 2 * bool(num_prompts))
    for number in range(num_sequences):
        timed.submit(f"r{number}", length, least + number * 7 % 40, number)
    for number in range(num_prompts):
        timed.submit(f"p{number}", 900, 20, 1000 + number)
    return timed.run()


@pytest.mark.parametrize(("depth", "num_sequences", "num_prompts"), [(1, 1, 0), (2, 1, 0), (2, 8, 0), (2, 32, 0), (1, 4, 12), (2, 4, 12)])
@pytest.mark.parametrize("options", [LARGE, SMALL, STAIRS], ids=["large", "small", "stairs"])
def test_answers_are_the_same_and_come_no_later(options: FakeOptions, depth: int, num_sequences: int, num_prompts: int) -> None:
    plain = served(options, None, depth, num_sequences, num_prompts)
    for method in (NGRAM, DRAFT_MODEL):
        speedups = {}
        for accuracy in (0.0, 0.3, 0.6, 0.95):
            drawn = replace(options, draft_accuracy=accuracy, draft_seconds=0.0006 if method == DRAFT_MODEL else 0.0)
            drafted = served(drawn, method, depth, num_sequences, num_prompts)
            assert drafted.tokens == plain.tokens
            speedups[accuracy] = plain.now / drafted.now
        assert min(speedups.values()) > 0.97, speedups
        if options is LARGE and num_sequences == 1:
            assert all(speedups[accuracy] > least for accuracy, least in {0.3: 1.08, 0.6: 1.5, 0.95: 3.0}.items()), speedups
        if options is LARGE and num_sequences == 8:
            assert speedups[0.95] > 2.0


@pytest.mark.parametrize("num_streams", [8, 32])
def test_streams_that_follow_one_another_are_never_slower(num_streams: int) -> None:
    """In one batch of equal lengths the last answers alone would take longer steps for each token."""

    def follow(method: str | None, accuracy: float) -> float:
        timed = Timed(replace(STAIRS, draft_accuracy=accuracy), method, max_num_seqs=num_streams)
        for number in range(6 * num_streams):
            timed.submit(f"r{number}", 32, 48 - number * 7 % 24, number)
        return timed.run().now

    plain = follow(None, 0.0)
    speedups = {accuracy: plain / follow(NGRAM, accuracy) for accuracy in (0.3, 0.6, 0.8, 0.95)}
    assert min(speedups.values()) > 0.98, speedups
    assert speedups[0.95] > {8: 1.3, 32: 1.03}[num_streams], speedups


def test_drafts_that_are_offered_now_and_then_pay_too() -> None:
    options = replace(LARGE, draft_accuracy=0.95, draft_rate=0.3)
    assert served(LARGE, None, 2, 1, 0).now > 1.8 * served(options, NGRAM, 2, 1, 0).now


def test_a_machine_that_stood_still_goes_on_drafting() -> None:
    timed = Timed(replace(LARGE, draft_accuracy=0.9, stall_after_steps=30, stall_seconds=2.0), NGRAM)
    timed.submit("r", 20, 400, 1)
    timed.run()
    after = [len(plan.drafts) for plan in timed.plans[31:100]]
    assert sum(num_drafts == 0 for num_drafts in after) < 8


def test_of_two_sequences_only_one_is_drafted_where_only_its_drafts_are_right() -> None:
    """And a step of both: neither waits for steps of the other."""
    timed = Timed(replace(SMALL, step_seconds=0.008, draft_accuracy=0.0), NGRAM)
    runner = timed.engine._steps.runner
    draw = runner._draw  # type: ignore[attr-defined]
    runner._draw = lambda slot, *drawn: slot.seed == 1 or draw(slot, *drawn)  # type: ignore[attr-defined]
    for seed in (1, 2):
        timed.submit(f"r{seed}", 20, 300 * (4 if seed == 1 else 1), seed)
    timed.run()
    both = [plan for plan in timed.plans if plan.num_rows == 2][40:]
    assert len(both) > 100
    counts = [list(plan.counts) for plan in both]
    drafted = [max(row) for row in counts if max(row) > 1]
    assert len(drafted) > 0.9 * len(both)
    assert sum(min(row) > 1 for row in counts) < 0.1 * len(both)


def test_drafts_keep_the_goals_of_rows_and_leave_prompts_their_part() -> None:
    goal = TierTerms(name="quick", tpot_ms=14.0)
    timed = Timed(replace(LARGE, draft_accuracy=0.95), NGRAM, max_num_seqs=12)
    for number in range(8):
        timed.submit(f"r{number}", 20, 300, number, goal)
    for number in range(20):
        timed.submit(f"p{number}", 900, 2, 1000 + number)
    timed.run()
    steps = [plan for plan in timed.plans if plan.drafts]
    prompts = [sum(count for count, samples in zip(plan.counts, plan.samples, strict=True) if count != samples) for plan in steps]
    assert sum(num_tokens >= 512 // 64 for num_tokens in prompts) > 20
    most_within = 16 + (14.0 - 10.0) / 0.3
    assert all(plan.num_tokens - num_tokens <= most_within for plan, num_tokens in zip(steps, prompts, strict=True))


@pytest.mark.parametrize("length", [20, 100, 600])
@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_draft_model_that_computes_prompts_pays_as_one_that_knows_them(length: int, num_sequences: int) -> None:
    """Its prompts take their time, and what is drafted later while they are computed is missed."""
    at_once = replace(LARGE, draft_seconds=0.0006)
    catching_up = replace(at_once, catch_up_seconds=0.00003)
    prompts_s = num_sequences * length * catching_up.catch_up_seconds
    plain = served(LARGE, None, 2, num_sequences, 0, length, 500)
    for accuracy, least in {0.0: 0.97, 0.3: 0.97, 0.6: 1.15, 0.95: 1.5}.items():
        paces = (replace(paced, draft_accuracy=accuracy) for paced in (at_once, catching_up))
        known, drafted = (served(paced, DRAFT_MODEL, 2, num_sequences, 0, length, 500) for paced in paces)
        assert drafted.tokens == plain.tokens
        assert plain.now / drafted.now > least
        assert drafted.now < 1.05 * known.now + 3 * prompts_s or plain.now < 1.1 * known.now


def test_short_answers_are_not_delayed_by_what_a_draft_model_computes_of_their_prompts() -> None:
    paced = replace(LARGE, draft_seconds=0.0006, catch_up_seconds=0.00003)
    for length, accuracy in ((20, 0.3), (100, 0.0), (600, 0.0), (600, 0.3)):
        plain = served(LARGE, None, 2, 8, 0, length)
        assert served(replace(paced, draft_accuracy=accuracy), DRAFT_MODEL, 2, 8, 0, length).now < 1.03 * plain.now
