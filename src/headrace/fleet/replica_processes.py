"""The engine processes of one deployment: made from the configuration, kept running until `fleet.reconciler` retires them.

Handles the time before the first success, and the end: `fleet.keeper` restarts a process that has served.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Protocol

from headrace.core.adapters import AdapterSource
from headrace.core.backoff import Backoff
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.tasks import end_tasks
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.files import ReplicaFiles, rank_label, write_engine_files
from headrace.fleet.keeper import FleetFailed, ProcessKeeper
from headrace.fleet.launcher import Child, Launcher, launch_ranks
from headrace.machine.resources import MachineShare
from headrace.policy.deployment import Deployment, PlannedReplica, ReplicaPhase

FIRST_RETRY_S = 30.0
LAST_RETRY_S = 600.0
"""Each try loads weights, which costs the replicas that serve."""

END_GRACE_S = 10.0

Listens = Callable[[Mapping[str, str]], None]
"""Takes `ReplicaFiles.listening`."""


class ReplicaHost(Protocol):
    """Where the processes of replicas run."""

    is_this_machine: bool

    async def launch(self, config: FleetConfig, spec: Callable[[], ModelSpec], files: ReplicaFiles, listens: Listens) -> Child:
        """Starts one replica. Raises OSError.

        spec     as it is when it is called: a reload may have changed the adapters
        listens  called where only its start tells where it listens
        """
        ...

    def want(self, num_replicas: int) -> None:
        """Called when the deployment's number of replicas has changed, before they are launched."""
        ...


class ThisMachine:
    is_this_machine = True

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    async def launch(self, config: FleetConfig, spec: Callable[[], ModelSpec], files: ReplicaFiles, listens: Listens) -> Child:
        launch = partial(self._launcher.launch, forward=True, withheld=config.key_variables)
        commands = [(*config.engine_command, "--config", str(path)) for path in files.configs]
        return await launch_ranks([partial(launch, rank_label(files.name, rank), command) for rank, command in enumerate(commands)])

    def want(self, num_replicas: int) -> None:
        """The machine is as large as it is."""


class ReplicaProcess:
    """failure       why it could not be started; None while it runs or is being started
    drain_until   seconds on the event loop's clock: requests still open then move to another replica
    """

    def __init__(
        self, files: ReplicaFiles, spec: ModelSpec, share: MachineShare, keeper: ProcessKeeper, on_change: Callable[[], None]
    ) -> None:
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
        return self._is_cancelled if self.task is None else self.task.done()

    @property
    def has_served(self) -> bool:
        return self.keeper.ready.is_set()

    @property
    def why_failed(self) -> str:
        name = self.files.name
        return "" if self.failure is None else str(self.failure).removeprefix(f"{name}: ").removeprefix(f"{name} ")

    def listens(self, listening: Mapping[str, str]) -> None:
        self.files = replace(self.files, listening=listening)
        self._on_change()

    def launch(self) -> None:
        self.task = asyncio.create_task(self._live(), name=f"replica {self.files.name}")
        self.task.add_done_callback(lambda _: self._on_change())

    def end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"ending {self.files.name}")

    def cancel(self) -> None:
        self._is_cancelled = True
        if self.task is not None:
            self.task.cancel()

    def give_up_unless_connected(self, now: float, timeout_s: float, reason: str) -> None:
        if not self.keeper.is_serving:
            self._serving_since = None
        elif self._serving_since is None:
            self._serving_since = now
        elif now - self._serving_since > timeout_s and self.failure is None:
            self.give_up(FleetFailed(f"{self.files.name} serves, and a gateway does not find it ready after {timeout_s:g} s: {reason}"))

    def give_up(self, failure: HeadraceError) -> None:
        self.failure = failure
        self.cancel()

    async def close(self) -> None:
        """Files stay: the whole folder is removed later."""
        await end_tasks(task for task in (self.task, self._ending) if task is not None)

    async def _live(self) -> None:
        serving = asyncio.create_task(self._report_first_service(), name=f"first service of {self.files.name}")
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, math.inf)
        try:
            while await self._has_failed():
                await asyncio.sleep(math.inf if isinstance(self.failure, ConfigError) else backoff.pause_s(0.0))
        finally:
            serving.cancel()

    async def _has_failed(self) -> bool:
        """False: stopped; True: it cannot be started."""
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


class ReplicaProcesses(Mapping[str, ReplicaProcess]):
    def __init__(self, folder: Path, host: ReplicaHost, on_change: Callable[[], None], turn: Callable[[str], Awaitable[None]]) -> None:
        """turn: waited for before each start of a replica whose model sleeps"""
        self._turn = turn
        self._folder = folder
        self._host = host
        self._on_change = on_change
        self._by_name: dict[str, ReplicaProcess] = {}
        self._numbers = count()
        self._has_forgotten_served = False

    def __getitem__(self, name: str) -> ReplicaProcess:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def make(
        self,
        config: FleetConfig,
        deployment: Deployment,
        replica: PlannedReplica,
        spec: ModelSpec,
        replaces: str,
        adapters: Sequence[AdapterSource],
    ) -> None:
        """Raises ConfigError if the file cannot be written."""
        share, number = self._share(config, deployment, spec, replaces), next(self._numbers)
        here = share if self._host.is_this_machine else None
        files = write_engine_files(config, spec, self._folder, name=replica.name, number=number, share=here, adapters=adapters)
        launch = partial(self._host.launch, config, lambda: process.spec, files, lambda listening: self[replica.name].listens(listening))
        turn = partial(self._turn, replica.name) if spec.sleeps else None
        keeper = ProcessKeeper(replica.name, launch, start_timeout_s=config.start_timeout_s, turn=turn)
        process: ReplicaProcess = ReplicaProcess(files, spec, share, keeper, self._on_change)
        self._by_name[replica.name] = process
        self._host.want(len(self))

    def _share(self, config: FleetConfig, deployment: Deployment, spec: ModelSpec, replaces: str) -> MachineShare:
        """The share of the replica it replaces, else the first free one. Where the load decides, there is one for each that may come.
        Engines that sleep have one together.
        """
        most = {spec.name: spec.autoscale.max for spec in config.models if spec.autoscale is not None}
        sleepers = {spec.name for spec in config.models if spec.sleeps}
        own = {name: target for name, target in deployment.targets.items() if name not in sleepers}
        total = sum(most.get(name, target.num_replicas) + target.num_standby for name, target in own.items()) + bool(sleepers)
        stay = (ReplicaPhase.STARTING, ReplicaPhase.STANDBY, ReplicaPhase.SERVING)
        staying = {name for name, replica in deployment.replicas.items() if replica.phase in stay}
        if shared := [process.share for name, process in self.items() if spec.sleeps and process.spec.sleeps and name in staying]:
            return shared[0]
        taken = {process.share.index for name, process in self.items() if name != replaces and name in staying}
        wanted = [self[replaces].share.index] if replaces in self else []
        used = {process.share.index for process in self.values()}  # by those that drain, too
        free = (index for index in range(total) if index not in used)
        index = next(index for index in chain((each for each in wanted if each < total), free, count()) if index not in taken)
        return MachineShare(index, max(total, index + 1))

    def launch(self) -> None:
        for process in self.values():
            if not process.is_launched:
                process.launch()

    def forget(self, name: str) -> None:
        process = self._by_name.pop(name)
        self._has_forgotten_served |= process.has_served
        process.cancel()
        process.files.remove()
        self._host.want(len(self))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for process in self.values() if (task := process.task) is not None]

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self.values()))

    @property
    def has_served(self) -> bool:
        """Forgotten replicas included."""
        return self._has_forgotten_served or any(process.has_served for process in self.values())

    def failure_of_all(self) -> HeadraceError | None:
        failures = [process.failure for process in self.values()]
        return failures[0] if failures and all(failures) else None

    def failures_of(self, replicas: list[PlannedReplica]) -> list[HeadraceError]:
        return [failure for replica in replicas if (failure := self[replica.name].failure) is not None]
