"""Tests rows that give 0..k tokens: whatever is drafted, withheld, preempted or cancelled, the answers are the reference
implementation's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_speculation import decide_at_random

from headrace.core.ids import RequestId, SlotId
from headrace.core.plan import Plan, Result, Started, int_column
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.speculation import NGRAM, SpeculativeConfig
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, FakeRunner, fake_answer, fake_engine
from headrace.policy.step_builder import StepBuilder

pytestmark = pytest.mark.pure

OPTIONS = FakeOptions(block_size=4, num_blocks=20, max_model_len=48, vocab_size=50)
FOUR = SpeculativeConfig(method=NGRAM, num_speculative_tokens=4)


class VirtualClock:
    """A clock that moves on only when code waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Driven:
    """A fake engine turned by hand, its plans watched. num_alone: steps with rows behind which none was planned"""

    options: FakeOptions
    config: EngineConfig
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], SequenceUpdate] = field(default_factory=dict)
    most: int = 0
    num_drafted_rows: int = 0
    num_sampling_rows: int = 0
    num_alone: int = 0

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = fake_engine(self.take, self.options, self.config, clock=self.clock, wait=self.clock.wait)
        submit, commit = self.engine._steps.runner.submit, self.engine.scheduler.commit
        in_flight: dict[int, set[int]] = {}

        def seen(plan: Plan) -> object:
            drafted = {slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples > 1}
            assert len(plan.drafts) == sum(max(samples - 1, 0) for samples in plan.samples)
            assert not any(drafted & earlier for earlier in in_flight.values()), "verified while another row of it is in flight"
            assert not plan.num_drafts or len(plan.num_drafts) == plan.num_rows
            self.num_drafted_rows += len(drafted)
            self.num_sampling_rows += sum(samples > 0 for samples in plan.samples)
            in_flight[plan.step_id] = set(plan.slots) - set(plan.ended)
            return submit(plan)

        def committed(plan: Plan, result: Result, now: float) -> list[SequenceUpdate]:
            del in_flight[plan.step_id]
            self.num_alone += plan.num_rows > 0 and not in_flight
            return commit(plan, result, now)

        self.engine._steps.runner.submit = seen  # type: ignore[method-assign, assignment]
        self.engine.scheduler.commit = committed  # type: ignore[method-assign]

    def take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate), update
            self.tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            self.most = max(self.most, len(update.token_ids))
            if update.finish is not None:
                self.ends[update.request_id, update.index] = update

    def run(self) -> None:
        for _ in range(3000):
            busy = self.engine.turn()
            self.engine.scheduler.check()
            if not busy and not self.engine.scheduler.sequences.has_work:
                return
        raise AssertionError("the engine did not come to rest")


def request(number: int, length: int, **params: object) -> EngineRequest:
    given = {"seed": number, "max_tokens": 20, **params}
    prompt = tuple((number % 3 * 7 + i) % 49 for i in range(length))
    return EngineRequest(request_id=RequestId(f"r{number}"), prompt_ids=prompt, params=SamplingParams(**given))  # type: ignore[arg-type]


def expected(one: EngineRequest, index: int, options: FakeOptions) -> list[int]:
    """The reference implementation's answer: one token after the other, until one of its own ends it."""
    answer = fake_answer(one, index, one.params.max_tokens or 20, options)
    stops = [place for place, token in enumerate(answer) if token in one.params.stop_token_ids]
    return answer[: stops[0] + 1] if stops else answer


requests = st.builds(
    lambda length, n, max_tokens, stop, logprobs: {
        "length": length,
        "n": n,
        "max_tokens": max_tokens,
        "stop_token_ids": (3, 11, 19) if stop else (),
        "prompt_logprobs": 1 if logprobs else None,
        "logprobs": 1 if logprobs else None,
    },
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(1, 24),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=120, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    depth=st.sampled_from([1, 2]),
    drawn=st.lists(requests, min_size=1, max_size=7),
    cancels=st.dictionaries(st.integers(0, 6), st.integers(1, 25), max_size=2),
    options=st.builds(
        lambda blocks, accuracy, rate, withhold, eos: replace(
            OPTIONS, num_blocks=blocks, draft_accuracy=accuracy, draft_rate=rate, withhold_every=withhold, eos_after=eos
        ),
        st.integers(14, 40),
        st.sampled_from([0.0, 0.5, 0.8, 1.0]),
        st.sampled_from([0.5, 1.0]),
        st.sampled_from([0, 2, 5]),
        st.none() | st.integers(1, 12),
    ),
    batched=st.sampled_from([5, 8, 64]),
    caching=st.booleans(),
    most=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_drafted_answers_are_the_plain_twins(
    depth: int,
    drawn: list[dict[str, int]],
    cancels: dict[int, int],
    options: FakeOptions,
    batched: int,
    caching: bool,
    most: int,
    seed: int,
) -> None:
    """Whatever is decided about drafts."""
    config = EngineConfig(
        model="fake",
        max_num_seqs=5,
        max_num_batched_tokens=batched,
        block_size=4,
        depth=depth,
        enable_prefix_caching=caching,
        speculative_config=SpeculativeConfig(method=NGRAM, num_speculative_tokens=most),
    )
    driven = Driven(options, config)
    decide_at_random(driven.engine.scheduler, seed)
    asked = [request(number, **one) for number, one in enumerate(drawn)]
    for one in asked:
        driven.engine.submit(one)
    for turn in range(26):
        for number, when in cancels.items():
            if when == turn:
                driven.engine.cancel(RequestId(f"r{number}"))
        driven.engine.turn()
        driven.engine.scheduler.check()
    driven.run()
    for one in asked:
        for index in range(one.params.n):
            tokens, end = driven.tokens[one.request_id, index], driven.ends[one.request_id, index]
            answer = expected(one, index, options)
            assert tokens == answer[: len(tokens)]
            assert len(tokens) == len(answer) or end.finish is FinishReason.CANCELLED
    counters = driven.engine.snapshot()
    assert (counters.num_running, counters.num_waiting) == (0, 0)
    assert counters.kv_blocks_used == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_save_steps(depth: int) -> None:
    steps: dict[SpeculativeConfig | None, int] = {}
    options = replace(OPTIONS, num_blocks=200, step_seconds=0.01, token_seconds=0.0001)
    for speculative in (None, FOUR):
        driven = Driven(options, EngineConfig(model="fake", block_size=4, depth=depth, speculative_config=speculative))
        for number in range(4):
            driven.engine.submit(request(number, 6, max_tokens=40))
        driven.run()
        assert [len(driven.tokens[f"r{number}", 0]) for number in range(4)] == [40] * 4
        counters = driven.engine.snapshot().counters
        steps[speculative] = counters.steps
        assert (driven.most > 1) == (driven.num_drafted_rows > 0) == (speculative is not None)
        assert counters.drafts == driven.num_drafted_rows
        assert counters.draft_tokens >= counters.accepted_tokens == sum(counters.accepted_per_position.values())
        assert counters.generation_tokens == driven.num_sampling_rows + counters.accepted_tokens == 160
        waits = depth > 1 and speculative is not None
        assert counters.steps_not_overlapped == (driven.num_alone if waits else 0)
        assert driven.num_alone > 5 or (depth > 1 and not waits)
    assert steps[FOUR] < 0.6 * steps[None]


@pytest.mark.parametrize("depth", [1, 2])
def test_memory_that_is_short_preempts_sequences_with_drafts(depth: int) -> None:
    config = EngineConfig(model="fake", max_num_seqs=5, max_num_batched_tokens=32, block_size=4, depth=depth, speculative_config=FOUR)
    driven = Driven(replace(OPTIONS, num_blocks=18, withhold_every=4), config)
    decide_at_random(driven.engine.scheduler, 1)
    asked = [request(number, 8, max_tokens=30) for number in range(6)]
    for one in asked:
        driven.engine.submit(one)
    driven.run()
    assert driven.engine.snapshot().counters.preemptions > 0
    assert driven.num_drafted_rows > 10
    assert all(driven.tokens[one.request_id, 0] == fake_answer(one, 0, 30, driven.options) for one in asked)


def test_a_row_behind_a_withheld_token_gives_none_and_the_token_comes_when_asked_again() -> None:
    runner = FakeRunner(replace(OPTIONS, withhold_every=1))
    started = Started(SlotId(0), int_column([1, 2, 3]), 3, SamplingParams(seed=0), 0)
    one = Plan(
        step_id=1,
        slots=int_column([0]),
        starts=int_column([0]),
        counts=int_column([3]),
        samples=int_column([1]),
        adapter_slots=int_column([0]),
        table_groups=int_column([0]),
        table_slots=int_column([0]),
        table_indices=int_column([0]),
        table_blocks=int_column([1]),
        started=(started,),
    )
    again = replace(one, step_id=2, starts=int_column([3]), counts=int_column([1]), started=())
    plans = [one, again, replace(again, step_id=3, starts=int_column([2]))]
    assert [list(runner.submit(plan).result().token_counts) for plan in plans] == [[0], [0], [1]]


def test_plans_without_decoding_rows_leave_speculation_as_it_is() -> None:
    driven = Driven(replace(OPTIONS, num_blocks=200, step_seconds=0.01), EngineConfig(model="fake", block_size=4, speculative_config=FOUR))
    speculation = driven.engine.scheduler._drafting.speculation  # type: ignore[union-attr]
    driven.engine.submit(request(0, 6, max_tokens=40))
    driven.run()
    assert speculation.is_on
    for _ in range(50):
        driven.engine.turn()
    assert speculation.is_on


def test_drafts_behind_an_end_token_are_not_accepted_ones() -> None:
    options = replace(OPTIONS, num_blocks=200, draft_accuracy=1.0, eos_after=9)
    driven = Driven(options, EngineConfig(model="fake", block_size=4, speculative_config=FOUR))
    decide_at_random(driven.engine.scheduler, 3)
    for number in range(12):
        driven.engine.submit(request(number, 6, max_tokens=30))
    driven.run()
    counters = driven.engine.snapshot().counters
    assert counters.accepted_tokens > 0
    assert counters.generation_tokens == driven.num_sampling_rows + counters.accepted_tokens


@pytest.mark.parametrize("num_blocks", range(20, 40))
def test_asking_for_drafts_leaves_a_block_for_each_sequence(num_blocks: int) -> None:
    options = replace(OPTIONS, num_blocks=num_blocks, draft_accuracy=0.9)
    driven = Driven(options, EngineConfig(model="fake", max_num_seqs=6, block_size=4, speculative_config=FOUR))
    decide_at_random(driven.engine.scheduler, num_blocks)
    scheduler = driven.engine.scheduler
    drafting, pool = scheduler._drafting, scheduler.kv.pools[0]
    assert drafting is not None
    ask = drafting.ask

    def watched(step: StepBuilder) -> None:
        before = pool.num_available
        ask(step)
        assert pool.num_available == before or pool.num_available >= len(scheduler.sequences.slots)

    drafting.ask = watched  # type: ignore[method-assign]
    for number in range(6):
        driven.engine.submit(request(number, 6, max_tokens=30))
    driven.run()
    assert driven.num_drafted_rows > 0
