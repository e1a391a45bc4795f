"""Lets engines that share `sleep_budget_bytes` start, sleep and wake in turn, as `policy.placement.slices` decides."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headrace.core.errors import Unavailable
from headrace.core.sleep import SleepLevel
from headrace.core.tasks import RunningTasks, end_tasks
from headrace.fleet.replica_processes import ReplicaProcess
from headrace.policy.deployment import PlannedReplica
from headrace.policy.placement.slices import SlicePhase, Slices
from headrace.wire.leash import ReloadRefused

if TYPE_CHECKING:
    from headrace.fleet.reconciler import Reconciler

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""A request waits this long more where its engine sleeps, and as long as the view is old."""


class EngineSlices:
    def __init__(self, budget_bytes: int | None) -> None:
        """budget_bytes: None: no engine sleeps"""
        self._slices = Slices(budget_bytes or 0)
        self._turns: dict[str, asyncio.Event] = {}
        self._asking: set[str] = set()
        self._changes = RunningTasks()
        self._num_tokens: dict[str, int] = {}

    async def turn(self, name: str) -> None:
        """Returns once the replica's process may be started; the one before has ended."""
        self._asking.add(name)
        self._turns[name] = event = asyncio.Event()
        await event.wait()

    def why_down(self, name: str) -> str:
        return "waits for its turn to start" if name in self._turns else ""

    async def run(self, reconciler: Reconciler) -> None:
        if not self._slices.budget_bytes:
            await asyncio.Event().wait()
        try:
            while True:
                await reconciler.look()
                try:
                    self._act(reconciler)
                except Exception:  # the outermost loop: a bug must not leave every engine as it is
                    log.exception("deciding which engines are awake failed")
                await asyncio.sleep(LOOK_S)
        finally:
            await end_tasks(self._changes)

    def _act(self, reconciler: Reconciler) -> None:
        slices, now = self._slices, asyncio.get_running_loop().time()
        replicas = reconciler.deployment.replicas
        for each in slices:
            if each.name not in replicas:
                slices.remove(each.name)
        for name, replica in replicas.items():
            process = reconciler.processes[name]
            if process.spec.sleeps:
                self._observe(reconciler, replica, process, now)
        for name, phase in slices.actions(now):
            log.info("%s is %s", name, phase)
            if phase is SlicePhase.STARTING:
                self._turns.pop(name).set()
                continue
            self._changes.start(self._change(reconciler.processes[name], phase), f"{phase}: {name}")

    def _observe(self, reconciler: Reconciler, replica: PlannedReplica, process: ReplicaProcess, now: float) -> None:
        name, view, slices = replica.name, reconciler.view, self._slices
        if name not in slices:
            slices.add(name, int(str(reconciler.config.engine_options(process.spec)["memory_bytes"])), now)
        if name in self._asking:
            self._asking.discard(name)
            slices.wants_start(name, now)
        elif process.failure is not None or process.has_ended:
            slices.gave_up(name, now)
        elif process.keeper.is_serving:
            slices.carried_out(name, SlicePhase.STARTING, now)
        num_open, load = view.num_open(replica.model, name), view.load(replica.model, name)
        num_tokens = 0 if load is None else load.num_tokens
        is_used = num_open is None or num_tokens != self._num_tokens.get(name, num_tokens)
        self._num_tokens[name] = num_tokens
        is_newest = [each.name for each in reconciler.deployment.listed(replica.model)][-1:] == [name]
        num_held = sum(status.num_held for status in view.of(replica.model)) if is_newest else 0
        slices.seen(name, now, num_open=num_open or 0, num_held=num_held, is_used=is_used)

    async def _change(self, process: ReplicaProcess, phase: SlicePhase) -> None:
        name, loop = process.files.name, asyncio.get_running_loop()
        if (asked := process.keeper.asked) is None:
            return  # it has ended, and asks for its turn
        try:
            await asked.change_sleep(SleepLevel.DISK if phase is SlicePhase.FALLING_ASLEEP else None)
        except Unavailable:
            return
        except ReloadRefused as error:
            log.warning("%s does not sleep: %s", name, error)
            self._slices.refused_sleep(name, loop.time())
        else:
            self._slices.carried_out(name, phase, loop.time())
