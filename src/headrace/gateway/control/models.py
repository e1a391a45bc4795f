"""Opens models, and changes open models to follow a changed configuration."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from headrace.core.clock import Clock
from headrace.core.errors import CheckpointError
from headrace.gateway.control.texts import FailedText, LoadedText
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.upstream.fallback import FallbackUpstream
from headrace.gateway.upstream.model_config import ModelConfig, PoolRules, ReplicaConfig
from headrace.gateway.upstream.own.model_text import ModelText
from headrace.gateway.upstream.own.replica_health import Replica, ReplicaCircuit
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.gateway.upstream.own.upstream import TokenUpstream
from headrace.gateway.upstream.seam import Upstream
from headrace.gateway.upstream.served_models import ServedModel, UnreadableModel
from headrace.policy.holding import HeldTotals
from headrace.policy.routing.choice import SLOW_START_S, Random, ReplicaId
from headrace.text.folder import TextModel
from headrace.text.output.formats import ModelFormats
from headrace.wire.client import ReplicaClient
from headrace.wire.service import Expectation

if TYPE_CHECKING:
    from headrace.gateway.upstream.foreign.upstream import HttpUpstream

MAX_DRAWN_SEED = 2**63
"""Exclusive. Seeds are signed 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of time and randomness, which tests replace. random: what routing compares, nothing secret"""

    clock: Clock = time.monotonic
    unix_time: Clock = time.time
    draw_seed: Callable[[], int] = field(default=lambda: secrets.randbelow(MAX_DRAWN_SEED))
    random: Random = field(default_factory=random.Random)


Connect = Callable[[ReplicaConfig, TextModel, Clock], ReplicaClient]


def connect_wire(config: ReplicaConfig, text: TextModel, clock: Clock) -> ReplicaClient:
    target = config.target()
    return ReplicaClient(
        config.address,
        name=config.name,
        token=target.token,
        tls=target.tls,
        tls_name=target.tls_name,
        expect=Expectation(digests=text.digests),
        clock=clock,
    )


@dataclass(slots=True, eq=False)
class OpenModel:
    """A model that is served, with all that was opened for it.

    text      None: it cannot be used, or only foreign servers answer
    pool      None whenever `text` is None
    replicas  configuration (with the token read from its file) -> replica in the pool
    failure   why tokenizer or template cannot be used; no replica is connected then
    """

    config: ModelConfig
    served: ServedModel
    stack: AsyncExitStack
    foreign: HttpUpstream | None = None
    text: LoadedText | None = None
    pool: ReplicaPool | None = None
    replicas: dict[ReplicaConfig, Replica] = field(default_factory=dict)
    failure: CheckpointError | None = None


class ModelOpener:
    """Opens models by their configuration, and changes open ones. on_closed: called with model name and replica name after a retired
    replica's connection has closed
    """

    def __init__(self, text_pool: TextPool, connect: Connect, sources: Sources) -> None:
        self._text_pool = text_pool
        self._connect = connect
        self._sources = sources
        self._held = HeldTotals()
        self.on_closed: Callable[[str, ReplicaId], None] = lambda _model, _replica: None

    async def open(
        self, config: ModelConfig, text: LoadedText | FailedText | None, rules: PoolRules, before: OpenModel | None = None
    ) -> OpenModel:
        """Replicas connect in the background. before: replicas in both keep their circuits. Raises ConfigError."""
        async with AsyncExitStack() as stack:
            foreign = await stack.enter_async_context(self._foreign_servers(config)) if config.upstreams else None
            if isinstance(text, FailedText):
                return self._unreadable(config, text, foreign, stack.pop_all())
            if text is None:
                assert foreign is not None, "something answers for a model"
                return OpenModel(config, self._served(config, foreign), stack.pop_all(), foreign)
            circuits = _circuits(before, config)
            replicas = {
                replica: self._replica(replica, text, circuits.get(replica) or ReplicaCircuit())
                for replica in map(_resolved, config.replicas)
            }
            pool = ReplicaPool(
                config.name,
                list(replicas.values()),
                random=self._sources.random,
                clock=self._sources.clock,
                failover_s=rules.failover_s,
                routing=rules.routing,
                admission=rules.admission,
                slow_start_s=SLOW_START_S,
                on_closed=partial(self.on_closed, config.name),
                totals=self._held,
            )
            self._describe(pool, config)
            await stack.enter_async_context(pool)
            upstream = self._engines(config, text, pool, foreign)
            return OpenModel(config, self._served(config, upstream), stack.pop_all(), foreign, text, pool, replicas)

    def why_unreadable(self, model: OpenModel) -> CheckpointError | None:
        return model.failure if model.text is None else self._text_pool.failures.get(model.text.name)

    def change(self, model: OpenModel, config: ModelConfig, text: LoadedText | None) -> Callable[[], None] | None:
        """Calling the result applies `config`; new replicas are not connected before. None: the model must be opened again, because its
        text or its foreign servers changed, or its text could not be used. Raises ConfigError.
        """
        if model.failure is not None or config.upstreams != model.config.upstreams:
            return None
        if (text and text.name) != (model.text and model.text.name):
            return None
        wanted = [_resolved(replica) for replica in config.replicas]
        add: dict[ReplicaConfig, Replica] = {}
        if model.text is not None:
            add = {replica: self._replica(replica, model.text, ReplicaCircuit()) for replica in wanted if replica not in model.replicas}
        retire = {given: replica for given, replica in model.replicas.items() if given not in wanted}
        served = self._changed(model, config)

        def apply() -> None:
            if model.pool is not None:
                model.pool.change(add=add.values(), retire=retire.values())
                self._describe(model.pool, config)
            model.replicas = {known: replica for known, replica in (model.replicas | add).items() if known not in retire}
            model.config, model.served, model.text = config, served, text

        return apply

    def _changed(self, model: OpenModel, config: ModelConfig) -> ServedModel:
        """The same object if only replicas changed, else a new one with the same users."""
        if _without_numbers(config) == _without_numbers(model.config):
            return model.served
        upstream = model.served.upstream
        if model.pool is not None and model.text is not None:
            upstream = self._engines(config, model.text, model.pool, model.foreign)
        return replace(model.served, aliases=config.aliases, upstream=upstream, fallbacks=config.fallbacks)

    def _engines(self, config: ModelConfig, text: LoadedText, pool: ReplicaPool, foreign: HttpUpstream | None) -> Upstream:
        model_text = ModelText(self._text_pool, text.name, text.model.tokenizer)
        engines = TokenUpstream(model_text, pool, draw_seed=self._sources.draw_seed, formats=_formats(config, text.model))
        return engines if foreign is None else FallbackUpstream(engines, foreign, self._sources.clock)

    def _unreadable(self, config: ModelConfig, text: FailedText, foreign: HttpUpstream | None, stack: AsyncExitStack) -> OpenModel:
        """Requests are refused, or answered by foreign servers alone."""
        own = UnreadableModel(config.name, [replica.name for replica in config.replicas])
        upstream = own if foreign is None else FallbackUpstream(own, foreign, self._sources.clock)
        return OpenModel(config, self._served(config, upstream), stack, foreign, failure=text.error)

    def _served(self, config: ModelConfig, upstream: Upstream) -> ServedModel:
        return ServedModel(config.name, config.aliases, upstream, int(self._sources.unix_time()), fallbacks=config.fallbacks)

    def _describe(self, pool: ReplicaPool, config: ModelConfig) -> None:
        pool.unavailable, pool.starts_on_demand = config.unavailable, config.starts_on_demand
        pool.num_wanted = config.num_wanted
        closed_s = 0.0 if config.closed_until is None else config.closed_until - self._sources.unix_time()
        pool.closed_until = self._sources.clock() + closed_s

    def _replica(self, config: ReplicaConfig, text: LoadedText, circuit: ReplicaCircuit) -> Replica:
        return Replica(ReplicaId(config.name), self._connect(config, text.model, self._sources.clock), circuit)

    def _foreign_servers(self, config: ModelConfig) -> AbstractAsyncContextManager[HttpUpstream]:
        from headrace.gateway.upstream.foreign.upstream import (
            open_upstream,  # aiohttp takes a fifth of a second, and most sites have no such server
        )

        sources = self._sources
        return open_upstream(config.name, config.upstreams, clock=sources.clock, unix_time=sources.unix_time, random=sources.random)


def _without_numbers(config: ModelConfig) -> ModelConfig:
    return replace(config, replicas=(), closed_until=None, num_wanted=None, num_pods=None)


def _circuits(before: OpenModel | None, config: ModelConfig) -> dict[ReplicaConfig, ReplicaCircuit]:
    """Empty when the former model served another folder."""
    if before is None or before.config.folder != config.folder:
        return {}
    return {known: replica.circuit for known, replica in before.replicas.items()}


def _resolved(config: ReplicaConfig) -> ReplicaConfig:
    """A changed token in the file counts as another replica. Raises ConfigError."""
    return replace(config, token=config.target().token, token_file="")


def _formats(model: ModelConfig, text: TextModel) -> ModelFormats:
    parsers = {"tool_call_parser": model.tool_call_parser, "reasoning_parser": model.reasoning_parser}
    return ModelFormats.of(text.tokenizer, text.template, **parsers)
