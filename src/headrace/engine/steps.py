"""Tracks steps between submission and commit."""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.errors import EngineFatal
from headrace.core.plan import Plan, Result, StepCosts

UNKNOWN_STEP_S = 5.0


MIN_SPREAD = 1.0
"""Least variance of the steps' token counts from which the fixed cost can be separated from the cost per token."""


SLACK = 2.0
"""A step takes at least its fixed cost, and at least that of its tokens. Neither is reported as more than this many times what the quickest
steps allow: a step that compiles a kernel would else decide for a hundred steps.
"""


class StepTimer:
    """Predicts the seconds of a step from its tokens: a fixed cost plus a cost per token, fitted by least squares; each step observed
    weighs 2 % less than the next.

    While all steps had about the same size, a larger one is predicted in proportion to its tokens, but never beyond UNKNOWN_STEP_S:
    readiness judges by four times the prediction.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._known_token_s: float | None = None
        self._least_s = self._least_token_s = math.inf

    def observe(self, num_tokens: int, seconds: float) -> None:
        fading = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (0.98 * value for value in fading)
        self._weight += 1.0
        self._least_s = min(seconds, self._least_s / 0.98)
        self._least_token_s = min(seconds / num_tokens, self._least_token_s / 0.98)
        self._x += num_tokens
        self._y += seconds
        self._xx += num_tokens * num_tokens
        self._xy += num_tokens * seconds
        if self._spread >= MIN_SPREAD:
            self._known_token_s = self._slope()

    def predict(self, num_tokens: int) -> float:
        if not self._weight:
            return UNKNOWN_STEP_S
        mean_tokens, mean_seconds = self._x / self._weight, self._y / self._weight
        if self._spread < MIN_SPREAD:
            in_proportion = mean_seconds * num_tokens / mean_tokens
            return min(max(mean_seconds, in_proportion), max(mean_seconds, UNKNOWN_STEP_S))
        return mean_seconds + self._slope() * (num_tokens - mean_tokens) if num_tokens > mean_tokens else mean_seconds

    @property
    def costs(self) -> StepCosts:
        """While all steps are about the same size, the cost per token is the last one that could be separated; before any could, all
        time counts as that of the tokens.
        """
        if not self._weight:
            return StepCosts()
        mean_tokens, mean_seconds = self._x / self._weight, self._y / self._weight
        if self._known_token_s is None:
            return StepCosts(0.0, mean_seconds / mean_tokens)
        return StepCosts(max(0.0, mean_seconds - self._known_token_s * mean_tokens), self._known_token_s)

    @property
    def reported_costs(self) -> StepCosts:
        """What a wait is predicted from. Not known after a single step, which may have compiled."""
        if self._weight <= 1.0:
            return StepCosts()
        fixed_s, token_s = self.costs
        return StepCosts(min(fixed_s, SLACK * self._least_s), min(token_s, SLACK * self._least_token_s))

    @property
    def _spread(self) -> float:
        return self._xx / self._weight - (self._x / self._weight) ** 2

    def _slope(self) -> float:
        mean_tokens, mean_seconds = self._x / self._weight, self._y / self._weight
        return max(0.0, (self._xy / self._weight - mean_tokens * mean_seconds) / self._spread)


PLAN_RING = 128
BESIDE_SHARE = 0.02
"""That the last step has in the mean number of steps which stages compute at once."""


class Ticket(Protocol):
    def result(self) -> Result: ...


class Runner(Protocol):
    def submit(self, plan: Plan) -> Ticket:
        """The error of a step is raised by its ticket's `result`, not here; EngineFatal may be."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class UncommittedStep:
    """submitted: when the runner got the plan, on the engine's clock; gap_s: seconds since the end of the step before, 0 where it runs"""

    plan: Plan
    ticket: Ticket
    submitted: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class RunningStep:
    """started: when the oldest uncommitted step began; predicted_s: of the newest"""

    started: float
    predicted_s: float


class StepQueue:
    """The uncommitted steps of one engine, oldest first. Changed on the loop's thread alone; `running` may be read from others.

    recent          the last PLAN_RING plans, without those that only poll for moves
    reported_costs  of a step from one token of a sequence to its next one: where stages compute steps at once, each of which has a part of
                    the sequences, as many fixed costs as steps
    """

    def __init__(self, runner: Runner, clock: Clock, steps_per_token: int = 1) -> None:
        """steps_per_token: `SchedulerConfig.steps_per_token`"""
        self._steps_per_token, self._num_beside = steps_per_token, 1.0
        self.runner = runner
        self.recent: deque[Plan] = deque(maxlen=PLAN_RING)
        self.running: RunningStep | None = None
        self._clock = clock
        self._ended: float | None = None
        self._timer = StepTimer()
        self._steps: deque[UncommittedStep] = deque()
        self.costs = self.reported_costs = StepCosts()

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, plan: Plan) -> None:
        """An error of the runner is raised by the step's ticket, except EngineFatal."""
        if not plan.only_polls_moves:
            self.recent.append(plan)
        now = self._clock()
        self.running = RunningStep(now if self.running is None else self.running.started, self._timer.predict(plan.num_tokens))
        gap_s = 0.0 if self._steps or self._ended is None else now - self._ended
        self._steps.append(UncommittedStep(plan, self._ticket(plan), now, gap_s))

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
        self.recent.append(plan)
        return self.runner.submit(plan).result()

    def take_oldest(self) -> UncommittedStep:
        return self._steps.popleft()

    def take_all(self) -> list[UncommittedStep]:
        taken = list(self._steps)
        self._steps.clear()
        return taken

    def end(self, step: UncommittedStep) -> float:
        """Returns the seconds that it took by itself."""
        now = self._ended = self._clock()
        began = step.submitted if self.running is None else max(step.submitted, self.running.started)
        self.running = replace(self.running, started=now) if self._steps and self.running is not None else None
        if step.plan.num_rows:
            self._timer.observe(step.plan.num_tokens, now - began)
            self._num_beside += BESIDE_SHARE * (min(self._steps_per_token, 1 + len(self._steps)) - self._num_beside)
            self.costs, reported = self._timer.costs, self._timer.reported_costs
            self.reported_costs = reported._replace(fixed_s=self._num_beside * reported.fixed_s)
        return now - began
