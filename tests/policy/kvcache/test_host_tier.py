"""Tests that blocks move to host slots and back under load, and that answers are those of an engine without a tier, whatever fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_kit import FULL, WINDOW, request
from failing_plans import SITES, fail_next_plan
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from random_speculation import decide_at_random
from tiered_engine import OPTIONS, Failure, TieredEngine

from headrace.core.ids import RequestId
from headrace.core.plan import MoveKind, Plan, int_column
from headrace.core.update import FinishReason
from headrace.lab.fake_runner import FakeRunner
from headrace.policy.kvcache.host_tier import HostTier, HostTierConfig
from headrace.policy.kvcache.leases import LeaseError
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.scheduler import MOVE_POLL_S

pytestmark = pytest.mark.pure

SPARED = (None,) * 6
"""Steps that do not fail: those that repeat, in parts, the rows of one that did."""
NEVER = (10**9, 10**9)
"""Steps of a move that does not end."""


def kinds(driven: TieredEngine) -> list[int]:
    return [kind for plan in driven.runner.plans for kind in plan.move_kinds]


def moved_out(driven: TieredEngine) -> TieredEngine:
    """A prompt of three full blocks was answered, its blocks went to the host, and the device forgot them."""
    driven.submit(request("first", list(range(13)), max_tokens=3))
    driven.run()
    driven.clock.now += 10.0
    driven.run()
    driven.evict_all()
    return driven


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_brought_back_from_the_host_instead_of_computed(depth: int) -> None:
    driven = moved_out(TieredEngine(depth=depth))
    assert kinds(driven) == [MoveKind.HOST_OUT] * 3
    driven.submit(request("second", list(range(13)), max_tokens=5))
    driven.run()
    driven.check_answers()
    assert driven.cached == {("first", 0): 0, ("second", 0): 12}
    assert kinds(driven)[3:6] == [MoveKind.HOST_IN] * 3
    assert driven.tier is not None
    assert (driven.tier.counters.blocks_out, driven.tier.counters.blocks_in) == (3, 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_come_from_the_host_do_not_push_out_those_before_them(depth: int) -> None:
    """The prompt's first block is on the device, the oldest of all; the other two are in the host, and only one block is free."""
    driven = moved_out(TieredEngine(depth=depth))
    driven.submit(request("head", list(range(5)), max_tokens=1))
    driven.run()
    driven.clock.now += 0.1
    driven.submit(request("newer", [(7 * i + 1) % 49 for i in range(40)], max_tokens=5))
    driven.run()
    pool = driven.kv.pools[0]
    assert (pool.num_free, pool.num_cached) == (1, 12)
    driven.submit(request("second", list(range(13)), max_tokens=2))
    driven.run()
    driven.check_answers()
    assert driven.cached["second", 0] == 12
    assert kinds(driven)[-2:] == [MoveKind.HOST_IN] * 2


def test_blocks_stay_on_the_device_until_they_are_old_enough() -> None:
    driven = TieredEngine(tier=HostTierConfig(num_slots=12, idle_s=5.0))
    driven.submit(request("first", list(range(13)), max_tokens=3))
    driven.run()
    driven.clock.now += 4.9
    driven.run()
    assert not kinds(driven)
    driven.clock.now += 0.1
    driven.run()
    assert kinds(driven) == [MoveKind.HOST_OUT] * 3


def test_blocks_of_one_age_do_not_take_turns_in_too_few_slots() -> None:
    driven = TieredEngine(replace(OPTIONS, host_slots=2))
    driven.submit(request("first", list(range(13)), max_tokens=3))
    driven.run()
    driven.clock.now += 10.0
    driven.run()
    assert kinds(driven) == [MoveKind.HOST_OUT] * 2
    driven.submit(request("newer", list(range(20, 29)), max_tokens=3))
    driven.run()
    driven.clock.now += 10.0
    driven.run()
    assert kinds(driven) == [MoveKind.HOST_OUT] * 4, "what was used later does take the place of what is older"


def test_while_only_moves_are_in_flight_the_runner_is_asked_now_and_then_and_no_plan_is_kept() -> None:
    driven = moved_out(TieredEngine())
    driven.runner._moves._steps = NEVER
    driven.submit(request("second", list(range(13)), max_tokens=5))
    driven.turn()
    plans, kept = len(driven.runner.plans), driven.engine.recent_plans()
    driven.clock.now += MOVE_POLL_S
    assert [driven.turn() for _ in range(20)] == [True] + [False] * 19
    assert len(driven.runner.plans) == plans + 1
    assert driven.scheduler.next_deadline() == driven.clock.now + MOVE_POLL_S
    driven.clock.now += MOVE_POLL_S
    driven.turn(20)
    assert len(driven.runner.plans) == plans + 2
    assert driven.engine.recent_plans() == kept
    driven.submit(request("beside", [40], max_tokens=2))
    assert driven.turn(), "a new request does not wait for the next time"
    for move in driven.runner._moves._in_flight.values():
        move.steps = 0
    driven.run()
    driven.check_answers()


def test_a_sequence_goes_on_when_its_blocks_do_not_arrive_in_time() -> None:
    """The blocks that were to be written stay the transfer's, and are counted, until the runner reports them."""
    driven = moved_out(TieredEngine())
    driven.runner._moves._steps = NEVER
    driven.submit(request("second", list(range(13)), max_tokens=5))
    driven.turn(20)
    assert ("second", 0) not in driven.tokens
    used = driven.engine.snapshot().kv_blocks_used
    driven.clock.now += 10.0
    driven.run()
    driven.check_answers()
    assert driven.finish["second", 0] is FinishReason.LENGTH
    assert driven.cached["second", 0] == 0
    assert driven.tier is not None
    assert driven.tier.counters.waits_given_up == 1
    assert driven.kv.leases.num_overdue_blocks(0) == 3
    assert driven.kv.pools[0].num_used == used == 4, "the pad block and three that may still be written"
    for move in driven.runner._moves._in_flight.values():
        move.steps = 0
    driven.submit(request("third", [40], max_tokens=2))
    driven.run()
    assert driven.kv.leases.num_overdue_blocks(0) == 0


def test_a_request_that_fits_only_with_overdue_blocks_is_refused_by_name() -> None:
    driven = moved_out(TieredEngine())
    assert driven.kv.shortage(48, 16) is None
    driven.runner._moves._steps = NEVER
    driven.submit(request("second", list(range(13)), max_tokens=5))
    driven.turn(2)
    driven.clock.now += 10.0
    driven.run()
    assert driven.kv.shortage(48, 16) == "48 tokens need 12 KV blocks of 4, the pool has 10"


def test_a_cancelled_sequence_leaves_its_transfer_to_end_alone() -> None:
    driven = moved_out(TieredEngine())
    driven.submit(request("second", list(range(13)), max_tokens=5))
    driven.turn()
    assert len(driven.kv.leases) == 1
    driven.engine.cancel(RequestId("second"))
    driven.run()
    assert driven.finish["second", 0] is FinishReason.CANCELLED
    assert len(driven.kv.leases) == 0
    assert driven.kv.pools[0].num_used == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("failure", Failure)
def test_a_step_that_fails_loses_no_move_and_makes_none_twice(depth: int, failure: Failure) -> None:
    driven = moved_out(TieredEngine(depth=depth))
    driven.submit(request("beside", [30, 31], max_tokens=12))
    driven.turn(2)
    driven.submit(request("second", list(range(13)), max_tokens=5))
    driven.runner.fail_next = [failure, *SPARED, failure]
    driven.run()
    driven.check_answers()
    assert not driven.runner.fail_next
    assert driven.cached["second", 0] == 12
    assert len(driven.kv.leases) == 0


def test_moves_told_by_a_step_whose_rows_are_rolled_back_have_ended_and_are_not_made_again() -> None:
    """The step that begins them fails; the one after it, computed on the same promise, tells of their end and is undone all the same."""
    driven = moved_out(TieredEngine(replace(OPTIONS, move_steps=(0, 0)), depth=2))
    driven.runner.fail_next = [Failure.APPLIED]
    driven.submit(request("second", list(range(13)), max_tokens=5), request("fails", [30], max_tokens=1))
    driven.turn()
    begins, before = driven.runner.plans[-1], len(driven.runner.plans)
    assert list(begins.move_kinds) == [MoveKind.HOST_IN] * 3
    assert begins.num_rows == 1
    driven.submit(request("beside", [31], max_tokens=4))
    driven.turn()
    repeated = driven.runner.plans[before + 1]
    assert repeated.num_rows == 0
    assert list(repeated.started) == list(begins.started), "the failed step's changes are sent again"
    assert not repeated.move_kinds, "but not its moves"
    driven.run()
    driven.check_answers()
    assert driven.cached["second", 0] == 12
    assert len(driven.kv.leases) == 0


def test_a_host_slot_is_not_given_away_while_a_transfer_reads_it() -> None:
    driven = moved_out(TieredEngine(replace(OPTIONS, host_slots=3)))
    driven.runner._moves._steps = (30, 30)
    driven.submit(request("second", list(range(13)), max_tokens=5))
    driven.turn()
    driven.clock.now += 2.0
    driven.submit(request("newer", list(range(20, 29)), max_tokens=3))
    driven.turn(8)
    assert driven.finish["newer", 0] is FinishReason.LENGTH
    driven.clock.now += 2.0
    driven.turn(3)
    assert kinds(driven) == [MoveKind.HOST_OUT] * 3 + [MoveKind.HOST_IN] * 3, "its blocks are old enough, and all slots are being read"
    driven.run()
    driven.check_answers()
    assert kinds(driven)[6:8] == [MoveKind.HOST_OUT] * 2, "they leave when the slots are read"


def test_a_move_that_nobody_planned_ends_the_engine() -> None:
    """The runner's word cannot be trusted, and with it no block."""
    driven = TieredEngine()
    driven.runner._moves._done.append(7)
    driven.submit(request("first", [1, 2], max_tokens=3))
    with pytest.raises(LeaseError, match="move 7"):
        driven.run()


def test_a_host_tier_refuses_groups_it_cannot_serve() -> None:
    for groups in ((), (WINDOW,), (FULL, FULL)):
        with pytest.raises(ValueError, match="exactly one KV group"):
            HostTier(KvManager(groups, (8,) * len(groups), 4), HostTierConfig(num_slots=4))


def a_plan(kind: MoveKind, source: int, target: int) -> Plan:
    one = int_column([1])
    return Plan(
        step_id=1,
        move_kinds=int_column([kind]),
        move_ids=one,
        move_groups=int_column([0]),
        move_sources=int_column([source]),
        move_targets=int_column([target]),
    )


@pytest.mark.parametrize("kind", [MoveKind.HOST_OUT, MoveKind.HOST_IN])
@pytest.mark.parametrize("verify", [True, False])
def test_a_fake_runner_without_host_memory_refuses_the_kind_by_name(kind: MoveKind, verify: bool) -> None:
    with pytest.raises(ValueError, match=kind.name):
        FakeRunner(replace(OPTIONS, host_slots=0, verify=verify)).submit(a_plan(kind, 1, 1))


@pytest.mark.parametrize(
    ("kind", "block", "found"), [(MoveKind.HOST_OUT, 3, "source was overwritten"), (MoveKind.HOST_IN, 5, "target was written")]
)
def test_a_block_that_is_given_away_while_it_moves_is_found(kind: MoveKind, block: int, found: str) -> None:
    runner = FakeRunner(replace(OPTIONS, move_steps=(1, 1)))
    runner.submit(a_plan(kind, 3, 5))
    runner._memory.block(0, block)[0] = 17
    with pytest.raises(AssertionError, match=found):
        runner.submit(Plan(step_id=2))


class TierMachine(RuleBasedStateMachine):
    """Random lives with few blocks, few slots, slow moves, failing steps and failing plans; the plain function is the twin."""

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_blocks=st.integers(13, 24),
        slots=st.integers(1, 16),
        slowest=st.sampled_from([0, 1, 3, 8]),
        seed=st.integers(0, 2**16),
        outs=st.integers(1, 5),
        lease=st.sampled_from([1.0, 10.0]),
        chunked=st.booleans(),
        drafts=st.sampled_from([0, 0, 2]),
    )
    def build(
        self, depth: int, num_blocks: int, slots: int, slowest: int, seed: int, outs: int, lease: float, chunked: bool, drafts: int
    ) -> None:
        options = replace(OPTIONS, num_blocks=num_blocks, host_slots=slots, move_steps=(0, slowest), move_seed=seed)
        tier = HostTierConfig(num_slots=slots, idle_s=0.5, lease_s=lease, max_outs=outs)
        self.driven = TieredEngine(options, tier=tier, depth=depth, enable_chunked_prefill=chunked, num_speculative_tokens=drafts)
        decide_at_random(self.driven.scheduler, seed)
        self.num_requests = 0

    @rule(
        family=st.integers(0, 1),
        length=st.sampled_from([1, 4, 9, 13, 22, 30]),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 2),
        turns=st.integers(0, 4),
    )
    def submit(self, family: int, length: int, max_tokens: int, n: int, turns: int) -> None:
        prompt = [(family * 13 + i) % 49 for i in range(length)]
        self.driven.submit(request(f"r{self.num_requests}", prompt, max_tokens=max_tokens, n=n))
        self.num_requests += 1
        self.driven.turn(turns)

    @rule(count=st.integers(1, 8), seconds=st.sampled_from([0.0, 0.6]))
    def turn(self, count: int, seconds: float) -> None:
        self.driven.clock.now += seconds
        self.driven.turn(count)

    @rule(seconds=st.sampled_from([0.6, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.driven.clock.now += seconds

    @rule(forget=st.booleans())
    def rest(self, forget: bool) -> None:
        """Everything ends, gets old and leaves for the host; the device may forget it."""
        self.driven.run()
        self.driven.clock.now += 0.6
        self.driven.run()
        if forget:
            self.driven.evict_all()

    @rule(which=st.integers(0, 12))
    def cancel(self, which: int) -> None:
        self.driven.engine.cancel(RequestId(f"r{which}"))

    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        running = self.driven.scheduler.sequences.slots.running
        if running:
            self.driven.scheduler.sequences.preempt(running[which % len(running)], self.driven.clock.now)

    @rule(failures=st.lists(st.sampled_from(Failure), min_size=1, max_size=2))
    def fail_steps(self, failures: list[Failure]) -> None:
        if not self.driven.runner.fail_next:
            self.driven.runner.fail_next = [entry for failure in failures for entry in (failure, *SPARED)]

    @rule(site=st.sampled_from(SITES), after=st.integers(0, 4))
    def fail_a_plan(self, site: str, after: int) -> None:
        fail_next_plan(self.driven.scheduler, site, after)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "driven"):
            self.driven.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "driven"):
            return
        self.driven.run()
        if len(self.driven.kv.leases):  # overdue: nobody asks for them, but the next steps tell
            self.driven.submit(request("last", [1], max_tokens=10))
            self.driven.run()
        self.driven.check_answers()
        assert len(self.driven.kv.leases) == 0
        assert self.driven.kv.pools[0].num_used == 1
        assert len(self.driven.finish) == len({*self.driven.tokens, *self.driven.finish})


TierMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
test_host_tier_machine = TierMachine.TestCase
