"""Tests TLS over a socket at the engine's end: what one direction waits for does not stop the other."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from tls_kit import authority, write_certificates

from headrace.wire.tls.files import Certificates, TlsRole
from headrace.wire.tls.stream import TlsStream

pytestmark = pytest.mark.loop


class MemoryStream:
    """Bytes to and from a TLS client in memory. takes_more: cleared, nothing is taken any more"""

    def __init__(self, to_client: ssl.MemoryBIO, received: asyncio.Queue[bytes]) -> None:
        self._to_client = to_client
        self.received = received
        self.takes_more = asyncio.Event()
        self.takes_more.set()

    async def recv(self) -> bytes:
        return await self.received.get()

    async def sendall(self, data: bytes) -> None:
        await self.takes_more.wait()
        self._to_client.write(data)


async def test_a_gateway_that_reads_nothing_is_still_read(tmp_path: Path) -> None:
    """Its cancels and heartbeats arrive while a write to it waits."""
    signer = authority()
    engine = Certificates(write_certificates(tmp_path / "engine", signer, TlsRole.ENGINE, "gpu1"), TlsRole.ENGINE)
    gateway = Certificates(write_certificates(tmp_path / "gateway", signer, TlsRole.GATEWAY), TlsRole.GATEWAY)
    to_client, from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = gateway.current().context.wrap_bio(to_client, from_client, server_hostname="gpu1")
    plain = MemoryStream(to_client, asyncio.Queue())
    stream = TlsStream(plain, engine.current().context)
    shaking = asyncio.create_task(stream.shake_hands())
    while not shaking.done() or from_client.pending:
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        if data := from_client.read():
            plain.received.put_nowait(data)
        await asyncio.sleep(0)
    await shaking

    plain.takes_more.clear()
    writing = asyncio.create_task(stream.sendall(b"tokens"))
    reading = asyncio.create_task(stream.recv())
    await asyncio.sleep(0)
    client.write(b"cancel")
    plain.received.put_nowait(from_client.read())
    assert await reading == b"cancel"
    assert not writing.done()
    plain.takes_more.set()
    await writing
    assert client.read(100) == b"tokens"
