"""Recovers from a step that raised: undoes it, repeats its rows in halves, and ends the sequence that makes it fail."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.errors import EngineFatal
from headrace.core.load import EngineCounters, FailureKind
from headrace.core.plan import Plan
from headrace.policy.schedule.scheduler import Scheduler
from headrace.policy.sequence import Sequence

log = logging.getLogger(__name__)

Compute = Callable[[Plan], None]

MAX_LOGGED = 5
WINDOW_S = 10.0


class Failures:
    def __init__(self, counters: Callable[[], EngineCounters], clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        self._windows: dict[FailureKind, _Window] = {}

    def note(self, kind: FailureKind, what: str, error: BaseException) -> None:
        self._counters().note_failure(kind)
        window = self._windows.setdefault(kind, _Window())
        if (num_left_out := window.take(self._clock())) is None:
            return
        more = f" ({num_left_out} more of this kind were not logged)" if num_left_out else ""
        log.error("%s%s", what, more, exc_info=error)


class _Window:
    def __init__(self) -> None:
        self._began = float("-inf")
        self._num_logged = self._num_left_out = 0

    def take(self, now: float) -> int | None:
        """How many were left out since the last logged failure; None: this one is left out too."""
        if now - self._began >= WINDOW_S:
            self._began, self._num_logged = now, 0
        if self._num_logged >= MAX_LOGGED:
            self._num_left_out += 1
            return None
        self._num_logged += 1
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out


class Recovery:
    def __init__(self, scheduler: Scheduler, compute: Compute, failures: Failures, clock: Clock) -> None:
        self._scheduler = scheduler
        self._compute = compute
        self._failures = failures
        self._clock = clock

    def recover(self, plans: list[Plan]) -> None:
        sequences: dict[int, Sequence] = {}
        for plan in reversed(plans):
            for seq in self._scheduler.rollback(plan):
                sequences[seq.seq_id] = seq
        for plan in plans:
            self._repeat_changes(plan)
        if (unsent := self._scheduler.unsent_plan()) is not None:
            self._compute_changes(unsent)
        self._repeat_in_halves(list(sequences.values()))

    def _repeat_changes(self, plan: Plan) -> None:
        self._compute_changes(self._scheduler.delta_plan(plan))

    def _compute_changes(self, plan: Plan) -> None:
        try:
            self._compute(plan)
        except EngineFatal:
            raise
        except Exception as error:
            raise EngineFatal(f"the runner cannot take state changes in: {error!r:.200}") from error

    def _repeat_in_halves(self, sequences: list[Sequence]) -> None:
        pending = _halves(sequences)
        while pending:
            group = pending.pop()
            plan, left = self._scheduler.replan(group, self._clock())
            if plan is None:
                continue
            if left:
                pending.append(left)
                group = [seq for seq in group if seq not in left]
            try:
                self._compute(plan)
            except EngineFatal:
                raise
            except Exception as error:
                self._failures.note(FailureKind.STEP, f"step {plan.step_id}, which repeats {plan.num_rows} rows, failed", error)
                self._scheduler.rollback(plan)
                self._repeat_changes(plan)
                if len(group) == 1:
                    self._scheduler.sequences.fail(group[0], "the model step failed for this sequence", self._clock())
                else:
                    pending += _halves(group)


def _halves(sequences: list[Sequence]) -> list[list[Sequence]]:
    middle = (len(sequences) + 1) // 2
    return [half for half in (sequences[middle:], sequences[:middle]) if half]
