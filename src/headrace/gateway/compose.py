"""Opens everything that a gateway is made of, and closes it together: `open_gateway`.

The only module of the gateway that knows every other one. The process around it is `gateway.main`, the application `gateway.app`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.app import Gateway
from headrace.gateway.config import GatewayConfig, ModelConfig, ReplicaConfig
from headrace.gateway.foreign_config import named
from headrace.gateway.generation.encoding import EncodingTurns
from headrace.gateway.generation.service import Service
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.memory import give_back_when_idle, machine_bytes, memory_budget
from headrace.gateway.text_workers.frames import HostConfig
from headrace.gateway.text_workers.model_text import ModelText
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.text_workers.processes import HostProcess
from headrace.gateway.text_workers.workers import Workers
from headrace.gateway.upstream.foreign import HttpUpstream, open_upstream
from headrace.gateway.upstream.replicas import Connection, Replica, ReplicaPool
from headrace.gateway.upstream.seam import Upstream
from headrace.gateway.upstream.served_models import ModelTable, ServedModel
from headrace.gateway.upstream.tokens import TokenUpstream
from headrace.observe.logs import environment_format
from headrace.observe.metrics import MemoryReading, Metrics
from headrace.observe.request_log import RequestLog
from headrace.policy.routing.choice import Random, ReplicaId
from headrace.text.folder import TextModel, load_text
from headrace.text.output.model_formats import ModelFormats
from headrace.wire.client import ReplicaClient
from headrace.wire.service import Expectation


def load_texts(config: GatewayConfig) -> dict[str, TextModel]:
    """Tokenizer and template of every model that engines serve, by name. Only text workers compile templates. Raises CheckpointError."""
    return {model.name: load_text(model.folder) for model in config.models if not model.upstreams}


def text_workers(config: GatewayConfig) -> HostProcess:
    """The text workers, not yet started. They tokenize for the models that engines serve, and parse large bodies for every model."""
    folders = {model.name: model.folder for model in config.models if not model.upstreams}
    keys = frozenset(upstream.api_key_env for model in config.models for upstream in model.upstreams)
    return HostProcess(HostConfig(folders, config.limits), withheld=keys)


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


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    texts: Mapping[str, TextModel],
    workers: Workers,
    *,
    connect: Connect = connect_wire,
    sources: Sources | None = None,
) -> AsyncIterator[Gateway]:
    """The application, connected to its replicas (or trying to) until the block ends. Raises ConfigError and CheckpointError.

    workers  what `text_workers` made, started or not
    """
    sources = sources or Sources()
    metrics = Metrics()
    request_log = _open_log(config.request_log_target)
    async with AsyncExitStack() as stack:
        stack.callback(request_log.close)
        text_pool = await stack.enter_async_context(_text_pool(config, workers))
        models = await _open_models(stack, config, texts, text_pool, metrics, connect, sources)
        memory = memory_budget(config, machine_bytes())
        watch = StreamWatch(
            left_bytes=lambda: memory.answers.left,
            ping_s=config.timeouts.sse_ping_s,
            max_pending_bytes=config.limits.max_pending_bytes,
            on_lag=metrics.loop_lag.observe,
            clock=sources.clock,
        )
        service = Service(
            config=config,
            models=ModelTable(models),
            open_requests=OpenRequests(config.limits.max_requests),
            watch=await stack.enter_async_context(watch),
            text_pool=text_pool,
            encoding=EncodingTurns(sources.clock),
            memory=memory,
            metrics=metrics,
            salt_key=bytes.fromhex(config.salt_key) or secrets.token_bytes(32),
            clock=sources.clock,
            unix_time=sources.unix_time,
        )
        _connect_metrics(service, request_log)
        trimming = asyncio.create_task(give_back_when_idle(memory), name="memory given back")
        stack.callback(trimming.cancel)
        yield Gateway(service, request_log)


def _text_pool(config: GatewayConfig, workers: Workers) -> TextPool:
    limits = config.limits
    return TextPool(
        workers, max_workers=limits.max_text_workers, max_queue=limits.max_text_queue, max_queue_bytes=limits.max_text_queue_bytes
    )


async def _open_models(
    stack: AsyncExitStack,
    config: GatewayConfig,
    texts: Mapping[str, TextModel],
    text_pool: TextPool,
    metrics: Metrics,
    connect: Connect,
    sources: Sources,
) -> list[ServedModel]:
    """Every model with its upstream, which `stack` closes."""
    models: list[ServedModel] = []
    for model in config.models:
        upstream: Upstream
        if model.upstreams:
            upstream = await stack.enter_async_context(_foreign_servers(model, metrics, sources))
        else:
            pool = await stack.enter_async_context(
                _replica_pool(model, texts[model.name], metrics, connect, sources, config.timeouts.failover_s)
            )
            text = ModelText(text_pool, model.name, texts[model.name].tokenizer)
            upstream = TokenUpstream(text, pool, draw_seed=sources.draw_seed, formats=_formats(model, texts[model.name]))
        models.append(ServedModel(model.name, model.aliases, upstream, int(sources.unix_time())))
    return models


def _formats(model: ModelConfig, text: TextModel) -> ModelFormats:
    parsers = {"tool_call_parser": model.tool_call_parser, "reasoning_parser": model.reasoning_parser}
    return ModelFormats.of(text.tokenizer, text.template, **parsers)


def _foreign_servers(config: ModelConfig, metrics: Metrics, sources: Sources) -> AbstractAsyncContextManager[HttpUpstream]:
    for name, _ in named(config.upstreams):
        metrics.replica(config.name, name)  # the server's series exist before its first request
    return open_upstream(config.name, config.upstreams, clock=sources.clock, unix_time=sources.unix_time, random=sources.random)


def _connect_metrics(service: Service, request_log: RequestLog) -> None:
    """Let the metrics page read what is known elsewhere, at the moment it is asked for."""
    upstreams = [model.upstream for model in service.models.models if isinstance(model.upstream, HttpUpstream)]
    metrics, budgets = service.metrics, (service.memory.prompts, service.memory.answers)
    metrics.read_engines(service.models.readings)
    if upstreams:
        metrics.read_upstreams(lambda: [reading for upstream in upstreams for reading in upstream.readings()])
    metrics.read_text(service.text_pool.reading)
    metrics.requests_open.set_function(lambda: service.open_requests.num_open)
    metrics.log_dropped.set_function(lambda: request_log.num_dropped)
    metrics.read_memory(
        lambda: MemoryReading(
            held={budget.name: budget.held for budget in budgets},
            refused={budget.name: budget.num_refused for budget in budgets},
            num_streams_cut=service.watch.num_cut,
            num_answers_pending=service.encoding.num_pending,
        )
    )


def _open_log(target: str) -> RequestLog:
    try:
        return RequestLog(target, environment_format())
    except OSError as error:
        raise ConfigError("request_log", f"{target} cannot be opened: {error.strerror}") from None


def _replica_pool(
    config: ModelConfig, text: TextModel, metrics: Metrics, connect: Connect, sources: Sources, failover_s: float
) -> ReplicaPool:
    for replica in config.replicas:
        metrics.replica(config.name, replica.name)  # the replica's series exist before its first request
    replicas = [Replica(ReplicaId(replica.name), connect(replica, text, sources.clock)) for replica in config.replicas]
    return ReplicaPool(config.name, replicas, random=sources.random, clock=sources.clock, failover_s=failover_s)
