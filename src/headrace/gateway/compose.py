"""Everything a gateway is made of, opened and closed together."""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from headrace.core.errors import ConfigError
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.app import Gateway
from headrace.gateway.config import GatewayConfig, ModelConfig, ReplicaConfig
from headrace.gateway.generation.service import Service
from headrace.gateway.generation.text_pool import TextPool
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.upstream.replicas import Connection, Replica, ReplicaPool
from headrace.gateway.upstream.served_models import ModelTable, ServedModel, now_unix
from headrace.gateway.upstream.tokens import TokenUpstream
from headrace.observe.metrics import Metrics, ReplicaMetrics
from headrace.observe.request_log import RequestLog
from headrace.policy.routing.choice import ReplicaId
from headrace.text.folder import TextModel, load_text
from headrace.wire.client import ReplicaClient
from headrace.wire.service import Expectation


def load_texts(config: GatewayConfig) -> dict[str, TextModel]:
    """Tokenizer and template of every model, by name, with templates compiled. Raises CheckpointError; takes a moment."""
    texts = {model.name: load_text(model.folder) for model in config.models}
    for text in texts.values():
        text.template.compile()
    return texts


Connect = Callable[[ReplicaConfig, TextModel, ReplicaMetrics], Connection]
"""How a replica is reached. `connect_wire` speaks the wire; tests bring their own."""


def connect_wire(config: ReplicaConfig, text: TextModel, instruments: ReplicaMetrics) -> Connection:
    return ReplicaClient(
        config.address,
        name=config.name,
        token=config.token,
        expect=Expectation(digests=text.digests),
        on_load=instruments.observe_steps,
    )


@asynccontextmanager
async def open_gateway(config: GatewayConfig, texts: Mapping[str, TextModel], *, connect: Connect = connect_wire) -> AsyncIterator[Gateway]:
    """The application, connected to its replicas (or trying to) until the block ends. Raises ConfigError."""
    metrics = Metrics()
    request_log = _open_log(config.request_log)
    text_pool = TextPool(max_workers=config.limits.max_text_workers, max_queue=config.limits.max_text_queue)
    async with AsyncExitStack() as stack:
        stack.callback(request_log.close)
        stack.callback(text_pool.close)
        models = [await stack.enter_async_context(_model(model, texts[model.name], metrics, connect)) for model in config.models]
        watch = StreamWatch(
            ping_s=config.timeouts.sse_ping_s, max_pending_bytes=config.limits.max_pending_bytes, on_lag=metrics.loop_lag.observe
        )
        service = Service(
            config=config,
            models=ModelTable(models),
            open_requests=OpenRequests(config.limits.max_requests),
            watch=await stack.enter_async_context(watch),
            text_pool=text_pool,
            metrics=metrics,
            salt_key=bytes.fromhex(config.salt_key) or secrets.token_bytes(32),
        )
        metrics.read_engines(service.models.readings)
        metrics.requests_open.set_function(lambda: service.open_requests.num_open)
        metrics.log_dropped.set_function(lambda: request_log.num_dropped)
        yield Gateway(service, request_log)


def _open_log(target: str) -> RequestLog:
    try:
        return RequestLog(target)
    except OSError as error:
        raise ConfigError("request_log", f"{target} cannot be opened: {error.strerror}") from None


@asynccontextmanager
async def _model(config: ModelConfig, text: TextModel, metrics: Metrics, connect: Connect) -> AsyncIterator[ServedModel]:
    replicas: list[Replica] = []
    for replica in config.replicas:
        instruments = metrics.replica(config.name, replica.name)
        replicas.append(Replica(ReplicaId(replica.name), connect(replica, text, instruments), instruments))
    async with ReplicaPool(config.name, replicas, random=random.SystemRandom()) as pool:
        yield ServedModel(config.name, config.aliases, text, pool, TokenUpstream(pool, text.tokenizer), now_unix())
