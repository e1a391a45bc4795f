"""Holds the engine processes of one deployment by replica name: makes them from the configuration, starts, forgets and closes them.

`fleet.reconciler` decides when. `fleet.replica_process` is one such process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, count
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.files import MachineShare, write_engine_file
from headrace.fleet.keeper import ProcessKeeper
from headrace.fleet.launcher import Launcher
from headrace.fleet.replica_process import ReplicaProcess
from headrace.policy.deployment import Deployment, PlannedReplica, ReplicaPhase


class ReplicaProcesses(Mapping[str, ReplicaProcess]):
    """Replica's name -> its process, from `make` until `forget`.

    folder     private directory of the deployment, for the engines' files
    on_change  called when a replica serves, fails or has ended
    """

    def __init__(self, folder: Path, launcher: Launcher, on_change: Callable[[], None]) -> None:
        self._folder = folder
        self._launcher = launcher
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

    def make(self, config: FleetConfig, deployment: Deployment, replica: PlannedReplica, spec: ModelSpec, replaces: str) -> None:
        """Make the process of a planned replica, without launching it. Raises ConfigError if its file cannot be written.

        replaces  name of the replica that this one replaces; "" for none
        """
        share = self._share(deployment, replaces)
        files = write_engine_file(config, spec, self._folder, name=replica.name, number=next(self._numbers), share=share)
        keeper = ProcessKeeper(
            replica.name,
            (*config.engine_command, "--config", str(files.config)),
            self._launcher,
            forward=True,
            withheld=config.key_variables,
            start_timeout_s=config.start_timeout_s,
        )
        self._by_name[replica.name] = ReplicaProcess(files, spec, share, keeper, self._on_change)

    def _share(self, deployment: Deployment, replaces: str) -> MachineShare:
        """The machine share of a new replica: that of the replica it replaces, else the first free one of as many as there are planned
        engines."""
        total = sum(target.num_replicas for target in deployment.targets.values())
        stay = (ReplicaPhase.STARTING, ReplicaPhase.SERVING)
        staying = {name for name, replica in deployment.replicas.items() if replica.phase in stay}
        taken = {process.share.index for name, process in self.items() if name != replaces and name in staying}
        wanted = [self[replaces].share.index] if replaces in self else []
        index = next(index for index in chain((each for each in wanted if each < total), count()) if index not in taken)
        return MachineShare(index, max(total, index + 1))

    def launch(self) -> None:
        """Launch every process that is not launched yet."""
        for process in self.values():
            if not process.is_launched:
                process.launch()

    def forget(self, name: str) -> None:
        """End the process of a replica that is not planned any more, and remove its files."""
        process = self._by_name.pop(name)
        self._has_forgotten_served |= process.has_served
        process.cancel()
        process.remove_files()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of launched processes; each is done when its process has ended for good."""
        return [task for process in self.values() if (task := process.task) is not None]

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self.values()))

    @property
    def has_served(self) -> bool:
        """Whether any replica has served, forgotten ones included."""
        return self._has_forgotten_served or any(process.has_served for process in self.values())

    def failure_of_all(self) -> HeadraceError | None:
        """The first failure if every process has failed; else None."""
        failures = [process.failure for process in self.values()]
        return failures[0] if failures and all(failures) else None

    def failures_of(self, replicas: list[PlannedReplica]) -> list[HeadraceError]:
        return [failure for replica in replicas if (failure := self[replica.name].failure) is not None]
