"""Runs an opened gateway: listens, reports that it is ready, serves and drains.

`gateway.process` is the process around it, and `gateway.compose` opens its parts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.core.errors import CheckpointError, HeadraceError, Unavailable, counted
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.compose import OpenGateway, open_gateway
from headrace.gateway.config import GatewayConfig
from headrace.gateway.control.reload import answering
from headrace.gateway.http.config import ConnectionLimit, connection_limit
from headrace.gateway.http.server import Server
from headrace.gateway.http.tls import ServerCertificate
from headrace.gateway.site import GatewayWorker
from headrace.gateway.text_workers.frames import Workers
from headrace.gateway.upstream.served_models import ModelTable
from headrace.machine.signals import DUPLICATE_SIGNAL_S, StopSignals, first_of
from headrace.text.folder import TextModel
from headrace.wire.leash import Leash
from headrace.wire.listening import shown_host

log = logging.getLogger("headrace.gateway")

YOUNG_OBJECTS = 50_000
"""Net new objects that start a collection of the youngest generation: more than the rows of a large frame. With Python's 700 a frame counts
as growth although it is freed at once, and full collections (0.1 s with a thousand streams) come every minute without need."""

FIRST_CONNECTIONS_S = 1.0
"""Longest time in seconds that a starting gateway waits for its engines before it listens. Only hosts that do not answer at all take it."""

DRAIN_GRACE_S = 1.0
"""Seconds that a request which is cut off has to write its error."""


class CannotBind(HeadraceError):
    """The address is in use, or does not belong to this machine."""


def run_loop(main: Coroutine[Any, Any, bool]) -> bool:
    """asyncio.run on uvloop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def serve(
    config: GatewayConfig,
    texts: Mapping[str, TextModel | CheckpointError],
    workers: Workers,
    leash: Leash,
    read_again: Callable[[], GatewayConfig] | None,
    worker: GatewayWorker | None,
) -> bool:
    """Open the gateway, listen, serve and drain. False: the drain cut requests off.

    Raises CannotBind, ConfigError for a fault that only opening shows, or CheckpointError when no model can be served.
    """
    with StopSignals(duplicate_signal_s=0.0 if leash.is_held else DUPLICATE_SIGNAL_S) as stop:
        limit = limit_connections(config)
        async with open_gateway(config, texts, workers, worker=worker) as opened:
            return await _serve_until_stopped(opened, config, limit, leash, read_again, stop)


async def _serve_until_stopped(
    opened: OpenGateway,
    config: GatewayConfig,
    limit: ConnectionLimit,
    leash: Leash,
    read_again: Callable[[], GatewayConfig] | None,
    stop: StopSignals,
) -> bool:
    """Listen and serve until a stop signal, once everything else is open. False: the drain cut requests off. Raises CannotBind."""
    gateway = opened.app
    await first_connections(gateway.service.models)
    server = Server(gateway, config.server, gateway.refused, limit)
    try:
        port = await server.start(shares_port=leash.is_held)  # with the supervisor, which keeps it
    except OSError as error:
        raise CannotBind(f"cannot listen on {shown_host(config.host)}:{config.port}: {error.strerror}") from error
    opened.reloader.follow(partial(follow_connections, server))
    # Every object made so far stays for good: frozen, no collection visits it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    urls = ", ".join(f"{config.scheme}://{address}" for address in server.addresses)
    log.info("listening on %s; a model answers once its engine is up", urls)
    first = server.addresses[0].removesuffix(f":{port}").strip("[]")
    host = first if first in ("0.0.0.0", "::") else config.host  # "*" and "::0" are not for a URL
    leash.ready({"host": host, "port": port, "scheme": config.scheme})
    closed = asyncio.Event()
    serving = asyncio.create_task(server.serve_until(closed))
    async with answering(leash, opened.reloader, read_again, stop):
        await first_of(stop.soft)
        is_complete = await drain(gateway.service.open_requests, opened.reloader.config.timeouts.drain_s, stop.hard)
        closed.set()
        await serving
        return is_complete


def limit_connections(config: GatewayConfig, num_connections: int = 0) -> ConnectionLimit:
    """As many connections as open files allow. num_connections: open client connections. Raises ConfigError if too few fit."""
    wanted = config.limits.max_connections
    num_foreign = sum(len(model.upstreams) for model in config.models)
    num_replicas = sum(len(model.replicas) for model in config.models)
    num_text_workers = config.limits.max_text_workers
    limit = connection_limit(wanted, num_replicas, num_foreign, num_text_workers=num_text_workers, num_connections=num_connections)
    if limit.max_connections < wanted:
        log.warning("%d connections at once instead of %d, as open files allow (ulimit -n)", limit.max_connections, wanted)
    return limit


def follow_connections(server: Server, config: GatewayConfig) -> Callable[[], None]:
    """Prepare to bound connections by a changed configuration, and read its certificate. Raises ConfigError."""
    limit = limit_connections(config, len(server.server_state.connections))
    certificate = None if config.tls is None else ServerCertificate(config.tls)
    return partial(server.follow, config.server, limit, certificate)


async def first_connections(models: ModelTable) -> None:
    """Wait until the first attempt to connect to each replica has ended, at most FIRST_CONNECTIONS_S.

    Otherwise a gateway that restarts while its engines run would refuse its first requests. An engine that is not up yet refuses the
    attempt at once.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_CONNECTIONS_S):
            while not all(replica.has_tried for model in models.models for replica in model.upstream.replicas()):
                await asyncio.sleep(0.002)


async def drain(open_requests: OpenRequests, timeout_s: float, hard: asyncio.Future[None]) -> bool:
    """Refuse new requests (503 with Retry-After), and wait for running ones. False: some were ended with an error, at the timeout or when
    `hard` was done."""
    open_requests.drain()
    hint = "; Ctrl-C again ends them now" if open_requests.num_open else ""
    log.info("draining %s for up to %g s%s", counted(open_requests.num_open, "request"), timeout_s, hint)
    emptied = asyncio.ensure_future(open_requests.wait_empty(timeout_s))
    await first_of(emptied, hard)
    if emptied.done() and emptied.result():
        return True
    emptied.cancel()
    why = "since a second signal came" if hard.done() else f"after {timeout_s:g} s"
    log.warning("cut off %s, %s", counted(open_requests.num_open, "request"), why)
    open_requests.cut(Unavailable("This server shut down before the answer was complete; it can be sent again."))
    await open_requests.wait_empty(DRAIN_GRACE_S)
    return False
