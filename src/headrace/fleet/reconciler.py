"""Makes the processes of this machine what they should be: engines are started and ended, and gateways read what has changed.

`policy.deployment` decides, this does it and reports what became of it. One round: ask the gateways what they see, have the deployment
plan, write the gateways' file and have every gateway read it, and only then start and end processes. docs/control.md has the rules.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from headrace.core.counted import counted
from headrace.core.errors import ConfigError, HeadraceError
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.files import MachineShare, gateway_content, write_engine_file, write_gateway_file
from headrace.fleet.gateways import GatewayGroup, GatewaysView
from headrace.fleet.keeper import ProcessKeeper
from headrace.fleet.launcher import Launcher
from headrace.fleet.replica_process import ReplicaProcess
from headrace.policy.deployment import (
    Deployment,
    DeploymentAction,
    EndRollout,
    PlannedReplica,
    ReplicaPhase,
    RetireReplica,
    RolloutOptions,
    StartReplica,
)
from headrace.wire.leash import ReloadRefused

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two questions to the gateways while a replica comes or goes."""

REFUSED_PAUSE_S = 5.0
"""Seconds until a change of replicas that a gateway has refused is offered to it again."""

CONNECT_TIMEOUT_S = 60.0
"""A successor whose engine serves and which a gateway still does not find ready after these seconds counts as one that cannot be started:
the gateway knows another tokenizer, or cannot reach it."""

STARTING = "It is being started."
REFUSED = "Its engine refused its configuration or weights."
DIED = "Its engine ended before it served."
NO_REPLICA = "It has no replica now."


class Reconciler:
    """Owns the engine processes of one deployment, and the gateways' file.

    config       what should be, with the secrets of this site filled in
    deployment   what is, and what to do next
    processes    name of a replica -> its process, until it has ended
    failures     model -> why its last rollout ended early
    """

    def __init__(self, config: FleetConfig, folder: Path, launcher: Launcher, gateways: GatewayGroup) -> None:
        """folder: the deployment's own. Raises ConfigError where its files cannot be written"""
        self.config = config
        self.deployment = Deployment()
        self.processes: dict[str, ReplicaProcess] = {}
        self.failures: dict[str, str] = {}
        self.gateways = gateways
        self.view = GatewaysView()
        self._folder = folder
        self._launcher = launcher
        self._specs: dict[tuple[str, int], ModelSpec] = {}
        self._numbers = count()
        self._drain_s: dict[str, float] = {}
        self._has_served = False
        self._is_frozen = False
        self._listeners: set[Callable[[str], None]] = set()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._round_done = asyncio.Condition()
        self._aim_at(config)
        self._plan()
        self.gateway_file = write_gateway_file(self._content(), folder)
        self._offered = self._content()

    # -- what commands do ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def progress(self, listener: Callable[[str], None]) -> Iterator[None]:
        """`listener` gets every line that says what is done, until the block ends."""
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def say(self, text: str) -> None:
        log.info("%s", text)
        for listener in [*self._listeners]:
            listener(text)

    async def change(self, command: Callable[[Deployment], None]) -> None:
        """Give the deployment a command and begin what follows from it. Raises what the command raises."""
        async with self._lock:
            await self._observe()
            command(self.deployment)
            self._retarget_specs()
            await self._round()
        self._wake.set()

    async def roll_out(self, model: str, options: RolloutOptions) -> None:
        """Replace every replica of a model. Raises ConfigError."""

        def command(deployment: Deployment) -> None:
            num_old = len(deployment.listed(model))
            revision = deployment.roll_out(model, options)
            self.failures.pop(model, None)
            self.say(f"{model}: revision {revision} replaces {counted(num_old, 'replica')}, one at a time")

        await self.change(command)

    async def reload(self, config: FleetConfig) -> None:
        """Have the whole deployment follow another configuration. Raises ConfigError and ReloadRefused; nothing was changed then."""
        async with self._lock:
            await self._observe()
            before = self.config, copy.deepcopy(self.deployment), {**self._specs}
            self.config = config
            try:
                self._aim_at(config)
                await self._round()
            except (ConfigError, ReloadRefused):
                self.config, self.deployment, self._specs = before
                await self._offer()
                self._carry_out()
                raise
        self._wake.set()

    async def drain(self, name: str, within_s: float, *, allow_outage: bool) -> None:
        """Retire one replica for good. Raises ConfigError."""

        def command(deployment: Deployment) -> None:
            if name not in deployment.replicas:
                raise ConfigError(name, "is not a replica here", f"Replicas: {', '.join(deployment.replicas) or 'none'}.")
            deployment.drain(name, allow_outage=allow_outage)
            self._drain_s[name] = within_s

        await self.change(command)

    async def look(self) -> None:
        """Ask the gateways what they see, for `view`."""
        self.view = await self.gateways.view()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a round after which `condition` holds."""
        async with self._round_done:
            await self._round_done.wait_for(condition)

    # -- the loop ------------------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start every process that is planned and was not started."""
        for process in self.processes.values():
            if not process.is_launched:
                process.launch()

    async def run(self) -> None:
        """Round after round, whenever a process reports something, until cancelled.

        Raises: the first failure where no model of the configuration can be served, and none has ever been.
        """
        while (failure := self._hopeless_failure()) is None:
            self._wake.clear()
            pause_s = await self._try_round()
            async with self._round_done:
                self._round_done.notify_all()
            await self._sleep(pause_s)
        raise failure

    def freeze(self) -> None:
        """Start and retire nothing from now on: the deployment ends."""
        self._is_frozen = True

    async def _try_round(self) -> float:
        """One round; seconds until the next one has to follow."""
        if self._is_frozen:
            return POLL_S
        try:
            async with self._lock:
                await self._observe()
                await self._round()
        except (ReloadRefused, ConfigError) as error:
            log.error("the gateways' file cannot be changed: %s", error)
            return REFUSED_PAUSE_S
        return POLL_S

    async def _sleep(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s if self._is_busy() and not self._is_frozen else None):
                await self._wake.wait()
        except TimeoutError:
            return

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """One per process that was launched; done when it has ended for good."""
        return [task for process in self.processes.values() if (task := process.task) is not None]

    async def limit_drain(self, within_s: float) -> None:
        """Give the gateways this many seconds for running requests, once they are asked to end. Raises ReloadRefused and ConfigError."""
        async with self._lock:
            timeouts = self.config.gateway.get("timeouts", {})
            assert isinstance(timeouts, Mapping), "the gateways read it"
            gateway = {**self.config.gateway, "timeouts": {**timeouts, "drain_s": max(within_s, 0.1)}}
            self.config = replace(self.config, gateway=gateway)
            await self._offer()

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self.processes.values()))

    def _is_busy(self) -> bool:
        """The gateways have to be asked: a replica comes or goes."""
        if any(target.rollout is not None for target in self.deployment.targets.values()):
            return True
        return any(
            replica.phase is ReplicaPhase.DRAINING or (replica.phase is ReplicaPhase.STARTING and self.processes[name].keeper.is_serving)
            for name, replica in self.deployment.replicas.items()
        )

    # -- one round -----------------------------------------------------------------------------------------------------------------

    async def _observe(self) -> None:
        """Tell the deployment what became of each process, and what the gateways see."""
        self.view = await self.gateways.view()
        now = asyncio.get_running_loop().time()
        for name, replica in [*self.deployment.replicas.items()]:
            process = self.processes[name]
            if replica.phase is ReplicaPhase.DRAINING:
                self._follow_drain(replica, process, now)
            elif process.failure is not None:
                self._note_failure(replica, process)
            else:
                self._note_readiness(replica, process, now)

    def _note_failure(self, replica: PlannedReplica, process: ReplicaProcess) -> None:
        if replica.phase is not ReplicaPhase.FAILED:
            self.deployment.failed(replica.name)
            self.say(f"{replica.name} cannot be started: {process.why_failed}")

    def _note_readiness(self, replica: PlannedReplica, process: ReplicaProcess, now: float) -> None:
        self.deployment.started_after_all(replica.name)
        is_ready = process.keeper.is_serving and self.view.is_ready(replica.model, replica.name)
        if is_ready and replica.phase is ReplicaPhase.STARTING:
            self.say(f"{replica.name} serves")
        self.deployment.seen(replica.name, is_ready=is_ready)
        if replica.phase is ReplicaPhase.STARTING and self._is_in_rollout(replica):
            process.give_up_unless_connected(now, CONNECT_TIMEOUT_S, self.view.why_not_ready(replica.model, replica.name))

    def _is_in_rollout(self, replica: PlannedReplica) -> bool:
        target = self.deployment.targets.get(replica.model)
        return target is not None and target.rollout is not None and replica.revision >= target.revision

    def _follow_drain(self, replica: PlannedReplica, process: ReplicaProcess, now: float) -> None:
        if process.has_ended:
            self.deployment.ended(replica.name)
            self.say(f"{replica.name} has left")
        elif process.is_unlisted:
            num_open = self.view.num_open(replica.model, replica.name)
            if num_open == 0 or not process.keeper.is_serving:
                process.end()
            elif now >= process.drain_until:
                self.say(f"{replica.name} is ended, its {counted(num_open or 0, 'open request')} move to other replicas")
                process.drain_until = math.inf
                process.keeper.kill()

    async def _round(self) -> None:
        """Plan, have the gateways follow, and start and end processes. Raises ReloadRefused and ConfigError: no process was touched."""
        if self._is_frozen:
            raise ConfigError("the deployment", "ends, and changes no more")
        self._plan()
        await self._offer()
        self._carry_out()

    def _plan(self) -> None:
        while actions := self.deployment.actions():
            for action in actions:
                self._do(action)

    def _do(self, action: DeploymentAction) -> None:
        match action:
            case StartReplica():
                self._make(self.deployment.start(action), action.replaces)
            case RetireReplica():
                self.deployment.retire(action.name)
            case EndRollout():
                self._end_rollout(action)

    def _end_rollout(self, action: EndRollout) -> None:
        self.deployment.end_rollout(action)
        if not action.failed:
            self.say(f"{action.model}: every replica was replaced")
            return
        self.failures[action.model] = f"{action.failed} cannot be started: {self.processes[action.failed].why_failed}"
        self.say(f"{action.model}: the rollout has ended, since {action.failed} cannot be started")

    def _make(self, replica: PlannedReplica, replaces: str) -> None:
        """A process for a planned replica, not yet launched. Raises ConfigError where its file cannot be written."""
        spec, share = self._specs[replica.model, replica.revision], self._share(replaces)
        files = write_engine_file(self.config, spec, self._folder, name=replica.name, number=next(self._numbers), share=share)
        command = (*self.config.engine_command, "--config", str(files.config))
        keeper = ProcessKeeper(replica.name, command, self._launcher, forward=True, withheld=self.config.key_variables)
        self.processes[replica.name] = ReplicaProcess(files, spec, share, keeper, self._wake.set)

    def _share(self, replaces: str) -> MachineShare:
        """The part of the machine of the replica that leaves, else the first that no process has."""
        if replaces in self.processes:
            return self.processes[replaces].share
        total = sum(target.num_replicas for target in self.deployment.targets.values())
        stay = (ReplicaPhase.STARTING, ReplicaPhase.SERVING)
        taken = {process.share.index for name, process in self.processes.items() if self._phase(name) in stay}
        index = next(index for index in count() if index not in taken)
        return MachineShare(index, max(total, index + 1))

    def _phase(self, name: str) -> ReplicaPhase | None:
        replica = self.deployment.replicas.get(name)
        return None if replica is None else replica.phase

    async def _offer(self) -> None:
        """Have every gateway follow the file, if it is another one. The one before comes back where a gateway refuses it."""
        content = self._content()
        if content == self._offered:
            return
        write_gateway_file(content, self._folder)
        try:
            await self.gateways.reload()
        except ReloadRefused:
            write_gateway_file(self._offered, self._folder)
            await self.gateways.reload()
            raise
        self._offered = content

    def _carry_out(self) -> None:
        """Start what was planned, and end what is planned no more. Every gateway has the list of replicas."""
        now = asyncio.get_running_loop().time()
        for name, process in [*self.processes.items()]:
            replica = self.deployment.replicas.get(name)
            if replica is None:
                self._forget(name, process)
            elif replica.phase is ReplicaPhase.DRAINING:
                self._begin_drain(replica, process, now)
            elif not process.is_launched:
                self.say(f"{name} is starting" + (f", for {replica.replaces}" if replica.replaces else ""))
                process.launch()

    def _begin_drain(self, replica: PlannedReplica, process: ReplicaProcess, now: float) -> None:
        if process.is_unlisted:
            return
        process.is_unlisted = True
        process.drain_until = now + self._drain_s.pop(replica.name, self.config.drain_timeout_s)
        num_open = self.view.num_open(replica.model, replica.name)
        self.say(f"{replica.name} is retired" + (f", {counted(num_open, 'request')} open" if num_open else ""))
        if process.failure is not None or not process.is_launched:
            process.cancel()

    def _forget(self, name: str, process: ReplicaProcess) -> None:
        process.cancel()
        process.remove_files()
        del self.processes[name]

    # -- what should be ------------------------------------------------------------------------------------------------------------

    def _aim_at(self, config: FleetConfig) -> None:
        """Number and options of every model's replicas. Changed options are a rollout; what failed is tried again."""
        specs = {model.name: model for model in config.models if model.replicas}
        known = {name: self._specs.get((name, target.revision)) for name, target in self.deployment.targets.items()}
        self.deployment.scale({name: spec.replicas for name, spec in specs.items()})
        for name, spec in specs.items():
            before = known.get(name)
            if before is not None and not _runs_alike(before, spec):
                self._specs[name, self.deployment.roll_out(name, RolloutOptions())] = spec
                self.failures.pop(name, None)
                continue
            self._specs[name, self.deployment.targets[name].revision] = spec
            if self.deployment.drop_failed(name):
                self.failures.pop(name, None)

    def _retarget_specs(self) -> None:
        """A revision that a command has made runs with the options of the file."""
        for spec in self.config.models:
            if (target := self.deployment.targets.get(spec.name)) is not None:
                self._specs.setdefault((spec.name, target.revision), spec)

    def _content(self) -> dict[str, object]:
        listed = {
            name: [self.processes[replica.name].files for replica in self.deployment.listed(name)] for name in self.deployment.targets
        }
        unavailable = {name: self.why_unavailable(name) for name, files in listed.items() if not files}
        return gateway_content(self.config, [each for files in listed.values() for each in files], unavailable)

    def why_unavailable(self, model: str) -> str:
        """Why a model has no replica that gateways may ask, in words that clients may read: no path, nothing of a configuration."""
        failures = [process.failure for process in self._processes_of(model) if process.failure is not None]
        if not failures:
            return NO_REPLICA
        return REFUSED if any(isinstance(failure, ConfigError) for failure in failures) else DIED

    def _processes_of(self, model: str) -> Iterable[ReplicaProcess]:
        return [self.processes[replica.name] for replica in self.deployment.of(model)]

    # -- the start of the deployment -----------------------------------------------------------------------------------------------

    async def first_service(self) -> None:
        """Wait until every replica has served or failed. Does not return where `run` raises."""
        names = self.deployment.replicas
        await self.until(lambda: all(self._is_decided(name) for name in names) and self._hopeless_failure() is None)

    def _hopeless_failure(self) -> HeadraceError | None:
        self._has_served = self._has_served or any(process.keeper.ready.is_set() for process in self.processes.values())
        if self._has_served or any(model.upstreams or not model.replicas for model in self.config.models):
            return None
        failures = [process.failure for process in self.processes.values()]
        return failures[0] if all(failures) else None

    def _is_decided(self, name: str) -> bool:
        process = self.processes[name]
        return process.failure is not None or process.keeper.ready.is_set()


def _runs_alike(before: ModelSpec, after: ModelSpec) -> bool:
    """Engines of both have the same options."""
    return (before.folder, dict(before.engine)) == (after.folder, dict(after.engine))


def with_site_keys(before: FleetConfig, after: FleetConfig) -> FleetConfig:
    """`after` with the secrets and the port that this site has had since its start, where `after` leaves them open."""
    kept = {name: before.gateway[name] for name in ("salt_key", "port") if not after.gateway.get(name) and name in before.gateway}
    return replace(after, block_key=after.block_key or before.block_key, gateway={**after.gateway, **kept})


FIXED = ("block_key", "log_format", "run_dir", "engine_command", "gateway_command")
FIXED_GATEWAY = ("host", "port", "salt_key", "workers")


def check_can_become(before: FleetConfig, after: FleetConfig) -> None:
    """Raises ConfigError naming the first option that takes a restart."""
    changed = [name for name in FIXED if getattr(before, name) != getattr(after, name)]
    changed += [f"gateway.{name}" for name in FIXED_GATEWAY if before.gateway.get(name) != after.gateway.get(name)]
    if changed:
        raise ConfigError(changed[0], "cannot change while the deployment runs", "Stop and start it for this, or write what it was.")
    folders = {model.name: model.folder for model in before.models}
    for model in after.models:
        if model.folder is not None and folders.get(model.name) not in (None, model.folder):
            remedy = "Add it under another name and reload; then remove this one, give its name to the new one as an alias, and reload."
            raise ConfigError(f"models[{model.name}]", "cannot have another folder while the deployment runs", remedy)
