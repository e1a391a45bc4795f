"""Tests the loop around plan and commit: overlap, steps that raise, call sites that raise, threads."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import Future
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from engine_kit import FULL, VOCAB, WINDOW, DrivenEngine, NotedPreparer, request
from kv_oracle import OracleRunner, expected_tokens

from headrace.core.errors import EngineFatal
from headrace.core.ids import RequestId
from headrace.core.load import summed
from headrace.core.model_info import KvGroup
from headrace.core.plan import Plan, Result
from headrace.core.plan_codec import load_plans
from headrace.core.update import FinishReason
from headrace.engine import loop
from headrace.engine.loop import Engine
from headrace.engine.steps import UNKNOWN_STEP_S, StepQueue, StepTimer
from headrace.policy.kvcache.leases import LeaseError
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule import sequence_table
from headrace.policy.schedule.planner import Planner
from headrace.policy.schedule.scheduler import Scheduler
from headrace.policy.schedule.sequence_table import SequenceTable
from headrace.policy.sequence import Sequence
from headrace.policy.step_builder import StepBuilder

pytestmark = pytest.mark.pure

PROMPTS = [[i + 1, 2, 3, i] for i in range(6)]


def submit_all(driven: DrivenEngine, max_tokens: int = 8, n: int = 1) -> None:
    driven.submit(*(request(f"r{i}", prompt, max_tokens=max_tokens, n=n) for i, prompt in enumerate(PROMPTS)))


def assert_unharmed(driven: DrivenEngine, culprits: set[str] = frozenset(), count: int = 8) -> None:  # type: ignore[assignment]
    for i, prompt in enumerate(PROMPTS):
        if f"r{i}" not in culprits:
            assert driven.tokens[f"r{i}", 0] == expected_tokens(prompt, count, VOCAB), f"r{i}"
            assert driven.finish[f"r{i}", 0] is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_fails_its_culprit_alone(depth: int) -> None:
    driven = DrivenEngine(depth=depth)
    driven.runner.fail_when = [96]
    submit_all(driven)
    driven.submit(request("bad", [5, 96, 6]))
    driven.run()
    assert driven.finish["bad", 0] is FinishReason.ERROR
    assert driven.tokens["bad", 0] == []
    assert_unharmed(driven)


@pytest.mark.parametrize("depth", [1, 2])
def test_two_culprits_in_one_step_fail_and_nobody_else(depth: int) -> None:
    driven = DrivenEngine(depth=depth, max_num_batched_tokens=64)
    driven.runner.fail_when = [96]
    submit_all(driven)
    driven.submit(request("bad1", [96]), request("bad2", [4, 96]))
    driven.run()
    assert {name for (name, _), reason in driven.finish.items() if reason is FinishReason.ERROR} == {"bad1", "bad2"}
    assert_unharmed(driven)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("when", range(1, 14))
def test_a_passing_fault_of_the_runner_is_invisible(depth: int, when: int) -> None:
    driven = DrivenEngine(depth=depth, num_blocks=14)
    calls = 0
    compute = driven.runner.compute

    def flaky(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when:
            raise RuntimeError("once")
        return compute(plan)

    driven.runner.compute = flaky  # type: ignore[method-assign]
    submit_all(driven)
    driven.run()
    assert_unharmed(driven)


CALL_SITES: list[tuple[type | ModuleType, str]] = [
    (SequenceTable, "check_room"),
    (SequenceTable, "add"),
    (NotedPreparer, "begin"),
    (Scheduler, "plan"),
    (SequenceTable, "expire"),
    (Scheduler, "_commit_row"),
    (Planner, "_plan_row"),
    (Planner, "_extend_bulk_decode"),
    (Planner, "_try_start"),
    (Planner, "_add_row"),
    (Planner, "_start"),
    (SequenceTable, "start"),
    (KvManager, "grow"),
    (KvManager, "take_hits"),
    (KvManager, "num_left"),
    (KvManager, "write_tables"),
    (Sequence, "append"),
    (SequenceTable, "emit_output"),
    (sequence_table, "sequence_update"),
    (SequenceTable, "cancel"),
    (SequenceTable, "finish"),
    (KvManager, "open"),
    (KvManager, "num_hit_tokens"),
    (KvManager, "commit"),
    (KvManager, "release"),
    (SequenceTable, "_forget"),
    (SequenceTable, "_leave_state"),
    (SequenceTable, "_end"),
    (SequenceTable, "_place"),
    (SequenceTable, "fork_siblings"),
    (OracleRunner, "submit"),
    (OracleRunner, "compute"),
    (OracleRunner, "_apply"),
    (OracleRunner, "_write"),
    (OracleRunner, "_read_and_sample"),
]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("owner", "method"), CALL_SITES, ids=[f"{owner.__name__}.{method}" for owner, method in CALL_SITES])
@pytest.mark.parametrize(("when", "n"), [(1, 1), (2, 1), (7, 1), (1, 2), (5, 2)])
def test_an_exception_at_any_call_site_harms_one_request_at_most(
    monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, method: str, when: int, depth: int, n: int
) -> None:
    original, calls = getattr(owner, method), 0

    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when:
            raise RuntimeError("planted")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, raising)
    driven = DrivenEngine(depth=depth)
    submit_all(driven, n=n)
    if method in ("cancel", "finish", "_end", "_forget", "_leave_state", "release"):
        driven.engine.cancel(RequestId("r0"))
        driven.engine.finish(RequestId("r1"), 0, 0)
    driven.run()
    harmed = {name for (name, _), reason in driven.finish.items() if reason is not FinishReason.LENGTH} | set(driven.errors)
    assert len(harmed - {"r0", "r1"}) <= 1
    assert_unharmed(driven, harmed | {"r0", "r1"})


def test_planning_that_keeps_failing_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = DrivenEngine()

    def broken(self: Scheduler, now: float) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Scheduler, "plan", broken)
    submit_all(driven)
    with pytest.raises(EngineFatal, match="3 times"):
        driven.run()


def test_a_runner_that_cannot_take_state_changes_is_fatal() -> None:
    driven = DrivenEngine()

    def dead(plan: Any) -> Any:
        raise RuntimeError("device lost")

    driven.runner.compute = dead  # type: ignore[method-assign]
    submit_all(driven)
    with pytest.raises(EngineFatal, match="state changes"):
        driven.run()


@pytest.mark.socket
def test_run_in_a_thread_serves_requests_from_another_and_stops() -> None:
    driven = DrivenEngine()
    thread = threading.Thread(target=driven.engine.run)
    done = threading.Event()
    take = driven.take

    def watch(updates: Any) -> None:
        take(updates)
        if len(driven.finish) == len(PROMPTS):
            done.set()

    driven.engine._outbox = watch
    thread.start()
    try:
        submit_all(driven)
        assert done.wait(60)
    finally:
        driven.engine.stop()
        thread.join(60)
    assert not thread.is_alive()
    assert_unharmed(driven)


@pytest.mark.parametrize(("is_damaged", "passed_s", "expected"), [(False, 0.0, 1), (False, loop.CHECK_INTERVAL_S, 2), (True, 0.0, 1)])
def test_an_idle_engine_checks_its_books_once_per_idle_period_and_minute(
    is_damaged: bool, passed_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage nobody noticed while requests ran ends the engine before the next one gets a wrong answer from it."""
    monkeypatch.setattr(loop, "IDLE_WAKE_S", 0.001)
    driven, num_checks, check, idle = DrivenEngine(), 0, Scheduler.check, Engine.idle
    remaining = 10

    def counted(self: Scheduler) -> None:
        nonlocal num_checks
        num_checks += 1
        check(self)

    def sleep(self: Engine) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 5:
            driven.clock.now += passed_s
            driven.submit(request("b", [2]))
        if not remaining:
            self.stop()
        idle(self)

    monkeypatch.setattr(Scheduler, "check", counted)
    monkeypatch.setattr(Engine, "idle", sleep)
    driven.submit(request("a", [1]))
    if is_damaged:
        driven.kv.pools[0].take()
        with pytest.raises(EngineFatal, match="do not add up"):
            driven.engine.run()
    else:
        driven.engine.run()
    assert num_checks == expected
    assert ("a", 0) in driven.finish


def idle_once(driven: DrivenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn until nothing is left to do, then sleep once with no message."""
    monkeypatch.setattr(loop, "IDLE_WAKE_S", 0.001)
    while driven.engine.turn():
        pass
    driven.engine.idle()


def test_an_engine_is_not_checked_while_a_request_waits_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request would be lost with the engine; once it has its answer, damage ends the engine."""
    driven = DrivenEngine()
    driven.submit(request("a", [1]), needs=frozenset({"grammar"}))
    driven.kv.pools[0].take()
    idle_once(driven, monkeypatch)
    driven.satisfied("a", "grammar")
    with pytest.raises(EngineFatal, match="do not add up"):
        idle_once(driven, monkeypatch)
    assert ("a", 0) in driven.finish


def test_a_check_that_cannot_be_made_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Scheduler) -> None:
        raise KeyError("slot")

    monkeypatch.setattr(Scheduler, "check", broken)
    with pytest.raises(EngineFatal, match=r"KeyError\('slot'\)"):
        idle_once(DrivenEngine(), monkeypatch)


def test_the_plan_ring_can_be_dumped_and_replayed_on_a_fresh_runner() -> None:
    driven = DrivenEngine(num_blocks=14)
    submit_all(driven)
    driven.run()
    plans = load_plans(driven.engine.recent_plans())
    assert len(plans) > 8
    assert plans == list(driven.engine._steps.recent)
    fresh = OracleRunner(driven.kv.groups, (14,), 4, vocab_size=VOCAB)
    tokens = sorted(token for plan in plans for token in fresh.compute(plan).token_ids)
    assert tokens == sorted(token for told in driven.tokens.values() for token in told)


def test_snapshots_count_blocks_by_state_and_steps_once() -> None:
    driven = DrivenEngine()
    submit_all(driven)
    driven.turn(3)
    during = driven.engine.snapshot()
    assert during.num_running > 0
    assert during.kv_blocks_free + during.kv_blocks_cached + during.kv_blocks_used == during.kv_blocks_total
    while driven.engine.turn():
        driven.clock.now += 0.01
    after = driven.engine.snapshot()
    assert sum(after.counters.step_buckets) == after.counters.steps > sum(during.counters.step_buckets) > 0
    assert after.counters.generation_tokens == 8 * len(PROMPTS)
    assert after.counters.prompt_tokens == sum(len(prompt) for prompt in PROMPTS)
    assert after.counters.finished == {"length": len(PROMPTS)}


def test_a_snapshot_counts_the_tokens_that_no_plan_has_reached() -> None:
    """In the inbox, in the queue, and what is left of a prompt that is computed in chunks."""
    driven = DrivenEngine(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=256)
    assert driven.engine.snapshot().max_num_seqs == 2
    driven.submit(request("long", [1 + i % 90 for i in range(100)]))
    driven.submit(request("short", [1, 2, 3], n=2))
    assert driven.engine.snapshot().num_queued_tokens == 103, "a prompt counts once, however many sequences it has"
    driven.turn()
    left = driven.engine.snapshot().num_queued_tokens
    assert 103 - 32 <= left < 103, "one step of 32 tokens was planned"
    driven.turn(2)
    assert driven.engine.snapshot().num_queued_tokens <= left - 32
    driven.run()
    done = driven.engine.snapshot()
    assert (done.num_queued_tokens, done.num_waiting) == (0, 0)


def test_a_snapshot_reports_what_steps_cost() -> None:
    driven = DrivenEngine()
    assert driven.engine.snapshot().step_fixed_s == driven.engine.snapshot().step_token_s == 0.0, "not known"
    compute = driven.runner.compute

    def timed(plan: Any) -> Any:
        driven.clock.now += 0.010 + 0.001 * plan.num_tokens
        return compute(plan)

    driven.runner.compute = timed  # type: ignore[method-assign]
    submit_all(driven)
    while driven.engine.turn():
        pass
    seen = driven.engine.snapshot()
    assert [seen.step_fixed_s, seen.step_token_s] == pytest.approx([0.010, 0.001])


class NeverDone:
    def submit(self, plan: Plan) -> Future[Result]:
        return Future()

    def close(self) -> None: ...


@pytest.mark.parametrize(("num_beside", "fixed_s"), [(1, 0.010), (2, 0.020), (3, 0.020)])
def test_where_stages_compute_steps_at_once_a_token_costs_the_fixed_part_of_each(num_beside: int, fixed_s: float) -> None:
    """A sequence is in one of the steps that two stages compute; a third one waits."""
    now = [0.0]
    steps = StepQueue(NeverDone(), lambda: now[0], steps_per_token=2)
    for number in range(300):
        ones = array("i", [1] * (1 + 4 * (number % 3)))
        plan = Plan(step_id=number + 1, slots=ones, counts=ones)
        steps.submit(plan)
        if len(steps) == num_beside:
            oldest = steps.take_oldest()
            now[0] += 0.010 + 0.001 * oldest.plan.num_tokens
            steps.end(oldest)
    assert steps.costs == pytest.approx((0.010, 0.001))
    assert steps.reported_costs == pytest.approx((fixed_s, 0.001), rel=0.01)


def test_a_snapshot_taken_while_a_step_runs_knows_what_the_step_was_planned_from() -> None:
    """What another thread sees in the midst of a turn is whole: blocks, sequences and counters of the moment the step was planned."""
    driven = DrivenEngine()
    submit_all(driven)
    driven.turn(2)
    before, seen = driven.engine.snapshot(), []
    compute = driven.runner.compute

    def in_the_midst(plan: Any) -> Any:
        driven.clock.now += 7.0
        seen.append(driven.engine.snapshot())
        return compute(plan)

    driven.runner.compute = in_the_midst  # type: ignore[method-assign]
    driven.submit(request("late", [1, 2, 3]))
    assert driven.engine.snapshot().num_waiting == before.num_waiting + 1, "it is in the inbox"
    driven.turn()
    (during,) = seen
    assert during.num_running + during.num_waiting == before.num_running + before.num_waiting + 1, "it left the inbox, and is counted still"
    assert during.kv_blocks_used > before.kv_blocks_used
    assert during.kv_blocks_free + during.kv_blocks_cached + during.kv_blocks_used == during.kv_blocks_total
    assert (during.step_age_s, during.loop_age_s) == (7.0, 7.0), "ages are those of the moment of asking: a hang shows"
    after = driven.engine.snapshot()
    assert after.counters.steps == before.counters.steps + 1
    assert during.counters.steps == before.counters.steps, "a snapshot that was taken does not change"
    assert (after.step_age_s, after.loop_age_s) == (None, 0.0)


def test_waiting_is_how_many_sequences_wait_whatever_else_is_in_the_inbox() -> None:
    """Cancels, finishes and wake-ups are messages, not work: a router that counted them would shun a replica that is about to be idle."""
    driven = DrivenEngine(max_num_seqs=1)
    driven.submit(request("a", [1], n=3), request("b", [2]))
    assert driven.engine.snapshot().num_waiting == 4
    for _ in range(50):
        driven.engine.cancel(RequestId("a"))
        driven.engine.finish(RequestId("a"), 0, 0)
    assert driven.engine.snapshot().num_waiting == 4
    driven.turn()
    seen = driven.engine.snapshot()
    assert (seen.num_running, seen.num_waiting) == (1, 0)
    for _ in range(50):
        driven.engine.cancel(RequestId("b"))
    assert driven.engine.snapshot().num_waiting == 0
    assert summed(driven.engine.snapshot().classes).num_waiting == 0
    driven.submit(request("refused", [10_000], n=2))
    assert driven.engine.snapshot().num_waiting == 2
    driven.run()


@pytest.mark.parametrize(
    ("owner", "moment"), [(SequenceTable, "check_room"), (SequenceTable, "add"), (SequenceTable, "cancel"), (Scheduler, "plan")]
)
def test_what_leaves_the_inbox_is_never_uncounted_nor_counted_twice(owner: type[Any], moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by another thread at the worst moments: between taking a request and adding it, after adding it, before the plan."""
    driven, seen = DrivenEngine(max_num_seqs=1), list[int]()
    original = getattr(owner, moment)

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = driven.engine.snapshot()
        found = original(self, *args, **kwargs)
        seen.extend(load.num_running + load.num_waiting for load in (before, driven.engine.snapshot()))
        return found

    driven.submit(request("a", [1]), request("b", [2], n=2))
    driven.engine.cancel(RequestId("unknown"))
    monkeypatch.setattr(owner, moment, observed)
    driven.turn()
    assert set(seen) == {3}


@pytest.mark.socket
def test_threads_that_submit_at_once_are_all_counted() -> None:
    driven, num_threads, num_each = DrivenEngine(max_waiting=10_000), 4, 500
    barrier = threading.Barrier(num_threads)

    def submit(which: int) -> None:
        barrier.wait()
        for number in range(num_each):
            driven.engine.submit(request(f"{which}-{number}", [1]))

    threads = [threading.Thread(target=submit, args=(which,)) for which in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driven.engine.snapshot().num_waiting == num_threads * num_each
    driven.turn()
    load = driven.engine.snapshot()
    assert load.num_running + load.num_waiting == num_threads * num_each


def test_a_replica_whose_first_step_runs_does_not_say_that_it_is_idle() -> None:
    driven, seen = DrivenEngine(), []
    compute = driven.runner.compute

    def in_the_midst(plan: Any) -> Any:
        seen.append(driven.engine.snapshot())
        return compute(plan)

    driven.runner.compute = in_the_midst  # type: ignore[method-assign]
    submit_all(driven)
    driven.turn()
    assert seen[0].num_running + seen[0].num_waiting == len(PROMPTS)
    assert seen[0].kv_blocks_used > len(driven.kv.pools)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_failed_and_was_repeated_is_in_the_next_snapshot(depth: int) -> None:
    driven = DrivenEngine(depth=depth)
    driven.runner.fail_when = [96]
    driven.submit(request("bad", [96]))
    while not driven.finish:
        driven.turn()
    snapshot = driven.engine.snapshot()
    assert (snapshot.num_running, snapshot.counters.finished) == (0, {"error": 1})
    assert snapshot.counters.steps == sum(snapshot.counters.step_buckets) == driven.scheduler.sequences.counters.steps


def test_leases_used_wrongly_in_a_plan_end_the_engine_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = DrivenEngine()
    submit_all(driven)
    driven.turn()

    def misused(self: KvManager, now: float) -> None:
        raise LeaseError("released twice")

    monkeypatch.setattr(KvManager, "begin_plan", misused)
    with pytest.raises(LeaseError, match="released twice"):
        driven.engine.turn()


def test_leases_used_wrongly_in_a_commit_end_the_engine_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = DrivenEngine()
    compute = driven.runner.compute
    driven.runner.compute = lambda plan: replace(compute(plan), moves_done=array("i", [7]))  # type: ignore[method-assign]
    submit_all(driven)
    with pytest.raises(LeaseError, match="move 7"):
        driven.engine.turn()


@pytest.mark.parametrize("is_computed", [False, True], ids=["before computing", "after computing"])
@pytest.mark.parametrize("num_failing", [1, 2, 3])
@pytest.mark.parametrize("when", range(1, 9))
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,)], ids=["full", "both", "window"])
def test_a_plan_that_raises_and_then_steps_that_raise_harm_nobody(
    groups: tuple[KvGroup, ...], when: int, num_failing: int, is_computed: bool
) -> None:
    """What the plan handed out reaches the runner before rows are repeated: they may lie in blocks it never heard of."""
    driven = DrivenEngine(depth=2, groups=groups, max_num_batched_tokens=64, max_model_len=128, num_blocks=80, caching=False)
    fill, compute = driven.scheduler._planner.fill, driven.runner.compute
    num_plans = num_left = 0

    def fill_and_raise(step: StepBuilder) -> None:
        nonlocal num_plans, num_left
        fill(step)
        num_plans += 1
        if num_plans == when:
            num_left = num_failing
            raise RuntimeError("planning")

    def compute_and_raise(plan: Plan) -> Result:
        nonlocal num_left
        fails = plan.num_rows > 1 and num_left > 0
        num_left -= fails
        if fails and not is_computed:
            raise RuntimeError("a step")
        result = compute(plan)
        if fails:
            raise RuntimeError("a step")
        return result

    driven.scheduler._planner.fill = fill_and_raise  # type: ignore[method-assign]
    driven.runner.compute = compute_and_raise  # type: ignore[method-assign]
    prompts = {"a": [1, 2, 3, 4, 5, 6], "b": [7, 8], "long": [i % 90 for i in range(100)], "c": [9, 10, 11]}
    for name, prompt in prompts.items():
        driven.submit(request(name, prompt, n=2 if name == "a" else 1))
    driven.run()
    assert num_plans > when
    assert set(driven.finish.values()) == {FinishReason.LENGTH}
    for (name, index), tokens in driven.tokens.items():
        assert tokens == expected_tokens(prompts[name], 8, VOCAB, index)


def test_step_times_are_predicted_from_a_fixed_cost_and_a_cost_per_token() -> None:
    timer = StepTimer()
    assert timer.predict(1) == UNKNOWN_STEP_S
    for _ in range(50):
        timer.observe(1, 0.040)
    assert timer.predict(1) == pytest.approx(0.040)
    assert timer.predict(512) == UNKNOWN_STEP_S, "a size never seen: in proportion it would be 20 s, and a hang would hide behind it"
    for _ in range(3):
        timer.observe(512, 0.040 + 511 * 0.001)
    assert timer.predict(512) == pytest.approx(0.551, rel=0.01)
    assert timer.predict(1024) == pytest.approx(1.063, rel=0.01)
    assert 0.0 < timer.predict(1) < 0.2


def test_the_cost_per_token_is_kept_while_all_steps_are_of_one_size() -> None:
    timer = StepTimer()
    assert timer.costs == (0.0, 0.0), "nothing is known"
    timer.observe(8, 0.040)
    assert timer.costs == (0.0, 0.005), "the two costs cannot be separated: all of it is taken to be the tokens'"
    timer.observe(512, 0.544)
    assert [*timer.costs] == pytest.approx([0.032, 0.001])
    for _ in range(2000):
        timer.observe(8, 0.040)
    assert [*timer.costs] == pytest.approx([0.032, 0.001]), "long after the last large step"
    for _ in range(300):
        timer.observe(8, 0.080)
    assert [*timer.costs] == pytest.approx([0.072, 0.001], rel=0.01), "what all steps have in common is learned all the same"


def test_an_engine_is_idle_while_no_request_is_in_it() -> None:
    driven = DrivenEngine()
    assert driven.engine.is_idle
    driven.submit(request("a", [1, 2], max_tokens=4))
    assert not driven.engine.is_idle, "from the moment in which it is handed in"
    while ("a", 0) not in driven.finish:
        assert not driven.engine.is_idle
        driven.turn()
    driven.run()
    assert driven.engine.is_idle
    driven.submit(request("b", [1]), needs=frozenset({"grammar"}))
    driven.turn(3)
    assert not driven.engine.is_idle, "it waits for what it needs"


def test_what_a_builder_adds_is_given_back_when_the_loop_has_ended_and_the_rest_after_it() -> None:
    driven = DrivenEngine()
    closed: list[str] = []
    driven.runner.close = lambda: closed.append("runner")  # type: ignore[method-assign]
    driven.preparer.close = lambda: closed.append("preparer")  # type: ignore[method-assign]
    driven.engine.closing.callback(closed.append, "added")
    driven.engine.stop()
    assert driven.engine.is_stopping
    driven.engine.run()
    assert closed == ["added", "preparer", "runner"]
