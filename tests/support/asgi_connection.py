"""Stands for the connection of a request that comes without a socket: what `http.exchange` asks of a `ClientTransport`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.core.ids import RequestId
from headrace.gateway.app import Gateway
from headrace.gateway.http.asgi import CONNECTION_EXTENSION, Receive, Scope, Send
from headrace.gateway.http.exchange import Exchange
from headrace.observe.timeline import StageMarks


class AsgiConnection:
    """A client that left is known by `receive` alone. on_cut: called when the gateway drops the connection"""

    def __init__(self, receive: Receive, on_cut: Callable[[], None] = lambda: None) -> None:
        self._receive = receive
        self.cut = on_cut
        self._watching: asyncio.Task[None] | None = None

    def has_body(self, _scope: Scope) -> bool:
        return False

    def has_room(self, _scope: Scope) -> bool:
        return False

    def lost(self) -> None:
        return

    def join_writes(self) -> None:
        return

    def end_join(self) -> None:
        return

    def watch(self, on_left: Callable[[], None]) -> None:
        self._watching = asyncio.create_task(self._wait(on_left))

    def end_watch(self, _on_left: Callable[[], None]) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _wait(self, on_left: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_left()


def connected(gateway: Gateway) -> Callable[[Any, Any, Any], Any]:
    """The application, for a server that gives it no connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await gateway({**scope, "extensions": {CONNECTION_EXTENSION: AsgiConnection(receive)}}, receive, send)

    return app


def exchange_of(receive: Receive, send: Send, *, on_cut: Callable[[], None] = lambda: None) -> Exchange:
    scope = {"headers": [], "extensions": {CONNECTION_EXTENSION: AsgiConnection(receive, on_cut)}}
    return Exchange(scope, receive, send, request_id=RequestId("r"), marks=StageMarks(lambda: 0.0))
