"""Provides loopback inside one event loop on virtual time: ports are entries of a table, and a connection is a pair of connected sockets.

The other end of a connection can read at once what one end writes: the kernel guarantees it. So nothing depends on the machine's speed: the
loop's clock goes on only when no end has anything to read.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

HOST = "127.0.0.1"
Address = tuple[str, int]


class ConnectedSocket(socket.socket):
    def __init__(self, fileno: int, own: Address, peer: Address) -> None:
        super().__init__(fileno=fileno)
        self.setblocking(False)
        self._own, self._peer = own, peer
        self._is_reset = False

    def send(self, data: Any, flags: int = 0) -> int:
        """What is sent first after the peer has closed is taken and lost, as TCP does, which has not heard of the reset yet."""
        try:
            return super().send(data, flags)
        except BrokenPipeError:
            if self._is_reset:
                raise
            self._is_reset = True
            return len(data)

    def getsockname(self) -> Address:
        return self._own

    def getpeername(self) -> Address:
        return self._peer


class ListeningSocket:
    """Readable while a connection waits to be accepted."""

    family, type, proto = socket.AF_UNIX, socket.SOCK_STREAM, 0

    def __init__(self, address: Address, on_close: Callable[[], object]) -> None:
        self._address, self._on_close = address, on_close
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._waiting: deque[tuple[socket.socket, Address, int | None]] = deque()
        self._options: dict[tuple[int, int], int] = {}

    def connect(self, client: Address, receive_bytes: int | None) -> ConnectedSocket:
        """receive_bytes: that the client's end takes before it reads; None: as many as the kernel gives"""
        ours, theirs = socket.socketpair()
        self._waiting.append((theirs, client, receive_bytes))
        os.eventfd_write(self._ready, 1)
        return ConnectedSocket(ours.detach(), client, self._address)

    def accept(self) -> tuple[ConnectedSocket, Address]:
        """Takes a descriptor, so that it fails where there is none. Raises BlockingIOError where nobody waits."""
        if not self._waiting:
            raise BlockingIOError
        theirs, client, receive_bytes = self._waiting[0]
        accepted = ConnectedSocket(os.dup(theirs.fileno()), self._address, client)
        os.eventfd_read(self._ready)
        self._waiting.popleft()
        theirs.close()
        for (level, name), value in self._options.items():
            accepted.setsockopt(level, name, value)
        if receive_bytes is not None:  # a connected pair has one buffer for each direction, the sender's
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, receive_bytes)
        return accepted, client

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """Accepted sockets inherit it."""
        self._options[level, name] = value

    def setblocking(self, _flag: bool) -> None:
        return

    def listen(self, _backlog: int) -> None:
        return

    def getsockname(self) -> Address:
        return self._address

    def fileno(self) -> int:
        return self._ready

    def close(self) -> None:
        if self._ready < 0:
            return
        os.close(self._ready)
        self._ready = -1
        self._on_close()
        for theirs, _, _ in self._waiting:
            theirs.close()


class LoopNetwork:
    def __init__(self) -> None:
        self._listening: dict[int | str, ListeningSocket] = {}
        self._ports = count(40_000)

    def listen(self, port: int = 0) -> ListeningSocket:
        """port: 0 for any that is free. Raises OSError where it is taken."""
        port = port or next(self._ports)
        if port in self._listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._listening[port] = made = ListeningSocket((HOST, port), lambda: self._listening.pop(port))
        return made

    def listen_at(self, path: str) -> ListeningSocket:
        """A Unix socket; no file is made. Raises OSError where it is taken."""
        if path in self._listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._listening[path] = made = ListeningSocket((path, 0), lambda: self._listening.pop(path))
        return made

    def connect(self, port: int | str, *, receive_bytes: int | None = None) -> ConnectedSocket:
        """port: or the path of a Unix socket. Raises ConnectionRefusedError where nothing listens."""
        if port not in self._listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return self._listening[port].connect((HOST, next(self._ports)), receive_bytes)


class NetworkedLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: Any = None) -> None:
        self.network = LoopNetwork()
        super().__init__(selector)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **options: Any) -> Any:
        listening: Any = sock or self.network.listen(port or 0)
        return await super().create_server(protocol_factory, sock=listening, **options)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **options: Any
    ) -> Any:
        if sock is None:
            sock = self.network.connect(port)
            if options.get("ssl") and options.get("server_hostname") is None:
                options["server_hostname"] = host
        return await super().create_connection(protocol_factory, sock=sock, **options)

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, *, sock: Any = None, **options: Any) -> Any:
        listening: Any = sock or self.network.listen_at(str(path))
        return await super().create_unix_server(protocol_factory, sock=listening, **options)

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, *, sock: Any = None, **options: Any) -> Any:
        return await super().create_unix_connection(protocol_factory, sock=sock or self.network.connect(str(path)), **options)

    async def getaddrinfo(self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        if host not in ("localhost", HOST):
            raise socket.gaierror(socket.EAI_NONAME, f"{host!r} has no address in a loop's own network")
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (HOST, port))]


def use_loop_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's server listens, and aiohttp connects, in the network of the loop that runs."""
    if "headrace.gateway.http.server" in sys.modules:
        monkeypatch.setattr("headrace.gateway.http.server.listening_sockets", _listening_sockets)
        import aiohappyeyeballs  # noqa: F401  # which the gateway imports at its first foreign server: in the midst of a test
    if "aiohappyeyeballs" in sys.modules:
        monkeypatch.setattr("aiohappyeyeballs.start_connection", _start_connection)


def _network() -> LoopNetwork:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, NetworkedLoop)
    return loop.network


def _listening_sockets(host: str, port: int, **_options: Any) -> list[ListeningSocket]:
    return [_network().listen(port)]


async def _start_connection(
    addr_infos: Sequence[tuple[Any, ...]], *, socket_factory: Callable[[tuple[Any, ...]], socket.socket] | None = None, **_options: Any
) -> ConnectedSocket:
    errors: list[OSError] = []
    for info in addr_infos:
        try:
            if socket_factory is not None:  # which may refuse the address
                socket_factory(info).close()
            if info[4][0] != HOST:
                raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
            return _network().connect(info[4][1])
        except OSError as error:
            errors.append(error)
    raise errors[0]
