"""Tests offers of another protocol (h2c, WebSocket, TLS), which are not taken: the request is the one that it is without them.

No byte of its body is read as another request. A request for a tunnel, or bytes that begin HTTP/2, are refused.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from gateway_kit import TestBench, chat_body, dial, eventually, gateway_config, metric, open_bench, post, server_config, serving
from hypothesis import example, given, settings
from hypothesis import strategies as st
from virtual_time import virtual_loop

from headrace.gateway.http import connection as protocol
from headrace.gateway.http.config import ConnectionLimit
from headrace.gateway.http.server import Server
from headrace.gateway.surfaces import endpoint
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
"""As Java's HttpClient and `curl --http2` send it with every first request."""

INNER = b"GET /inner HTTP/1.1\r\nhost: localhost\r\n\r\n"
GAP_S = 0.01
"""Virtual seconds between two packets: each is read alone."""


# -- any request, any cut ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """One request. offer: header lines that the plain twin has not; at: where they stand among the other lines; body: framed by `lines`"""

    target: str
    lines: tuple[str, ...]
    offer: tuple[str, ...]
    at: int
    body: bytes = b""
    version: str = "1.1"

    def wire(self, *, is_plain: bool) -> bytes:
        offer = () if is_plain else self.offer
        lines = "".join(f"{line}\r\n" for line in (*self.lines[: self.at], *offer, *self.lines[self.at :]))
        return f"{self.target} HTTP/{self.version}\r\n{lines}\r\n".encode() + self.body


def mixed_case(words: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return words | words.map(str.upper) | words.map(str.title)


TOKENS = st.lists(mixed_case(st.sampled_from(["upgrade", "http2-settings", "x-other", "keep-alive", ""])), max_size=3)
PROTOCOLS = st.sampled_from(["h2c", "websocket", "WebSocket", "TLS/1.0", "h2c, websocket", "made-up/7.1", "HTTP/2.0, TLS/1.2", "", "h2c "])
SEPARATORS = st.sampled_from([",", ", ", " ,\t", ",,"])


@st.composite
def offers(draw: st.DrawFn) -> tuple[str, ...]:
    """One header or several of each, lists and single words, in any order."""
    lines = [
        f"{draw(mixed_case(st.just('connection')))}: {draw(SEPARATORS).join([*draw(TOKENS), draw(mixed_case(st.just('upgrade')))])}",
        *(f"{draw(mixed_case(st.just('upgrade')))}: {draw(PROTOCOLS)}" for _ in range(draw(st.integers(1, 3)))),
        *draw(st.sampled_from([(), ("HTTP2-Settings: AAMAAABk",), ("Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")])),
    ]
    return tuple(draw(st.permutations(lines)))


def chunked(body: bytes, size: int, end: bytes) -> bytes:
    pieces = [body[first : first + size] for first in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + end + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    method = draw(st.sampled_from(["GET", "POST", "POST", "HEAD", "PUT", "OPTIONS", "DELETE", "M-SEARCH"]))
    lines = ["Host: localhost", *draw(st.sampled_from([(), ("x-empty:",), ("X-Spaced:  a\tb ", "x-spaced: \u00e9")]))]
    data = draw(st.sampled_from([b"", b"{}", INNER, b"x" * 300, b"0\r\n\r\n" + INNER, INNER * 3]) | st.binary(max_size=40))
    framing = draw(st.sampled_from(["none", "length", "length", "chunked", "chunked"]))
    body = b""
    if framing == "length":
        lines.append(f"content-length: {len(data)}")
        body = data
    elif framing == "chunked":
        lines.append(draw(st.sampled_from(["transfer-encoding: chunked", "Transfer-Encoding: Chunked"])))
        end = draw(st.sampled_from([b"", b"x-trailer: 1\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n"]))
        body = chunked(data, draw(st.integers(1, 40)), end)
    lines += draw(st.sampled_from([(), (), ("Expect: 100-continue",), ("connection: close",), ("Connection: keep-alive",)]))
    return Sent(
        f"{method} /echo/{draw(st.integers(0, 9))}?a=%20b",
        tuple(lines),
        draw(offers()),
        draw(st.integers(0, len(lines))),
        body,
        draw(st.sampled_from(["1.1", "1.1", "1.1", "1.0"])),
    )


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request as an application gets it."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, has_more = body + message["body"], message["more_body"]
    headers = [(name, value) for name, value in scope["headers"] if name not in OFFERING]
    said = repr([scope[key] for key in ("method", "path", "query_string", "http_version")] + [headers, body]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


OFFERING = (b"connection", b"upgrade", b"http2-settings", b"sec-websocket-key", b"sec-websocket-version")


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """`echo` behind the gateway's HTTP server."""
    server = Server(echo, server_config(gateway_config()), lambda *_: None, ConnectionLimit(100, 8))
    port = await server.start()
    stop = asyncio.Event()
    task = asyncio.create_task(server.serve_until(stop))
    try:
        yield port
    finally:
        stop.set()
        await task


async def answers(port: int, packets: Sequence[bytes], wait_s: float = 1.0) -> bytes:
    """What is answered until the server closes, or says nothing for a second; without what differs from one moment to the next."""
    said = b""
    async with dial(port) as (reader, writer):
        reading = asyncio.create_task(reader.read(-1))
        for packet in packets:
            writer.write(packet)
            await asyncio.sleep(GAP_S)
        await asyncio.wait([reading], timeout=wait_s)
        if not reading.done():
            writer.write_eof()
        said = await reading
    return re.sub(rb"(?m)^(date|x-request-id): .*\r\n", b"", said)


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[first:last] for first, last in pairwise(places)]


JAVA = Sent("POST /echo", ("Host: localhost", f"Content-Length: {len(INNER)}"), tuple(H2C.splitlines()), 1, INNER)
EXPECTING = Sent(
    "POST /echo", ("Host: localhost", "Expect: 100-continue", "Content-Length: 2"), ("Upgrade: h2c", "Connection: upgrade"), 0, b"{}"
)


@settings(max_examples=150)
@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 5000), max_size=6))
@example([JAVA], [])
@example([JAVA, JAVA, EXPECTING, JAVA], [])
@example([EXPECTING], [1])
def test_a_request_with_an_offer_is_the_request_without_it_in_any_packets(sent: list[Sent], cuts: list[int]) -> None:
    plain, offering = (b"".join(each.wire(is_plain=is_plain) for each in sent) for is_plain in (True, False))

    async def run() -> list[bytes]:
        async with echoing() as port:
            return [await answers(port, packets) for packets in ([plain], [offering], pieces(offering, cuts))]

    expected, whole, cut = asyncio.run(run())
    assert whole == expected
    assert cut == expected
    assert b" 400 " not in expected.partition(b"\r\n")[0]


@pytest.mark.usefixtures("over")
async def test_every_cut_in_two_gives_the_same_answers() -> None:
    data = JAVA.wire(is_plain=False) + EXPECTING.wire(is_plain=False)
    async with echoing() as port:
        expected = await answers(port, [data])
        assert expected.count(b"HTTP/1.1 200") == 2
        for cut in range(1, len(data)):
            assert await answers(port, [data[:cut], data[cut:]]) == expected
        assert await answers(port, [bytes([byte]) for byte in data]) == expected


BROKEN = {
    "two framings": ("content-length: 2", "transfer-encoding: chunked"),
    "two lengths": ("content-length: 2", "content-length: 40"),
    "no length": ("content-length: x",),
    "chunked is not last": ("transfer-encoding: chunked, gzip",),
    "unknown coding": ("transfer-encoding: gzip",),
    "folded": ("x: a", " b", "content-length: 2"),
    "folded offer": ("connection: upgrade", " , x", "content-length: 2"),
    "bare CR": ("x: a\rb", "content-length: 2"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.usefixtures("over")
async def test_a_broken_request_with_an_offer_is_refused_as_one_without_it(name: str) -> None:
    for at in (0, len(BROKEN[name])):
        sent = Sent("POST /echo", BROKEN[name], ("Connection: Upgrade", "Upgrade: h2c"), at, INNER)
        async with echoing() as port:
            expected = await answers(port, [sent.wire(is_plain=True)])
            assert expected.startswith(b"HTTP/1.1 400 ")
            assert expected.count(b"HTTP/1.1 ") == 1
            assert await answers(port, [sent.wire(is_plain=False)]) == expected
            assert await answers(port, pieces(sent.wire(is_plain=False), range(0, 400, 7))) == expected


# -- at the gateway ----------------------------------------------------------------------------------------------------------------------


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


OFFER = tuple(H2C.splitlines())


@pytest.mark.usefixtures("over")
async def test_a_chat_that_offers_http2_is_answered_and_keeps_its_connection(bench: TestBench) -> None:
    sent = post("/v1/chat/completions", chat_body(max_tokens=2), *OFFER)
    head, gap, body = sent.partition(b"\r\n\r\n")
    async with serving(bench.gateway) as port:
        answer = await answers(port, [sent, head + gap, body, post("/v1/chat/completions", chat_body(max_tokens=2, stream=True), *OFFER)])
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.endswith(b"0\r\n\r\n")
    assert len(bench.replica.requests) == 3
    assert len({tuple(request.prompt_ids) for request in bench.replica.requests}) == 1


@pytest.mark.usefixtures("over")
async def test_an_offer_takes_no_bound_away(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_HEADER_BYTES", 4096)
    monkeypatch.setattr(protocol, "MAX_HEADERS", 10)
    monkeypatch.setattr(protocol, "HEADER_S", 0.3)
    monkeypatch.setattr(endpoint, "BODY_S", 0.3)
    async with open_bench(text, limits={"max_body_bytes": 1000}, timeouts={"keep_alive_s": 1}) as bench, serving(bench.gateway) as port:
        many = [f"x{number}: a" for number in range(5)]
        for lines, code in ((many, 431), (["x: " + "a" * 4000], 431), ([], 200)):
            assert status(await answers(port, [post("/v1/chat/completions", chat_body(max_tokens=1), *OFFER, *lines)])) == code
        assert status(await answers(port, [post("/v1/completions", {"prompt": "x" * 1000}, *OFFER)])) == 413
        whole = post("/v1/chat/completions", chat_body(), *OFFER)
        for late in (whole[:-1], whole.partition(b"Upgrade: h")[0]):
            began = virtual_loop().time()
            assert status(await answers(port, [late], wait_s=10.0)) == 408
            assert virtual_loop().time() - began == pytest.approx(0.3, abs=2 * GAP_S)


@pytest.mark.usefixtures("over")
async def test_the_wire_behind_an_offer_may_cost_no_more_than_without_it(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head in many packets counts for the flood of chunks behind it."""
    refuse, refused = protocol.BoundedProtocol._refuse, []

    def noted(self: protocol.BoundedProtocol, status: int, message: str, *more: Any) -> None:
        refused.append((self._wire_bytes, self._body_bytes))
        refuse(self, status, message, *more)

    monkeypatch.setattr(protocol.BoundedProtocol, "_refuse", noted)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
    async with open_bench(text, limits={"max_body_bytes": 100_000}) as bench, serving(bench.gateway) as port:
        for offer in (b"", H2C.encode().replace(b"AAMA", b"A" * 5000)):
            whole = head + offer + b"\r\n"
            await answers(port, [*pieces(whole, range(0, 6000, 500)), *([b"1\r\nx\r\n" * 300] * 100)])
            wire_bytes, body_bytes = refused.pop()
            assert wire_bytes == len(whole) + 6 * body_bytes


@pytest.mark.parametrize("authority", ["localhost:443", "/", "/v1/models"])
@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.usefixtures("over")
async def test_connect_is_refused_and_nothing_behind_it_is_read(bench: TestBench, authority: str, is_at_once: bool) -> None:
    head = f"CONNECT {authority} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    behind = post("/v1/chat/completions", chat_body(max_tokens=1))
    async with serving(bench.gateway) as port:
        answer = await answers(port, [head + behind] if is_at_once else [head, behind])
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status(answer) == 405
    assert b"\r\nallow: GET, HEAD, POST, DELETE, OPTIONS\r\n" in answer
    assert b"\r\nconnection: close\r\n" in answer
    assert "CONNECT is not served" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert bench.replica.requests == []
    await eventually(lambda: metric(bench.gateway, "headrace_http_responses_total", status="405") == 1)


@pytest.mark.parametrize("cuts", [(), (5,), (18,), (20,)])
@pytest.mark.usefixtures("over")
async def test_http2_without_asking_is_refused_with_what_to_send(bench: TestBench, cuts: tuple[int, ...]) -> None:
    """`curl --http2-prior-knowledge`, and gRPC clients at the wrong port."""
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00d" + INNER
    async with serving(bench.gateway) as port:
        answer = await answers(port, pieces(data, cuts))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status(answer) == 400
    assert "HTTP/2 is not served here. Send HTTP/1.1, " in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
