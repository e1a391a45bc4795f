"""Speaks TLS over a non-blocking socket at the engine's end, with OpenSSL's memory buffers.

asyncio's own TLS transport drops the alert of a failed handshake, which tells the other end why it failed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Protocol

CHUNK_BYTES = 2**16


class ByteStream(Protocol):
    """`recv` returns b"" at the end."""

    async def recv(self) -> bytes: ...
    async def sendall(self, data: bytes) -> None: ...


class PlainStream:
    """The caller closes the socket."""

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        self._socket = connection
        self._received = received
        self._loop = asyncio.get_running_loop()

    async def recv(self) -> bytes:
        if received := self._received:
            self._received = b""
            return received
        return await self._loop.sock_recv(self._socket, CHUNK_BYTES)

    async def sendall(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)


class TlsStream:
    """One task may call `recv` while another calls `sendall`."""

    def __init__(self, plain: ByteStream, context: ssl.SSLContext) -> None:
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._sending = asyncio.Lock()

    async def shake_hands(self) -> None:
        """Raises ssl.SSLError, after the alert was sent, or OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                await self._flush()
                raise
        await self._flush()

    async def recv(self) -> bytes:
        while True:
            try:
                data = self._tls.read(CHUNK_BYTES)
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            else:
                return data

    async def sendall(self, data: bytes) -> None:
        self._tls.write(data)
        await self._flush()

    async def _fill(self) -> None:
        if data := await self._plain.recv():
            self._incoming.write(data)
        else:
            raise ConnectionResetError("the other end closed the connection")

    async def _flush(self) -> None:
        """Records keep their order, also for two tasks."""
        if not self._outgoing.pending:
            return
        async with self._sending:
            if data := self._outgoing.read():
                await self._plain.sendall(data)
