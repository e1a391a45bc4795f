"""Runs the HTTP server: uvicorn with `connection.BoundedProtocol` and a listener of its own. `gateway.main` starts and stops it.

A connection beyond the limit is answered 503 with Retry-After; of https clients one beyond `max_refusals` is closed unanswered. The event
loop's own server would accept every waiting connection before it can be counted, and drop connections at the limit of open files, where
this listener pauses.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from headrace.gateway.http.config import ConnectionLimit, ServerConfig
from headrace.gateway.http.connection import OnRefused, protocol_for, refusal_bytes
from headrace.gateway.http.errors import ErrorObject
from headrace.gateway.http.tls import HANDSHAKE_FAILED, ServerCertificate, TlsNotice, TlsTransport
from headrace.wire.listening import listening_sockets, shown_address

log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 32
"""Then open connections are served again."""

PAUSE_S = 0.1
"""Where there is no descriptor or memory for another socket."""

LINGER_S = 1.0
"""Closing with unread bytes resets the connection, and the refusal is lost."""

HANDSHAKE_S = 10.0

READ_BYTES = 64 << 10
RETRY_AFTER = [(b"retry-after", b"1")]
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MESSAGE = "This server has as many connections as it can hold; try again in a moment."
UNAVAILABLE = ErrorObject(MESSAGE, "service_unavailable_error", None, "unavailable")


class Listener:
    """Accepts the connections of one port, up to a limit, in place of asyncio's server. uvicorn calls `close` and `wait_closed`. limit,
    certificate: may be replaced
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        limit: ConnectionLimit,
        *,
        connections: Collection[object],
        on_refused: OnRefused,
        certificate: ServerCertificate | None = None,
    ) -> None:
        """connections: uvicorn's live collection"""
        self._sockets, self._make_protocol, self.limit = listening, make_protocol, limit
        self._connections, self._on_refused = connections, on_refused
        self.certificate = certificate
        self._notice = TlsNotice(text=HANDSHAKE_FAILED)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._opening: set[asyncio.Protocol] = set()  # accepted, and neither lost nor known to be in `connections` yet
        self._refused: dict[socket.socket, asyncio.TimerHandle] = {}  # in order of arrival
        self._refusals: set[_TlsRefusal] = set()
        self._pause: asyncio.TimerHandle | None = None
        for each in listening:
            each.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Open connections stay."""
        if self._pause is not None:
            self._pause.cancel()
        for each in self._sockets:
            self._loop.remove_reader(each.fileno())
            each.close()
        self._sockets = ()
        for client in list(self._refused):
            self._drop(client)
        for opening in [*self._opening, *(refusal.transport for refusal in self._refusals)]:
            if isinstance(opening, TlsTransport):
                opening.abort()

    async def wait_closed(self) -> None:
        """At once: `close` leaves nothing to wait for."""

    @property
    def _is_full(self) -> bool:
        most, known = self.limit.max_connections, len(self._connections)
        if known + len(self._opening) < most:
            return False
        return known + sum(protocol not in self._connections for protocol in self._opening) >= most

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                client, _address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._wait(error)
                    return
                continue  # this client left before it was accepted
            client.setblocking(False)
            if self._is_full:
                self._refuse(client)
            else:
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        protocol = self._make_protocol()
        if self.certificate is not None:
            context = self.certificate.current()
            protocol = TlsTransport(context, protocol, handshake_s=HANDSHAKE_S, on_handshake=self._handshake_ended)
        self._opening.add(protocol)
        self._hand_over(client, protocol)

    def _hand_over(self, client: socket.socket, protocol: asyncio.Protocol) -> None:
        task: asyncio.Task[object] = self._loop.create_task(self._loop.connect_accepted_socket(lambda: protocol, client))
        self._tasks.add(task)
        task.add_done_callback(partial(self._connected, protocol))

    def _connected(self, protocol: asyncio.Protocol, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning("a connection could not be taken: %r", error)
        if not isinstance(protocol, TlsTransport):
            self._opening.discard(protocol)
        elif error is not None:
            protocol.connection_lost(None)  # nothing else ends its handshake, and its place is kept until then

    def _handshake_ended(self, transport: TlsTransport, failure: str | None) -> None:
        self._opening.discard(transport)
        if failure:
            self._notice(failure)

    def _wait(self, error: OSError) -> None:
        log.warning("no connection can be accepted for %g s: %s", PAUSE_S, error.strerror)
        for each in self._sockets:
            self._loop.remove_reader(each.fileno())
        self._pause = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        for each in self._sockets:
            self._loop.add_reader(each.fileno(), self._accept, each)

    def _refuse(self, client: socket.socket) -> None:
        request_id = os.urandom(12).hex()
        self._on_refused(request_id, 503, MESSAGE)
        answer = refusal_bytes(503, request_id, UNAVAILABLE, RETRY_AFTER)
        if self.certificate is not None:
            self._refuse_in_tls(client, answer, self.certificate.current())
            return
        if len(self._refused) >= self.limit.max_refusals:
            self._drop(next(iter(self._refused)))
        self._refused[client] = self._loop.call_later(LINGER_S, self._drop, client)
        with suppress(OSError):  # the client has left; `_read` gets its end
            client.send(answer)  # an empty socket takes it whole
            client.shutdown(socket.SHUT_WR)
        self._loop.add_reader(client.fileno(), self._read, client)

    def _refuse_in_tls(self, client: socket.socket, answer: bytes, context: ssl.SSLContext) -> None:
        if len(self._refusals) >= self.limit.max_refusals:
            client.close()  # those before it may still shake hands, and are owed their answer
            return
        refusal = _TlsRefusal(answer, context, self._refusals)
        self._hand_over(client, refusal.transport)

    def _read(self, client: socket.socket) -> None:
        try:
            is_open = bool(client.recv(READ_BYTES))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_open = False
        if not is_open:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._refused.pop(client).cancel()
        self._loop.remove_reader(client.fileno())
        with suppress(OSError):  # closing with unread bytes resets the connection: one is dropped early where more are refused at once
            client.recv(READ_BYTES)
        client.close()


class _TlsRefusal(asyncio.Protocol):
    """Answers one connection beyond the limit over TLS, and closes it. It is in `refusals` until the connection ends."""

    def __init__(self, answer: bytes, context: ssl.SSLContext, refusals: set[_TlsRefusal]) -> None:
        self._answer, self._refusals = answer, refusals
        self.transport = TlsTransport(context, self, handshake_s=LINGER_S, on_handshake=self._handshake_ended)
        self._timer: asyncio.TimerHandle | None = None
        refusals.add(self)

    def _handshake_ended(self, _transport: TlsTransport, failure: str | None) -> None:
        if failure is not None:
            self._refusals.discard(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._answer)
        transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._refusals.discard(self)
        if self._timer is not None:
            self._timer.cancel()


BACKLOG = 2048
KERNEL_SEND_BYTES = 128 << 10
"""By default it grows to megabytes for a client that does not read."""

DRAIN_GRACE_S = 1


class Server(uvicorn.Server):
    """uvicorn's server with this package's listener and protocol. addresses: "host:port", as in a URL"""

    def __init__(self, app: Any, config: ServerConfig, on_refused: OnRefused, limit: ConnectionLimit) -> None:
        """Raises ConfigError."""
        self._limit, self._on_refused = limit, on_refused
        self.addresses: list[str] = []
        self._certificate = None if config.tls is None else ServerCertificate(config.tls)
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
        """Returns the port. Raises OSError (uvicorn would end the process). shares_port: SO_REUSEPORT"""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.on_tick(0)
        sockets = listening_sockets(self.config.host, self.config.port, backlog=BACKLOG, shares_port=shares_port)
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BYTES)  # accepted sockets inherit it
        self.addresses = [shown_address(each) for each in sockets]
        connections = self.server_state.connections
        self.listener = Listener(
            sockets, self._protocol, self._limit, connections=connections, on_refused=self._on_refused, certificate=self._certificate
        )
        self.servers = [self.listener]  # type: ignore[list-item]  # uvicorn only closes it
        self.started = True
        port: int = sockets[0].getsockname()[1]
        return port

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    def follow(self, config: ServerConfig, limit: ConnectionLimit, certificate: ServerCertificate | None) -> None:
        """An open connection keeps its `keep_alive_s` and its certificate."""
        self.listener.certificate = certificate
        self._bounds.follow(config)
        self.config.timeout_keep_alive = _keep_alive_s(config)
        self.listener.limit = limit

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Then close idle connections at once, and busy ones after their answer, at most DRAIN_GRACE_S later."""
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
    """Whole seconds, as uvicorn needs them."""
    return max(1, round(config.timeouts.keep_alive_s))
