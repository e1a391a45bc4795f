"""Simulates one replica on virtual time: the real engine loop and scheduler run over a runner that computes only how long each
step takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.load import LoadSnapshot
from headrace.core.model_info import ModelInfo
from headrace.core.plan import Plan, Result
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.steps import Runner

Update = SequenceUpdate | Rejected

Wait = Callable[[float], None]
"""Called with seconds of virtual time, which have passed when it returns."""


class TimedRunner:
    """An `engine.steps.Runner` in virtual time. Every sampled token is 0: answers end by their length. seconds_of: of a plan's step"""

    def __init__(self, seconds_of: Callable[[Plan], float], wait: Wait) -> None:
        self._seconds_of = seconds_of
        self._wait = wait

    def submit(self, plan: Plan) -> TimedTicket:
        samples = plan.samples
        result = Result(step_id=plan.step_id, token_counts=array("i", samples), token_ids=array("i", bytes(4 * sum(samples))))
        return TimedTicket(result, self._seconds_of(plan), self._wait)

    def close(self) -> None:
        pass


class TimedTicket:
    """A step that takes `seconds` of virtual time."""

    def __init__(self, result: Result, seconds: float, wait: Wait) -> None:
        self._result, self._seconds, self._wait = result, seconds, wait

    def result(self) -> Result:
        self._wait(self._seconds)
        return self._result


class SimulatedReplica:
    """A replica that its caller drives: `submit` requests, and `turn` whenever it is not busy.

    now     its own clock; a turn advances it by the step's time
    report  the load as gateways know it: as of the beginning of the running step
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, make_runner: Callable[[Clock, Wait], Runner], *, now: float = 0.0) -> None:
        """make_runner: called with this replica's clock and a function that advances it"""
        self.now = now
        self._updates: list[Update] = []

        def clock() -> float:
            return self.now

        runner = make_runner(clock, self._pass)
        self.engine: Engine = assemble(config, runner, info, self._updates.extend, block_key="00" * 32, clock=clock)
        self.report: LoadSnapshot = self.engine.snapshot()

    def submit(self, request: EngineRequest, at: float) -> None:
        """Hand in a request that arrives at `at`. If a step runs then, the request is planned after that step."""
        ends_at, self.now = self.now, at
        self.engine.submit(request)
        self.now = max(ends_at, at)

    def turn(self, at: float) -> list[Update] | None:
        """Run one step from `at` to `now`. Returns its updates; None if there was nothing to do and no refusal."""
        self.now = at
        did_work = self.engine.turn()
        updates, self._updates[:] = list(self._updates), []
        if not did_work and not updates:
            self.report = self.engine.snapshot()
            return None
        return updates

    def _pass(self, seconds: float) -> None:
        self.report = self.engine.snapshot()
        self.now += seconds
