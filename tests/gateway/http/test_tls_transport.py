"""Tests what only TLS has: handshakes that fail, hang or crowd, halves that close apart, records that are no records.

The limits of a connection are tested over both transports, in test_connection, test_streaming and test_upgrade.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from gateway_kit import TestBench, chat_body, dial, dial_tcp, eventually, metric, open_bench, post, serving
from tls_kit import TlsClient, tls_client, trusting_context
from virtual_time import virtual_loop

from headrace.gateway.http import connection, server
from headrace.gateway.http.config import HttpTls
from headrace.gateway.http.tls import MAX_OWN_BYTES, RECORD_BYTES, TlsTransport, load_context
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
GARBAGE = b"GARBAGE\r\n\r\n"
UNWANTED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99999999\r\n\r\n"


@pytest.fixture(autouse=True)
def https(https_files: HttpTls, monkeypatch: pytest.MonkeyPatch) -> HttpTls:
    monkeypatch.setattr("gateway_kit.https", https_files)
    return https_files


@pytest.fixture
async def port(bench: TestBench) -> AsyncIterator[int]:
    async with serving(bench.gateway) as port:
        yield port


@asynccontextmanager
async def dialled(port: int, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> AsyncIterator[TlsClient]:
    context = trusting_context()
    context.minimum_version = context.maximum_version = version
    async with dial_tcp(port) as (reader, writer), tls_client(reader, writer, context=context) as client:
        yield client


async def is_served(port: int) -> bool:
    """Whether a new connection is answered 200. Raises ssl.SSLError or ConnectionError where it cannot shake hands."""
    async with dialled(port) as client:
        client.write(GET)
        return b" 200 " in await client.reader.readline()


async def send_bytes(client: TlsClient) -> None:
    """A few, each alone. Raises ConnectionError where the server has closed."""
    for _ in range(3):
        client.write(b"x")
        await client.drain()
        await asyncio.sleep(0)


# -- halves ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_refusal_ends_with_close_notify_and_what_is_sent_behind_it_is_read(
    text: TextModel, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close was waited for until the client closed too, and what it sent meanwhile was read without a bound."""
    monkeypatch.setattr(connection, "MAX_LINGER_BYTES", 300_000)
    async with open_bench(text) as bench, serving(bench.gateway) as port, dialled(port, version) as client, asyncio.timeout(20):
        client.write(GARBAGE)
        answer = await client.reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert client.num_closed == 1
        began = virtual_loop().time()
        for _ in range(29):
            client.write(b"x" * 10_000)
            await client.drain()
        await asyncio.sleep(0.5)
        assert client.num_closed == 1, "nothing more was said"
        for _ in range(3):
            client.write(b"x" * 10_000)
        await eventually(lambda: client.is_over)
        assert virtual_loop().time() - began < 1.0


@pytest.mark.parametrize("sent", [GARBAGE, UNWANTED], ids=["garbage", "unwanted body"])
async def test_a_refused_client_that_never_closes_is_closed_after_a_moment(port: int, sent: bytes) -> None:
    async with dialled(port) as client, asyncio.timeout(20):
        client.write(sent.replace(b"\r\ncontent-type", b"\r\nconnection: close\r\ncontent-type"))
        assert int((await client.reader.read())[9:12]) in (400, 413)
        await asyncio.sleep(connection.LINGER_S - 0.1)
        client.write(b"x")
        await client.drain()
        await asyncio.sleep(0.2)
        with pytest.raises(ConnectionError):
            await send_bytes(client)


async def test_a_client_that_closes_its_half_of_tls_has_left(bench: TestBench, port: int) -> None:
    """The socket stays open, as a client leaves it that waits for the server's own close_notify."""
    bench.replica.go.clear()
    async with dialled(port) as client, asyncio.timeout(20):
        client.write(post("/v1/chat/completions", chat_body()))
        await eventually(lambda: bool(bench.replica.requests))
        client.write_eof()
        assert await client.reader.read() == b""
        await eventually(lambda: bench.replica.cancelled == [bench.replica.requests[0].request_id])
        await eventually(lambda: client.is_over)


async def test_a_socket_that_ends_without_close_notify_ends_the_request(bench: TestBench, port: int) -> None:
    bench.replica.go.clear()
    async with dial(port) as (_, writer), asyncio.timeout(20):
        writer.write(post("/v1/chat/completions", chat_body()))
        await eventually(lambda: bool(bench.replica.requests))
        assert isinstance(writer.transport, asyncio.WriteTransport)
        writer.transport.write_eof()
        await eventually(lambda: bench.replica.cancelled == [bench.replica.requests[0].request_id])


async def test_a_body_that_nobody_reads_yet_stays_in_the_socket(bench: TestBench, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pausing stopped what was handed on, and half a megabyte more was taken for each connection."""
    taken: list[int] = []
    received = TlsTransport.data_received

    def noted(self: TlsTransport, data: bytes) -> None:
        taken.append(len(data))
        received(self, data)

    monkeypatch.setattr(TlsTransport, "data_received", noted)
    bench.replica.go.clear()
    whole = post("/v1/chat/completions", chat_body())
    async with dial(port) as (_, writer), asyncio.timeout(20):
        writer.write(whole)
        await eventually(lambda: bool(bench.replica.requests))
        writer.write(post("/v1/completions", {"prompt": "x" * 4_000_000}))
        for _ in range(10):
            await asyncio.sleep(0.1)
        at_once = sum(taken)
        assert at_once < 1_000_000
        await asyncio.sleep(1.0)
        assert sum(taken) == at_once
        bench.replica.go.set()
        await eventually(lambda: sum(taken) > 2_000_000)


# -- handshakes --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_s", [None, 0.5], ids=["silent", "trickled"])
async def test_a_handshake_that_does_not_end_is_ended_in_time(port: int, every_s: float | None, caplog: pytest.LogCaptureFixture) -> None:
    """A byte now and then does not keep it alive. It is named once, without a traceback."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trusting_context().wrap_bio(incoming, outgoing).do_handshake()
    hello = outgoing.read()
    async with dial_tcp(port) as (reader, writer), asyncio.timeout(60):
        began = virtual_loop().time()
        closing = asyncio.ensure_future(reader.read())
        for byte in hello if every_s else b"":
            if closing.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(every_s or 0.0)
        with suppress(ConnectionError):  # bytes that it did not read
            assert await closing == b""
        assert virtual_loop().time() - began == pytest.approx(server.HANDSHAKE_S, abs=0.6)
    [record] = caplog.records
    assert "a TLS handshake failed (it took more than 10 s)" in record.message
    assert record.exc_info is None


async def test_handshakes_count_as_connections_and_give_their_places_back(text: TextModel) -> None:
    async with (
        open_bench(text) as bench,
        serving(bench.gateway, max_connections=2) as port,
        asyncio.timeout(60),
        dial_tcp(port),
        dial_tcp(port),
    ):
        async with dialled(port) as client:
            answer = await client.reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert metric(bench.gateway, "headrace_http_responses_total", status="503") == 1
        await asyncio.sleep(server.HANDSHAKE_S + 0.1)
        assert await is_served(port)


async def test_refusals_beyond_the_cap_are_bounded_in_number_and_time(text: TextModel) -> None:
    """Eight at a time are answered after their handshake; one that does not shake hands gives its place back after a second."""
    async with (
        open_bench(text) as bench,
        serving(bench.gateway, max_connections=1) as port,
        asyncio.timeout(60),
        dialled(port),
        AsyncExitStack() as silent,
    ):
        for _ in range(8):
            await silent.enter_async_context(dial_tcp(port))
        await asyncio.sleep(0.1)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await is_served(port)
        await asyncio.sleep(server.LINGER_S)
        assert not await is_served(port)


async def test_refused_connections_that_cannot_be_taken_give_their_places_back(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight of them shut the door to refusals for good: every later client was closed without an answer."""

    async def refused(_make: object, client: socket.socket) -> None:
        client.close()
        raise OSError("no room")

    async with (
        open_bench(text) as bench,
        serving(bench.gateway, max_connections=1) as port,
        asyncio.timeout(60),
        dialled(port),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(virtual_loop(), "connect_accepted_socket", refused)
            for _ in range(9):
                async with dial_tcp(port) as (reader, _), asyncio.timeout(20):
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
        assert [record.message for record in caplog.records] == ["a connection could not be taken: OSError('no room')"] * 9
        assert not await is_served(port), "it is answered 503"


async def test_a_server_that_stops_does_not_wait_for_handshakes(text: TextModel) -> None:
    async with open_bench(text) as bench, asyncio.timeout(60):
        async with serving(bench.gateway) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.1)
            began = virtual_loop().time()
        assert virtual_loop().time() - began < 1.5
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\xff\xff" + b"a" * 100,
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["zeros", "endless record", "short hello", "alert", "ssh", "http2"],
)
async def test_what_is_no_handshake_is_closed_and_named_once(port: int, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        async with dial_tcp(port) as (reader, writer), asyncio.timeout(20):
            writer.write(sent)
            assert b"HTTP/" not in await reader.read()
    assert [record.message.partition("(")[0] for record in caplog.records] == ["a TLS handshake failed "]
    assert await is_served(port)


async def test_many_clients_that_leave_in_the_handshake_leave_nothing(port: int, caplog: pytest.LogCaptureFixture) -> None:
    before = len(asyncio.all_tasks())
    for length in range(0, 60, 5):
        async with dial_tcp(port) as (_, writer):
            writer.write(b"\x16\x03\x01\x02\x00\x01" + b"\x00" * length)
            await asyncio.sleep(0.01 * (length % 2))
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    assert "Traceback" not in caplog.text


# -- records -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x17\x03\x03\x00\x20" + b"j" * 32,
        b"\x16\x03\x03\x00\x20" + b"j" * 32,
        b"\x17\x03\x03\xff\xff" + b"j" * 999,
    ],
    ids=["plain text", "junk", "handshake", "too long"],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_record_that_is_none_closes_the_connection_and_ends_its_request(
    text: TextModel, record: bytes, version: ssl.TLSVersion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench, serving(bench.gateway) as port:
        bench.replica.go.clear()
        async with dialled(port, version) as client, asyncio.timeout(20):
            client.write(post("/v1/chat/completions", chat_body()))
            await eventually(lambda: bool(bench.replica.requests))
            client.write_record(record)
            with pytest.raises(ssl.SSLError, match="ALERT"):
                await client.reader.read()
            await eventually(lambda: bench.replica.cancelled == [bench.replica.requests[0].request_id])
            await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
    assert not caplog.records
    assert json.loads(log.read_text())["outcome"] == "cancelled"


class Recording(asyncio.Protocol):
    """The protocol above a transport under test."""

    transport: asyncio.Transport | None = None
    is_lost = False

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


@asynccontextmanager
async def taken(context: ssl.SSLContext) -> AsyncIterator[tuple[Recording, socket.socket]]:
    """A protocol above a TLS transport whose socket takes little, and the client's socket."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.setblocking(False)
    above = Recording()
    tls = TlsTransport(context, above, handshake_s=5.0, on_handshake=lambda *_: None)
    await virtual_loop().connect_accepted_socket(lambda: tls, ours)
    with theirs:
        yield above, theirs


async def test_a_client_that_breaks_tls_and_does_not_read_is_dropped(https: HttpTls) -> None:
    """Nothing else would end the connection: what waits for it is less than makes a writer wait."""
    async with taken(load_context(https)) as (above, theirs), dial(0, sock=theirs, limit=1024) as (_, client):
        await eventually(lambda: above.transport is not None)
        assert above.transport is not None
        above.transport.write(b"x" * 60_000)
        assert isinstance(client, TlsClient)
        client.write_record(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.1)
        assert above.transport.is_closing()
        assert above.transport.get_write_buffer_size() > 0
        assert not above.is_lost
        await asyncio.sleep(5.0)
        assert above.is_lost


class Measured:
    """A buffer of OpenSSL, which keeps the largest size that it had. most: that size"""

    def __init__(self, buffer: ssl.MemoryBIO) -> None:
        self._buffer = buffer
        self.most = 0

    @property
    def pending(self) -> int:
        self.most = max(self.most, self._buffer.pending)
        return self._buffer.pending

    def write(self, data: bytes) -> None:
        self._buffer.write(data)
        assert self.pending

    def read(self) -> bytes:
        return self._buffer.read(self.pending)


class Wire(asyncio.Transport):
    """The transport of a socket that takes everything, into `sent`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def taken(self) -> bytes:
        sent, self.sent = bytes(self.sent), bytearray()
        return sent


@pytest.mark.parametrize("at_once", [1, 100, RECORD_BYTES, 1 << 20])
async def test_the_buffers_of_a_connection_stay_small(https: HttpTls, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """One long read or write gave a connection buffers of its size until it ended."""
    above = Recording()
    server_end = TlsTransport(load_context(https), above, handshake_s=5.0, on_handshake=lambda *_: None)
    buffers = [Measured(server_end._incoming), Measured(server_end._outgoing)]
    monkeypatch.setattr(server_end, "_incoming", buffers[0])
    monkeypatch.setattr(server_end, "_outgoing", buffers[1])
    wire, incoming, outgoing = Wire(), ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    server_end.connection_made(wire)

    def send() -> None:
        data = outgoing.read()
        for start in range(0, len(data), at_once):
            server_end.data_received(data[start : start + at_once])
        incoming.write(wire.taken())

    while above.transport is None:
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        send()
    num_bytes = min(500_000, 1000 * at_once)
    client.write(b"x" * num_bytes)
    send()
    assert b"".join(above.received) == b"x" * num_bytes
    above.transport.write(b"y" * 500_000)
    send()
    assert sum(len(client.read(RECORD_BYTES)) for _ in range(-(-500_000 // RECORD_BYTES))) == 500_000
    assert max(buffer.most for buffer in buffers) < 2 * RECORD_BYTES + 1024


class Chatty(ssl.SSLContext):
    """Its TLS is complete at once, and answers each read with 40 bytes, as a key update makes it do."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *_: object, **__: object) -> ssl.SSLObject:
        class ChattyTls:
            def do_handshake(self) -> None:
                pass

            def read(self, _num_bytes: int) -> bytes:
                incoming.read()
                outgoing.write(b"k" * 40)
                raise ssl.SSLWantReadError

        return cast(ssl.SSLObject, ChattyTls())


async def test_answers_of_tls_itself_are_bounded() -> None:
    """A client that asks for new keys without end, and does not read, made its answers wait without a bound."""
    async with taken(Chatty(ssl.PROTOCOL_TLS_SERVER)) as (above, theirs):
        num_sent = 0
        while num_sent < 10_000 and not (above.transport is not None and above.transport.is_closing()):
            await virtual_loop().sock_sendall(theirs, b"u")
            await asyncio.sleep(0.001)
            num_sent += 1
        assert num_sent == MAX_OWN_BYTES // 40 + 1
        await asyncio.sleep(5.0)
        assert above.is_lost


@pytest.mark.pure
def test_no_client_may_renegotiate(https: HttpTls) -> None:
    assert load_context(https).options & ssl.OP_NO_RENEGOTIATION


async def test_refusals_of_the_protocol_are_a_line_each_in_the_request_log(
    text: TextModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    heads = [GARBAGE, b"GET / HTTP/1.1\r\nx: " + b"a" * 40_000, b"GET / HTTP/1.1\r\nhost:", UNWANTED]
    async with open_bench(text, request_log=str(log)) as bench, serving(bench.gateway) as port:
        for head in heads:
            async with dial(port) as (reader, writer), asyncio.timeout(60):
                writer.write(head)
                await reader.readuntil(b"\r\n\r\n")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["status"], line["outcome"]) for line in lines] == [(code, "refused") for code in (400, 431, 408, 413)]
    assert not caplog.records
