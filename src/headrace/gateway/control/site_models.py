"""Keeps the models that a gateway serves, and removed models until no request can use them: those that began under an earlier configuration
may still ask for one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from headrace.core.errors import CheckpointError
from headrace.core.load import AttemptCounts, LoadSnapshot
from headrace.core.request import PriorityClass
from headrace.core.tasks import end_tasks
from headrace.gateway.access.open_requests import UseCount
from headrace.gateway.control.models import ModelOpener, OpenModel
from headrace.gateway.control.texts import FailedText, LoadedText, ModelTexts
from headrace.gateway.upstream.model_config import ModelConfig, PoolRules
from headrace.gateway.upstream.own.replicas import RETIRED
from headrace.gateway.upstream.seam import ReplicaHealth
from headrace.gateway.upstream.served_models import ServedModel
from headrace.observe.metrics import Metrics, ReplicaReading
from headrace.observe.reading_metrics import UpstreamReading
from headrace.policy.routing.choice import ReplicaId
from headrace.wire.leash import ModelStatus, ModelStatuses, ReplicaStatus, ReportedReplicaLoad

SERIES_KEPT_S = 300.0
"""Enough to be scraped once more, so that old names do not pile up."""


@dataclass(slots=True, eq=False)
class SiteModels:
    """All open models of one gateway, present and leaving ones.

    _leaving  removed or replaced model -> the task that closes it when its last request has ended
    _earlier  per earlier configuration, the count of its requests that have not asked for a model yet
    """

    opener: ModelOpener
    metrics: Metrics
    models: dict[str, OpenModel] = field(default_factory=dict)
    _leaving: dict[OpenModel, asyncio.Task[None]] = field(default_factory=dict)
    _earlier: list[UseCount] = field(default_factory=list)
    _forgetting: dict[tuple[str, str | None], asyncio.TimerHandle] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.opener.on_closed = self.replica_closed

    async def open(self, models: Sequence[ModelConfig], rules: PoolRules, texts: ModelTexts) -> None:
        """Raises ConfigError; the caller must call `close` in that case too."""
        for model in models:
            self.models[model.name] = await self.opener.open(model, texts.get(model.name), rules)
            self._keep_series(self.models[model.name])

    async def close(self) -> None:
        for timer in self._forgetting.values():
            timer.cancel()
        await end_tasks(self._leaving.values())
        for model in (*self.models.values(), *self._leaving):
            await model.stack.aclose()

    # -- what is known of them -----------------------------------------------------------------------------------------------------

    @property
    def served(self) -> list[ServedModel]:
        return [model.served for model in self.models.values()]

    @property
    def texts_in_use(self) -> set[LoadedText]:
        """Running requests may still need them."""
        return {model.text for model in (*self.models.values(), *self._leaving) if model.text is not None}

    def status(self) -> ModelStatuses:
        """Replicas of equal model and replica name share one entry."""
        statuses: dict[str, dict[str, ReplicaStatus]] = {}
        for model in (*self._leaving, *self.models.values()):
            replicas = statuses.setdefault(model.config.name, {})
            for replica in _replicas(model, is_leaving=model in self._leaving):
                status = _status(replica, self.opener.why_unreadable(model))
                if (before := replicas.get(replica.name)) is not None:
                    status = replace(status, num_open=status.num_open + before.num_open)
                replicas[replica.name] = status
        num_held = self.num_held()
        return {name: _model_status(self.models.get(name), replicas, num_held.get(name, 0)) for name, replicas in statuses.items()}

    def readings(self) -> Iterator[ReplicaReading]:
        """A present model's reading comes before a leaving one's of the same names."""
        return _one_of_each(reading for model in (*self.models.values(), *self._leaving) for reading in model.served.readings())

    def num_held(self) -> Mapping[str, int]:
        """A model that was opened again may have held some before."""
        counts = Counter({name: model.served.upstream.num_held for name, model in self.models.items()})
        for model in self._leaving:
            if model.config.name in self.models:
                counts[model.config.name] += model.served.upstream.num_held
        return counts

    def num_wanted(self) -> Mapping[str, int]:
        configs = {name: model.config for name, model in self.models.items()}
        wanted = {name: config.num_pods if config.num_wanted is None else config.num_wanted for name, config in configs.items()}
        return {name: number for name, number in wanted.items() if number is not None}

    def upstream_readings(self) -> Iterator[UpstreamReading]:
        upstreams = [model.foreign for model in (*self.models.values(), *self._leaving)]
        return _one_of_each(reading for upstream in upstreams if upstream is not None for reading in upstream.readings())

    def check(self) -> None:
        assert not set(self.models.values()) & set(self._leaving)
        assert list(self.models) == [model.config.name for model in self.models.values()]
        for model in (*self.models.values(), *self._leaving):
            if model.pool is not None:
                model.pool.check()
        for model in self.models.values():
            listed = set() if model.failure else {replica.name for replica in model.config.replicas}
            assert listed == {replica.name for replica in model.replicas}
            assert model.pool is None or set(model.replicas.values()) == set(model.pool.replicas)

    # -- changing them -------------------------------------------------------------------------------------------------------------

    async def prepare(self, models: Sequence[ModelConfig], rules: PoolRules, texts: ModelTexts) -> Callable[[UseCount], None]:
        """Calling the result serves `models`, and takes the count of the present configuration's requests that have not asked for a model
        yet. Raises ConfigError.
        """
        changed: dict[str, Callable[[], None]] = {}
        opened: dict[str, OpenModel] = {}
        async with AsyncExitStack() as undo:
            for model in models:
                known, text = self.models.get(model.name), texts.get(model.name)
                if known is not None and not isinstance(text, FailedText) and (change := self.opener.change(known, model, text)):
                    changed[model.name] = change
                    continue
                opened[model.name] = await self.opener.open(model, text, rules, known)
                undo.push_async_callback(opened[model.name].stack.aclose)
            undo.pop_all()
        return partial(self._apply, [model.name for model in models], rules, opened, changed)

    def _apply(
        self,
        names: Sequence[str],
        rules: PoolRules,
        opened: Mapping[str, OpenModel],
        changed: Mapping[str, Callable[[], None]],
        undecided: UseCount,
    ) -> None:
        """undecided: requests that have not asked for a model yet"""
        left = [model for name, model in self.models.items() if name not in changed]
        for apply in changed.values():
            apply()
        known = {**self.models, **opened}
        self.models = {name: known[name] for name in names}
        for model in self.models.values():
            if model.pool is not None:
                model.pool.follow(rules)
            self._keep_series(model)
        self._earlier = [count for count in (*self._earlier, undecided) if count.num_users]
        for model in left:
            closing = self._close_unused(model, [*self._earlier, model.served.users])
            self._leaving[model] = asyncio.get_running_loop().create_task(closing, name=f"model {model.config.name} leaves")
        for model in self._leaving:
            present = self.models.get(model.config.name)
            if model.pool is not None and (present is None or present.replicas.keys().isdisjoint(model.replicas)):
                model.pool.leave()

    async def _close_unused(self, model: OpenModel, users: Sequence[UseCount]) -> None:
        """The last of `users` is the model's own: it gets no new user once the others are unused."""
        for count in users:
            await count.wait_unused()
        replicas = [replica.name for replica in _replicas(model, is_leaving=True)]
        await model.stack.aclose()
        del self._leaving[model]
        if model.config.name not in self.models:
            self._forget_later(model.config.name, None)
        for name in replicas:
            self.replica_closed(model.config.name, ReplicaId(name))

    # -- series on the metrics page ------------------------------------------------------------------------------------------------

    def replica_closed(self, model: str, replica: ReplicaId) -> None:
        present = self.models.get(model)
        if present is None or replica not in [known.name for known in present.served.upstream.replicas()]:
            self._forget_later(model, replica)

    def _forget_later(self, model: str, replica: str | None) -> None:
        """replica None: the series of the whole model"""
        self._stop_forgetting(model, replica)
        self._forgetting[model, replica] = asyncio.get_running_loop().call_later(SERIES_KEPT_S, self._forget, model, replica)

    def _forget(self, model: str, replica: str | None) -> None:
        del self._forgetting[model, replica]
        self.metrics.forget(model, replica)

    def _stop_forgetting(self, model: str, replica: str | None) -> None:
        if (timer := self._forgetting.pop((model, replica), None)) is not None:
            timer.cancel()

    def _keep_series(self, model: OpenModel) -> None:
        """Series are there before the first request: what a new counter begins with is not in its rate."""
        name = model.config.name
        self._stop_forgetting(name, None)
        self.metrics.expect_failures(name, "")
        for replica in model.served.upstream.replicas():
            self._stop_forgetting(name, replica.name)
            self.metrics.replica(name, replica.name)
            self.metrics.expect_failures(name, replica.name)


R = TypeVar("R", ReplicaReading, UpstreamReading)


def _one_of_each(readings: Iterable[R]) -> Iterator[R]:
    """A page may have one sample of a name."""
    seen: set[tuple[str, str]] = set()
    for reading in readings:
        if (reading.model, reading.replica) not in seen:
            seen.add((reading.model, reading.replica))
            yield reading


def _model_status(model: OpenModel | None, replicas: Mapping[str, ReplicaStatus], num_held: int) -> ModelStatus:
    """model: None: it was removed"""
    if model is None:
        return ModelStatus(replicas)
    queue = model.served.upstream.queue(PriorityClass.STANDARD, model.served.unsent)
    return ModelStatus(replicas, model.served.users.num_entered, num_held, wait_s=0.0 if queue is None else queue.wait_s)


def _status(replica: ReplicaHealth, unreadable: CheckpointError | None) -> ReplicaStatus:
    if unreadable is not None and not replica.is_foreign:
        return ReplicaStatus(is_ready=False, reason=str(unreadable), num_open=replica.num_open, is_refused=True)
    load = None if replica.load is None else _reported(replica.load, replica.load_age_s)
    attempts = AttemptCounts() if replica.attempts is None else replica.attempts
    return ReplicaStatus(not replica.reason, replica.reason, replica.num_open, load=load, attempts=attempts)


def _reported(load: LoadSnapshot, age_s: float) -> ReportedReplicaLoad:
    counters = load.counters
    num_finished = sum(counters.finished.values())
    return ReportedReplicaLoad(load.num_running, load.num_waiting, load.fill, num_finished, counters.generation_tokens, age_s)


def _replicas(model: OpenModel, *, is_leaving: bool) -> Iterator[ReplicaHealth]:
    upstream = model.served.upstream
    yield from upstream.retired_replicas()
    for replica in upstream.replicas():
        yield replace(replica, reason=RETIRED) if is_leaving else replica
