"""Recovers from a step that raised: undoes it, repeats its rows in halves, and ends the sequence that makes it fail.

One forward computes all rows, so the sequence that causes the failure is unknown until it runs alone.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.errors import EngineFatal
from headrace.core.load import FailureKind
from headrace.core.plan import Plan
from headrace.engine.failures import Failures
from headrace.policy.schedule.scheduler import Scheduler
from headrace.policy.sequence import Sequence

Compute = Callable[[Plan], None]


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
