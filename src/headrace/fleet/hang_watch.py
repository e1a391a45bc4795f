"""Ends the processes that hang (docs/fleet.md): gateways that answer nothing, and engines that no gateway can use."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator

from headrace.fleet.keeper import ProcessKeeper
from headrace.fleet.reconciler import Reconciler
from headrace.policy.deployment import ReplicaPhase

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Looks are counted, not seconds: a supervisor that was stopped has not looked."""

GATEWAY_LOOKS = 4
"""About ten seconds: each look waits `gateways.STATUS_TIMEOUT_S`."""

Hung = tuple[str, int | None, int]
"""Label, process id, number of answers so far."""


class HangWatch:
    """`hang_timeout_s` 0: nothing is killed."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self._looks: dict[Hung, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # the outermost loop: a bug must not leave later hangs unnoticed
                log.exception("looking for processes that hang failed")

    async def look(self) -> None:
        limit_s = self._reconciler.config.hang_timeout_s
        if not limit_s:
            self._looks.clear()
            return
        await self._reconciler.look()
        gateways, engines = [*self._silent_gateways()], [*self._lost_engines()]
        self._count([_hung(keeper) for keeper in (*gateways, *(keeper for keeper, _ in engines))])
        for keeper in gateways:
            if self._has_hung(keeper, min(GATEWAY_LOOKS, math.ceil(limit_s / LOOK_S))):
                log.error("%s answers nothing: it is killed, and started again", keeper.label)
                keeper.restart()
        for keeper, reason in engines:
            if self._has_hung(keeper, math.ceil(limit_s / LOOK_S)):
                log.error("no gateway could use %s for %g s (%s): it is killed, and started again", keeper.label, limit_s, reason)
                keeper.restart()

    def _silent_gateways(self) -> Iterator[ProcessKeeper]:
        silent = self._reconciler.view.silent
        return (keeper for keeper in self._reconciler.gateways.keepers if keeper.label in silent)

    def _lost_engines(self) -> Iterator[tuple[ProcessKeeper, str]]:
        """Only engines that have served: for others a new process would not help."""
        view = self._reconciler.view
        for name, replica in self._reconciler.deployment.replicas.items():
            keeper = self._reconciler.processes[name].keeper
            if replica.phase is ReplicaPhase.SERVING and keeper.is_serving and view.is_lost(replica.model, name):
                yield keeper, view.why_not_ready(replica.model, name)

    def _count(self, hung: Iterable[Hung]) -> None:
        self._looks = {each: self._looks.get(each, 0) + 1 for each in hung}

    def _has_hung(self, keeper: ProcessKeeper, num_looks: int) -> bool:
        return self._looks[_hung(keeper)] >= num_looks


def _hung(keeper: ProcessKeeper) -> Hung:
    return keeper.label, keeper.pid, keeper.asked.num_answers if keeper.asked is not None else 0
