"""Keeps the process behind one replica running: tries again if it could not be started, and ends it once its requests have left.

`keeper` restarts a process that has served. This module handles the time before the first success, and the end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from headrace.core.backoff import Backoff
from headrace.core.errors import ConfigError, HeadraceError
from headrace.fleet.config import ModelSpec
from headrace.fleet.files import MachineShare, ReplicaFiles
from headrace.fleet.keeper import FleetFailed, ProcessKeeper

FIRST_RETRY_S = 30.0
LAST_RETRY_S = 600.0
"""Pauses in seconds before a replica that could not be started is tried again: FIRST_RETRY_S, doubling up to LAST_RETRY_S. Each try loads
weights, which costs the replicas that serve."""

END_GRACE_S = 10.0
"""Seconds for an engine without requests to free its weights and exit; then it is killed."""


class ReplicaProcess:
    """One replica's process.

    failure       why it could not be started; None while it runs or is being started
    is_unlisted   whether gateways have stopped to send it new requests
    task          the task that keeps the process running; None before `launch`
    drain_until   seconds on the event loop's clock: requests still open then move to another replica
    """

    def __init__(
        self, files: ReplicaFiles, spec: ModelSpec, share: MachineShare, keeper: ProcessKeeper, on_change: Callable[[], None]
    ) -> None:
        """on_change: called when the replica serves, fails or has ended"""
        self.files = files
        self.spec = spec
        self.share = share
        self.keeper = keeper
        self.failure: HeadraceError | None = None
        self.is_unlisted = False
        self.drain_until = math.inf
        self._on_change = on_change
        self.task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._serving_since: float | None = None

    @property
    def is_launched(self) -> bool:
        return self.task is not None

    @property
    def has_ended(self) -> bool:
        """Whether no process of this replica runs or will run."""
        return self._is_cancelled if self.task is None else self.task.done()

    @property
    def has_served(self) -> bool:
        return self.keeper.ready.is_set()

    @property
    def why_failed(self) -> str:
        """The reason of the replica's failure, without its name; empty without a failure."""
        name = self.files.name
        return "" if self.failure is None else str(self.failure).removeprefix(f"{name}: ").removeprefix(f"{name} ")

    def launch(self) -> None:
        self.task = asyncio.create_task(self._live(), name=f"replica {self.files.name}")
        self.task.add_done_callback(lambda _: self._on_change())

    def end(self) -> None:
        """Ask the process, which has no requests, to leave. Kill it if it does not."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"ending {self.files.name}")

    def cancel(self) -> None:
        """Kill the process, if there is one, and start no other."""
        self._is_cancelled = True
        if self.task is not None:
            self.task.cancel()

    def give_up_unless_connected(self, now: float, timeout_s: float, reason: str) -> None:
        """Fail the replica if its engine has served for `timeout_s` seconds without a gateway connecting. reason: the gateway's"""
        if not self.keeper.is_serving:
            self._serving_since = None
        elif self._serving_since is None:
            self._serving_since = now
        elif now - self._serving_since > timeout_s and self.failure is None:
            self.give_up(FleetFailed(f"{self.files.name} serves, and a gateway does not find it ready after {timeout_s:g} s: {reason}"))

    def give_up(self, failure: HeadraceError) -> None:
        """Kill the process and mark the replica failed: it is of no use to the gateways."""
        self.failure = failure
        self.cancel()

    async def close(self) -> None:
        """Kill the process now. Its files stay: the whole folder is removed later."""
        tasks = [task for task in (self.task, self._ending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def remove_files(self) -> None:
        for path in (self.files.config, self.files.socket):
            path.unlink(missing_ok=True)

    async def _live(self) -> None:
        serving = asyncio.create_task(self._report_first_service(), name=f"first service of {self.files.name}")
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, math.inf)
        try:
            while await self._has_failed():
                await asyncio.sleep(math.inf if isinstance(self.failure, ConfigError) else backoff.pause_s(0.0))
        finally:
            serving.cancel()

    async def _has_failed(self) -> bool:
        """Run the process until it is stopped (False) or cannot be started (True)."""
        try:
            await self.keeper.keep()
        except (ConfigError, FleetFailed) as error:
            self.failure = error
            self._on_change()
            return True
        return False

    async def _report_first_service(self) -> None:
        await self.keeper.ready.wait()
        self.failure = None
        self._on_change()

    async def _end(self) -> None:
        if self.task is None:
            return
        if self.failure is not None:
            self.task.cancel()
        self.keeper.stop()
        _, left = await asyncio.wait([self.task], timeout=END_GRACE_S)
        if left:
            self.keeper.kill()
