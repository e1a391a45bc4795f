"""Asks a foreign server for its list of models and its load, for as long as the gateway runs.

Neither an answer nor a failure of the server is fatal.
"""

from __future__ import annotations

import asyncio
import math

import aiohttp

from headrace.core.clock import Clock
from headrace.gateway.upstream.foreign.facts import listed_model, reported_load
from headrace.gateway.upstream.foreign.server import ForeignServer
from headrace.gateway.upstream.foreign.session import NOT_CONNECTED

MODELS_S = 60.0
"""Seconds between two lists of models."""

UNREACHABLE_S = 5.0
"""The same for a server that cannot be reached, so that it is used again soon after it came back."""

LOAD_S = 1.0
"""Seconds between two metrics pages."""

NO_ANSWER = (*NOT_CONNECTED, aiohttp.ClientError, OSError, TimeoutError)


async def watch(server: ForeignServer, *, reads_load: bool, clock: Clock) -> None:
    """Ask a server for its list of models and its load, until cancelled.

    reads_load  whether metrics are read, which matters only among several servers. A server without known metrics is asked again only with
                each list of models
    """
    asked_at, has_load = -math.inf, False
    while True:
        if clock() - asked_at >= (MODELS_S if server.is_reachable else UNREACHABLE_S):
            asked_at = clock()
            await _read_models(server)
            has_load = reads_load
        if has_load:
            has_load = await _read_load(server)
        await asyncio.sleep(LOAD_S)


async def _read_models(server: ForeignServer) -> None:
    """Read the list of models: notes whether the server is reachable and lists the model, and the model's context."""
    try:
        status, body = await server.session.get(server.session.models_url)
    except NOT_CONNECTED as error:
        if server.is_reachable:
            server.log_fault(f"cannot be reached: {type(error).__name__}")
        server.is_reachable = False
        return
    except NO_ANSWER:
        return  # a server that is slow or does not have the list may answer requests all the same
    server.is_reachable = True
    if status in (401, 403) and not server.is_key_refused:
        server.log_fault(f"does not list its models: status {status}; is its key right?")
    server.is_key_refused = status in (401, 403)
    listed = listed_model(body, server.far_name) if status == 200 else None
    if listed is not None and listed != server.listed:
        if listed.is_listed:
            server.log_fact(f"lists the model, with a context of {listed.max_model_len or 'unknown'} tokens")
        else:
            server.log_fault(f"does not list the model {server.far_name!r}")
        server.listed = listed


async def _read_load(server: ForeignServer) -> bool:
    """Read the metrics page and note the load. False: the page has no known metric."""
    num_sent, url = server.num_sent, server.session.metrics_url
    if url is None:
        return False
    try:
        status, page = await server.session.get(url)
    except NO_ANSWER:
        return True  # the list of models says whether the server can be reached
    load = reported_load(page, server.far_name) if status == 200 else None
    if load is not None:
        server.note_load(load, num_sent=num_sent)
    return load is not None
