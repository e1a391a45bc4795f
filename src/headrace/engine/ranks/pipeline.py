"""Rank 0's side of several stages: these compute a step each, at the same time.

A plan is sent to the earlier stages when it is submitted. The last stage, which is this rank's, computes it when its result is asked for;
meanwhile the earlier ones compute it, and those that were submitted after it.

No circle of waits: a member of an earlier stage reads its link in a thread of its own, which waits for nothing else, so that `submit` never
waits for an exchange. Frames of one step are sent to all before those of the next one, and each rank computes its steps in order. So of the
steps that are not computed by all, the oldest waits for no other. What a member has read and not computed are the steps in flight, as many
as there are stages, and their block copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from headrace.core.errors import EngineFatal
from headrace.core.plan import Plan, Result
from headrace.engine.ranks.adapters import part_of_rank_0
from headrace.engine.ranks.frames import FrameKind, int_frame, step_frame
from headrace.engine.ranks.leader import RankGroup
from headrace.engine.runner.batch import Resident, build_batch, upload_each
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.slots import Ints, SlotState, column
from headrace.engine.runner.state import RunnerState

_NONE_FAILED = np.zeros(0, dtype=np.int64)


class EarlierStages:
    """Sends plans to the stages before rank 0's. What it knows of the slots is ahead of the runner, which has not computed these plans:
    a slot may have another sequence by the time at which the tokens of the last one's step are known.
    """

    def __init__(self, group: RankGroup, slots: SlotState, resident: Callable[[], Resident] | None = None) -> None:
        """resident: as `ModelRunner` has it"""
        self._group, self._resident = group, resident
        self._state = RunnerState(self, slots)
        self._num_sent = 0
        self._changed: Ints = np.zeros(len(slots.known), dtype=np.int64)
        """Per slot, the number of the plan with which its sequence started or ended."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        self._group.send_to_earlier_stages(int_frame(FrameKind.COPY, group, source, target))

    def send(self, plan: Plan) -> int:
        """Returns the number of the plan, for `commit`. All ids of its rows are known: a pipeline plans no token that is in flight."""
        self._num_sent += 1
        self._state.apply(plan)
        self._changed[[*plan.ended, *(started.slot for started in plan.started)]] = self._num_sent
        if plan.num_rows:
            resident = () if self._resident is None else self._resident()
            rows, _ = self._state.read(plan, resident)
            ids, batch = build_batch(rows, self._state.slots, partial(upload_each, device="cpu"), resident=resident)
            _, adapters = part_of_rank_0(batch)
            self._group.drop_unused()
            self._group.send_to_earlier_stages(step_frame(ids, batch, adapters))
        return self._num_sent

    def commit(self, number: int, plan: Plan, result: Result) -> None:
        slots = np.repeat(column(plan.slots), column(result.token_counts))
        is_current = self._changed[slots] <= number
        self._state.commit(slots[is_current], column(result.token_ids)[is_current], _NONE_FAILED)


class _Ticket:
    def __init__(self, runner: PipelinedRunner) -> None:
        self._runner = runner
        self.done: Result | None = None

    def result(self) -> Result:
        while self.done is None:
            self._runner.compute_oldest()
        return self.done


class PipelinedRunner:
    """Has the earlier stages compute plans ahead of rank 0. An error in one, wherever it is raised, ends the replica: the stages are no
    longer at the same steps.
    """

    def __init__(self, runner: ModelRunner, earlier: EarlierStages, group: RankGroup) -> None:
        self._runner, self._earlier, self._group = runner, earlier, group
        self._sent: deque[tuple[int, Plan, _Ticket]] = deque()

    def submit(self, plan: Plan) -> _Ticket:
        ticket = _Ticket(self)
        with self._group.computing():
            self._sent.append((self._earlier.send(plan), plan, ticket))
        return ticket

    def compute_oldest(self) -> None:
        with self._group.computing():
            number, plan, ticket = self._sent.popleft()
            ticket.done = self._runner.execute(plan)
            self._earlier.commit(number, plan, ticket.done)

    def close(self) -> None:
        """What was sent is computed, so that the other ranks end in order."""
        with suppress(EngineFatal):  # another rank has ended
            while self._sent:
                self.compute_oldest()
        self._runner.close()
