"""Reconciles this machine's processes with the desired state.

`policy.deployment` decides; this module acts (docs/control.md): processes start and end only after every gateway has read the new list.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError, counted
from headrace.fleet.adapters import read_lists
from headrace.fleet.canary_watch import CanaryWatch
from headrace.fleet.commands import ModelProgress, Progress
from headrace.fleet.config import DesiredState, FleetConfig, ModelSpec
from headrace.fleet.engine_adapters import EngineAdapters
from headrace.fleet.files import gateway_content
from headrace.fleet.gateways import GatewayFile, GatewayGroup, GatewaysView, TextRefused, why_unavailable
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.placement import EngineSlices
from headrace.fleet.replica_processes import ReplicaHost, ReplicaProcess, ReplicaProcesses
from headrace.machine.resources import why_crowded
from headrace.policy.canary import MAX_WAIT_S, MIN_REQUESTS
from headrace.policy.deployment import (
    Deployment,
    DeploymentAction,
    EndRollout,
    PlannedReplica,
    ReplicaPhase,
    RetireReplica,
    RolloutOptions,
    StartReplica,
    TakeStandby,
)
from headrace.wire.leash import ASLEEP, ReloadRefused

log = logging.getLogger(__name__)

POLL_S = 0.1

REFUSED_PAUSE_S = 5.0

STRAGGLERS_S = 10.0
"""Counted from the first replica that serves; then the deployment counts as started without the others."""

CONNECT_TIMEOUT_S = 60.0
"""A successor that no gateway finds ready for this long counts as one that cannot be started."""


class Reconciler:
    """processes  replica's name -> its process, until the process has ended
    failures   model -> why its last rollout ended early
    found      Service -> name, address and tls_name of the engines in its pods
    scaling    model -> keys of its entry in the gateways' file that its scaling decides
    """

    def __init__(self, config: FleetConfig, folder: Path, host: ReplicaHost, gateways: GatewayGroup) -> None:
        """folder: private directory of the deployment. Raises ConfigError"""
        self._desired = DesiredState(config)
        self._wake = asyncio.Event()
        self.deployment = Deployment()
        self.slices = EngineSlices(config.sleep_budget_bytes)
        self.processes = ReplicaProcesses(folder, host, self._wake.set, self.slices.turn)
        self.adapters = EngineAdapters(read_lists(config), self.processes)
        for line in self.adapters.lists.lines():
            log.warning("%s", line)
        self.failures: dict[str, str] = {}
        self.found: dict[KubernetesService, Sequence[Mapping[str, object]]] = {}
        self.scaling: dict[str, Mapping[str, object]] = {}
        self.gateways = gateways
        self.progress = Progress()
        self.view = GatewaysView()
        self._asked_at = -math.inf
        self._drain_s: dict[str, float] = {}
        self._canaries: dict[str, CanaryWatch] = {}
        self._is_frozen = False
        self._lock = asyncio.Lock()
        self._round_done = asyncio.Condition()
        self._desired.follow(config, self.deployment)
        self._plan()
        for warning in self.crowded():
            self.progress.say(warning)
        self.gateway_file = GatewayFile(folder, gateways, self._content())

    @property
    def config(self) -> FleetConfig:
        return self._desired.config

    # -- what commands do ----------------------------------------------------------------------------------------------------------

    async def change(self, command: Callable[[Deployment], Iterable[ModelProgress]]) -> None:
        """Raises the command's errors, and ReloadRefused or ConfigError; nothing is changed then."""

        def apply() -> list[ModelProgress]:
            lines = [*command(self.deployment)]
            self._desired.note_revisions(self.deployment)
            return lines

        await self._all_or_nothing(apply)
        self._wake.set()

    async def roll_out(self, models: Sequence[str], options: RolloutOptions, config: FleetConfig) -> dict[str, int]:
        """One model after another. Returns their new revisions. Raises as `change`."""
        revisions = {}

        def command(deployment: Deployment) -> Iterator[ModelProgress]:
            self._desired.config = config
            for spec in config.models:
                if (model := spec.name) not in models:
                    continue
                num_old = len(deployment.listed(model))
                revisions[model] = revision = deployment.roll_out(
                    model, replace(options, is_version=self._desired.is_version(spec, deployment))
                )
                self.failures.pop(model, None)
                yield ModelProgress(model, f"{model}: revision {revision} replaces {counted(num_old, 'replica')}, one at a time")
                yield from self._memory_note(model)

        await self.change(command)
        return revisions

    async def reload(self, config: FleetConfig) -> None:
        """Raises as `change`."""

        def apply() -> list[ModelProgress]:
            for model in self._desired.follow(config, self.deployment):
                self.failures.pop(model, None)
            return [*(line for model in self.deployment.targets for line in self._memory_note(model)), *self.crowded()]

        lists = await asyncio.to_thread(read_lists, config)
        changed = [model for model in config.models if lists.sources(model.name) or self.adapters.lists.sources(model.name)]
        async with self.adapters.changed(lists, changed):
            await self._all_or_nothing(apply)
        self._wake.set()

    def _memory_note(self, model: str) -> Iterator[ModelProgress]:
        """For successors that size their KV cache by the memory that their predecessors leave free."""
        rollout = self.deployment.targets[model].rollout
        [options] = [self.config.engine_options(each) for each in self.config.models if each.name == model]
        is_fixed = any(options.get(name) is not None for name in ("num_kv_blocks", "kv_cache_bytes", "memory_bytes"))
        if rollout is None or not rollout.max_surge or is_fixed:
            return
        reason = "a successor sizes its KV cache by the memory that is free beside its predecessor"
        yield ModelProgress(model, f"{model}: {reason}; num_kv_blocks makes it a fixed size, --max-surge 0 ends the predecessor first")

    def crowded(self) -> Iterator[ModelProgress]:
        """Warns of replicas of several ranks that have more threads than there are CPUs."""
        for spec in self.config.models:
            target = self.deployment.targets.get(spec.name)
            if target is None or spec.num_ranks == 1 or self.config.ray is not None:
                continue
            if crowd := why_crowded(target.num_replicas * spec.num_ranks, int(str(spec.engine.get("num_threads") or 1))):
                text = f"{spec.name}: {counted(target.num_replicas, 'replica')} of {spec.num_ranks} ranks are {crowd}"
                yield ModelProgress(spec.name, text, logging.WARNING)

    async def _all_or_nothing(self, apply: Callable[[], Iterable[ModelProgress]]) -> None:
        """If `apply` or the round raises, the plan before it is restored."""
        async with self._lock:
            await self._observe()
            before = self._desired.copy(), self.deployment.copy(), {**self.failures}, {**self._drain_s}
            try:
                await self._round(apply())
            except (ConfigError, ReloadRefused):
                self._desired, self.deployment, self.failures, self._drain_s = before
                self._carry_out()
                raise

    async def drain(self, name: str, within_s: float, *, allow_outage: bool) -> None:

        def command(deployment: Deployment) -> list[ModelProgress]:
            deployment.drain(name, allow_outage=allow_outage)
            self._drain_s[name] = within_s
            return []

        await self.change(command)

    @property
    def services(self) -> Set[KubernetesService]:
        return {spec.kubernetes for spec in self.config.models if spec.kubernetes is not None}

    def find(self, service: KubernetesService, engines: Sequence[Mapping[str, object]]) -> None:
        self.found[service] = engines
        self._wake.set()

    def note_scaling(self, model: str, keys: Mapping[str, object]) -> None:
        """keys: as in `scaling`; those before no longer hold"""
        if keys != self.scaling.get(model, {}):
            self.scaling[model] = keys
            self._wake.set()

    def with_found(self, spec: ModelSpec) -> ModelSpec:
        if spec.kubernetes is None:
            return spec
        [alike] = spec.remote
        return replace(spec, remote=tuple({**alike, **engine} for engine in self.found.get(spec.kubernetes, ())))

    async def look(self, max_age_s: float = POLL_S) -> None:
        """Asks the gateways, unless the view is one that was asked for, by any caller, less than max_age_s ago."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= max_age_s:
            self.view, self._asked_at = await self.gateways.view(), now

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._round_done:
            await self._round_done.wait_for(condition)

    # -- the loop ------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises the first failure if no model can be served and none ever was."""
        while (failure := self._hopeless_failure()) is None:
            self._wake.clear()
            pause_s = await self._try_round()
            async with self._round_done:
                self._round_done.notify_all()
            await self._sleep(pause_s)
        raise failure

    def freeze(self) -> None:
        self._is_frozen = True

    async def _try_round(self) -> float:
        """Returns the seconds until the next round must follow."""
        if self._is_frozen:
            return POLL_S
        try:
            await self._all_or_nothing(tuple)
        except (ReloadRefused, ConfigError) as error:
            if self._is_frozen:  # it was meanwhile: the deployment ends
                return POLL_S
            log.error("what is planned cannot be done: %s", error)
            return REFUSED_PAUSE_S
        except Exception:  # the outermost loop: a bug must not end what serves
            log.exception("a round of the reconciler failed")
            return REFUSED_PAUSE_S
        return POLL_S

    async def _sleep(self, pause_s: float) -> None:
        is_waiting = self._is_busy() or pause_s > POLL_S
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s if is_waiting and not self._is_frozen else None):
                await self._wake.wait()

    def _is_busy(self) -> bool:
        if any(target.rollout is not None for target in self.deployment.targets.values()):
            return True
        return any(
            replica.phase is ReplicaPhase.DRAINING or (replica.phase is ReplicaPhase.STARTING and self.processes[name].has_served)
            for name, replica in self.deployment.replicas.items()
        )

    # -- one round -----------------------------------------------------------------------------------------------------------------

    async def _observe(self) -> None:
        await self.look(0.0)  # whether a replica is still in use is asked after the gateways have read the list without it
        now = asyncio.get_running_loop().time()
        for name, replica in [*self.deployment.replicas.items()]:
            process = self.processes[name]
            if replica.phase is ReplicaPhase.DRAINING:
                self._follow_drain(replica, process, now)
            elif process.failure is not None:
                self._note_failure(replica, process)
            elif self.view.is_refused(replica.model, name):
                process.give_up(TextRefused(name, self.view.why_not_ready(replica.model, name).rstrip(".")))
                self._note_failure(replica, process)
            else:
                self._note_readiness(replica, process, now)
        if self.view.answers and not self.view.silent:
            for model in self.deployment.targets:
                self._look_at_canary(model, now)

    def _look_at_canary(self, model: str, now: float) -> None:
        canary, watch = self.deployment.canary(model), self._canaries.pop(model, None)
        if canary is None:
            return
        num_starts = self.processes[canary.name].keeper.num_starts
        if watch is None or watch.name != canary.name:
            watch = CanaryWatch(canary.name, num_starts, now)
            limits = f"{MIN_REQUESTS} requests, at most {MAX_WAIT_S:g} s"
            self._say(model, f"{canary.name} has another version of {model}: it serves beside the others for {limits}")
        reason = self.view.why_not_ready(model, canary.name) or "its process does not serve"
        why_not_ready = "" if canary.is_ready or reason == ASLEEP else reason
        before = [replica for replica in self.deployment.of(model) if replica.revision <= self.deployment.previous_revision(model)]
        is_one_lost = any(replica.phase is ReplicaPhase.SERVING and not replica.is_ready for replica in before)
        counts = {replica.name: self.view.served(model, replica.name) for replica in (canary, *before)}
        judged = watch.look(counts, num_starts, why_not_ready, now, is_one_lost=is_one_lost)
        if judged is None:
            self._canaries[model] = watch
        elif judged.is_worse:
            self.deployment.roll_back(model)
            self._desired.return_to(model, self.deployment.targets[model].revision)
            self.failures[model] = f"{canary.name} is rolled back: {judged.reason}"
            self._say(model, f"{model}: {self.failures[model]}", logging.ERROR)
        else:
            self.deployment.passed(model)
            self._say(model, f"{model}: the rollout goes on after {canary.name}: {judged.reason}")

    def _note_failure(self, replica: PlannedReplica, process: ReplicaProcess) -> None:
        if replica.phase is not ReplicaPhase.FAILED:
            self.deployment.failed(replica.name)
            self._say(replica.model, f"{replica.name} cannot be started: {process.why_failed}", logging.ERROR)

    def _note_readiness(self, replica: PlannedReplica, process: ReplicaProcess, now: float) -> None:
        self.deployment.started_after_all(replica.name)
        if replica.is_standby:
            self._note_loaded(replica, process)
            return
        is_ready = self.view.is_ready(replica.model, replica.name) if process.keeper.is_serving else False
        if process.spec.sleeps and process.keeper.is_serving and self.view.why_not_ready(replica.model, replica.name) == ASLEEP:
            is_ready = True  # the next request wakes it
        if is_ready is None:
            return
        if is_ready and replica.phase is ReplicaPhase.STARTING:
            self._say(replica.model, f"{replica.name} serves")
        self.deployment.seen(replica.name, is_ready=is_ready)
        if replica.phase is ReplicaPhase.STARTING and self._is_in_rollout(replica):
            process.give_up_unless_connected(now, CONNECT_TIMEOUT_S, self.view.why_not_ready(replica.model, replica.name))

    def _note_loaded(self, replica: PlannedReplica, process: ReplicaProcess) -> None:
        if process.has_served and replica.phase is ReplicaPhase.STARTING:
            self.deployment.loaded(replica.name)
            self._say(replica.model, f"{replica.name} stands by")

    def _is_in_rollout(self, replica: PlannedReplica) -> bool:
        target = self.deployment.targets.get(replica.model)
        return target is not None and target.rollout is not None and replica.revision >= target.revision

    def _follow_drain(self, replica: PlannedReplica, process: ReplicaProcess, now: float) -> None:
        if process.has_ended:
            self.deployment.ended(replica.name)
            self._say(replica.model, f"{replica.name} has left")
        elif process.is_unlisted:
            num_open = self.view.num_open(replica.model, replica.name)
            if num_open == 0 or not process.keeper.is_serving:
                process.end()
            elif now >= process.drain_until:
                self._say(replica.model, f"{replica.name} is ended, its {counted(num_open or 0, 'open request')} move to other replicas")
                process.drain_until = math.inf
                process.keeper.kill()

    async def _round(self, lines: Iterable[ModelProgress]) -> None:
        if self._is_frozen:
            raise ConfigError("the deployment", "ends, and changes no more")
        self._plan()
        await self.gateway_file.offer(self._content())
        for line in lines:
            self.progress.say(line)
        self._carry_out()

    def _plan(self) -> None:
        while actions := self.deployment.actions():
            for action in actions:
                self._do(action)

    def _do(self, action: DeploymentAction) -> None:
        match action:
            case StartReplica():
                replica = self.deployment.start(action)
                spec = self._desired.options[replica.model, replica.revision]
                adapters = self.adapters.lists.sources(replica.model)
                self.processes.make(self.config, self.deployment, replica, spec, action.replaces, adapters)
            case TakeStandby():
                self.deployment.take(action.name)
                self._say(self.deployment.replicas[action.name].model, f"{action.name} stood by, and is listed")
            case RetireReplica():
                self.deployment.retire(action.name)
            case EndRollout():
                self._end_rollout(action)

    def _end_rollout(self, action: EndRollout) -> None:
        before = self.deployment.targets[action.model]
        self.deployment.end_rollout(action)
        if before.rollout is not None and before.rollout.is_version and (action.failed or action.kept):
            self._desired.return_to(action.model, before.rollout.previous)
        if action.kept:
            reason = f"{action.kept} is the only replica of {action.model} now and --max-surge 0 would leave none"
            self.failures[action.model] = f"{reason}. Use --max-surge 1 if memory allows two copies, or say --allow-outage."
            self._say(action.model, f"{action.model}: the rollout has ended before {action.kept} was replaced: {reason}", logging.ERROR)
            return
        if not action.failed:
            self._say(action.model, f"{action.model}: " + ("as it was before" if before.is_rollback else "every replica was replaced"))
            return
        self.failures[action.model] = f"{action.failed} cannot be started: {self.processes[action.failed].why_failed}"
        is_going_back = self.deployment.targets[action.model].rollout is not None
        end = "is rolled back" if is_going_back else "has ended"
        self._say(action.model, f"{action.model}: the rollout {end}, since {action.failed} cannot be started", logging.ERROR)

    def _carry_out(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, process in [*self.processes.items()]:
            replica = self.deployment.replicas.get(name)
            if replica is None:
                self.processes.forget(name)
            elif replica.phase is ReplicaPhase.DRAINING:
                self._begin_drain(replica, process, now)
            elif not process.is_launched:
                self._say(replica.model, f"{name} is starting" + (f", for {replica.replaces}" if replica.replaces else ""))
                process.launch()

    def _begin_drain(self, replica: PlannedReplica, process: ReplicaProcess, now: float) -> None:
        if process.is_unlisted:
            return
        process.is_unlisted = True
        process.drain_until = now + self._drain_s.pop(replica.name, self.config.drain_timeout_s)
        num_open = self.view.num_open(replica.model, replica.name)
        self._say(replica.model, f"{replica.name} is retired" + (f", {counted(num_open, 'request')} open" if num_open else ""))
        if process.failure is not None or not process.is_launched:
            process.cancel()

    def _say(self, model: str, text: str, level: int = logging.INFO) -> None:
        self.progress.say(ModelProgress(model, text, level))

    # -- what gateways read --------------------------------------------------------------------------------------------------------

    def _content(self) -> dict[str, object]:
        listed = {
            name: [each for replica in self.deployment.listed(name) if (each := self.processes[replica.name].files).listening]
            for name in self.deployment.targets
        }
        models = tuple(map(self.with_found, self.config.models))
        starting = {name for name, of_model in listed.items() if not of_model and self.deployment.listed(name)}
        on_demand = {spec.name for spec in models if spec.starts_on_demand}
        without = [name for name, of_model in listed.items() if not of_model and name not in starting]
        failures = {name: self.processes.failures_of(self.deployment.of(name)) for name in without}
        failures |= {spec.name: [] for spec in models if spec.kubernetes is not None and not spec.remote}
        more: dict[str, dict[str, object]] = {spec.name: {**self.scaling.get(spec.name, {})} for spec in models}
        for name, errors in failures.items():
            if errors or name not in on_demand:
                more[name]["unavailable"] = why_unavailable(errors)
        for name in starting:
            more[name]["starts_on_demand"] = True
        for name, target in self.deployment.targets.items():
            more[name]["num_wanted"] = target.num_replicas
        files = [each for of_model in listed.values() for each in of_model]
        return gateway_content(replace(self.config, models=models), files, more)

    # -- the start of the deployment -----------------------------------------------------------------------------------------------

    async def first_service(self) -> None:
        """Waits at most STRAGGLERS_S once a model is served. Never returns if `run` raises."""
        await self.until(lambda: self._is_all_decided() or self._is_anything_served())
        with suppress(TimeoutError):
            async with asyncio.timeout(STRAGGLERS_S):
                await self.until(self._is_all_decided)

    def _is_all_decided(self) -> bool:
        processes = map(self.processes.__getitem__, self.deployment.replicas)
        return all(each.failure is not None or each.has_served for each in processes) and self._hopeless_failure() is None

    def _is_anything_served(self) -> bool:
        return self.processes.has_served or any(model.upstreams or not model.replicas for model in self.config.models)

    def _hopeless_failure(self) -> HeadraceError | None:
        return None if self._is_anything_served() else self.processes.failure_of_all()
