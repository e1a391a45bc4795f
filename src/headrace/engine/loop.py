"""Runs the engine loop.

One thread runs the loop and owns the scheduler; other threads reach it through the `inbox`. The runner is a Protocol (`steps`): the
loop imports no tensor.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Protocol

from headrace.core.adapters import AdapterSource
from headrace.core.clock import Clock
from headrace.core.errors import ConfigError, EngineFatal, HeadraceError, InvalidRequest, Overloaded, QueueFull, SequenceFailed, Unavailable
from headrace.core.ids import PreparationId, RequestId
from headrace.core.load import EngineCounters, FailureKind, LoadSnapshot
from headrace.core.model_info import ModelInfo
from headrace.core.plan import Plan, Result
from headrace.core.plan_codec import dump_plans
from headrace.core.request import EngineRequest
from headrace.core.sleep import SleepLevel
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.adapters.preparer import AdapterPreparer
from headrace.engine.inbox import Abort, Cancel, ChangeSleep, Finish, Inbox, Message, PrerequisiteFailed, Refuse, Satisfied, Submit, Wake
from headrace.engine.load_board import LoadBoard
from headrace.engine.preparation import Preparations, Preparer, Preparers
from headrace.engine.recovery import Failures, Recovery
from headrace.engine.sleeping import EngineMemory, EngineSleep
from headrace.engine.steps import Runner, StepQueue, UncommittedStep
from headrace.engine.utilisation import EngineMeter, StepWork
from headrace.policy.admission import full_queue_retry_s
from headrace.policy.schedule.arrival import check_prerequisite
from headrace.policy.schedule.scheduler import Scheduler

IDLE_WAKE_S = 0.2
"""Seconds between wakes of an idle loop, which publishes its load each time."""

CHECK_INTERVAL_S = 60.0

MAX_PLAN_FAILURES = 3


class StepMeter(Protocol):
    def count(self, counters: EngineCounters) -> None:
        """Adds what was done until the end of a step."""
        ...


Outbox = Callable[[list[SequenceUpdate | Rejected]], None]


class Engine:
    """outbox: called on the loop's thread, must not block; closing: released when the loop has ended"""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        info: ModelInfo,
        outbox: Outbox,
        preparer: Preparer | None = None,
        adapters: AdapterPreparer[Any] | None = None,
        clock: Clock = time.monotonic,
        meter: EngineMeter | None = None,
        ranks: StepMeter | None = None,
        memory: EngineMemory | None = None,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self._sequences = scheduler.sequences
        self._outbox = outbox
        self._clock = clock
        self._depth = scheduler.config.depth
        self._inbox = Inbox(scheduler.config.max_waiting_bytes)
        self._steps = StepQueue(runner, clock, scheduler.config.steps_per_token)
        self._work = StepWork(info)
        self._ranks = ranks
        self._adapters = adapters
        self._info_changes = threading.Lock()
        self._sleep = EngineSleep(scheduler, memory)
        self._load = LoadBoard(scheduler, self._inbox, self._steps, clock, meter, adapters, self._sleep)
        self._plan_failures = 0
        self._failures = Failures(lambda: scheduler.sequences.counters, clock)
        self._preparations = Preparations(Preparers(preparer, adapters), self._failures)
        self._recovery = Recovery(scheduler, self._compute, self._failures, clock)
        self.closing = ExitStack()
        self.closing.callback(lambda: self._steps.runner.close())
        self.closing.callback(self._preparations.close)
        self.closing.callback(self._sleep.close)
        self._stopping = False
        self._is_checked = False
        self._next_check = -math.inf

    @property
    def clock(self) -> Clock:
        return self._clock

    # what other threads call

    def submit(self, request: EngineRequest) -> None:
        self._inbox.put(Submit(request, self._clock()))

    def cancel(self, request_id: RequestId) -> None:
        self._inbox.put(Cancel(request_id))

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        self._inbox.put(Finish(request_id, index, keep_tokens, reason))

    def abort(self, error: Exception) -> None:
        """The loop ends, also where it is idle: `run` raises EngineFatal with the error's message."""
        self._inbox.put(Abort(str(error)))

    def satisfied(self, preparation_id: PreparationId, what: str, adapter_slot: int = 0) -> None:
        check_prerequisite(what)
        self._inbox.put(Satisfied(preparation_id, what, adapter_slot))

    def failed(self, preparation_id: PreparationId, what: str, error: Exception) -> None:
        """A HeadraceError is sent to the client, any other is logged."""
        check_prerequisite(what)
        self._inbox.put(PrerequisiteFailed(preparation_id, what, error))

    def set_adapters(self, sources: Sequence[AdapterSource], changed: Collection[str] | None = None) -> None:
        """Replace the adapters that may be asked for; `info` names them from then on. All or nothing. Reads files, and blocks meanwhile.

        changed  names of known adapters whose folders are looked at again; None: all

        Raises ConfigError, CheckpointError.
        """
        if self._adapters is None:
            raise ConfigError("lora_modules", "this engine has no adapters", "Start it with enable_lora.")
        with self._info_changes:
            self._adapters.set(sources, changed)
            self.info = self.info.with_adapters(self._adapters.digests)

    def set_weights_digest(self, digest: str) -> None:
        with self._info_changes:
            self.info = self.info.with_weights_digest(digest)

    def change_sleep(self, level: SleepLevel | None) -> Future[None]:
        """None: it is to be awake. Else it takes no request from now on, and sleeps once it has finished those that it has, unless another
        change comes first. The result raises ConfigError, Unavailable.
        """
        self._inbox.put(asked := ChangeSleep(level))
        return asked.done

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(Wake())

    def snapshot(self) -> LoadSnapshot:
        return self._load.snapshot()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    @property
    def is_idle(self) -> bool:
        load = self.snapshot()
        return load.num_running == 0 and load.num_waiting == 0 and load.step_age_s is None

    def recent_plans(self) -> bytes:
        """Plans hold prompts: a caller that stores them must keep them private."""
        return dump_plans(list(self._steps.recent))

    @property
    def last_plan(self) -> Plan | None:
        return self._steps.recent[-1] if self._steps.recent else None

    # the loop

    def run(self) -> None:
        """Raises EngineFatal when going on could give wrong answers."""
        with self.closing:
            while not self._stopping:
                if self.turn():
                    self._is_checked = False
                else:
                    self.idle()

    def turn(self) -> bool:
        """False when there was nothing to do."""
        self._take_messages()
        self._sleep.fall_asleep(len(self._steps), self._clock())
        plan = self._plan()
        self._publish()  # before a step keeps this thread busy: what left the inbox is counted, and ended requests are released
        if plan is not None:
            self._steps.submit(plan)
        commits = len(self._steps) > 0 and (plan is None or len(self._steps) >= self._depth)
        if commits:
            self._commit_oldest()
        updates = self._sequences.take_updates()
        if updates:
            self._emit(updates)
        return plan is not None or commits or bool(updates) or self._plan_failures > 0

    def _emit(self, updates: Sequence[SequenceUpdate | Rejected]) -> None:
        """The load is published first: whoever reads an update finds a snapshot that includes it."""
        self._publish()
        if updates:
            self._outbox(list(updates))

    def _publish(self) -> None:
        if ended := self._sequences.take_ended():
            self._preparations.end(ended)
        self._load.publish()

    def idle(self) -> None:
        timeout = IDLE_WAKE_S
        if (deadline := self.scheduler.next_deadline()) is not None:
            timeout = min(timeout, max(0.0, deadline - self._clock()))
        if (message := self._inbox.take(timeout)) is not None:
            self._handle(message)
        elif not self._is_checked and not self._sequences.has_work and self._clock() >= self._next_check:
            self._check()

    def _check(self) -> None:
        self._is_checked = True
        self._next_check = self._clock() + CHECK_INTERVAL_S
        try:
            self.scheduler.check()
            if self._adapters is not None:
                self._adapters.check()
        except Exception as error:
            raise EngineFatal(f"the idle engine's sequences, slots, blocks and adapters do not add up: {error!r:.200}") from error

    def _take_messages(self) -> None:
        while (message := self._inbox.take()) is not None:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        """An error refuses the message: nothing a client sends may end the loop."""
        try:
            self._dispatch(message)
        except EngineFatal:
            raise
        except Exception as error:
            self._refuse(message, error)

    def _dispatch(self, message: Message) -> None:
        match message:
            case Submit(request, arrived):
                self._add(request.checked(vocab_size=self.info.vocab_size, max_model_len=self.info.max_model_len), arrived)
            case Refuse():
                self._reject(message, message.error)
            case Cancel(request_id):
                self._sequences.cancel(request_id, self._clock())
            case Finish(request_id, index, keep_tokens, reason):
                self._sequences.finish(request_id, index, keep_tokens, reason, self._clock())
            case Satisfied(preparation_id, what, adapter_slot):
                self._sequences.satisfied(preparation_id, what, adapter_slot)
            case PrerequisiteFailed(preparation_id, what, error):
                self._end_unprepared(preparation_id, what, error)
            case Wake():
                pass
            case ChangeSleep():
                self._sleep.change(message, self._clock())
            case Abort(reason):
                raise EngineFatal(reason)

    def _add(self, request: EngineRequest, arrived: float) -> None:
        self._sleep.refuse_request(self._clock())
        leaving = self._sequences.check_room(request)
        preparation_id, prerequisites = self._preparations.begin(request)
        try:
            self._sequences.add(request, arrived, prerequisites, preparation_id=preparation_id, leaving=leaving)
        except Exception:
            self._preparations.end([preparation_id])
            raise

    def _end_unprepared(self, preparation_id: PreparationId, what: str, error: Exception) -> None:
        if isinstance(error, InvalidRequest | Overloaded | Unavailable):
            if (request := self._sequences.withdraw(preparation_id, self._clock())) is not None:
                self._reject(request, error)
            return
        if not isinstance(error, HeadraceError):
            self._failures.note(FailureKind.PREREQUISITE, f"a prerequisite failed ({what})", error)
        message = str(error) if isinstance(error, HeadraceError) else "the engine's log says why"
        self._sequences.failed(preparation_id, what, f"prerequisite failed: {what}: {message}", self._clock())

    def _reject(self, refused: EngineRequest | Refuse, error: Exception) -> None:
        if isinstance(error, QueueFull):
            lowest = self._sequences.queue.traits.lowest_before(refused.priority)
            wait_s = full_queue_retry_s(self.snapshot(), lowest, block_size=self.info.block_size)
            error = Overloaded(str(error), retry_after_s=wait_s)
        self._emit([Rejected(request_id=refused.request_id, epoch=refused.epoch, error=error)])

    def _refuse(self, message: Message, error: Exception) -> None:
        if not isinstance(error, HeadraceError):
            self._failures.note(FailureKind.MESSAGE, f"a message could not be handled ({type(message).__name__.lower()})", error)
        if isinstance(message, Submit):
            known = error if isinstance(error, HeadraceError) else SequenceFailed("the engine could not add the request; its log says why")
            self._reject(message.request, known)
        elif isinstance(message, Cancel | Finish):
            self._sequences.cancel(message.request_id, self._clock())
        elif isinstance(message, Wake | ChangeSleep | Refuse | Abort):
            raise EngineFatal(f"a message that changes nothing raised ({type(message).__name__.lower()})") from error
        else:
            self._sequences.cancel_preparation(message.preparation_id, self._clock())

    def _plan(self) -> Plan | None:
        """Raises EngineFatal after MAX_PLAN_FAILURES."""
        try:
            plan = self.scheduler.plan(self._clock(), self._steps.costs)
        except EngineFatal:
            raise
        except Exception as error:
            self._plan_failures += 1
            self._failures.note(FailureKind.PLAN, "a plan could not be made", error)
            if self._plan_failures >= MAX_PLAN_FAILURES:
                raise EngineFatal(f"planning failed {self._plan_failures} times in a row: {error!r:.200}") from error
            return None
        self._plan_failures = 0
        for request, refusal in self._sequences.take_refused():
            self._reject(request, refusal)
        return plan

    def _commit_oldest(self) -> None:
        step = self._steps.take_oldest()
        plan = step.plan
        try:
            result = step.ticket.result()
        except EngineFatal:
            raise
        except Exception as error:
            self._failures.note(FailureKind.STEP, f"step {plan.step_id} of {plan.num_rows} rows failed: it is repeated in parts", error)
            self._recover(plan)
            self._end_step(step, None)
            self._emit(self._sequences.take_updates())
        else:
            self._end_step(step, result)
            self._deliver(plan, result)

    def _end_step(self, step: UncommittedStep, result: Result | None) -> None:
        seconds = self._steps.end(step)
        if step.plan.num_rows:
            self._sequences.counters.note_step(seconds)
            self._work.add(step.plan, self._sequences.counters)
            if self._ranks is not None:
                self._ranks.count(self._sequences.counters)
            self.scheduler.end_step(step.plan, result, seconds, step.gap_s)

    def _recover(self, failed: Plan) -> None:
        later = self._steps.take_all()
        for step in later:
            self.scheduler.end_moves(self._discard(step))
        self._recovery.recover([failed, *(step.plan for step in later)])

    def _discard(self, step: UncommittedStep) -> array[int]:
        try:
            return step.ticket.result().moves_done
        except EngineFatal:
            raise
        except Exception as error:
            self._failures.note(FailureKind.STEP, f"step {step.plan.step_id}, submitted after a step that failed, failed too", error)
            return array("i")

    def _compute(self, plan: Plan) -> None:
        self._deliver(plan, self._steps.compute(plan))

    def _deliver(self, plan: Plan, result: Result) -> None:
        updates = self.scheduler.commit(plan, result, self._clock())
        for error in self.scheduler.take_failures():
            self._failures.note(FailureKind.COMMIT, f"a row of step {plan.step_id} could not be committed: its sequence ends", error)
        self._emit(updates)
