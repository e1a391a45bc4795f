"""Scales the models of a deployment by their load: facts from the gateways -> a decision -> an actuator, every TICK_S.

`policy.scaling` decides, docs/autoscaling.md has the rules. While a gateway does not answer there are no new facts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from headrace.core.errors import HeadraceError, counted
from headrace.fleet.commands import CommandAudit, ControlBusy, ModelProgress, no_operator
from headrace.fleet.config import ModelSpec
from headrace.fleet.gateways import GatewaysView
from headrace.fleet.kept_scaling import KeptScaling, keep_scaling, read_scaling
from headrace.fleet.reconciler import Reconciler
from headrace.policy.deployment import Deployment, ReplicaPhase
from headrace.policy.scaling.autoscaler import Autoscaler, ScalingDecision, ScalingFacts, ScalingRules
from headrace.policy.scaling.budget import DayUse

log = logging.getLogger(__name__)

TICK_S = 2.0

KEEP_S = 60.0
"""What was learned and used is written so often: a supervisor that is killed has not written what its replicas used since."""

ACTOR = "autoscaler"


class NotScaling(HeadraceError):
    """Another process scales this model."""


class Actuator(Protocol):
    """Its methods raise NotScaling, or another HeadraceError: the next decision follows in any case."""

    async def num_replicas(self, model: str) -> int:
        """That are wanted now."""
        ...

    def load_s(self, model: str) -> float | None:
        """From the start of a replica until it served, where one was seen."""
        ...

    def num_existing(self, model: str) -> int:
        """That load, serve, stand by or leave."""
        ...

    def found_use(self, model: str) -> DayUse | None:
        """What the process left that scaled the model before; None: where there is one, the state folder has it."""
        ...

    def leave_use(self, model: str, use: DayUse) -> None:
        """For the process that scales the model next, where that may be on another machine."""
        ...

    async def scale(self, model: str, num_replicas: int, reason: str) -> None:
        """Called after each decision; does nothing where the model has as many replicas, or is getting them.

        Raises ControlBusy where that has to wait.
        """
        ...


class ProcessActuator:
    """Scales the replicas that this machine's supervisor runs."""

    def __init__(self, reconciler: Reconciler, audit: CommandAudit) -> None:
        self._reconciler = reconciler
        self._audit = audit

    async def num_replicas(self, model: str) -> int:
        return self._reconciler.deployment.targets[model].num_replicas

    def load_s(self, model: str) -> float | None:
        keepers = [process.keeper for process in self._reconciler.processes.values() if process.files.model == model]
        return max((keeper.load_s for keeper in keepers if keeper.load_s is not None), default=None)

    def num_existing(self, model: str) -> int:
        """One that cannot be started counts while its process tries to."""
        processes = self._reconciler.processes
        replicas = self._reconciler.deployment.of(model)
        return sum(replica.phase is not ReplicaPhase.FAILED or bool(processes[replica.name].keeper.pids) for replica in replicas)

    def found_use(self, model: str) -> None:
        return None

    def leave_use(self, model: str, use: DayUse) -> None:
        """It would find this in the state folder."""

    async def scale(self, model: str, num_replicas: int, reason: str) -> None:
        target = self._reconciler.deployment.targets.get(model)
        if target is None or target.num_replicas == num_replicas:
            return
        if self._reconciler.deployment.is_rolling(model):
            raise ControlBusy(f"a rollout of {model} is under way")

        def command(deployment: Deployment) -> Iterator[ModelProgress]:
            if model not in deployment.targets:  # a reload has removed it meanwhile
                return
            deployment.scale_model(model, num_replicas)
            yield ModelProgress(model, f"{model}: {counted(num_replicas, 'replica')} instead of {target.num_replicas}: {reason}")

        await self._reconciler.change(command)
        await self._audit.record(ACTOR, "scale", {"model": model, "replicas": num_replicas, "reason": reason}, no_operator)


class Growth:
    """Sums counters that begin anew with the processes that count. What one had counted when it was first seen is not included."""

    def __init__(self) -> None:
        self.total = 0
        self._last: Mapping[str, int] = {}

    def add(self, counters: Mapping[str, int]) -> int:
        self.total += sum(max(0, value - self._last.get(name, value)) for name, value in counters.items())
        self._last = counters
        return self.total


class ScaledModel:
    """load_s: of a start, measured or kept; reason: of the last decision; failure: why it could not be carried out"""

    def __init__(self, rules: ScalingRules, num_replicas: int, kept: KeptScaling) -> None:
        """kept: its use is that until now"""
        self.load_s = kept.load_s
        self.history = kept.history
        self.reason = self.failure = ""
        self._autoscaler = Autoscaler(rules, num_replicas, kept.history, kept.use)
        self._arrived, self._finished, self._tokens = Growth(), Growth(), Growth()
        self._facts: ScalingFacts | None = None
        self._facts_at = 0.0

    @property
    def kept(self) -> KeptScaling:
        return KeptScaling(self.load_s, self.history, self._autoscaler.use)

    def decide(self, model: str, view: GatewaysView, rules: ScalingRules, now: float, *, num_existing: int) -> ScalingDecision | None:
        """None: no gateway has ever answered."""
        if view.answers and not view.silent:
            self._facts, self._facts_at = self._read(model, view), now
        if self._facts is None:
            return None
        self._autoscaler.rules = rules
        age_s = self._facts.age_s + now - self._facts_at
        return self._autoscaler.decide(replace(self._facts, age_s=age_s, num_existing=num_existing), now)

    def _read(self, model: str, view: GatewaysView) -> ScalingFacts:
        seen, by_name = view.of(model), view.loads(model)
        loads = by_name.values()
        return ScalingFacts(
            num_serving=len(loads),
            num_arrived=self._arrived.add({"": sum(status.num_arrived for status in seen)}),
            num_finished=self._finished.add({name: load.num_finished for name, load in by_name.items()}),
            num_tokens=self._tokens.add({name: load.num_tokens for name, load in by_name.items()}),
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(status.num_held for status in seen) + sum(load.num_waiting for load in loads),
            num_full=sum(load.num_waiting > 0 for load in loads),
            wait_s=max((status.wait_s for status in seen), default=0.0),
            fill=sum(load.fill for load in loads),
            age_s=max((load.age_s for load in loads), default=0.0),
        )


class Autoscaling:
    """models: those whose configuration has `autoscale`, and that are scaled here; not_scaled: why the others are not"""

    def __init__(self, reconciler: Reconciler, actuator_of: Callable[[ModelSpec], Actuator]) -> None:
        self.models: dict[str, ScaledModel] = {}
        self.not_scaled: dict[str, str] = {}
        self._reconciler = reconciler
        self._actuator_of = actuator_of
        self._clock = asyncio.get_running_loop().time
        self._since = time.time() - self._clock()  # the loop's clock is never set back
        self._ticked_at = self._now
        self._kept_at = -math.inf  # kept by the first tick: of a supervisor that is killed soon, again and again, each start counts

    @property
    def _now(self) -> float:
        """Seconds since 1970."""
        return self._since + self._clock()

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(TICK_S)
                try:
                    await self.tick(self._now)
                except Exception:  # the outermost loop: a bug must not end what serves
                    log.exception("scaling by load failed")
        finally:
            self._keep()

    async def tick(self, now: float) -> None:
        """now: seconds since 1970"""
        await self._reconciler.look()
        specs = [spec for spec in self._reconciler.config.models if spec.autoscale is not None]
        names = [spec.name for spec in specs]
        if self.models.keys() - {*names}:
            self._keep()  # a model that a reload has taken out may come back
        self.models = {name: self.models[name] for name in names if name in self.models}
        for name in self._reconciler.scaling.keys() - {*names}:
            self._reconciler.note_scaling(name, {})
        for spec in specs:
            try:
                await self._scale(spec, now)
                self.not_scaled.pop(spec.name, None)
            except HeadraceError as error:
                if not isinstance(error, NotScaling) and str(error) != self.not_scaled.get(spec.name):
                    log.error("%s: its replicas cannot be counted: %s", spec.name, error)
                if spec.name in self.models:
                    self._keep()
                    del self.models[spec.name]
                self.not_scaled[spec.name] = str(error)
        self._ticked_at = now
        if now - self._kept_at >= KEEP_S:
            self._kept_at = now
            self._keep()

    async def _made(self, spec: ModelSpec, actuator: Actuator) -> ScaledModel:
        num_replicas = await actuator.num_replicas(spec.name)
        kept = read_scaling(self._reconciler.config.scaling_file).get(spec.name) or KeptScaling()
        use, began = actuator.found_use(spec.name), self._ticked_at
        if use is None and kept.use is not None:
            # Between two supervisors no engine runs, and one that was killed has not written what its engines used last.
            use = kept.use.later(actuator.num_existing(spec.name), min(began, kept.use.at + KEEP_S)).later(0, began)
        return ScaledModel(self._rules(spec, kept.load_s), num_replicas, replace(kept, use=use or DayUse(began)))

    def _rules(self, spec: ModelSpec, load_s: float) -> ScalingRules:
        assert spec.autoscale is not None
        return ScalingRules(
            min_replicas=spec.autoscale.min,
            max_replicas=spec.autoscale.max,
            ttft_s=self._reconciler.config.ttft_s,
            load_s=load_s,
            budget=self._reconciler.config.day_budget(spec),
        )

    async def _scale(self, spec: ModelSpec, now: float) -> None:
        actuator = self._actuator_of(spec)
        model = self.models.get(spec.name) or await self._made(spec, actuator)
        self.models[spec.name] = model
        model.load_s = actuator.load_s(spec.name) or model.load_s
        rules, num_existing = self._rules(spec, model.load_s), actuator.num_existing(spec.name)
        decision = model.decide(spec.name, self._reconciler.view, rules, now, num_existing=num_existing)
        if decision is None:
            return
        model.reason = decision.reason
        self._note(spec, decision)
        if rules.budget is not None and (use := model.kept.use) is not None:
            actuator.leave_use(spec.name, use)
        try:
            await actuator.scale(spec.name, decision.num_replicas, decision.reason)
            model.failure = ""
        except NotScaling:
            raise
        except ControlBusy as error:
            model.failure = f"{counted(decision.num_replicas, 'replica')} later: {error}"
        except HeadraceError as error:
            failure = f"{counted(decision.num_replicas, 'replica')} cannot be had: {error}"
            if failure != model.failure:
                log.error("%s: %s", spec.name, failure)
            model.failure = failure

    def _note(self, spec: ModelSpec, decision: ScalingDecision) -> None:
        """For gateways, which know the number of the replicas that are started here."""
        pods = {} if spec.kubernetes is None else {"num_pods": decision.num_replicas}
        closed = {} if decision.closed_until is None else {"closed_until": decision.closed_until}
        self._reconciler.note_scaling(spec.name, {**pods, **closed})

    def _keep(self) -> None:
        """What the file has of models that are not scaled at this moment stays in it."""
        if self.models:
            file = self._reconciler.config.scaling_file
            kept = {name: model.kept for name, model in self.models.items()}
            keep_scaling(file, {**kept, **{name: before for name, before in read_scaling(file).items() if name not in kept}})
