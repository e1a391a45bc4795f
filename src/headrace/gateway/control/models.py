"""Opens the models of a configuration, and changes their replicas while requests run.

What may change at all is decided in `control.changes`; when, and that all of it happens or nothing, in `control.reload`.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.gateway.config import ModelConfig, ReplicaConfig, Routing, Timeouts
from headrace.gateway.foreign_config import named
from headrace.gateway.text_workers.model_text import ModelText
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.upstream.foreign import HttpUpstream, open_upstream
from headrace.gateway.upstream.replicas import Connection, Replica, ReplicaPool
from headrace.gateway.upstream.seam import Upstream
from headrace.gateway.upstream.served_models import ServedModel
from headrace.gateway.upstream.tokens import TokenUpstream
from headrace.observe.metrics import Metrics
from headrace.policy.routing.choice import Random, ReplicaId
from headrace.text.folder import TextModel
from headrace.text.output.model_formats import ModelFormats
from headrace.wire.client import ReplicaClient
from headrace.wire.service import Expectation

MAX_DRAWN_SEED = 2**63
"""Exclusive. Seeds are signed 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Time and randomness, which tests replace.

    clock      monotonic seconds: arrivals, deadlines, latencies, health
    unix_time  Unix seconds: `created` in answers
    draw_seed  draws the seed of a request that names none
    random     draws the candidates that routing compares
    """

    clock: Clock = time.monotonic
    unix_time: Clock = time.time
    draw_seed: Callable[[], int] = field(default=lambda: secrets.randbelow(MAX_DRAWN_SEED))
    random: Random = field(default_factory=random.SystemRandom)


Connect = Callable[[ReplicaConfig, TextModel, Clock], Connection]
"""Makes the connection to a replica; the clock times its deadlines. `connect_wire` speaks the wire; tests make their own."""


def connect_wire(config: ReplicaConfig, text: TextModel, clock: Clock) -> Connection:
    return ReplicaClient(
        config.address,
        name=config.name,
        token=config.target().token,
        tls=config.tls,
        expect=Expectation(digests=text.digests),
        clock=clock,
    )


@dataclass(slots=True, eq=False)
class OpenModel:
    """A model that is served.

    pool      None: foreign servers answer for it
    replicas  the configuration of each of the pool's replicas, and what was made of it
    """

    config: ModelConfig
    served: ServedModel
    text: TextModel | None = None
    pool: ReplicaPool | None = None
    replicas: dict[ReplicaConfig, Replica] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What a new configuration makes of one model's replicas. The connections to `add` are made, and not started."""

    model: OpenModel
    config: ModelConfig
    add: Mapping[ReplicaConfig, Replica]
    retire: Mapping[ReplicaConfig, Replica]

    def apply(self) -> None:
        model = self.model
        assert model.pool is not None
        model.pool.change(add=self.add.values(), retire=self.retire.values())
        model.replicas = {config: replica for config, replica in (model.replicas | dict(self.add)).items() if config not in self.retire}
        model.config = self.config


class ModelOpener:
    """Makes models from their configuration. `stack` closes what it opened."""

    def __init__(self, stack: AsyncExitStack, text_pool: TextPool, metrics: Metrics, connect: Connect, sources: Sources) -> None:
        self._stack = stack
        self._text_pool = text_pool
        self._metrics = metrics
        self._connect = connect
        self._sources = sources

    async def open(self, config: ModelConfig, text: TextModel | None, timeouts: Timeouts, routing: Routing) -> OpenModel:
        """A model, connected to its replicas or trying to. Raises ConfigError. text: not used where foreign servers answer"""
        if config.upstreams:
            return OpenModel(config, self._served(config, await self._stack.enter_async_context(self._foreign_servers(config))))
        assert text is not None, "engines are sent token ids"
        replicas = {replica: self._replica(config, replica, text) for replica in config.replicas}
        pool = ReplicaPool(
            config.name,
            list(replicas.values()),
            random=self._sources.random,
            clock=self._sources.clock,
            failover_s=timeouts.failover_s,
            slow_start_s=routing.slow_start_s,
        )
        await self._stack.enter_async_context(pool)
        model_text = ModelText(self._text_pool, config.name, text.tokenizer)
        upstream = TokenUpstream(model_text, pool, draw_seed=self._sources.draw_seed, formats=_formats(config, text))
        return OpenModel(config, self._served(config, upstream), text, pool, replicas)

    def change_replicas(self, model: OpenModel, config: ModelConfig) -> PoolChange:
        """What `config` makes of a model's replicas; nothing is changed before `PoolChange.apply`. Raises ConfigError."""
        assert model.text is not None, "a foreign server is no replica"
        add = {replica: self._replica(config, replica, model.text) for replica in config.replicas if replica not in model.replicas}
        retire = {given: replica for given, replica in model.replicas.items() if given not in config.replicas}
        return PoolChange(model, config, add, retire)

    def _served(self, config: ModelConfig, upstream: Upstream) -> ServedModel:
        return ServedModel(config.name, config.aliases, upstream, int(self._sources.unix_time()))

    def _replica(self, model: ModelConfig, config: ReplicaConfig, text: TextModel) -> Replica:
        self._metrics.replica(model.name, config.name)  # the replica's series exist before its first request
        return Replica(ReplicaId(config.name), self._connect(config, text, self._sources.clock))

    def _foreign_servers(self, config: ModelConfig) -> AbstractAsyncContextManager[HttpUpstream]:
        for name, _ in named(config.upstreams):
            self._metrics.replica(config.name, name)  # as for replicas
        sources = self._sources
        return open_upstream(config.name, config.upstreams, clock=sources.clock, unix_time=sources.unix_time, random=sources.random)


def _formats(model: ModelConfig, text: TextModel) -> ModelFormats:
    parsers = {"tool_call_parser": model.tool_call_parser, "reasoning_parser": model.reasoning_parser}
    return ModelFormats.of(text.tokenizer, text.template, **parsers)
