"""Tests bare sockets against the real server: slow, huge, broken and smuggled HTTP is refused and closed, and harms no other client."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest
from gateway_kit import TestBench, chat_body, dial, eventually, metric, open_bench, post, serving
from tls_kit import TlsClient
from virtual_time import virtual_loop

from headrace.gateway.http import connection as protocol
from headrace.gateway.http.client_transport import ClientTransport
from headrace.gateway.http.config import ConnectionLimit, HttpTls
from headrace.gateway.http.server import PAUSE_S, Server
from headrace.gateway.http.tls import TlsTransport, load_context
from headrace.gateway.surfaces import endpoint
from headrace.machine.resources import num_open_files
from headrace.text.folder import TextModel

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("over")]


@pytest.fixture
async def port(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(protocol, "MAX_HEADER_BYTES", 4096)
    monkeypatch.setattr(protocol, "MAX_HEADERS", 20)
    monkeypatch.setattr(protocol, "HEADER_S", 0.3)
    monkeypatch.setattr(endpoint, "BODY_S", 0.3)
    async with open_bench(text, timeouts={"keep_alive_s": 1}) as bench:
        async with serving(bench.gateway) as port:
            yield port
        assert bench.replica.requests == [] or all(request.prompt_ids for request in bench.replica.requests)


async def talk(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Everything the server says until it closes, after sending `pieces`."""
    async with asyncio.timeout(10), dial(port) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await reader.read()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def timed_talk(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    """What `talk` returns, and the seconds until the server closed."""
    began = virtual_loop().time()
    async with asyncio.timeout(10), dial(port) as (reader, writer):
        reading = asyncio.create_task(reader.read())
        ended: list[float] = []
        reading.add_done_callback(lambda _: ended.append(virtual_loop().time()))
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await reading, ended[0] - began


GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def test_server_answers(port: int) -> None:
    assert status(await talk(port, GET)) == 200


class CountedWrites:
    """A transport that counts its writes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.sizes: list[int] = []
        self._transport = transport

    def write(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_a_small_answer_is_one_write(port: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[CountedWrites] = []

    def client(transport: asyncio.Transport, close: Callable[[], None]) -> ClientTransport:
        counted.append(CountedWrites(transport))
        return ClientTransport(cast(asyncio.Transport, counted[-1]), close)

    monkeypatch.setattr(protocol, "ClientTransport", client)
    kept_alive = GET.replace(b"connection: close\r\n", b"")
    answer = await talk(port, kept_alive.replace(b"GET", method.encode()) + GET)
    assert [len(each.sizes) for each in counted] == [2], "two answers, a write each"
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert sum(counted[0].sizes) == len(answer)
    assert answer.endswith(b"}")


BROKEN = {
    "garbage": b"\x80\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no-version": b"GET /live\r\n\r\n",
    "bad-version": b"GET /live HTTP/9.9\r\nhost: localhost\r\n\r\n",
    "bad-method": b"G\x00T /live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no-host": b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n",
    "two-hosts": b"GET /live HTTP/1.1\r\nhost: localhost\r\nhost: evil\r\nconnection: close\r\n\r\n",
    "bare-lf-header": b"GET /live HTTP/1.1\nhost: localhost\n\n",
    "space-before-colon": b"GET /live HTTP/1.1\r\nhost : localhost\r\n\r\n",
    "folded": b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b\r\nconnection: close\r\n\r\n",
    "nul-in-header": b"GET /live HTTP/1.1\r\nhost: local\x00host\r\n\r\n",
    "non-ascii-path": b"GET /li\xffve HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    "length-and-chunked": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two-lengths": HEAD + b"content-length: 2\r\ncontent-length: 20\r\n\r\n{}",
    "length-text": HEAD + b"content-length: abc\r\n\r\n{}",
    "length-negative": HEAD + b"content-length: -1\r\n\r\n{}",
    "length-huge": HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}",
    "length-plus": HEAD + b"content-length: +2\r\n\r\n{}",
    "chunked-not-last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked-obfuscated": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunk-size-text": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "chunk-size-huge": HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n",
    "chunk-without-crlf": HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_http_is_refused(port: int, name: str) -> None:
    answer = await talk(port, BROKEN[name])
    assert answer.count(b"HTTP/1.1 ") == 1, "one answer, nothing smuggled"
    assert status(answer) in (400, 415)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert status(await talk(port, GET)) == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 8000 + b"\r\n\r\n",
        b"GET /live?" + b"a" * 8000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x%d: a\r\n" % number for number in range(30)) + b"\r\n",
        b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"a" * 500_000,
    ],
    ids=["one-header", "url", "count", "endless"],
)
async def test_large_heads_are_refused(port: int, head: bytes) -> None:
    answer = await talk(port, head)
    assert status(answer) == 431
    assert b"connection: close" in answer


async def test_refusals_of_the_protocol_are_logged_and_counted(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench, serving(bench.gateway) as port:
        answer = await talk(port, BROKEN["garbage"])
        assert metric(bench.gateway, "headrace_http_responses_total", status="400") == 1
    line = json.loads(log.read_text())
    assert (line["status"], line["outcome"], line["error"]) == (400, "refused", "bad_http")
    assert f"x-request-id: {line['request_id']}".encode() in answer


async def test_slow_headers_are_refused(port: int) -> None:
    answer, took_s = await timed_talk(port, b"GET /live HTTP/1.1\r\n", b"host: local")
    assert status(answer) == 408
    assert took_s == pytest.approx(0.3)


async def test_trickled_headers_are_refused(port: int) -> None:
    """A byte now and then does not keep a head alive."""
    pieces = [bytes([byte]) for byte in b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: aaaaaaaa"]
    answer, took_s = await timed_talk(port, *pieces, pause_s=0.02)
    assert status(answer) == 408
    assert took_s == pytest.approx(0.3)


async def test_silent_connections_are_closed(port: int) -> None:
    answer, took_s = await timed_talk(port)
    assert answer == b""
    assert took_s == pytest.approx(0.3)


async def test_slow_body_is_refused(port: int) -> None:
    answer, took_s = await timed_talk(port, HEAD + b"content-length: 100\r\n\r\n", b'{"mo')
    assert status(answer) == 408
    assert took_s == pytest.approx(0.3)
    assert b"read_timeout" in answer


async def test_idle_connection_is_closed_after_keep_alive(port: int) -> None:
    answer, took_s = await timed_talk(port, GET.replace(b"connection: close\r\n", b""))
    assert status(answer) == 200
    assert took_s == pytest.approx(1.0)


async def test_stray_line_ends_do_not_keep_an_idle_connection(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers skip them; the connection still goes, and still serves a request that comes in time."""
    monkeypatch.setattr(protocol, "HEADER_S", 0.5)
    kept = GET.replace(b"connection: close\r\n", b"")
    async with open_bench(text, timeouts={"keep_alive_s": 60}) as bench, serving(bench.gateway) as port:
        answer, took_s = await timed_talk(port, kept, b"\r\n", kept, b"\r\n", b"\r\n", b"\r\n", pause_s=0.4)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert took_s == pytest.approx(1.2 + 0.5), "HEADER_S after the first line end behind the second answer"


async def test_announced_large_body_is_refused_before_it_is_sent(port: int) -> None:
    async with asyncio.timeout(10), dial(port) as (reader, writer):
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
        assert b" 413 " in await reader.readline()


SEND_EVERY_S = 0.02


async def send_for_ever(writer: asyncio.StreamWriter | TlsClient) -> None:
    while True:
        writer.write(b"x" * 1000)
        await writer.drain()
        await asyncio.sleep(SEND_EVERY_S)


async def test_refusal_reaches_a_client_that_sends_its_whole_body_first(bench: TestBench) -> None:
    """Closing at once would reset the connection over the bytes that still come, and the refusal with it."""
    body = b"x" * 3_000_000
    async with serving(bench.gateway) as port, asyncio.timeout(20), dial(port) as (reader, writer):
        writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        await eventually(lambda: metric(bench.gateway, "headrace_http_responses_total", status="413") == 1)
        writer.write(body)
        await writer.drain()
        answer = await reader.read()
    assert status(answer) == 413
    assert b"connection: close" in answer


async def test_no_more_than_so_much_of_an_unwanted_body_is_thrown_away(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 3600.0)
    monkeypatch.setattr(protocol, "MAX_LINGER_BYTES", 100_000)
    async with asyncio.timeout(20), dial(port) as (reader, writer):
        writer.write(HEAD + b"connection: close\r\ncontent-length: 99999999\r\n\r\n")
        assert b" 413 " in await reader.readline()
        with pytest.raises(ConnectionError):
            await send_for_ever(writer)


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
async def test_unwanted_body_is_thrown_away_for_a_moment_only(port: int, connection: bytes) -> None:
    """The refusal can be read although the body is still coming; a sender that never stops is cut off."""
    async with asyncio.timeout(20), dial(port) as (reader, writer):
        writer.write(HEAD + b"connection: " + connection + b"\r\ncontent-length: 99999999\r\n\r\n")
        assert b" 413 " in await reader.readline()
        refused_at = virtual_loop().time()
        with pytest.raises(ConnectionError):
            await send_for_ever(writer)
        assert virtual_loop().time() - refused_at == pytest.approx(protocol.LINGER_S, abs=3 * SEND_EVERY_S)


async def test_client_that_does_not_take_the_end_of_the_last_answer_is_cut_off(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, over: str, https_files: HttpTls
) -> None:
    """Everything is written and closed, and less waits than makes a writer wait: nothing else would end this connection."""
    monkeypatch.setattr(protocol, "WRITE_S", 3.0)
    loop = virtual_loop()
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.setblocking(False)
    async with open_bench(text) as bench:
        config = bench.gateway.config
        server = Server(bench.gateway, config.server, bench.gateway.refused, ConnectionLimit(8, 8))
        server.config.load()
        kind = protocol.protocol_for(bench.gateway.config.server, bench.gateway.refused)
        made: asyncio.Protocol = kind(server.config, server.server_state, app_state={})
        taken = made
        if over == "tls":
            taken = TlsTransport(load_context(https_files), made, handshake_s=10.0, on_handshake=lambda *_: None)
        transport, _ = await loop.connect_accepted_socket(lambda: taken, ours)
        unsent_bytes = transport.get_write_buffer_size
        async with dial(0, sock=theirs, limit=1024) as (reader, _):
            await eventually(lambda: bool(server.server_state.connections))
            [connection] = server.server_state.connections
            connection.transport.write(b"x" * 4 * protocol.SEND_BUFFER_BYTES)
            connection.transport.close()
            while unsent_bytes() > protocol.SEND_BUFFER_BYTES // 2:
                await reader.read(1024)
            assert unsent_bytes() > 0
            stopped_at = loop.time()
            await eventually(lambda: not server.server_state.connections)
            assert loop.time() - stopped_at == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"1;" + b"e" * 2000 + b"\r\nx\r\n"], ids=["tiny", "extensions"])
async def test_floods_of_chunks_are_cut_off(text: TextModel, chunk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire may cost twice the body and a little more, not any number of times."""
    refuse, refused = protocol.BoundedProtocol._refuse, []

    def noted(self: protocol.BoundedProtocol, status: int, message: str) -> None:
        refused.append((status, self._wire_bytes, self._body_bytes))
        refuse(self, status, message)

    monkeypatch.setattr(protocol.BoundedProtocol, "_refuse", noted)
    monkeypatch.setattr(protocol, "MAX_HEADER_BYTES", 4096)
    piece = chunk * max(1, 2000 // len(chunk))
    async with (
        open_bench(text, limits={"max_body_bytes": 100_000}) as bench,
        serving(bench.gateway) as port,
        asyncio.timeout(20),
        dial(port) as (reader, writer),
    ):
        answer = asyncio.create_task(reader.readline())
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(3000):
            writer.write(piece)
            await asyncio.sleep(0.001)  # it is read alone
            if answer.done():
                break
        assert status(await answer) == 400
    [(code, wire_bytes, body_bytes)] = refused
    assert code == 400
    allowed_bytes = (64 << 10) + 2 * body_bytes + 4096
    assert allowed_bytes < wire_bytes <= allowed_bytes + len(piece)


async def test_chunked_bodies_of_any_cut_are_read(bench: TestBench) -> None:
    body = json.dumps(chat_body(max_tokens=1)).encode()
    head = HEAD.replace(b"/v1/completions", b"/v1/chat/completions") + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(bench.gateway) as port:
        for size in (1, 7, len(body)):
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[at : at + size]), body[at : at + size]) for at in range(0, len(body), size))
            answer = await talk(port, head + chunks + b"0\r\nx-trailer: 1\r\n\r\n")
            assert status(answer) == 200


async def test_pipelined_requests_are_answered_in_order(bench: TestBench) -> None:
    async with serving(bench.gateway) as port:
        first = post("/v1/chat/completions", chat_body(max_tokens=2))
        answer = await talk(port, first + post("/v1/nope", {}) + GET)
        assert [int(part.split(b" ", 1)[0]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 404, 200]


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
REFUSED = {
    "broken": (b"G\x00T / HTTP/1.1\r\n\r\n", 400),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
    "large": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 8000 + b"\r\n\r\n", 431),
    "large and not whole": (b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 8000, 431),
    "late": (b"GET /live HTTP/1.1\r\nhost:", 408),
    "other coding": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "broken chunk": (CHUNKED + b"zz\r\n", 400),
    "broken later chunk": (CHUNKED + b"1\r\na\r\nzz\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("num_due", [1, 3])
@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_is_refused_behind_running_requests_is_refused_behind_their_answers(
    text: TextModel, name: str, num_due: int, is_at_once: bool, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was closed at once: a client lost an answer that it was owed, and perhaps paid for."""
    refused, code = REFUSED[name]
    due = post("/v1/chat/completions", chat_body(max_tokens=2, stream=is_stream)) * num_due
    monkeypatch.setattr(protocol, "MAX_HEADER_BYTES", 4096)
    monkeypatch.setattr(protocol, "HEADER_S", 0.3)
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        bench.replica.go.clear()
        async with asyncio.timeout(60), dial(port) as (reader, writer):
            for piece in [due + refused] if is_at_once else [due, refused]:
                writer.write(piece)
                await asyncio.sleep(1)
            writer.write(post("/v1/chat/completions", chat_body()))
            bench.replica.go.set()
            answer = await reader.read()
        assert [int(part.split(b" ", 1)[0]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200] * num_due + [code]
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"
        assert len(bench.replica.requests) == num_due, "nothing behind it is read"
        await eventually(lambda: metric(bench.gateway, "headrace_http_responses_total", status=str(code)) == 1)
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)


async def test_bytes_behind_a_refusal_that_waits_are_bounded(bench: TestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_LINGER_BYTES", 100_000)
    bench.replica.go.clear()
    async with serving(bench.gateway) as port, asyncio.timeout(10), dial(port) as (_, writer):
        writer.write(post("/v1/chat/completions", chat_body()) + REFUSED["broken"][0])
        with pytest.raises(ConnectionError):
            await send_for_ever(writer)
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)


async def test_a_body_that_arrives_while_an_earlier_request_is_answered_has_its_own_time(text: TextModel) -> None:
    """It was taken for what is left of the earlier body, and its connection was closed after two seconds."""
    request = post("/v1/chat/completions", chat_body(max_tokens=2))
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        answer = await talk(port, request + request[:-1], request[-1:], GET, pause_s=3.0)
    assert [int(part.split(b" ", 1)[0]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200]


@pytest.mark.parametrize(
    "lines",
    [
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"transfer-encoding: gzip\r\nTransfer-Encoding: Chunked\r\n",
        b"transfer-encoding: deflate ,, chunked\r\nConnection: upgrade\r\nUpgrade: h2c\r\n",
    ],
)
async def test_a_transfer_coding_beside_chunked_is_refused_by_name(bench: TestBench, lines: bytes) -> None:
    """Its packed bytes were read as JSON."""
    body = gzip.compress(b"{}")
    async with serving(bench.gateway) as port:
        answer = await talk(port, HEAD + lines + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + GET)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status(answer) == 501
    assert "Transfer-Encoding: only chunked" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert b"connection: close" in answer


@pytest.mark.parametrize("value", [b"chunked", b"CHUNKED ", b", chunked"])
async def test_chunked_may_be_written_in_any_way(port: int, value: bytes) -> None:
    answer = await talk(port, HEAD + b"connection: close\r\ntransfer-encoding: " + value + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert b"prompt: expected a value" in answer


async def test_connections_beyond_the_cap_are_told_so(text: TextModel) -> None:
    """They were closed without a word, which a client cannot tell from a server that crashed."""
    async with open_bench(text) as bench, serving(bench.gateway, max_connections=2) as port:
        async with dial(port) as (reader, writer), dial(port):
            writer.write(GET.replace(b"connection: close\r\n", b""))
            assert b" 200 " in await reader.readline()
            for asked in (GET, post("/v1/chat/completions", chat_body()), b""):
                answer = await talk(port, asked)
                assert status(answer) == 503
                assert b"retry-after: 1\r\n" in answer
                assert b'"code":"unavailable"' in answer
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
        async with asyncio.timeout(10):
            while status(await talk(port, GET)) != 200:  # the server may not have seen yet that the others are gone
                await asyncio.sleep(0.01)


async def test_a_burst_beyond_the_cap_is_answered_to_the_last(text: TextModel, over: str) -> None:
    """All at once: as many as there are places for are served, every other one is told 503; none is dropped.

    Over TLS as many are told so as may be refused at a time: the others would have to be held until they have shaken hands.
    """

    async def ask(port: int) -> int | None:
        try:
            return status(await talk(port, GET))
        except (ssl.SSLError, ConnectionError):
            return None

    async with open_bench(text) as bench, serving(bench.gateway, max_connections=20) as port:
        before = num_open_files()
        counts = Counter(await asyncio.gather(*(ask(port) for _ in range(150))))
        assert counts.keys() <= {200, 503, None}
        assert counts[200] >= 20
        assert counts[503] >= 8
        assert not counts[None] or over == "tls"
        await eventually(lambda: num_open_files() <= before + 1)


async def test_without_descriptors_accepting_waits_and_goes_on(bench: TestBench, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a spin nor a crash: who waits in the kernel's queue is served once there is a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(bench.gateway) as port:
        client = virtual_loop().network.connect(port)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            await asyncio.sleep(3.5 * PAUSE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert caplog.text.count("no connection can be accepted") == 4
        async with dial(port, sock=client) as (reader, writer):
            writer.write(GET)
            assert b" 200 " in await reader.readline()


async def test_many_aborted_connections_leave_nothing(bench: TestBench) -> None:
    """Reset in the middle of everything: tasks, streams and requests return to what they were."""
    async with serving(bench.gateway) as port:
        before = len(asyncio.all_tasks())
        bench.replica.token_delay_s = 0.001
        whole = post("/v1/chat/completions", chat_body(stream=True, ignore_eos=True))
        for number in range(120):
            async with dial(port) as (reader, writer):
                writer.write(whole[: len(whole) * (number % 6 + 1) // 6])
                if number % 6 == 5:
                    await reader.read(1 + number * 10)
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= before + 1)
        assert not bench.replica.streams
        assert len(bench.replica.cancelled) == len(bench.replica.requests) == 20
