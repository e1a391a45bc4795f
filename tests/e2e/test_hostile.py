"""Sends one storm of hostile requests to `headrace serve`: each gets its refusal, and no other client notices.

Bodies come from `hostile_requests`, broken framing from the gateway's own tests; slow, half-closed and greedy clients are written here.
Neighbours stream from before the first of them until after the last.

A tenant that fills the queue is refused, sooner on a slow machine, and no other tenant is (docs/tenancy.md, "Busy models"). So whoever must
be served has a tenant of its own: while each has one open request, the turn of each is within a quarter of the engine's 64 slots.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hostile_requests import CHAT, COMPLETIONS, Hostile, cases
from http_kit import Connection, Reply, ask, request_bytes, stream
from plain_loop import Checkpoint
from server_kit import GREEDY, KEY, Server, key_of

from tests.gateway.http.test_connection import BROKEN

pytestmark = pytest.mark.process

LENGTH = 150
HERE = re.escape(str(Path(__file__).parents[2]))
INTERNALS = re.compile(r"0x[0-9a-f]{6,}|Traceback|/home/|/root/|/tmp/|site-packages|\.py\b|unix:|" + KEY + "|" + HERE)
BEARER = f"authorization: Bearer {KEY}\r\n".encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + BEARER
ENDLESS: dict[str, Any] = {"model": "random", "prompt": [7, 8, 9], "max_tokens": 400, "ignore_eos": True}

Attack = Callable[[Server], Awaitable[None]]


class Neighbours:
    """Streams one after the other, each checked token for token; `num_whole` of them have ended."""

    def __init__(self, server: Server, checkpoint: Checkpoint) -> None:
        self._server = server
        self._prompt = checkpoint.plain.clear_one(checkpoint.prompts, LENGTH)
        self._expected = checkpoint.plain.text(checkpoint.plain.greedy(self._prompt, LENGTH))
        self.num_whole = 0
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            body = {"model": "random", "prompt": list(self._prompt), "temperature": 0, "ignore_eos": True, "max_tokens": LENGTH}
            answer = await stream(self._server.port, COMPLETIONS, body, key=key_of("neighbour"))
            assert (answer.status, answer.is_done, answer.finish) == (200, True, {0: "length"}), answer.error
            assert answer.text[0] == self._expected
            self.num_whole += 1


@asynccontextmanager
async def calm_neighbourhood(server: Server, checkpoint: Checkpoint) -> AsyncIterator[None]:
    """Whatever happens inside: the processes stay the same ones, neighbours get their tokens, and every block comes back."""
    pids, instance = server.pids(), server.load().instance_id
    neighbours = Neighbours(server, checkpoint)
    running = asyncio.create_task(neighbours.run())
    await server.eventually(lambda: server.load().num_running > 0)
    try:
        yield
    finally:
        neighbours.is_over = True
        await running
    assert neighbours.num_whole >= 1
    for name in ("/live", "/health"):
        assert (await asyncio.to_thread(server.get, name, key=None))[0] == 200
    # An engine on a machine that stood still is not ready for a moment.
    await server.eventually(lambda: server.get("/ready", key=None)[0] == 200)
    await server.eventually(lambda: server.load().is_idle)
    assert server.pids() == pids
    assert server.load().instance_id == instance


def check_refusal(reply: Reply, statuses: tuple[int, ...]) -> dict[str, Any]:
    """OpenAI's shape, nothing of the inside, an id to find it in the log."""
    assert reply.status in statuses, (reply.status, reply.body[:300])
    assert not INTERNALS.search(reply.body.decode())
    assert len(reply.body) < 4096
    assert reply.headers["x-request-id"]
    return reply.error


async def test_hostile_bodies_and_broken_http_are_refused_and_neighbours_unharmed(server: Server, random_checkpoint: Checkpoint) -> None:
    given = cases("random")
    assert len({case.name for case in given}) >= 60
    gate = asyncio.Semaphore(8)
    failures: list[str] = []

    async def attack(case: Hostile) -> None:
        async with gate:
            reply = await ask(server.port, "POST", case.path, case.body, key=KEY, headers={"content-type": case.content_type})
        try:
            assert check_refusal(reply, (case.status,))["param"] == case.param
        except AssertionError as error:
            failures.append(f"{case.name}: {error}")

    async with calm_neighbourhood(server, random_checkpoint):
        await asyncio.gather(*(attack(case) for case in given))
        for name, data in BROKEN.items():
            said = await everything_said(server, data)
            assert said.count(b"HTTP/1.1 ") == 1, f"{name}: one answer, nothing smuggled"
            # These carry no key: what is no broken framing is refused for that.
            assert int(said.split(b" ", 2)[1]) in (400, 401, 415), name
            assert set(json.loads(said.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}, name
    assert not failures, "\n".join(failures)


async def everything_said(server: Server, *pieces: bytes, pause_s: float = 0.0, half_close: bool = False) -> bytes:
    """What the server says until it closes, read while the pieces are sent; a connection it resets says what came before."""
    async with asyncio.timeout(60), Connection(server.port) as connection:
        reading = asyncio.create_task(_read_all(connection.reader))
        for piece in pieces:
            if reading.done():
                break
            connection.writer.write(piece)
            await asyncio.sleep(pause_s)
        if half_close and not reading.done():
            connection.writer.write_eof()
        return await reading


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    said = b""
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            said += piece
    return said


def status_of(said: bytes) -> int:
    return int(said.split(b" ", 2)[1]) if said else 0


# -- one attack each: what a hostile client does, and what it must get -----------------------------------------------------------------


async def slow_headers(server: Server) -> None:
    assert status_of(await everything_said(server, b"POST /v1/completions HTTP/1.1\r\n", b"host: local")) == 408


async def trickled_headers(server: Server) -> None:
    """A byte now and then does not keep a head alive."""
    pieces = [bytes([byte]) for byte in b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 100]
    assert status_of(await everything_said(server, *pieces, pause_s=0.1)) == 408


async def silence(server: Server) -> None:
    assert await everything_said(server) == b""


async def half_closed_before_the_body(server: Server) -> None:
    said = await everything_said(server, HEAD + b"content-length: 100\r\n\r\n{", half_close=True)
    assert said == b"" or status_of(said) in (400, 408)


async def half_closed_after_the_request(server: Server) -> None:
    """Whoever closes its sending side has left, as far as HTTP servers know: no stream may run on for it."""
    await everything_said(server, request_bytes("POST", COMPLETIONS, {**ENDLESS, "stream": True}, key=KEY), half_close=True)


async def reset_in_the_body(server: Server) -> None:
    for cut in (1, 40, 120):
        async with Connection(server.port) as connection:
            await connection.send(request_bytes("POST", COMPLETIONS, ENDLESS, key=KEY)[:-cut])
            linger = connection.writer.get_extra_info("socket")
            linger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


async def pipelined_garbage(server: Server) -> None:
    """After a request that is still being answered: its answer may come or not, but no other one."""
    said = await everything_said(server, request_bytes("GET", "/live", close=False) + b"G\x00T / HTTP/1.1\r\n\r\n")
    assert [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]] in ([b"200", b"400"], [b"400"], [b"200"], [])


async def pipelined_garbage_after_a_stream(server: Server) -> None:
    """The stream is due, and comes; the garbage is refused behind it."""
    wanted = {**ENDLESS, "n": 2, "stream": True, "cache_salt": "garbage"}
    body = request_bytes("POST", COMPLETIONS, wanted, key=key_of("garbage"), close=False)
    said = await everything_said(server, body, b"\x00\x01\x02garbage\r\n\r\n", pause_s=0.3)
    stream, _, refusal = said.partition(b"[DONE]")
    assert (status_of(stream), stream.count(b"HTTP/1.1 ")) == (200, 1)
    assert refusal.count(b"HTTP/1.1 400") == refusal.count(b"HTTP/1.1 ") == 1


async def flood_of_pipelined_requests(server: Server) -> None:
    said = await everything_said(server, request_bytes("GET", "/v1/models", key=KEY, close=False) * 50 + request_bytes("GET", "/live"))
    assert said.count(b"HTTP/1.1 200") == 51


async def endless_headers(server: Server) -> None:
    assert status_of(await everything_said(server, b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 500_000)) == 431


async def too_many_headers(server: Server) -> None:
    lines = b"".join(b"x%d: a\r\n" % number for number in range(200))
    assert status_of(await everything_said(server, b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + lines + b"\r\n")) == 431


async def length_of_10_to_the_18(server: Server) -> None:
    async with Connection(server.port) as connection:
        await connection.send(HEAD + b"content-length: 1000000000000000000\r\n\r\n")
        check_refusal(await connection.reply(), (413,))


async def megabytes_of_chunks(server: Server) -> None:
    """Two, with 350 kB in them, which is no large body: it is their framing that is refused, before they end."""
    said = await everything_said(server, HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 350_000)
    assert status_of(said) == 400
    assert b"chunks carry too little" in said


async def compressed_body(server: Server) -> None:
    for coding, status in (("gzip", 400), ("br", 415)):
        reply = await ask(server.port, "POST", COMPLETIONS, b"\x1f\x8b" + b"0" * 100, key=KEY, headers={"content-encoding": coding})
        check_refusal(reply, (status,))


async def foreign_names(server: Server) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        check_refusal(await ask(server.port, "POST", COMPLETIONS, ENDLESS, key=KEY, headers=headers), (403,))


async def wrong_keys(server: Server) -> None:
    for value in ("Bearer", "Bearer ", "Bearer " + "x" * 10_000, "Basic " + KEY, KEY, "Bearer " + KEY[:-1], "Bearer " + KEY + "\t."):
        reply = await ask(server.port, "POST", COMPLETIONS, ENDLESS, headers={"authorization": value})
        assert check_refusal(reply, (401,))["code"] == "invalid_api_key"
    twice = HEAD + BEARER + b"content-length: 2\r\nconnection: close\r\n\r\n{}"
    assert status_of(await everything_said(server, twice)) == 401


async def paths_that_are_none(server: Server) -> None:
    paths = ("/v1/models/../../etc/passwd", "/%2e%2e/etc/passwd", "//v1/completions", "/v1/completions/", "/docs/..%2f..%2fsecret", "/%00")
    for path in paths:
        check_refusal(await ask(server.port, "GET", path, key=KEY), (400, 404, 405))


async def methods_that_are_none(server: Server) -> None:
    for method in ("GET", "PUT", "DELETE", "TRACE", "PATCH"):
        reply = await ask(server.port, method, CHAT, key=KEY)
        check_refusal(reply, (405,))
        assert reply.headers["allow"] == "POST"


async def slow_reader(server: Server) -> None:
    """Asks for more than fits between the two ends and does not read: cut off, its blocks come back while it still holds the socket."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
    _, writer = await asyncio.open_connection(sock=sock, limit=2048)
    try:
        wanted = {**ENDLESS, "n": 8, "logprobs": 20, "stream": True, "cache_salt": "slow"}
        writer.write(request_bytes("POST", COMPLETIONS, wanted, key=key_of("slow")))
        log, cut_off = server.folder / "requests.jsonl", re.compile('"tenant":"slow".*"error":"slow_reader"')
        await server.eventually(lambda: cut_off.search(log.read_text()) is not None)
    finally:
        writer.transport.abort()


async def more_kv_than_there_is(server: Server) -> None:
    """Thirty sequences of 400 tokens in memory for two: they queue and preempt each other until their clients leave."""

    async def leave(tenant: str) -> None:
        async with Connection(server.port) as connection:
            wanted = {**ENDLESS, "n": 10, "stream": True, "cache_salt": "greedy"}
            await connection.send(request_bytes("POST", COMPLETIONS, wanted, key=key_of(tenant)))
            assert (await connection.head())[0] == 200
            await asyncio.sleep(0.5)

    await asyncio.gather(*map(leave, GREEDY))


async def what_can_never_fit(server: Server) -> None:
    for prompt, max_tokens, param in (([5] * 512, 1, "prompt"), ([5] * 400, 200, "max_tokens"), ([5] * 100_000, 1, "prompt")):
        reply = await ask(server.port, "POST", COMPLETIONS, {**ENDLESS, "prompt": prompt, "max_tokens": max_tokens}, key=KEY)
        error = check_refusal(reply, (400,))
        assert error["param"] == param
        assert "512" in error["message"]


async def upgrade_requests(server: Server) -> None:
    lines = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with asyncio.timeout(30), Connection(server.port) as connection:
        await connection.send(request_bytes("GET", "/v1/models", key=KEY, headers=lines))
        assert (await connection.head())[0] in (200, 400)


ATTACKS: tuple[Attack, ...] = (
    slow_headers,
    trickled_headers,
    silence,
    half_closed_before_the_body,
    half_closed_after_the_request,
    reset_in_the_body,
    pipelined_garbage,
    pipelined_garbage_after_a_stream,
    flood_of_pipelined_requests,
    endless_headers,
    too_many_headers,
    length_of_10_to_the_18,
    megabytes_of_chunks,
    compressed_body,
    foreign_names,
    wrong_keys,
    paths_that_are_none,
    methods_that_are_none,
    slow_reader,
    more_kv_than_there_is,
    upgrade_requests,
)


async def test_hostile_clients_are_refused_and_neighbours_unharmed(server: Server, random_checkpoint: Checkpoint) -> None:
    """All at once, but for what is told from a full queue only while there is room in it."""

    async def attack(one: Attack) -> str | None:
        try:
            async with asyncio.timeout(90):
                await one(server)
        except (AssertionError, TimeoutError, OSError, ValueError) as error:
            return f"{getattr(one, '__name__', one)}: {type(error).__name__} {error}"
        return None

    async with calm_neighbourhood(server, random_checkpoint):
        failures = [await attack(what_can_never_fit), *await asyncio.gather(*(attack(one) for one in ATTACKS))]
    assert not any(failures), "\n".join(failure for failure in failures if failure)
