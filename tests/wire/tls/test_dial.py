"""Tests why a connection to an engine failed, where gRPC does not say."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tls_kit import authority, write_certificates

from bench.network_faults import FaultyLink
from headrace.wire import dial
from headrace.wire.dial import Dialer
from headrace.wire.target import parse_target
from headrace.wire.tls.files import Certificates, TlsFiles, TlsRole

pytestmark = pytest.mark.socket

TOKEN = "0123456789abcdef-of-tests"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for what never comes ends in the test's time limit."""
    monkeypatch.setattr(dial, "PROBE_S", 3600.0)
    monkeypatch.setattr(dial, "LOOK_S", 3600.0)


@asynccontextmanager
async def listening(context: ssl.SSLContext | None) -> AsyncIterator[int]:
    """A server that says nothing by itself."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


def engine_tls(folder: Path) -> ssl.SSLContext:
    return Certificates(write_certificates(folder, authority(), TlsRole.ENGINE, "127.0.0.1"), TlsRole.ENGINE).current().context


async def fault(port: int, tls: TlsFiles | None = None) -> str:
    return await Dialer(parse_target(f"127.0.0.1:{port}", TOKEN, tls)).find_tls_fault()


async def test_an_engine_that_speaks_tls_is_found_out_by_a_gateway_without_it(tmp_path: Path) -> None:
    async with listening(engine_tls(tmp_path)) as port:
        assert await fault(port) == "the engine speaks TLS, and no certificates are configured for it here (tls)"


async def test_a_certificate_of_another_authority_is_named(tmp_path: Path) -> None:
    gateway = write_certificates(tmp_path / "gateway", authority(), TlsRole.GATEWAY)
    async with listening(engine_tls(tmp_path / "engine")) as port:
        assert "the engine's certificate" in await fault(port, gateway)


async def test_a_connection_that_is_reset_is_no_fault_of_tls_and_leaves_no_socket_open(tmp_path: Path) -> None:
    """A socket left to the collector would be a warning, which is an error in tests."""
    gateway = write_certificates(tmp_path, authority(), TlsRole.GATEWAY)
    async with listening(None) as port, FaultyLink("127.0.0.1", port) as link:
        link.refuses = True
        assert [await fault(link.port, tls) for tls in (None, gateway, None, gateway)] == [""] * 4
    gc.collect()
