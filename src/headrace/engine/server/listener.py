"""Listens on the engine's TCP port: accepts gateways with the right certificate, and relays their bytes to the gRPC server.

The gRPC server listens at a Unix socket behind this port: its own TLS port would tell neither end why a handshake failed
(docs/wire.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.tasks import RunningTasks, end_tasks
from headrace.machine.locked_folders import LockedFolder, remove_unlocked
from headrace.machine.private_files import check_socket_folder
from headrace.wire.listening import RefusalLog, close_all, listening_sockets
from headrace.wire.service import LEASE_S
from headrace.wire.target import MAX_UNIX_PATH_BYTES, GrpcTarget
from headrace.wire.tls.files import Certificates, TlsRole, handshake_fault
from headrace.wire.tls.stream import CHUNK_BYTES, ByteStream, PlainStream, TlsStream

log = logging.getLogger(__name__)

FOLDER_PREFIX = "headrace-wire-"
INNER_NAME = "grpc.sock"
LOCK_NAME = "engine.lock"
"""A name other than "lock", which marks a deployment's directory (fleet/files.py)."""

HANDSHAKE_S = 5.0

MAX_HANDSHAKES = 64
"""Handshakes at once: one more connection is closed."""

UNREAD_S = 2 * LEASE_S
"""Seconds after which the system ends a connection whose other end acknowledges or reads nothing."""

LINGER_S = 2.0
"""Seconds in which a connection that the gRPC server has closed may deliver the rest of its bytes."""

ACCEPT_PAUSE_S = 0.1

BACKLOG = 128

TLS_HANDSHAKE = 0x16


class HandshakeRefused(HeadraceError):
    """The message is logged, unless it is empty."""


class CannotListen(HeadraceError):
    """The address is taken, or does not belong to this machine."""


class TcpListener:
    def __init__(self, target: GrpcTarget) -> None:
        """Raises ConfigError if the certificates or the directory cannot be used."""
        self._target = target
        self._certificates = None if target.tls is None else Certificates(target.tls, TlsRole.ENGINE)
        self._log_refusal = RefusalLog(time.monotonic)
        self._folder = _make_folder()
        self.inner = self._folder.path / INNER_NAME
        self._sockets: list[socket.socket] = []
        self._serving = RunningTasks()
        self._num_handshakes = 0
        self._is_stopping = False

    async def start(self) -> str:
        """Returns the address with its port. Raises CannotListen."""
        self._sockets = await asyncio.to_thread(_listen, self._target)
        for listening in self._sockets:
            self._accept_from(listening)
        return f"{self._target.address.rpartition(':')[0]}:{self._sockets[0].getsockname()[1]}"

    def stop_accepting(self) -> None:
        """Called before the gRPC server stops, which could not answer a new connection any more."""
        self._is_stopping = True
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._sockets = []

    async def close(self) -> None:
        self.stop_accepting()
        if self._serving:
            await asyncio.wait(self._serving, timeout=LINGER_S)
        await end_tasks(self._serving)
        self._folder.remove()

    def _accept_from(self, listening: socket.socket) -> None:
        """No task: one could be cancelled with a connection accepted that nothing would then close."""
        if not self._is_stopping:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, address = listening.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._log_refusal("any address", f"no connection can be accepted ({error.strerror})")
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_PAUSE_S, self._accept_from, listening)
            return
        self._serving.start(self._serve(connection, address[0]), "connection")

    async def _serve(self, connection: socket.socket, host: str) -> None:
        with connection, socket.socket(socket.AF_UNIX) as inner:
            try:
                _set_options(connection)
                stream = await self._shake_hands(connection, host)
                inner.setblocking(False)
                await self._connect_inner(inner)
                await relay(stream, PlainStream(inner))
                await linger(connection)
            except HandshakeRefused as refused:
                if str(refused):
                    self._log_refusal(host, str(refused))
            except OSError as error:  # a connection that broke, TLS's own errors included
                log.debug("connection from %s: %s", host, error)

    async def _connect_inner(self, inner: socket.socket) -> None:
        """Raises HandshakeRefused with the reason: the gateway sees only a closed connection."""
        try:
            await asyncio.get_running_loop().sock_connect(inner, str(self.inner))
        except OSError as error:
            if self._is_stopping:
                raise HandshakeRefused from error
            raise HandshakeRefused(f"this engine's gRPC server does not answer at {self.inner} ({error.strerror})") from error

    async def _shake_hands(self, connection: socket.socket, host: str) -> ByteStream:
        if self._num_handshakes >= MAX_HANDSHAKES:
            raise HandshakeRefused(f"{MAX_HANDSHAKES} connections have not finished their handshake yet")
        self._num_handshakes += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await self._open_stream(connection, host)
        except TimeoutError:
            raise HandshakeRefused(f"it did not finish its handshake within {HANDSHAKE_S:g} s") from None
        finally:
            self._num_handshakes -= 1

    async def _open_stream(self, connection: socket.socket, host: str) -> ByteStream:
        first = await PlainStream(connection).recv()
        if not first:
            raise HandshakeRefused
        plain = PlainStream(connection, first)
        if self._certificates is None:
            if first[0] == TLS_HANDSHAKE:
                # The connection is relayed all the same: gRPC's plain answer shows the other end what is wrong.
                self._log_refusal(host, "it speaks TLS, and no certificates are configured for this engine (tls)")
            return plain
        if first[0] != TLS_HANDSHAKE:
            raise HandshakeRefused("it sent plain text, and this engine speaks TLS")
        stream = TlsStream(plain, self._certificates.current().context)
        try:
            await stream.shake_hands()
        except ssl.SSLError as error:
            fault = handshake_fault(error, own="this engine", peer="the gateway", ca=self._certificates.files.ca)
            raise HandshakeRefused(fault or f"the TLS handshake failed: {error.reason}") from error
        return stream


def _set_options(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_S))


def _make_folder() -> LockedFolder:
    """Raises ConfigError if its path is too long for a socket or cannot be written."""
    base = Path("the temporary directory")
    try:
        base = Path(tempfile.gettempdir())
        remove_unlocked(base, FOLDER_PREFIX, LOCK_NAME)
        folder = LockedFolder.make(base, FOLDER_PREFIX, LOCK_NAME)
    except OSError as error:
        raise ConfigError("TMPDIR", f"{base} cannot be written ({error.strerror})", "Set TMPDIR to one that can be written.") from error
    if len(os.fsencode(folder.path / INNER_NAME)) > MAX_UNIX_PATH_BYTES:
        folder.remove()
        raise ConfigError("TMPDIR", f"{base} is too long a path for a socket", "Set TMPDIR to a shorter one.")
    return folder


def _listen(target: GrpcTarget) -> list[socket.socket]:
    try:
        sockets = listening_sockets(target.host, target.port, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(f"cannot listen on {target.address}: {error.strerror}") from error
    for each in sockets:
        each.setblocking(False)
    return sockets


def check_can_listen(target: GrpcTarget) -> None:
    """Fail early: loading weights may take minutes.

    Raises: CannotListen for a TCP address that is taken or not of this machine, ConfigError for a socket's directory that others may enter.
    """
    if target.path is not None:
        check_socket_folder("engine address", target.path)
    else:
        close_all(_listen(target))


async def relay(gateway: ByteStream, server: ByteStream) -> None:
    """The server's last bytes are still delivered."""
    to_server = asyncio.ensure_future(_copy(gateway.recv, server.sendall))
    to_gateway = asyncio.ensure_future(_copy(server.recv, gateway.sendall))
    try:
        await asyncio.wait([to_server, to_gateway], return_when=asyncio.FIRST_COMPLETED)
        if to_server.done() and to_server.exception() is not None:
            await to_gateway  # the server has ended: its last bytes may still wait here
        for task in (to_server, to_gateway):
            if task.done():
                task.result()
    finally:
        await end_tasks([to_server, to_gateway])


async def linger(connection: socket.socket) -> None:
    """Closing with unread bytes would discard bytes that are still under way."""
    connection.shutdown(socket.SHUT_WR)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await asyncio.get_running_loop().sock_recv(connection, CHUNK_BYTES):
                pass


async def _copy(receive: Callable[[], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]) -> None:
    while data := await receive():
        await send(data)
