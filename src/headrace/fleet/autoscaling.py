"""Scales the models of a deployment by their load: facts from the gateways -> a decision -> an actuator, every TICK_S.

`policy.scaling` decides, docs/autoscaling.md has the rules. While a gateway does not answer there are no new facts.
"""

from __future__ import annotations

import asyncio
import logging
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
from headrace.policy.deployment import Deployment
from headrace.policy.scaling.autoscaler import Autoscaler, ScalingDecision, ScalingFacts, ScalingRules
from headrace.policy.scaling.history import SLOT_S

log = logging.getLogger(__name__)

TICK_S = 2.0

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
        self.load_s = kept.load_s
        self.history = kept.history
        self.reason = self.failure = ""
        self._autoscaler = Autoscaler(rules, num_replicas, kept.history)
        self._arrived, self._finished, self._tokens = Growth(), Growth(), Growth()
        self._facts: ScalingFacts | None = None
        self._facts_at = 0.0

    def decide(self, model: str, view: GatewaysView, rules: ScalingRules, now: float) -> ScalingDecision | None:
        """None: no gateway has ever answered."""
        if view.answers and not view.silent:
            self._facts, self._facts_at = self._read(model, view), now
        if self._facts is None:
            return None
        self._autoscaler.rules = rules
        return self._autoscaler.decide(replace(self._facts, age_s=self._facts.age_s + now - self._facts_at), now)

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
        self._kept_at = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        since = time.time() - loop.time()  # the loop's clock is never set back
        try:
            while True:
                await asyncio.sleep(TICK_S)
                try:
                    await self.tick(since + loop.time())
                except Exception:  # the outermost loop: a bug must not end what serves
                    log.exception("scaling by load failed")
        finally:
            self._keep()

    async def tick(self, now: float) -> None:
        """now: seconds since 1970"""
        await self._reconciler.look()
        specs = [spec for spec in self._reconciler.config.models if spec.autoscale is not None]
        self.models = {spec.name: self.models[spec.name] for spec in specs if spec.name in self.models}
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
        if now - self._kept_at >= SLOT_S:
            self._kept_at = now
            self._keep()

    async def _made(self, spec: ModelSpec, actuator: Actuator) -> ScaledModel:
        num_replicas = await actuator.num_replicas(spec.name)
        kept = read_scaling(self._reconciler.config.scaling_file).get(spec.name) or KeptScaling()
        return ScaledModel(self._rules(spec, kept.load_s), num_replicas, kept)

    def _rules(self, spec: ModelSpec, load_s: float) -> ScalingRules:
        assert spec.autoscale is not None
        return ScalingRules(
            min_replicas=spec.autoscale.min,
            max_replicas=spec.autoscale.max,
            ttft_s=self._reconciler.config.ttft_s,
            load_s=load_s,
        )

    async def _scale(self, spec: ModelSpec, now: float) -> None:
        actuator = self._actuator_of(spec)
        model = self.models.get(spec.name) or await self._made(spec, actuator)
        self.models[spec.name] = model
        model.load_s = actuator.load_s(spec.name) or model.load_s
        decision = model.decide(spec.name, self._reconciler.view, self._rules(spec, model.load_s), now)
        if decision is None:
            return
        model.reason = decision.reason
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

    def _keep(self) -> None:
        """What the file has of models that are not scaled at this moment stays in it."""
        if self.models:
            file = self._reconciler.config.scaling_file
            kept = {name: KeptScaling(model.load_s, model.history) for name, model in self.models.items()}
            keep_scaling(file, {**kept, **{name: before for name, before in read_scaling(file).items() if name not in kept}})
