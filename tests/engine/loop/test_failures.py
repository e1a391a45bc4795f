"""Tests that an exception in an engine is logged with its traceback and counted, and that the client learns nothing of the inside."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from engine_kit import VOCAB, DrivenEngine, ManualClock, request
from failing_plans import SITES, fail_next_plan
from kv_oracle import expected_tokens

from headrace.core.errors import EngineFatal
from headrace.core.ids import RequestId
from headrace.core.load import EngineCounters, FailureKind
from headrace.core.plan import Plan, Result
from headrace.core.update import FinishReason
from headrace.engine.recovery import MAX_LOGGED, WINDOW_S, Failures
from headrace.policy.schedule.scheduler import Scheduler
from headrace.policy.schedule.sequence_table import SequenceTable

pytestmark = pytest.mark.pure

POISON = 96
SECRET = "internals: /srv/model at 0x7f"


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    original, calls = getattr(owner, method), 0

    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError(SECRET)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, raising)


def failures_of(driven: DrivenEngine) -> dict[str, int]:
    return driven.engine.snapshot().counters.failures


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "headrace.engine.recovery" and record.exc_info]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_is_logged_with_its_traceback_and_counted(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    driven = DrivenEngine(depth=depth)
    driven.runner.fail_when = [POISON]
    driven.submit(request("good", [1, 2]), request("bad", [POISON]))
    driven.run()
    assert driven.finish["bad", 0] is FinishReason.ERROR
    assert failures_of(driven)["step"] >= 2, "the whole step, and the culprit alone"
    assert len(tracebacks(caplog)) == min(failures_of(driven)["step"], MAX_LOGGED)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("owner", "method", "kind"),
    [
        (Scheduler, "plan", FailureKind.PLAN),
        (SequenceTable, "add", FailureKind.MESSAGE),
        (SequenceTable, "emit_output", FailureKind.COMMIT),
    ],
)
def test_a_failing_plan_message_or_commit_is_logged_and_counted(
    owner: type, method: str, kind: FailureKind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raise_once(monkeypatch, owner, method)
    driven = DrivenEngine()
    driven.submit(request("a", [1, 2]))
    driven.run()
    assert failures_of(driven) == {kind.value: 1}
    assert len(tracebacks(caplog)) == 1
    assert SECRET in caplog.text
    assert SECRET not in "".join(map(str, driven.errors.values()))


def test_every_step_that_fails_behind_another_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Two steps are in flight and both raise: the second one's error may be the one that says why."""
    driven = DrivenEngine(depth=2)
    compute, reasons = driven.runner.compute, ["device busy", "page fault at 0x7f"]

    def failing(plan: Plan) -> Result:
        if reasons and plan.num_rows:
            raise RuntimeError(reasons.pop(0))
        return compute(plan)

    driven.runner.compute = failing  # type: ignore[method-assign]
    driven.submit(request("a", [1, 2]), request("b", [3]))
    driven.run()
    assert not reasons
    assert failures_of(driven) == {"step": 2}
    assert "device busy" in caplog.text
    assert "page fault at 0x7f" in caplog.text
    assert set(driven.finish.values()) == {FinishReason.LENGTH}


def test_a_refusal_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [10_000]))
    driven.run()
    assert "a" in driven.errors
    assert not failures_of(driven)
    assert not tracebacks(caplog)


def test_planning_that_keeps_failing_says_so_each_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    driven = DrivenEngine()

    def broken(self: Scheduler, now: float) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Scheduler, "plan", broken)
    driven.submit(request("a", [1, 2]))
    with pytest.raises(EngineFatal):
        driven.run()
    assert len(tracebacks(caplog)) == 3


def test_a_failure_that_repeats_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock, counters = ManualClock(), EngineCounters()
    failures = Failures(lambda: counters, clock)
    for _ in range(1000):
        failures.note(FailureKind.STEP, "a step failed", RuntimeError("again"))
    failures.note(FailureKind.PLAN, "another kind", RuntimeError("is not held back"))
    assert len(tracebacks(caplog)) == MAX_LOGGED + 1
    clock.now += WINDOW_S
    failures.note(FailureKind.STEP, "a step failed", RuntimeError("again"))
    assert f"{1000 - MAX_LOGGED} more of this kind were not logged" in caplog.records[-1].message
    assert counters.failures == {"step": 1001, "plan": 1}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("site", SITES)
def test_a_slot_that_a_failed_plan_handed_out_is_ended_before_it_is_handed_out_again(site: str, after: int, depth: int) -> None:
    driven = DrivenEngine(depth=depth, max_num_seqs=1)
    driven.submit(request("first", [1, 2, 3], max_tokens=2))
    driven.turn()
    driven.engine.cancel(RequestId("first"))
    driven.submit(request("second", [4, 5, 6], max_tokens=2))
    fail_next_plan(driven.scheduler, site, after)
    driven.turn()
    driven.engine.cancel(RequestId("second"))
    driven.submit(request("third", [7, 8, 9], max_tokens=4))
    driven.run()
    assert driven.tokens["third", 0] == expected_tokens([7, 8, 9], 4, VOCAB, 0)
