"""Scales the models of a deployment by their load: facts from the gateways -> a decision -> an actuator, every TICK_S.

`policy.scaling` decides, docs/autoscaling.md has the rules. While a gateway does not answer there are no new facts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from headrace.core.errors import HeadraceError, counted
from headrace.fleet.commands import CommandAudit, CommandSlot, ControlBusy, ModelProgress, no_operator
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


class Actuator(Protocol):
    async def scale(self, model: str, num_replicas: int, reason: str) -> None:
        """Called after each decision; does nothing where the model has as many replicas, or is getting them.

        Raises ControlBusy where that has to wait, or another HeadraceError. The next decision follows in any case.
        """
        ...


class ProcessActuator:
    """Scales the replicas that this machine's supervisor runs."""

    def __init__(self, reconciler: Reconciler, slot: CommandSlot, audit: CommandAudit) -> None:
        self._reconciler = reconciler
        self._slot = slot
        self._audit = audit

    async def scale(self, model: str, num_replicas: int, reason: str) -> None:
        target = self._reconciler.deployment.targets.get(model)
        if target is None or target.num_replicas == num_replicas:
            return
        if target.rollout is not None:
            raise ControlBusy(f"a rollout of {model} is under way")

        def command(deployment: Deployment) -> Iterator[ModelProgress]:
            deployment.scale_model(model, num_replicas)
            yield ModelProgress(model, f"{model}: {counted(num_replicas, 'replica')} instead of {target.num_replicas}: {reason}")

        with self._slot.held(f"scale {model}={num_replicas}, by its load,"):
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
    """models: those whose configuration has `autoscale`, once a first decision was made"""

    def __init__(self, reconciler: Reconciler, actuator: Actuator) -> None:
        self.models: dict[str, ScaledModel] = {}
        self._reconciler = reconciler
        self._actuator = actuator
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
        new = [spec for spec in specs if spec.name not in self.models]
        kept = read_scaling(self._reconciler.config.scaling_file) if new else {}
        made = {spec.name: self._made(spec, kept.get(spec.name) or KeptScaling()) for spec in new}
        self.models = {spec.name: made.get(spec.name) or self.models[spec.name] for spec in specs}
        for spec in specs:
            await self._scale(spec, self.models[spec.name], now)
        if now - self._kept_at >= SLOT_S:
            self._kept_at = now
            self._keep()

    def _made(self, spec: ModelSpec, kept: KeptScaling) -> ScaledModel:
        num_replicas = self._reconciler.deployment.targets[spec.name].num_replicas
        return ScaledModel(self._rules(spec, kept.load_s), num_replicas, kept)

    def _rules(self, spec: ModelSpec, load_s: float) -> ScalingRules:
        assert spec.autoscale is not None
        return ScalingRules(
            min_replicas=spec.autoscale.min,
            max_replicas=spec.autoscale.max,
            ttft_s=self._reconciler.config.ttft_s,
            load_s=load_s,
        )

    async def _scale(self, spec: ModelSpec, model: ScaledModel, now: float) -> None:
        keepers = [process.keeper for process in self._reconciler.processes.values() if process.files.model == spec.name]
        model.load_s = max((keeper.load_s for keeper in keepers if keeper.load_s is not None), default=model.load_s)
        decision = model.decide(spec.name, self._reconciler.view, self._rules(spec, model.load_s), now)
        if decision is None:
            return
        model.reason = decision.reason
        try:
            await self._actuator.scale(spec.name, decision.num_replicas, decision.reason)
            model.failure = ""
        except ControlBusy as error:
            model.failure = f"{counted(decision.num_replicas, 'replica')} later: {error}"
        except HeadraceError as error:
            failure = f"{counted(decision.num_replicas, 'replica')} cannot be had: {error}"
            if failure != model.failure:
                log.error("%s: %s", spec.name, failure)
            model.failure = failure

    def _keep(self) -> None:
        if self.models:
            kept = {name: KeptScaling(model.load_s, model.history) for name, model in self.models.items()}
            keep_scaling(self._reconciler.config.scaling_file, kept)
