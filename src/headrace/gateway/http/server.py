"""The HTTP server: uvicorn with `connection.BoundedProtocol`, which `gateway.main` starts and stops: refuse, finish, stop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from headrace.gateway.http.config import ServerConfig
from headrace.gateway.http.connection import OnRefused, protocol_for
from headrace.gateway.http.descriptors import ConnectionLimit
from headrace.gateway.http.door_tls import DoorCertificate
from headrace.gateway.http.listener import Listener

BACKLOG = 2048
KERNEL_SEND_BYTES = 128 << 10
"""Send buffer of a connection in the kernel. By default it grows to megabytes for a client that does not read."""

DRAIN_GRACE_S = 1
"""Seconds that answers may take to be sent after the drain. A connection with unsent bytes is dropped then."""


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: `gateway.main` decides when to stop."""

    def __init__(self, app: Any, config: ServerConfig, on_refused: OnRefused, limit: ConnectionLimit) -> None:
        """Raises ConfigError for a certificate that cannot be used."""
        self._limit, self._on_refused = limit, on_refused
        self._certificate = None if config.tls is None else DoorCertificate(config.tls)
        self._bounds = protocol_for(config, on_refused)
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=self._bounds,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=True,
                backlog=BACKLOG,
                timeout_keep_alive=_keep_alive_s(config),
                timeout_graceful_shutdown=2 * DRAIN_GRACE_S,  # dropped clients end their requests; what outlives that is cancelled
            )
        )

    async def start(self, *, shares_port: bool = False) -> int:
        """Listen. Returns the port. Raises OSError when the address cannot be bound (uvicorn would end the process).

        shares_port  other processes of this user may listen there as well, and each gets a part of the connections
        """
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.on_tick(0)
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        listener = socket.create_server((self.config.host, self.config.port), family=family, backlog=BACKLOG, reuse_port=shares_port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BYTES)  # accepted sockets inherit it
        connections = self.server_state.connections
        self.listener = Listener(
            listener, self._protocol, self._limit, connections=connections, on_refused=self._on_refused, certificate=self._certificate
        )
        self.servers = [self.listener]  # type: ignore[list-item]  # uvicorn only closes it
        self.started = True
        port: int = listener.getsockname()[1]
        return port

    def _protocol(self) -> asyncio.Protocol:
        """As uvicorn's own `startup` makes it."""
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    def follow(self, config: ServerConfig, limit: ConnectionLimit, certificate: DoorCertificate | None) -> None:
        """Bound connections by another configuration, open ones too. Only `keep_alive_s` is an open connection's own, and its certificate.

        certificate  of new connections
        """
        self.listener.certificate = certificate
        self._bounds.follow(config)
        self.config.timeout_keep_alive = _keep_alive_s(config)
        self.listener.limit = limit

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then close idle connections at once, and busy ones after their answer or after DRAIN_GRACE_S."""
        counter = 0
        while not stop.is_set():
            counter = (counter + 1) % 864_000
            await self.on_tick(counter * 10)  # keeps the Date header current
            try:
                async with asyncio.timeout(1.0):
                    await stop.wait()
            except TimeoutError:
                continue
        drop = asyncio.get_running_loop().call_later(DRAIN_GRACE_S, self._drop_connections)
        await self.shutdown()
        drop.cancel()

    def _drop_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _keep_alive_s(config: ServerConfig) -> int:
    """uvicorn counts in whole seconds."""
    return max(1, round(config.timeouts.keep_alive_s))
