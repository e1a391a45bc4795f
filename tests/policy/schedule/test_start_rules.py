"""Tests room for other tenants and classes: sequences that are preempted for them still make progress, and lose little work."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from virtual_engine import VirtualEngine, asked

from headrace.core.plan import StepCosts
from headrace.core.request import EngineRequest, PriorityClass, TierTerms
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.policy.sequence import LEAST_PROGRESS_TOKENS, Sequence

pytestmark = pytest.mark.pure

TIER = TierTerms(name="standard")


class WatchedEngine(VirtualEngine):
    """runs: by sequence, for each time it ran after a preemption, the tokens it computed anew and those it gave until it made room for
    another one; None: it was not preempted for one again"""

    def __init__(self, config: EngineConfig, options: FakeOptions) -> None:
        super().__init__(config, options)
        self.runs: defaultdict[int, list[tuple[int, int | None]]] = defaultdict(list)
        self._begun: dict[int, tuple[int, int]] = {}
        self._makes_room = False
        scheduler = self.engine.scheduler
        self._start, self._preempt, self._make = (
            scheduler.sequences.start,
            scheduler.sequences.preempt,
            scheduler._planner.start_rules.preempt_for_head,
        )
        scheduler.sequences.start = self._note_start  # type: ignore[method-assign]
        scheduler.sequences.preempt = self._note_preempt  # type: ignore[method-assign]
        scheduler._planner.start_rules.preempt_for_head = self._note_make  # type: ignore[method-assign]

    def _note_start(self, seq: Sequence, now: float) -> None:
        if seq.plan_epoch:
            self._begun[seq.seq_id] = (len(seq.tokens), len(seq.tokens) - seq.num_computed)
            self.runs[seq.seq_id].append((self._begun[seq.seq_id][1], None))
        self._start(seq, now)

    def _note_preempt(self, seq: Sequence, now: float) -> None:
        if seq.seq_id in self._begun and self._makes_room:
            length, num_anew = self._begun[seq.seq_id]
            self.runs[seq.seq_id][-1] = (num_anew, len(seq.tokens) - length)
        self._preempt(seq, now)

    def _note_make(self, now: float, costs: StepCosts) -> Sequence | None:
        self._makes_room = True
        try:
            return self._make(now, costs)
        finally:
            self._makes_room = False


asks = st.tuples(
    st.floats(0.0, 8.0),
    st.integers(0, 2),
    st.integers(20, 300),
    st.integers(1, 300),
    st.sampled_from([PriorityClass.STANDARD, PriorityClass.STANDARD, PriorityClass.PREMIUM, PriorityClass.BATCH]),
)


@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink an engine takes minutes
@given(
    few=st.lists(asks, min_size=3, max_size=8),
    num_flood=st.integers(8, 16),
    depth=st.sampled_from([1, 2]),
    caching=st.booleans(),
    num_blocks=st.sampled_from([90, 2000]),
)
def test_what_makes_room_again_has_paid_for_it_and_every_answer_is_whole(
    few: list[tuple[float, int, int, int, PriorityClass]], num_flood: int, depth: int, caching: bool, num_blocks: int
) -> None:
    options = FakeOptions(step_seconds=0.02, num_blocks=num_blocks, max_model_len=1024)
    config = EngineConfig(model="fake", max_num_seqs=6, depth=depth, enable_prefix_caching=caching)
    shared = WatchedEngine(config, options)
    arrivals: list[tuple[float, EngineRequest]] = [
        (0.0, asked(f"flood-{i}", prompt_tokens=60, output_tokens=250, tenant="noisy", tier=TIER)) for i in range(num_flood)
    ]
    for i, (at, tenant, prompt, output, priority) in enumerate(few):
        arrivals.append(
            (at, asked(f"few-{i}", prompt_tokens=prompt, output_tokens=output, tenant=f"t{tenant}", tier=TIER, priority=priority))
        )
    shared.run(arrivals)
    assert shared.ended == set(shared.requests), "every sequence ends"
    for name, request in shared.requests.items():
        assert shared.token_ids[name] == fake_answer(request, 0, request.params.max_tokens or 0, options)
    for num_anew, progress in [run for runs in shared.runs.values() for run in runs]:
        assert progress is None or progress >= max(LEAST_PROGRESS_TOKENS, num_anew)


@pytest.mark.parametrize("num_blocks", [20_000, 3000])
def test_beside_a_flood_of_long_answers_another_tenant_waits_a_moment(num_blocks: int) -> None:
    """1,024 answers of 1,500 tokens. With sequences that make room once each, the longest wait was 9.6 s."""
    options = FakeOptions(step_seconds=0.02, token_seconds=0.0002, num_blocks=num_blocks, verify=False)
    shared = WatchedEngine(EngineConfig(model="fake", max_waiting=20_000), options)
    flood = [(0.0, asked(f"flood-{i}", prompt_tokens=40, output_tokens=1500, tenant="noisy", tier=TIER)) for i in range(1024)]
    quiet = [(2.0 + i / 4, asked(f"quiet-{i}", prompt_tokens=100, output_tokens=20, tenant="quiet", tier=TIER)) for i in range(90)]
    shared.run(flood + quiet, until=28.0)
    assert max(shared.ttft_s("quiet")) < 1.0
    num_anew = sum(anew for runs in shared.runs.values() for anew, _ in runs)
    assert any(len(runs) > 1 for runs in shared.runs.values()), "some made room again"
    assert num_anew < 0.1 * shared.num_tokens("noisy"), "what is computed anew is a small part"
