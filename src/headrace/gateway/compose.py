"""Opens everything that a gateway is made of, and closes it together: `open_gateway`.

No other module of the gateway knows all of its parts. `gateway.main` serves what is opened here, and `gateway.app` is the application.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.core.errors import CheckpointError, ConfigError
from headrace.gateway.access.key_store import open_keys
from headrace.gateway.access.memory_charges import RequestMemory
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.access.stored_keys import StoredKeys
from headrace.gateway.app import Gateway
from headrace.gateway.cache.answer_cache import AnswerCache, open_answer_store
from headrace.gateway.cache.replays import Replays, open_replay_store, replay_limits
from headrace.gateway.config import GatewayConfig
from headrace.gateway.control.models import Connect, ModelOpener, Sources, connect_wire
from headrace.gateway.control.reload import Reloader
from headrace.gateway.control.site_models import SiteModels
from headrace.gateway.control.texts import LoadedTexts, LoadText, MakeWorkers
from headrace.gateway.generation.answer_encoder import EncodingTurns
from headrace.gateway.generation.explanations import Explanations
from headrace.gateway.generation.kept_streams import KeptStreams
from headrace.gateway.generation.parsed_request import with_classifier
from headrace.gateway.generation.run import Pipeline
from headrace.gateway.generation.service import Service
from headrace.gateway.generation.shadows import ShadowCopies
from headrace.gateway.generation.stages import Stages
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.ledger.ledger import Ledger, open_ledger
from headrace.gateway.limits.limiter import Limiter
from headrace.gateway.limits.store import open_limits
from headrace.gateway.sessions.sessions import Sessions, open_session_store
from headrace.gateway.site import GatewayWorker, Siblings, SiteMetrics, TenantShare, give_back_when_idle, memory_limits
from headrace.gateway.stores.config import Stores
from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.store import Store
from headrace.gateway.text_workers.frames import Workers
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.text_workers.processes import HostProcess
from headrace.gateway.upstream.served_models import ModelTable
from headrace.machine.resources import machine_bytes, process_memory
from headrace.observe.logs import environment_format
from headrace.observe.metrics import MemoryReading, Metrics
from headrace.observe.request_log import RequestLog
from headrace.observe.store_metrics import AnswerCacheMetrics, ReplayMetrics, ResumeMetrics, SessionMetrics
from headrace.text.folder import TextModel, load_text

if TYPE_CHECKING:
    from headrace.observe.traces import TraceExporter


def load_texts(config: GatewayConfig) -> dict[str, TextModel | CheckpointError]:
    """Model name -> tokenizer and template, or the error of loading them, for models of engines. Only text workers compile templates."""
    return {model.name: _load_or_error(model.folder) for model in config.models if model.folder}


def _load_or_error(folder: str) -> TextModel | CheckpointError:
    try:
        return load_text(folder)
    except CheckpointError as error:
        return error


@dataclass(frozen=True, slots=True)
class OpenGateway:
    """An opened gateway: the application, and the reloader that changes its configuration."""

    app: Gateway
    reloader: Reloader


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    texts: Mapping[str, TextModel | CheckpointError],
    workers: Workers,
    *,
    connect: Connect = connect_wire,
    load: LoadText = load_text,
    make_workers: MakeWorkers = HostProcess,
    sources: Sources | None = None,
    worker: GatewayWorker | None = None,
) -> AsyncIterator[OpenGateway]:
    """A gateway, opened until the block ends; it connects to its replicas in the background. Raises ConfigError and CheckpointError.

    workers       text workers, started or not
    load          loads the text of a model's folder, for later configurations
    make_workers  makes the text workers of later configurations
    worker        this process among several gateway workers; None: it is the only gateway of its port
    """
    sources = sources or Sources()
    metrics = Metrics()
    open_log = partial(_open_log, worker=None if worker is None else worker.index)
    request_log = open_log(config.request_log_target)
    async with AsyncExitStack() as stack:
        stack.callback(request_log.close)
        limits = config.limits
        text_pool = TextPool(workers, max_workers=limits.max_text_workers, max_queue=limits.max_text_queue, clock=sources.clock)
        await stack.enter_async_context(text_pool)
        loaded = LoadedTexts(config.models, texts, text_pool, load, make_workers)
        models = SiteModels(ModelOpener(text_pool, connect, sources), metrics)
        stack.push_async_callback(models.close)
        await models.open(config.models, config.pool_rules, loaded.texts)
        with_classifier(config.routes.values())
        service, stored_keys = await _open_service(stack, config, models, text_pool, metrics, sources)
        limiter = await _limiter(stack, config, metrics, sources)
        traces = _traces(stack, config, metrics)
        app = Gateway(
            config, service, request_log, stored_keys=stored_keys, limiter=limiter, metrics=metrics, traces=traces, clock=sources.clock
        )
        stack.callback(lambda: app.request_log.close())
        if worker is not None:
            siblings = Siblings(worker, config.workers)
            for part in (service.site_metrics, service.stages.kept_streams, service.explanations):
                part.join(siblings)
            await stack.enter_async_context(siblings)
        _connect_metrics(app, models)
        yield OpenGateway(app, _followed(Reloader(app, models, loaded, open_log), app))


async def _open_service(
    stack: AsyncExitStack,
    config: GatewayConfig,
    models: SiteModels,
    text_pool: TextPool,
    metrics: Metrics,
    sources: Sources,
) -> tuple[Service, StoredKeys | None]:
    """Open everything that requests share; `stack` closes each part. Raises ConfigError."""
    clock, unix_time, registry = sources.clock, sources.unix_time, metrics.registry
    share = TenantShare(config.limits.max_tenant_share, config.num_tenants)
    memory = RequestMemory(memory_limits(config.limits, machine_bytes(), share))
    stack.callback(asyncio.create_task(give_back_when_idle(memory), name="memory given back").cancel)
    open_requests = OpenRequests(config.limits.max_requests, share)
    stores = Stores(config.store, config.state, share, unix_time)

    def opened(store: Store, name: str) -> GuardedStore:
        guarded = GuardedStore(store, name, clock)
        stack.push_async_callback(guarded.close)
        return guarded

    answers = opened(open_answer_store(stores), "cached answers")
    replayed = opened(open_replay_store(stores), "answers under an Idempotency-Key")
    stored_keys = await _stored_keys(stack, config, share, sources)
    watch = StreamWatch(left_bytes=lambda: memory.answers.left, on_lag=metrics.loop_lag.observe, clock=clock)
    await stack.enter_async_context(watch)
    conversations = opened(open_session_store(stores), "sessions") if config.sessions.ttl_s else None
    stages = Stages(
        sessions=Sessions(conversations, ttl_s=config.sessions.ttl_s, metrics=SessionMetrics(registry), unix_time=unix_time),
        replays=Replays(replayed, ReplayMetrics(registry), limits=replay_limits(stores)),
        answer_cache=AnswerCache(answers, AnswerCacheMetrics(registry), unix_time),
        kept_streams=KeptStreams(opened(stores.open_streams(), "streams"), metrics=ResumeMetrics(registry)),
        open_requests=open_requests,
        watch=watch,
        metrics=metrics,
        clock=clock,
        unix_time=unix_time,
    )
    ledger = await _ledger(stack, config, metrics, sources)
    shadows = ShadowCopies(memory, metrics, clock)
    stack.push_async_callback(shadows.close)
    service = Service(
        config=config.requests,
        models=ModelTable(models.served, config.routes),
        open_requests=open_requests,
        text_pool=text_pool,
        memory=memory,
        stages=stages,
        pipeline=Pipeline(stages.chain(), watch, EncodingTurns(clock), shadows, metrics, clock),
        explanations=Explanations(ledger),
        site_metrics=SiteMetrics(metrics, open_requests.by_tenant, share),
        salt_key=bytes.fromhex(config.salt_key) or secrets.token_bytes(32),
        unix_time=unix_time,
    )
    return service, stored_keys


async def _stored_keys(stack: AsyncExitStack, config: GatewayConfig, share: TenantShare, sources: Sources) -> StoredKeys | None:
    store = open_keys(config.state, config.store)
    if store is None:
        return None
    keys = StoredKeys(store, clock=sources.clock, unix_time=sources.unix_time)
    keys.on_first_key(share.note_stored_keys)
    return await stack.enter_async_context(keys)


async def _limiter(stack: AsyncExitStack, config: GatewayConfig, metrics: Metrics, sources: Sources) -> Limiter:
    store = open_limits(config.store, config.state, clock=sources.clock, unix_time=sources.unix_time)
    limiter = await stack.enter_async_context(Limiter.running(store, clock=sources.clock, budget=config.limits.budget))
    metrics.read_budgets(limiter.budget_readings)
    return limiter


async def _ledger(stack: AsyncExitStack, config: GatewayConfig, metrics: Metrics, sources: Sources) -> Ledger | None:
    ledger = open_ledger(config.state, config.usage, sources.unix_time)
    if ledger is not None:
        stack.push_async_callback(ledger.close)
        metrics.read_usage(ledger.reading)
    return ledger


def _traces(stack: AsyncExitStack, config: GatewayConfig, metrics: Metrics) -> TraceExporter | None:
    if not config.traces_url:
        return None
    from headrace.observe.traces import TraceExporter  # aiohttp takes a fifth of a second, and most sites have no collector

    exporter = TraceExporter(config.traces_url, metrics.registry)
    stack.push_async_callback(exporter.close)
    return exporter


def _followed(reloader: Reloader, app: Gateway) -> Reloader:
    """The reloader, after each shared object has been set to follow configuration changes."""
    service, share = app.service, app.service.site_metrics.share
    reloader.follow(lambda config: partial(service.open_requests.change, config.limits.max_requests))
    reloader.follow(lambda config: partial(service.text_pool.change, config.limits.max_text_queue))
    reloader.follow(lambda config: partial(share.change, config.limits.max_tenant_share, config.num_tenants))
    reloader.follow(lambda config: partial(service.memory.change, memory_limits(config.limits, machine_bytes(), share)))
    if (ledger := service.explanations.ledger) is not None:
        reloader.follow(lambda config: ledger.prepare(config.usage))
    reloader.follow(lambda config: with_classifier(config.routes.values()))
    reloader.follow(lambda config: partial(app.limiter.follow_budget, config.limits.budget))
    return reloader


def _connect_metrics(app: Gateway, models: SiteModels) -> None:
    """Give the metrics page functions that read gauges from their owners when the page is asked for."""
    service, metrics = app.service, app.metrics
    budgets = service.memory.prompts, service.memory.answers
    metrics.read_process(lambda: process_memory().resident)
    metrics.read_engines(models.readings)
    metrics.read_held(models.num_held)
    metrics.read_wanted(models.num_wanted)
    metrics.read_upstreams(models.upstream_readings)
    metrics.read_text(service.text_pool.reading)
    metrics.requests_open.set_function(lambda: service.open_requests.num_open)
    metrics.log_dropped.set_function(lambda: app.request_log.num_dropped)
    metrics.read_memory(
        lambda: MemoryReading(
            held={budget.name: budget.held for budget in budgets},
            refused={budget.name: budget.num_refused for budget in budgets},
            num_streams_cut=service.pipeline.watch.num_cut,
            num_answers_pending=service.pipeline.encoding.num_pending,
        )
    )


def _open_log(target: str, *, worker: int | None) -> RequestLog:
    """Raises ConfigError."""
    try:
        return RequestLog(target, environment_format(), worker=worker)
    except OSError as error:
        raise ConfigError("request_log", f"{target} cannot be opened: {error.strerror}") from None
