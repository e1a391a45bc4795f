"""Carries out an operator's commands to a running deployment.

A caller that leaves before its command is done stops nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.core.errors import ConfigError, HeadraceError, counted
from headrace.core.sleep import SleepLevel
from headrace.core.tasks import RunningTasks, end_tasks
from headrace.fleet.adapter_commands import AdapterCommands
from headrace.fleet.autoscaling import Actuator, Autoscaling, ProcessActuator, ScaledModel
from headrace.fleet.commands import CommandAudit, CommandSlot, ControlBusy, Hear, ModelProgress, no_operator, say
from headrace.fleet.config import MAX_REPLICAS, FleetConfig, ModelSpec, check_can_become, with_choices_of_start
from headrace.fleet.kubernetes.endpoints import MAX_ENGINES
from headrace.fleet.kubernetes.service import KubernetesService, check_in_pod
from headrace.fleet.reconciler import Reconciler
from headrace.policy.deployment import Deployment, ReplicaPhase, RolloutOptions
from headrace.policy.scaling.budget import HOUR_S
from headrace.registry.names import read_reference
from headrace.wire.listening import shown_host

if TYPE_CHECKING:
    from headrace.fleet.kubernetes.actuator import PodActuator

log = logging.getLogger(__name__)

MAX_WITHIN_S = 86400.0

STARTS_S = 10.0
"""After this long a command that waits only for starting engines lets others in."""


class ConfigSource(Protocol):
    """file: its absolute path, shown to operators; None: there is none to read again"""

    @property
    def file(self) -> Path | None: ...

    def read(self, pulled: Mapping[str, Path]) -> FleetConfig:
        """pulled: name in a registry -> the folder that it keeps. May block. Raises ConfigError."""
        ...

    def renewed(self, pulled: Mapping[str, Path], versions: Mapping[str, str]) -> FleetConfig:
        """The configuration in force, with models of a registry pulled anew.

        versions: their names in the file -> the names that are pulled now. Raises as `fleet.weights.resolve_model`
        """
        ...

    def differences(self) -> Sequence[str]:
        """Between the last configuration read and the one in force, without secrets."""
        ...

    def accept(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Promotion:
    """A version that is to be served before its alias points to it. Both are names in a registry."""

    alias: str
    version: str

    def versions(self, models: Collection[str], sources: Collection[str]) -> Mapping[str, str]:
        """By the name that the file has for the model. Raises ConfigError."""
        alias, version = read_reference(self.alias), read_reference(self.version)
        following = [source for source in sources if read_reference(source) == alias]
        if len(models) != 1 or not following:
            served = f"is served from {', '.join(sources) or 'a folder'}"
            raise ConfigError(", ".join(models), f"{served}, not from {alias}", f"Write {alias} as its model in the file.")
        if (alias.registry, alias.name) != (version.registry, version.name):
            raise ConfigError("version", f"{version} is not a version of {alias.name} in {alias.registry}")
        return dict.fromkeys(following, str(version))


class FleetControl:
    """`hear` gets a command's progress; its failures are returned, one line per model. Where a command raises, nothing was changed."""

    def __init__(
        self,
        reconciler: Reconciler,
        source: ConfigSource | None,
        drain_all: Callable[[float], Awaitable[None]],
        audit: CommandAudit,
    ) -> None:
        """drain_all: takes the seconds for running requests; audit: written by callers, which know the actor"""
        self.audit = audit
        self._reconciler = reconciler
        self._source = source
        self._drain_all = drain_all
        self._slot = CommandSlot()
        self.adapters = AdapterCommands(reconciler, self._slot)
        self.autoscaling = Autoscaling(reconciler, self._actuator_of)
        self._processes = ProcessActuator(reconciler, self.audit)
        self._pods: PodActuator | None = None

    async def scale_by_load(self) -> None:
        try:
            await self.autoscaling.run()
        finally:
            if self._pods is not None:
                await self._pods.close()

    def _actuator_of(self, spec: ModelSpec) -> Actuator:
        if spec.kubernetes is None:
            return self._processes
        if self._pods is None:
            from headrace.fleet.kubernetes.actuator import PodActuator  # aiohttp takes a fifth of a second

            self._pods = PodActuator(self._reconciler, self.audit)
        return self._pods

    async def idle(self) -> None:
        await self._slot.wait_free()

    async def status(self) -> dict[str, object]:
        reconciler = self._reconciler
        await reconciler.look()
        host, port = reconciler.config.gateway_address
        return {
            "address": f"{shown_host(host)}:{port}",
            "config": str(self._source.file) if self._source is not None and self._source.file is not None else None,
            "command": self._slot.holder or None,
            "gateways": [
                {"name": keeper.label, "pid": keeper.pid, "serving": keeper.is_serving, "starts": keeper.num_starts}
                for keeper in reconciler.gateways.keepers
            ],
            "models": [self._model_status(model) for model in reconciler.config.models],
            "leaving": [
                self._replica_status(replica.name)
                for replica in reconciler.deployment.replicas.values()
                if replica.model not in reconciler.deployment.targets
            ],
        }

    async def reload(self, hear: Hear = no_operator) -> list[str]:
        source = self._source
        if source is None or source.file is None:
            raise ConfigError("reload", "this deployment was started without a file", "Start it with `headrace serve --config FILE`.")
        with self._slot.held("reload") as let_others_in:
            before = self._reconciler.config
            config = with_choices_of_start(before, await asyncio.to_thread(source.read, before.pulled))
            check_in_pod(spec.kubernetes for spec in config.models)
            await self._check(before, config)
            for line in source.differences():
                say(hear, line)
            models = {model.name for model in (*before.models, *config.models)}
            with self._reconciler.progress.heard(hear, models):
                await self._reconciler.reload(config)
                source.accept()
                for line in (*_inherited(before, config), *self._reconciler.adapters.lists.lines()):
                    say(hear, line)
                say(hear, "the configuration holds; replicas follow")
                return await self._converged(models, hear, let_others_in)

    async def roll_out(
        self, model: str | None, options: RolloutOptions, hear: Hear = no_operator, *, promotion: Promotion | None = None
    ) -> list[str]:
        """Models of a registry get the version that their names lead to now."""
        with self._slot.held(f"rollout {model or 'of all models'}") as let_others_in:
            models = [*self._reconciler.deployment.targets] if model is None else [self._known(model)]
            if promotion is not None and not any(self._reconciler.deployment.targets[each].num_replicas for each in models):
                reason = f"has no replica now, so that none would load {promotion.version} before the alias moves"
                raise ConfigError(", ".join(models), reason, "Send it a request first: that starts one.")
            config = await self._renewed(models, promotion, hear)
            with self._reconciler.progress.heard(hear, models):
                revisions = await self._reconciler.roll_out(models, options, config)
                failures = await self._converged(models, hear, let_others_in)
            return failures or [*self._not_rolled_out(revisions, promotion)]

    def _not_rolled_out(self, revisions: Mapping[str, int], promotion: Promotion | None) -> Iterator[str]:
        """Where another command came between."""
        deployment = self._reconciler.deployment
        for model, revision in revisions.items():
            target = deployment.targets.get(model)
            if target is None:
                yield f"{model}: was removed during its rollout"
            elif target.revision != revision:
                yield f"{model}: its rollout was superseded by another one"
            elif promotion is not None and not any(replica.phase is ReplicaPhase.SERVING for replica in deployment.listed(model)):
                yield f"{model}: no replica is left that serves {promotion.version}"

    async def _renewed(self, models: Collection[str], promotion: Promotion | None, hear: Hear) -> FleetConfig:
        before = self._reconciler.config
        sources = {spec.source for spec in before.models if spec.name in models and spec.source in before.pulled}
        versions = {source: source for source in sources} if promotion is None else promotion.versions(models, sources)
        if self._source is None or not versions:
            return before
        found = await asyncio.to_thread(self._source.renewed, before.pulled, versions)
        config = before.with_engines({spec.name: spec for spec in found.models if spec.name in models and spec.source in versions})
        await self._check(before, config)
        for spec in config.models:
            if spec.name in models and spec.version:
                say(hear, f"{spec.name}: version {spec.version} of {spec.source} is on this machine")
        return config

    async def _check(self, before: FleetConfig, config: FleetConfig) -> None:
        deployment = self._reconciler.deployment
        served = [model for model in deployment.targets if deployment.listed(model)]
        await asyncio.to_thread(check_can_become, before, config, served=served)

    async def scale(self, model: str, replicas: int, hear: Hear = no_operator) -> list[str]:
        with self._slot.held(f"scale {model}={replicas}") as let_others_in:
            spec = self._reconciler.config.spec(model)
            pods = None if spec is None or spec.kubernetes is None or not spec.kubernetes.workload else spec.kubernetes
            most = MAX_REPLICAS if pods is None else MAX_ENGINES
            if not 1 <= replicas <= most:
                raise ConfigError(f"{model}={replicas}", f"{replicas} is outside 1..{most}", "A model is removed in the file.")
            if spec is not None and spec.autoscale is not None:
                reason = f"the load decides, between {spec.autoscale.min} and {spec.autoscale.max}"
                remedy = "Change autoscale in the file and reload; without it this command decides."
                raise ConfigError(f"{model}={replicas}", reason, remedy)
            if pods is not None:
                before = await scale_pods(pods, replicas)
                say(hear, f"{model}: {pods.workload} had {counted(before, 'pod')}, {replicas} are wanted now; they are used once ready")
                return []
            self._known(model)
            if replicas > 1 and spec is not None and spec.sleeps:
                raise ConfigError(f"{model}={replicas}", "is more than the one replica of a model that sleeps")

            def command(deployment: Deployment) -> list[ModelProgress]:
                deployment.scale_model(model, replicas)
                return [*self._reconciler.crowded()]

            with self._reconciler.progress.heard(hear, [model]):
                await self._reconciler.change(command)
                return await self._converged([model], hear, let_others_in)

    async def change_sleep(self, model: str, level: SleepLevel | None, hear: Hear = no_operator) -> list[str]:
        """Returns once every replica of the model sleeps, or with None is awake. Each finishes its requests first."""
        if (spec := self._reconciler.config.spec(model)) is not None and spec.sleeps:
            raise ConfigError("MODEL", f"{model} sleeps and wakes by itself, as requests come", "Its `sleeps` in the file says so.")
        names = [replica.name for replica in self._reconciler.deployment.listed(self._known(model))]
        serving = {name: asked for name in names if (asked := self._reconciler.processes[name].keeper.asked) is not None}
        if not serving:
            raise ConfigError("MODEL", f"{model} has no engine that runs")
        for name, asked in serving.items():
            await asked.change_sleep(level)
            say(hear, f"{name} is {'awake' if level is None else f'asleep ({level})'}")
        return []

    async def drain(self, replica: str, within_s: float, *, allow_outage: bool, hear: Hear = no_operator) -> list[str]:
        """Requests not finished within `within_s` seconds move to another replica."""
        _check_within(within_s)
        replicas = self._reconciler.deployment.replicas
        if replica not in replicas:
            raise ConfigError(replica, "is not a replica here", f"Replicas: {', '.join(replicas) or 'none'}.")
        with self._reconciler.progress.heard(hear, [replicas[replica].model]):
            await self._reconciler.drain(replica, within_s, allow_outage=allow_outage)
            await self._reconciler.until(lambda: replica not in self._reconciler.deployment.replicas)
        return []

    async def drain_all(self, within_s: float) -> list[str]:
        _check_within(within_s)
        await self._drain_all(within_s)
        return []

    def _known(self, model: str) -> str:
        targets = self._reconciler.deployment.targets
        if model not in targets:
            raise ConfigError("MODEL", f"{model!r} has no engines on this machine", f"Models: {', '.join(targets) or 'none'}.")
        return model

    async def _converged(self, models: Collection[str], hear: Hear, let_others_in: Callable[[], None]) -> list[str]:
        """Returns the failures of this command. Once only starting engines are left, other commands may run after STARTS_S."""
        earlier = {**self._reconciler.failures}
        converged = asyncio.create_task(self._reconciler.until(lambda: not self._unconverged(models)))
        try:
            if starting := await self._only_starting(models, converged):
                let_others_in()
                verb = "is" if len(starting) == 1 else "are"
                say(hear, f"{', '.join(starting)} {verb} still starting; other commands are taken meanwhile")
            await converged
        finally:
            converged.cancel()
        targets = self._reconciler.deployment.targets
        return [failure for model in models if model in targets and (failure := self._failure_of(model, earlier.get(model)))]

    def _unconverged(self, models: Collection[str]) -> list[str]:
        deployment = self._reconciler.deployment
        return [model for model in models if not deployment.is_converged(model)]

    async def _only_starting(self, models: Collection[str], converged: asyncio.Task[None]) -> list[str]:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not converged.done():
            await asyncio.wait([converged], timeout=STARTS_S / 10)
            deployment, waiting = self._reconciler.deployment, self._unconverged(models)
            if not all(deployment.only_waits_for_starts(model) for model in waiting):
                since = loop.time()
            elif waiting and loop.time() - since >= STARTS_S:
                return [name for model in waiting for name in deployment.starting(model)]
        return []

    def _failure_of(self, model: str, earlier: str | None = None) -> str:
        """earlier: of a rollout before, which is not said again"""
        reconciler = self._reconciler
        if (failure := reconciler.failures.get(model)) is not None and failure is not earlier:
            return f"{model}: {failure}"
        for replica in reconciler.deployment.of(model):
            if reason := reconciler.processes[replica.name].why_failed:
                return f"{model}: {replica.name} cannot be started: {reason}"
        return ""

    def _model_status(self, spec: ModelSpec) -> dict[str, object]:
        reconciler, model = self._reconciler, spec.name
        target = reconciler.deployment.targets.get(model)
        upstreams = [
            *(str(engine["address"]) for engine in reconciler.with_found(spec).remote),
            *(str(upstream["url"]) for upstream in spec.upstreams),
        ]
        if target is None:
            failure, autoscale = reconciler.view.why_refused(model), self._autoscale_status(spec)
            return {"name": model, "served": "elsewhere", "upstreams": upstreams, "failure": failure, "autoscale": autoscale}
        canary = reconciler.deployment.canary(model)
        rollout = None if target.rollout is None else {"max_surge": target.rollout.max_surge, "allow_outage": target.rollout.allow_outage}
        return {
            "name": model,
            "served": "here",
            "upstreams": upstreams,
            "wanted": target.num_replicas,
            "revision": target.revision,
            "rollout": rollout,
            "autoscale": self._autoscale_status(spec),
            "version": spec.version or None,
            "canary": None if canary is None else canary.name,
            "failure": self._failure_of(model),
            "replicas": [self._replica_status(replica.name) for replica in reconciler.deployment.of(model)],
        }

    def _autoscale_status(self, spec: ModelSpec) -> Mapping[str, object] | None:
        if spec.autoscale is None:
            return None
        scaled = self.autoscaling.models.get(spec.name)
        not_yet = self.autoscaling.not_scaled.get(spec.name, "no gateway has reported yet")
        reason = not_yet if scaled is None else "; ".join(filter(None, [scaled.reason, scaled.failure]))
        return {"min": spec.autoscale.min, "max": spec.autoscale.max, "reason": reason, **self._budget_status(spec, scaled)}

    def _budget_status(self, spec: ModelSpec, scaled: ScaledModel | None) -> Mapping[str, object]:
        if spec.autoscale is None or spec.autoscale.replica_hours_per_day is None:
            return {}
        use = None if scaled is None else scaled.kept.use
        used = None if use is None else round(use.replica_s / HOUR_S, 2)
        return {"replica_hours_today": used, "replica_hours_per_day": spec.autoscale.replica_hours_per_day}

    def _replica_status(self, name: str) -> Mapping[str, object]:
        reconciler = self._reconciler
        replica, process = reconciler.deployment.replicas[name], reconciler.processes[name]
        reason = reconciler.view.why_not_ready(replica.model, name)
        return {
            "name": name,
            "phase": str(replica.phase),
            "ready": reconciler.view.is_ready(replica.model, name) is True,
            "open": reconciler.view.num_open(replica.model, name),
            "revision": replica.revision,
            "pids": [*process.keeper.pids],
            "starts": process.keeper.num_starts,
            "reason": process.why_failed or reconciler.slices.why_down(name) or reason,
        }


async def scale_pods(service: KubernetesService, num_pods: int) -> int:
    """Returns the number before. Raises KubernetesFailed."""
    from headrace.fleet.kubernetes.api import KubernetesApi  # aiohttp takes a fifth of a second
    from headrace.fleet.kubernetes.scale import WorkloadScaler

    api = KubernetesApi.of_pod()
    return await WorkloadScaler(api, service.namespace or api.own_namespace(), service.workload).scale(num_pods)


def _inherited(before: FleetConfig, after: FleetConfig) -> Iterator[str]:
    if added := sorted(after.key_variables - before.key_variables):
        verb = "is" if len(added) == 1 else "are"
        yield f"{', '.join(added)} {verb} in the environment of engines that run already; `headrace rollout` replaces them"


def _check_within(within_s: float) -> None:
    if not 0 <= within_s <= MAX_WITHIN_S:
        raise ConfigError("--within", f"{within_s:g} is outside 0..{MAX_WITHIN_S:g} seconds")


@asynccontextmanager
async def reloading_when_asked(asked: asyncio.Event, control: FleetControl) -> AsyncIterator[None]:
    """Reload each time `asked` is set, until the block ends. Signals that arrive while a command runs lead to one reload after it."""
    running = RunningTasks()

    async def listen() -> None:
        while True:
            await asked.wait()
            await control.idle()
            asked.clear()
            # A task: a reload that waits for an engine to start must not keep the next one waiting.
            running.start(_reload(control), "reload on SIGHUP")
            await asyncio.sleep(0)

    running.start(listen(), "SIGHUP")
    try:
        yield
    finally:
        await end_tasks(running)


async def _reload(control: FleetControl) -> None:
    try:
        failures = await _reload_once_idle(control)
    except HeadraceError as error:
        log.error("SIGHUP changed nothing: %s", error)
    except Exception:  # the outermost loop: a bug must not end what serves
        log.exception("the reload on SIGHUP failed")
    else:
        for failure in failures:
            log.error("%s", failure)


async def _reload_once_idle(control: FleetControl) -> list[str]:
    while True:
        try:
            failures = await control.reload()
            await control.audit.record("SIGHUP", "reload", {}, no_operator, failures)
            return failures
        except ControlBusy:
            await control.idle()
