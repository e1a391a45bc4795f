"""Tests room for other tenants and classes: sequences that are preempted for them still make progress, and lose little work."""

from __future__ import annotations

from collections import Counter, defaultdict

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
    """runs: by sequence, for each time it ran after a preemption, the tokens it computed anew and the new ones that it computed until it
    made room for another one; None: it was not preempted for one again"""

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
        self._reached: defaultdict[int, int] = defaultdict(int)
        scheduler.sequences.start = self._note_start  # type: ignore[method-assign]
        scheduler.sequences.preempt = self._note_preempt  # type: ignore[method-assign]
        scheduler._planner.start_rules.preempt_for_head = self._note_make  # type: ignore[method-assign]

    def _note_start(self, seq: Sequence, now: float) -> None:
        if seq.plan_epoch:
            reached = self._reached[seq.seq_id]
            self._begun[seq.seq_id] = (reached, reached - seq.num_computed)
            self.runs[seq.seq_id].append((self._begun[seq.seq_id][1], None))
        self._start(seq, now)

    def _note_preempt(self, seq: Sequence, now: float) -> None:
        if seq.seq_id in self._begun and self._makes_room:
            reached, num_anew = self._begun[seq.seq_id]
            self.runs[seq.seq_id][-1] = (num_anew, seq.num_computed - reached)
        self._reached[seq.seq_id] = max(self._reached[seq.seq_id], seq.num_computed)
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


class SharesWatched(VirtualEngine):
    """Holds each sequence that is preempted since another one cannot grow against the shares, counted by hand.

    num_spared  sequences within their share that stayed since another tenant was above its own
    """

    def __init__(self, config: EngineConfig, options: FakeOptions) -> None:
        super().__init__(config, options)
        self.num_spared = 0
        self._rules = self.engine.scheduler._planner.start_rules
        self._victim, self._rules.victim = self._rules.victim, self._note_victim  # type: ignore[method-assign]

    def _note_victim(self, candidates: list[Sequence]) -> Sequence:
        chosen = self._victim(candidates)
        total = self._rules.kv.pools[0].total - 1
        held: Counter[str] = Counter()
        for seq in self._rules.sequences.slots.running:
            held[seq.request.tenant] += len(seq.blocks[0])

        def is_above(seq: Sequence) -> bool:
            share = seq.request.tier.kv_share
            return 2 * len(seq.blocks[0]) > total if share is None else held[seq.request.tenant] > share * total

        queue = self._rules.sequences.queue
        may_go = [seq for seq in candidates if is_above(seq) and seq.num_computed >= seq.preemptible_from]
        others = [seq for seq in may_go if seq.request.tenant != chosen.request.tenant and not queue.outranks(seq, chosen)]
        assert is_above(chosen) or not others, "it is within its share, and a sequence of a tenant that is not stays"
        self.num_spared += chosen is not queue.victim(candidates)
        return chosen


shares = st.sampled_from([None, 0.2, 0.5, 1.0])


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    long=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(200, 1200), st.integers(1, 200), shares), min_size=1, max_size=3),
    few=st.lists(asks, min_size=4, max_size=12),
    depth=st.sampled_from([1, 2]),
    caching=st.booleans(),
)
def test_what_cannot_grow_takes_blocks_of_a_tenant_above_its_share_first(
    long: list[tuple[float, int, int, float | None]], few: list[tuple[float, int, int, int, PriorityClass]], depth: int, caching: bool
) -> None:
    options = FakeOptions(step_seconds=0.02, num_blocks=100, max_model_len=1536)
    shared = SharesWatched(EngineConfig(model="fake", max_num_seqs=8, depth=depth, enable_prefix_caching=caching), options)
    arrivals: list[tuple[float, EngineRequest]] = []
    for i, (at, prompt, output, share) in enumerate(long):
        tier = TierTerms(name=f"tier{i}", weight=8.0, kv_share=share)  # the order of service preempts others first
        arrivals.append((at, asked(f"long-{i}", prompt_tokens=prompt, output_tokens=output, tenant=f"long{i}", tier=tier)))
    for i, (at, tenant, prompt, output, priority) in enumerate(few):
        own = {"tenant": f"t{tenant}", "tier": TIER, "priority": priority}
        arrivals.append((at / 4, asked(f"few-{i}", prompt_tokens=prompt, output_tokens=output, **own)))
    shared.run(arrivals)
    assert shared.ended == set(shared.requests), "every sequence ends"
    for name, request in shared.requests.items():
        assert shared.token_ids[name] == fake_answer(request, 0, request.params.max_tokens or 0, options)


def test_a_tenant_that_grows_beyond_its_share_is_preempted_and_not_one_within_its_own() -> None:
    """The tenant within its share has been served more, so that the order of service would preempt it."""
    options = FakeOptions(step_seconds=0.02, num_blocks=101, max_model_len=1024)
    shared = SharesWatched(EngineConfig(model="fake", max_num_seqs=8), options)
    tier, large = TierTerms(name="capped", kv_share=0.4), TierTerms(name="large", kv_share=0.6)
    within = [(0.0, asked("within", prompt_tokens=640, output_tokens=250, tenant="within", tier=large))]
    grows = [(0.0, asked(f"grows-{i}", prompt_tokens=60, output_tokens=300, tenant="grows", tier=tier)) for i in range(3)]
    preempted: list[str] = []
    preempt = shared.engine.scheduler.sequences.preempt

    def noted(seq: Sequence, now: float) -> None:
        preempted.append(seq.request.tenant)
        preempt(seq, now)

    shared.engine.scheduler.sequences.preempt = noted  # type: ignore[method-assign]
    shared.run(within + grows)
    assert shared.num_spared > 0
    assert set(preempted) == {"grows"}


def test_a_victim_is_found_without_comparing_sequences_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all tenants are above their shares, as each of the sequences that cannot grow asks for one."""
    tier = TierTerms(name="capped", kv_share=0.001)
    shared = VirtualEngine(EngineConfig(model="fake", max_num_seqs=64), FakeOptions(step_seconds=0.02, num_blocks=2000))
    shared.run([(0.0, asked(f"r{i}", prompt_tokens=60, output_tokens=500, tenant=f"t{i % 8}", tier=tier)) for i in range(64)], until=1.0)
    rules = shared.engine.scheduler._planner.start_rules
    running = list(rules.sequences.slots.running)
    assert len(running) == len(rules._above_share(is_large_counted=True)) == 64
    compared: list[object] = []

    def noted(seq: Sequence, other: object) -> bool:
        compared.append(other)
        return seq is other

    monkeypatch.setattr(Sequence, "__eq__", noted)
    rules.victim(running)
    assert len(rules._candidates(running[0], 0, 1)) == 56, "all of other tenants"
    assert not compared


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
