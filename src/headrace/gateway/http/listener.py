"""Accepts connections up to a limit. A connection beyond it is answered 503 with Retry-After instead of being dropped; with TLS it is
closed, since an answer would take a handshake.

The event loop's own server accepts every waiting connection before it can be counted, and at the limit of open files it drops connections
unanswered, so this listener replaces it. Where descriptors run out it pauses and goes on; it never raises for them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from headrace.gateway.http.connection import OnRefused
from headrace.gateway.http.descriptors import ConnectionLimit
from headrace.gateway.http.door_tls import HANDSHAKE_FAILED, DoorCertificate, TlsNotice
from headrace.gateway.http.errors import ErrorBody, ErrorObject

log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 32
"""Connections accepted in one round of the event loop, before open connections are served again."""

PAUSE_S = 0.1
"""Seconds without accepting where there is no descriptor or memory for another socket. The kernel queues new connections meanwhile."""

LINGER_S = 1.0
"""Seconds for which a refused client's request is discarded: closing with unread bytes resets the connection, and the refusal is lost."""

HANDSHAKE_S = 10.0
"""Seconds that a TLS handshake may take."""

READ_BYTES = 64 << 10
RETRY_AFTER_S = 1
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MESSAGE = "This server has as many connections as it can hold; try again in a moment."


class Listener:
    """Accepts the connections of one listening socket. uvicorn closes it as it would close the event loop's server.

    limit        may be replaced; a lower one closes no connection
    certificate  of new connections; may be replaced. None: they speak plain HTTP
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        limit: ConnectionLimit,
        *,
        connections: Collection[object],
        on_refused: OnRefused,
        certificate: DoorCertificate | None = None,
    ) -> None:
        """connections: the protocols of open connections, in the server's own collection"""
        self._socket, self._make_protocol, self.limit = listening, make_protocol, limit
        self._connections, self._on_refused = connections, on_refused
        self.certificate = certificate
        self._notice = TlsNotice(text=HANDSHAKE_FAILED)
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[asyncio.Task[object], object] = {}  # task -> the protocol that it will add to the connections
        self._refused: dict[socket.socket, asyncio.TimerHandle] = {}  # in order of arrival
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept no further connection; open ones stay."""
        if self._socket.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for client in list(self._refused):
            self._drop(client)

    async def wait_closed(self) -> None:
        """uvicorn waits for this after `close`, which leaves nothing to wait for."""

    @property
    def _is_full(self) -> bool:
        most, known = self.limit.max_connections, len(self._connections)
        if known + len(self._connecting) < most:
            return False
        return known + sum(protocol not in self._connections for protocol in self._connecting.values()) >= most

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                client, _address = self._socket.accept()
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
        if self.certificate is None:
            connecting = self._loop.connect_accepted_socket(lambda: protocol, client)
        else:
            context = self.certificate.context()
            connecting = self._loop.connect_accepted_socket(lambda: protocol, client, ssl=context, ssl_handshake_timeout=HANDSHAKE_S)
        task: asyncio.Task[object] = self._loop.create_task(connecting)
        self._connecting[task] = protocol
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[object]) -> None:
        del self._connecting[task]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ssl.SSLError):
            self._notice(str(error.reason or "unknown"))
        elif error is not None and not (self.certificate is not None and isinstance(error, OSError)):  # that client left in the handshake
            log.warning("a connection could not be taken: %r", error)

    def _wait(self, error: OSError) -> None:
        """Readiness would be reported again at once, for ever."""
        log.warning("no connection can be accepted for %g s: %s", PAUSE_S, error.strerror)
        self._loop.remove_reader(self._socket.fileno())
        self._pause = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _refuse(self, client: socket.socket) -> None:
        if self.certificate is not None:  # an answer would take a handshake
            client.close()
            self._on_refused(os.urandom(12).hex(), 503, MESSAGE)
            return
        if len(self._refused) >= self.limit.max_refusals:
            self._drop(next(iter(self._refused)))
        request_id = os.urandom(12).hex()
        self._refused[client] = self._loop.call_later(LINGER_S, self._drop, client)
        with suppress(OSError):  # it left; its end is read below
            client.send(_refusal(request_id))  # an empty socket takes it whole
            client.shutdown(socket.SHUT_WR)
        self._loop.add_reader(client.fileno(), self._read, client)
        self._on_refused(request_id, 503, MESSAGE)

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


def _refusal(request_id: str) -> bytes:
    body = msgspec.json.encode(ErrorBody(ErrorObject(MESSAGE, "service_unavailable_error", None, "unavailable")))
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\nretry-after: %d\r\n"
        b"x-request-id: %s\r\nconnection: close\r\n\r\n%s" % (len(body), RETRY_AFTER_S, request_id.encode(), body)
    )
