"""Runs a deployment's processes, and takes them down in order: first the gateways, then the engines.

After a second signal the gateways end their streams with an error, and then everything ends. When the supervisor itself is killed, its
leashes break and the children leave by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path

from headrace.core.errors import counted
from headrace.core.tasks import end_tasks
from headrace.fleet.admin import AdminRequests, admin_socket
from headrace.fleet.admin_listen import AdminAddress
from headrace.fleet.commands import CommandAudit, WriteAudit, not_kept
from headrace.fleet.config import FleetConfig
from headrace.fleet.control import ConfigSource, FleetControl, reloading_when_asked
from headrace.fleet.files import run_dir
from headrace.fleet.gateways import GatewayGroup, reserved_port
from headrace.fleet.keeper import ProcessKeeper
from headrace.fleet.kubernetes.service import check_in_pod
from headrace.fleet.launcher import Launcher, ProcessLauncher
from headrace.fleet.reconciler import Reconciler
from headrace.fleet.replica_processes import ReplicaHost, ThisMachine
from headrace.machine.folders import expanded
from headrace.machine.signals import StopSignals, first_of, on_hangup
from headrace.observe.logs import LogFormat
from headrace.policy.deployment import ReplicaPhase

log = logging.getLogger(__name__)

GATEWAY_GRACE_S = 5.0

NOTICE_S = 1.0

CUT_GRACE_S = 3.0

ENGINE_GRACE_S = 10.0
"""No request runs while engines exit."""


LOOK_S = 1.0
"""Looks are counted, not seconds: a supervisor that was stopped has not looked."""

GATEWAY_LOOKS = 4
"""Looks until a silent gateway has hung, about ten seconds: each waits `gateways.STATUS_TIMEOUT_S`."""


class FleetExit(IntEnum):
    DRAINED = 0
    CUT = 75
    """Running requests were cut."""


@dataclass(frozen=True, slots=True)
class FleetReady:
    """gateway   "host" and "port", which all gateways share
    replicas  name -> facts of its engine: "address", "instance_id", "decided" (lines for people)
    """

    gateway: Mapping[str, object]
    replicas: Mapping[str, Mapping[str, object]]
    failed: Mapping[str, str] = field(default_factory=dict)
    starting: Sequence[str] = ()


class Supervisor:
    def __init__(
        self,
        config: FleetConfig,
        *,
        launcher: Launcher | None = None,
        source: ConfigSource | None = None,
        requests: Sequence[AdminRequests] = (),
        audit: WriteAudit = not_kept,
        on_ready: Callable[[FleetReady], None] | None = None,
    ) -> None:
        """source    None, or one without a file: the configuration cannot be read again, and SIGHUP drains
        on_ready  called once, when every gateway has served, and every replica has served, cannot be started or is late
        """
        self._config = config.checked().with_site_key()
        self._launcher = launcher or ProcessLauncher(log_format=LogFormat(config.log_format))
        self._source = source
        self._requests = requests
        self._audit = CommandAudit(audit)
        self._on_ready = on_ready
        self._within_s: float | None = None
        self._reconciler: Reconciler | None = None
        self._gateways = GatewayGroup()
        self._admin: AdminAddress | None = None

    @property
    def gateways(self) -> list[ProcessKeeper]:
        return self._gateways.keepers

    @property
    def engines(self) -> list[ProcessKeeper]:
        return [] if self._reconciler is None else [process.keeper for process in self._reconciler.processes.values()]

    async def run(self) -> FleetExit:
        """Raises ConfigError or FleetFailed if nothing can be served. Leaves no process behind."""
        check_in_pod(spec.kubernetes for spec in self._config.models)
        reload = asyncio.Event()
        self._admin = None if self._config.admin is None else self._config.admin.opened()
        with (
            StopSignals() as stop,  # entered first, so that a signal during the start waits until the processes serve
            on_hangup(None if self._source is None or self._source.file is None else reload.set, stop),
            run_dir(None if self._config.run_dir is None else expanded(self._config.run_dir)) as folder,
            self._address(),
        ):
            async with self._host(folder) as host:
                return await self._run_in(folder, host, stop, reload)

    @contextmanager
    def _address(self) -> Iterator[None]:
        with reserved_port(*self._config.gateway_address) as port:
            self._config = replace(self._config, gateway={**self._config.gateway, "port": port})
            yield

    def _host(self, folder: Path) -> AbstractAsyncContextManager[ReplicaHost]:
        if self._config.ray is None:
            return nullcontext(ThisMachine(self._launcher))
        from headrace.fleet.ray.cluster import opened_cluster

        return opened_cluster(self._config.ray, folder)

    async def _run_in(self, folder: Path, host: ReplicaHost, stop: StopSignals, reload: asyncio.Event) -> FleetExit:
        reconciler = self._reconciler = Reconciler(self._config, folder, host, self._gateways)
        self._gateways.keepers = self._gateway_keepers(reconciler.gateway_file.path)
        gateways = [asyncio.create_task(keeper.keep(), name=keeper.label) for keeper in self.gateways]
        reconciler.processes.launch()
        reconciling = asyncio.create_task(reconciler.run(), name="reconciler")
        watching = asyncio.create_task(HangWatch(reconciler).run(), name="hang watch")
        slicing = asyncio.create_task(reconciler.slices.run(reconciler), name="slices")
        controlling = asyncio.create_task(self._control(folder, reconciler, stop, reload), name="control")
        discovering = asyncio.create_task(_discover(reconciler), name="discovery")
        tasks = [*gateways, reconciling, watching, slicing, controlling, discovering]
        try:
            await first_of(*tasks, stop.soft, stop.hard)
            for task in tasks:
                if task.done():
                    task.result()
            watching.cancel()
            return await self._drain(gateways, slicing, reconciler, stop)
        finally:
            await end_tasks(tasks)
            await reconciler.processes.close()

    def _gateway_keepers(self, path: Path) -> list[ProcessKeeper]:
        # Not forwarded: its standard output is the request log, and it writes more lines than all engines together.
        command = (*self._config.gateway_command, "--config", str(path))
        commands = {f"gateway-{index}": (*command, "--worker", str(index)) for index in range(self._config.num_gateways)}
        commands = commands if len(commands) > 1 else {"gateway": command}
        launch, make = partial(self._launcher.launch, forward=False), partial(ProcessKeeper, start_timeout_s=self._config.start_timeout_s)
        return [make(label, partial(launch, label, command)) for label, command in commands.items()]

    async def _control(self, folder: Path, reconciler: Reconciler, stop: StopSignals, reload: asyncio.Event) -> None:
        control = FleetControl(reconciler, self._source, partial(self._drain_all, reconciler, stop), self._audit)
        async with admin_socket(folder, control, self._requests, self._admin), reloading_when_asked(reload, control):
            for keeper in self.gateways:
                await keeper.ready.wait()
            await reconciler.first_service()
            if self._on_ready is not None:
                self._on_ready(self._ready(reconciler))
            await control.scale_by_load()

    def _ready(self, reconciler: Reconciler) -> FleetReady:
        processes = reconciler.processes
        failed = {name: process.why_failed for name, process in processes.items() if process.failure is not None}
        served = {name: process.keeper.facts for name, process in processes.items() if process.keeper.ready.is_set() and name not in failed}
        return FleetReady(self.gateways[0].facts, served, failed, [name for name in processes if name not in {*served, *failed}])

    async def _drain_all(self, reconciler: Reconciler, stop: StopSignals, within_s: float) -> None:
        """The end begins after NOTICE_S at the latest."""
        asyncio.get_running_loop().call_later(within_s, stop.ask, f"{within_s:g} s are over")
        self._within_s = within_s
        reconciler.freeze()
        await reconciler.gateway_file.limit_drain(within_s, NOTICE_S)
        if not stop.soft.done():
            stop.ask(f"drained within {within_s:g} s")

    async def _drain(
        self, gateways: list[asyncio.Task[None]], slicing: asyncio.Task[None], reconciler: Reconciler, stop: StopSignals
    ) -> FleetExit:
        """The gateways first, so that no stream loses its engine. Until then engines still wake: requests may be held for them."""
        reconciler.freeze()
        log.info("stopping %s, then %s", _named(self.gateways), counted(len(self.engines), "engine"))
        _stop(self.gateways)
        drain_s = reconciler.config.drain_timeout_s if self._within_s is None else self._within_s
        left = await _ended(gateways, stop, drain_s + GATEWAY_GRACE_S)
        if stop.hard.done() and not left:
            _stop(self.gateways)  # their second signal, too
            await asyncio.wait(gateways, timeout=CUT_GRACE_S)
        slicing.cancel()
        _stop(self.engines)
        left = await _ended(reconciler.processes.tasks, stop, ENGINE_GRACE_S) and left
        was_cut = any(gateway.was_cut for gateway in self.gateways)
        return FleetExit.DRAINED if left and not was_cut else FleetExit.CUT


async def _discover(reconciler: Reconciler) -> None:
    if not reconciler.services:
        await reconciler.until(lambda: bool(reconciler.services))
    from headrace.fleet.kubernetes.api import KubernetesApi  # aiohttp takes a fifth of a second
    from headrace.fleet.kubernetes.discovery import Discovery

    await Discovery(reconciler, KubernetesApi.of_pod()).run()


class HangWatch:
    """Ends the processes that hang (docs/fleet.md): gateways that answer nothing, and engines that no gateway can use.

    A process that has answered meanwhile counts as another one.
    """

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self._num_looks: dict[tuple[str, int | None, int], int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # the outermost loop: a bug must not leave later hangs unnoticed
                log.exception("looking for processes that hang failed")

    async def look(self) -> None:
        before, self._num_looks, limit_s = self._num_looks, {}, self._reconciler.config.hang_timeout_s
        if not limit_s:
            return
        await self._reconciler.look(LOOK_S)
        for keeper, max_looks, reason in self._suspects(limit_s):
            process = keeper.label, keeper.pid, keeper.asked.num_answers if keeper.asked is not None else 0
            self._num_looks[process] = before.get(process, 0) + 1
            if self._num_looks[process] >= max_looks:
                log.error("%s: it is killed, and started again", reason)
                keeper.restart()

    def _suspects(self, limit_s: float) -> Iterator[tuple[ProcessKeeper, int, str]]:
        """With the number of looks until it has hung, and the reason. Engines that have not loaded would gain nothing by a new process."""
        reconciler, view, max_looks = self._reconciler, self._reconciler.view, math.ceil(limit_s / LOOK_S)
        for keeper in reconciler.gateways.keepers:
            if keeper.label in view.silent:
                yield keeper, GATEWAY_LOOKS, f"{keeper.label} answers nothing"
        for name, replica in reconciler.deployment.replicas.items():
            keeper = reconciler.processes[name].keeper
            has_loaded = replica.phase is ReplicaPhase.SERVING or (replica.phase is ReplicaPhase.STARTING and replica.was_loaded)
            if has_loaded and keeper.is_serving and view.is_lost(replica.model, name):
                yield keeper, max_looks, f"no gateway could use {name} for {limit_s:g} s ({view.why_not_ready(replica.model, name)})"


def _named(gateways: Sequence[ProcessKeeper]) -> str:
    return "the gateway" if len(gateways) == 1 else counted(len(gateways), "gateway")


def _stop(keepers: Iterable[ProcessKeeper]) -> None:
    for keeper in keepers:
        keeper.stop()


async def _ended(tasks: Sequence[asyncio.Task[None]], stop: StopSignals, timeout_s: float) -> bool:
    """False: too late, or a second signal came first."""
    everything = asyncio.gather(*tasks, return_exceptions=True)
    await first_of(everything, stop.hard, timeout_s=timeout_s)
    return everything.done()


def run_fleet(
    config: FleetConfig,
    *,
    source: ConfigSource | None = None,
    requests: Sequence[AdminRequests] = (),
    audit: WriteAudit = not_kept,
    on_ready: Callable[[FleetReady], None] | None = None,
) -> FleetExit:
    return asyncio.run(Supervisor(config, source=source, requests=requests, audit=audit, on_ready=on_ready).run())
