"""Asks a foreign server for its list of models and its load, for as long as the gateway runs. Nothing it answers, or fails to, is fatal."""

from __future__ import annotations

import asyncio

import aiohttp

from headrace.core.clock import Clock
from headrace.gateway.upstream.foreign_facts import listed_model, reported_load
from headrace.gateway.upstream.foreign_server import ForeignServer
from headrace.gateway.upstream.foreign_session import NOT_CONNECTED

MODELS_S = 60.0
"""Seconds between two lists of models."""

UNREACHABLE_S = 5.0
"""The same for a server that cannot be reached, so that it is used again soon after it came back."""

LOAD_S = 1.0
"""Seconds between two metrics pages."""

NO_ANSWER = (*NOT_CONNECTED, aiohttp.ClientError, OSError, TimeoutError)


class ServerWatch:
    """The watch over one server.

    reads_load  its metrics are asked for: they decide only among several servers. A server without known ones is asked again with each list
    """

    def __init__(self, server: ForeignServer, *, reads_load: bool, clock: Clock) -> None:
        self._server = server
        self._reads_load = reads_load
        self._has_load = False
        self._is_key_refused = False
        self._clock = clock

    async def run(self) -> None:
        asked_at: float | None = None
        while True:
            interval_s = MODELS_S if self._server.is_reachable else UNREACHABLE_S
            if asked_at is None or self._clock() - asked_at >= interval_s:
                asked_at = self._clock()
                await self.read_models()
                self._has_load = self._reads_load
            if self._has_load:
                await self.read_load()
            await asyncio.sleep(LOAD_S)

    async def read_models(self) -> None:
        """Learn whether it can be reached, whether it lists the model, and the model's limit."""
        server = self._server
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
        if status in (401, 403) and not self._is_key_refused:
            server.log_fault(f"does not list its models: status {status}; is its key right?")
        self._is_key_refused = status in (401, 403)
        listed = listed_model(body, server.far_name) if status == 200 else None
        if listed is not None and listed != server.listed:
            if listed.is_listed:
                server.log_fact(f"lists the model, with a context of {listed.max_model_len or 'unknown'} tokens")
            else:
                server.log_fault(f"does not list the model {server.far_name!r}")
            server.listed = listed

    async def read_load(self) -> None:
        server, num_sent = self._server, self._server.num_sent
        if server.session.metrics_url is None:
            self._has_load = False
            return
        try:
            status, page = await server.session.get(server.session.metrics_url)
        except NO_ANSWER:
            return  # the list of models says whether the server can be reached
        load = reported_load(page, server.far_name) if status == 200 else None
        self._has_load = load is not None
        if load is not None:
            server.note_load(load, num_sent=num_sent)
