"""The supervisor: gateway processes and one engine process per replica, kept running, and taken down in order.

SIGTERM or SIGINT drains: first the gateways, which take no new work and let running streams finish, then the engines. A second signal
has the gateways end their streams with an error, and then ends everything. When the supervisor itself is killed, its leashes break and the
children leave by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from headrace.core.counted import counted
from headrace.fleet.config import FleetConfig
from headrace.fleet.files import ReplicaFiles, run_dir, write_engine_files, write_gateway_file
from headrace.fleet.keeper import ProcessKeeper
from headrace.fleet.launcher import Launcher, ProcessLauncher
from headrace.fleet.listening import reserved_port
from headrace.wire.stop_signals import StopSignals, first_of

log = logging.getLogger(__name__)

GATEWAY_GRACE_S = 5.0
"""Seconds beyond the drain time for the gateways to close the remaining streams."""

CUT_GRACE_S = 3.0
"""Seconds after a second signal for the gateways to end each stream with an error and exit."""

ENGINE_GRACE_S = 10.0
"""Seconds for engines to exit after the gateways have left: nothing runs any more, they free their weights."""


class FleetExit(IntEnum):
    DRAINED = 0
    CUT = 75
    """A second signal, or the drain time was over: running requests were cut."""


@dataclass(frozen=True, slots=True)
class FleetReady:
    """Everything serves.

    gateway   what the first gateway reported: "host" and "port" that all of them listen on
    replicas  name -> what its engine reported: "address", "instance_id", "decided" (lines for people)
    """

    gateway: Mapping[str, object]
    replicas: Mapping[str, Mapping[str, object]]


class Supervisor:
    """Owns every process of one deployment for the length of `run`."""

    def __init__(
        self, config: FleetConfig, *, launcher: Launcher | None = None, on_ready: Callable[[FleetReady], None] | None = None
    ) -> None:
        """on_ready  called once, when every gateway and every replica have served for the first time"""
        self._config = config.checked().with_keys()
        self._launcher = launcher or ProcessLauncher(log_format=config.log_format)
        self._on_ready = on_ready
        self.engines: list[ProcessKeeper] = []
        self.gateways: list[ProcessKeeper] = []

    async def run(self) -> FleetExit:
        """Until drained. Raises ConfigError or FleetFailed when a process cannot be kept running. Leaves no process behind."""
        stop = StopSignals()
        try:
            with run_dir(self._config.run_dir) as folder, self._address():
                return await self._run_in(folder, stop)
        finally:
            stop.close()

    @contextmanager
    def _address(self) -> Iterator[None]:
        """Keeps the gateways' address for the length of the block; a port that was free takes the place of 0 in the configuration."""
        with reserved_port(*self._config.gateway_address) as port:
            self._config = replace(self._config, gateway={**self._config.gateway, "port": port})
            yield

    async def _run_in(self, folder: Path, stop: StopSignals) -> FleetExit:
        replicas = write_engine_files(self._config, folder)
        self.gateways = self._gateway_keepers(write_gateway_file(self._config, replicas, folder))
        self.engines = [self._engine_keeper(replica) for replica in replicas]
        tasks = [asyncio.create_task(keeper.keep(), name=keeper.label) for keeper in (*self.gateways, *self.engines)]
        announcing = asyncio.create_task(self._announce())
        try:
            await first_of(*tasks, stop.soft, stop.hard)
            for task in tasks:
                if task.done():
                    task.result()
            num_gateways = len(self.gateways)
            return await self._drain(tasks[:num_gateways], tasks[num_gateways:], stop)
        finally:
            for task in [announcing, *tasks]:
                task.cancel()
            await asyncio.gather(announcing, *tasks, return_exceptions=True)

    def _gateway_keepers(self, path: Path) -> list[ProcessKeeper]:
        # Not forwarded: its standard output is the request log, and it writes more lines than all engines together.
        command = (*self._config.gateway_command, "--config", str(path))
        if self._config.num_gateways == 1:
            return [ProcessKeeper("gateway", command, self._launcher, forward=False)]
        return [
            ProcessKeeper(f"gateway-{index}", (*command, "--worker", str(index)), self._launcher, forward=False)
            for index in range(self._config.num_gateways)
        ]

    def _engine_keeper(self, replica: ReplicaFiles) -> ProcessKeeper:
        command = (*self._config.engine_command, "--config", str(replica.config))
        return ProcessKeeper(replica.name, command, self._launcher, forward=True, withheld=self._config.key_variables)

    async def _announce(self) -> None:
        """Call `on_ready` once everything serves."""
        for keeper in (*self.gateways, *self.engines):
            await keeper.ready.wait()
        if self._on_ready is not None:
            self._on_ready(FleetReady(self.gateways[0].facts, {keeper.label: keeper.facts for keeper in self.engines}))

    async def _drain(self, gateways: list[asyncio.Task[None]], engines: list[asyncio.Task[None]], stop: StopSignals) -> FleetExit:
        """Gateways first, so that no stream loses its engine while it may still finish."""
        log.info("stopping %s, then %s", _named(self.gateways), counted(len(self.engines), "engine"))
        _stop(self.gateways)
        left = await _ended(gateways, stop, self._config.drain_timeout_s + GATEWAY_GRACE_S)
        if stop.hard.done() and not left:
            _stop(self.gateways)  # their second signal, too
            await asyncio.wait(gateways, timeout=CUT_GRACE_S)
        _stop(self.engines)
        left = await _ended(engines, stop, ENGINE_GRACE_S) and left
        was_cut = any(gateway.was_cut for gateway in self.gateways)
        return FleetExit.DRAINED if left and not was_cut else FleetExit.CUT


def _named(gateways: Sequence[ProcessKeeper]) -> str:
    return "the gateway" if len(gateways) == 1 else counted(len(gateways), "gateway")


def _stop(keepers: Iterable[ProcessKeeper]) -> None:
    for keeper in keepers:
        keeper.stop()


async def _ended(tasks: list[asyncio.Task[None]], stop: StopSignals, timeout_s: float) -> bool:
    """Wait until all have ended. False when the time is over or a second signal came first."""
    everything = asyncio.gather(*tasks, return_exceptions=True)
    await first_of(everything, stop.hard, timeout_s=timeout_s)
    return everything.done()


def run_fleet(config: FleetConfig, *, on_ready: Callable[[FleetReady], None] | None = None) -> FleetExit:
    """Runs a deployment in the foreground until it is drained. Raises ConfigError or FleetFailed with the failing process's reason."""
    return asyncio.run(Supervisor(config, on_ready=on_ready).run())
