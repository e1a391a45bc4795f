"""Tracks steps between submission and commit: the runner's protocol, the queue of uncommitted steps, and the ring of the last plans.

`StepQueue` keeps the order in which plans went to the runner, and when the oldest began. The scheduler commits results
(`policy.schedule.scheduler`); `engine.recovery` repeats steps that raised.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.errors import EngineFatal
from headrace.core.plan import Plan, Result, StepCosts
from headrace.policy.schedule.step_timer import StepTimer

PLAN_RING = 128
"""Plans kept for `headrace replay`; the oldest is dropped first."""


class Ticket(Protocol):
    def result(self) -> Result:
        """Wait for the step. Raises the step's error."""
        ...


class Runner(Protocol):
    """Computes plans in the order in which they are submitted."""

    def submit(self, plan: Plan) -> Ticket: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class UncommittedStep:
    """A plan that the runner has. submitted: when the runner got the plan, on the engine's clock."""

    plan: Plan
    ticket: Ticket
    submitted: float


@dataclass(frozen=True, slots=True)
class RunningStep:
    """Times of the uncommitted steps. started: when the oldest began; predicted_s: expected seconds of the newest"""

    started: float
    predicted_s: float


class StepQueue:
    """Uncommitted steps, oldest first. Changed on the loop's thread alone; `running` may be read from others.

    recent   the last PLAN_RING plans, without those that only poll for moves
    running  None while no step is uncommitted
    costs    recent cost of steps
    """

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self.runner = runner
        self.recent: deque[Plan] = deque(maxlen=PLAN_RING)
        self.running: RunningStep | None = None
        self._clock = clock
        self._timer = StepTimer()
        self._steps: deque[UncommittedStep] = deque()
        self.costs = StepCosts()

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, plan: Plan) -> None:
        """Hand a plan to the runner. If the runner raises, the step's ticket raises that error instead, except EngineFatal."""
        if not plan.only_polls_moves:
            self.recent.append(plan)
        now = self._clock()
        self.running = RunningStep(now if self.running is None else self.running.started, self._timer.predict(plan.num_tokens))
        self._steps.append(UncommittedStep(plan, self._ticket(plan), now))

    def _ticket(self, plan: Plan) -> Ticket:
        try:
            return self.runner.submit(plan)
        except EngineFatal:
            raise
        except Exception as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            return failed

    def compute(self, plan: Plan) -> Result:
        """Submit a plan and wait for it, while no other step is uncommitted. Raises the step's error."""
        self.recent.append(plan)
        return self.runner.submit(plan).result()

    def take_oldest(self) -> UncommittedStep:
        return self._steps.popleft()

    def take_all(self) -> list[UncommittedStep]:
        """Remove and return every uncommitted step, oldest first."""
        taken = list(self._steps)
        self._steps.clear()
        return taken

    def end(self, step: UncommittedStep) -> float:
        """Note that the step is over: committed, or undone and repeated. Returns the seconds that it took by itself."""
        now = self._clock()
        began = step.submitted if self.running is None else max(step.submitted, self.running.started)
        self.running = replace(self.running, started=now) if self._steps and self.running is not None else None
        if step.plan.num_rows:
            self._timer.observe(step.plan.num_tokens, now - began)
            self.costs = self._timer.costs
        return now - began
