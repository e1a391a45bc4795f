"""Tests pages of other origins: refused with a remedy, or answered as the Fetch standard wants once the operator lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from gateway_kit import TestBench, chat_body, dial, gateway_config, open_bench, post, serving

from headrace.core.errors import ConfigError
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

PAGE = "https://app.example:8443"
KEY = "sk-0123456789"
ASKED = "authorization,content-type,x-stainless-os,x-stainless-retry-count"


@pytest.fixture
async def opened(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text, allowed_origins=[PAGE], api_keys=[{"key": KEY}]) as bench:
        yield bench


def preflight(origin: str = PAGE, method: str = "POST", headers: str = ASKED) -> dict[str, str]:
    return {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}


def reads(response: httpx2.Response, origin: str = PAGE) -> bool:
    """Whether a browser would let the page read this answer, and a cache would keep it apart from other pages'."""
    headers = response.headers
    return headers.get("access-control-allow-origin") == origin and "origin" in headers["vary"].lower()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/", "/nope"])
async def test_a_preflight_needs_no_key_and_maps_nothing(opened: TestBench, path: str) -> None:
    response = await opened.client.options(path, headers=preflight())
    assert (response.status_code, response.content) == (204, b"")
    assert reads(response)
    assert response.headers["access-control-allow-headers"] == ASKED
    assert response.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE, OPTIONS"
    assert int(response.headers["access-control-max-age"]) > 0
    assert "access-control-allow-credentials" not in response.headers
    assert "access-control-allow-private-network" not in response.headers


async def test_a_public_page_may_ask_a_private_address(opened: TestBench) -> None:
    response = await opened.client.options("/v1/models", headers={**preflight(), "access-control-request-private-network": "true"})
    assert response.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("asked", ["x\x01y", "a;b", "x" * 3000, ""])
async def test_odd_header_names_are_not_repeated(opened: TestBench, asked: str) -> None:
    response = await opened.client.options("/v1/models", headers=preflight(headers=asked))
    assert response.headers["access-control-allow-headers"] == "authorization, content-type"


async def test_answers_errors_and_streams_may_be_read(opened: TestBench) -> None:
    told = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
    client = opened.client
    answers = [
        await client.get("/v1/models", headers=told),
        await client.post("/v1/chat/completions", headers=told, json=chat_body()),
        await client.post("/v1/chat/completions", headers=told, json=chat_body(stream=True)),
        await client.post("/v1/chat/completions", headers=told, json=chat_body(temperature=9)),
        await client.get("/v1/models", headers={"origin": PAGE}),
        await client.get("/nope", headers=told),
        await client.put("/v1/models", headers=told),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 401, 404, 405]
    assert all(reads(answer) for answer in answers)
    for name in ("x-request-id", "x-headrace-model", "x-headrace-reason"):
        assert all(name in answer.headers["access-control-expose-headers"] for answer in answers)
    assert answers[2].headers["content-type"].startswith("text/event-stream")


async def test_a_fault_may_be_read(opened: TestBench) -> None:
    opened.replica.on_submit = lambda request, stream: (_ for _ in ()).throw(RuntimeError("bug"))
    response = await opened.client.post(
        "/v1/chat/completions", headers={"origin": PAGE, "authorization": f"Bearer {KEY}"}, json=chat_body()
    )
    assert response.status_code == 500
    assert reads(response)


async def test_caches_are_told_even_where_no_page_asks(opened: TestBench) -> None:
    response = await opened.client.get("/health")
    assert "origin" in response.headers["vary"].lower()
    assert "access-control-allow-origin" not in response.headers


OTHERS = [
    "https://app.example",
    "http://app.example:8443",
    "https://app.example:8443.evil.example",
    "https://evil.example",
    "null",
    PAGE + "/",
]


@pytest.mark.parametrize("origin", OTHERS)
async def test_pages_that_are_not_listed_are_refused(opened: TestBench, origin: str) -> None:
    for response in (
        await opened.client.options("/v1/models", headers=preflight(origin)),
        await opened.client.get("/v1/models", headers={"origin": origin, "authorization": f"Bearer {KEY}"}),
        await opened.client.get("/v1/models", headers=[("origin", PAGE), ("origin", origin), ("authorization", f"Bearer {KEY}")]),
    ):
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


async def test_a_listed_page_still_needs_an_allowed_host(opened: TestBench) -> None:
    assert (await opened.client.options("/v1/models", headers={**preflight(), "host": "evil.example"})).status_code == 403


@pytest.mark.parametrize("origin", [PAGE, "null", "https://anything.example", "chrome-extension://abcdef"])
async def test_a_star_lists_everybody(text: TextModel, origin: str) -> None:
    async with open_bench(text, allowed_origins=["*"]) as bench:
        assert reads(await bench.client.options("/v1/models", headers=preflight(origin)), origin)
        assert reads(await bench.client.get("/v1/models", headers={"origin": origin}), origin)


async def test_without_a_list_nothing_of_it_is_said(bench: TestBench) -> None:
    answers = [await bench.client.get("/v1/models"), await bench.client.get("/v1/models", headers={"origin": "http://localhost"})]
    refused = await bench.client.options("/v1/models", headers=preflight())
    assert [answer.status_code for answer in (*answers, refused)] == [200, 200, 403]
    for answer in (*answers, refused):
        assert not any(name.startswith("access-control") or name == "vary" for name in answer.headers)


async def test_a_refusal_names_the_flag_and_the_value(bench: TestBench) -> None:
    message = (await bench.client.get("/v1/models", headers={"origin": PAGE})).json()["error"]["message"]
    assert f"--allowed-origins {PAGE} " in message
    assert f'gateway.allowed_origins: ["{PAGE}"]' in message
    message = (await bench.client.get("/v1/models", headers={"host": "Models.Example:8000"})).json()["error"]["message"]
    assert "--allowed-hosts models.example " in message
    assert 'gateway.allowed_hosts: ["models.example"]' in message
    message = (await bench.client.get("/v1/models", headers={"origin": "null"})).json()["error"]["message"]
    assert "--allowed-origins" in message


async def test_the_value_that_a_refusal_names_is_the_one_that_helps(text: TextModel) -> None:
    async with open_bench(text, allowed_hosts=["models.example"], allowed_origins=[PAGE]) as bench:
        headers = {"host": "Models.Example:8000", "origin": PAGE}
        assert (await bench.client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_browsers_exchange_over_a_socket(opened: TestBench) -> None:
    """What Chromium sends for a page's `fetch` with a key and a JSON body: the preflight, then the request, on one connection."""
    lines = ["OPTIONS /v1/chat/completions HTTP/1.1", "host: localhost", "accept: */*", f"origin: {PAGE}", "sec-fetch-mode: cors"]
    lines += ["access-control-request-method: POST", "access-control-request-headers: authorization,content-type", "", ""]
    request = post("/v1/chat/completions", chat_body(stream=True), f"origin: {PAGE}", f"authorization: Bearer {KEY}", "connection: close")
    async with serving(opened.gateway) as port, dial(port) as (reader, writer):
        writer.write("\r\n".join(lines).encode())
        first = await reader.readuntil(b"\r\n\r\n")
        writer.write(request)
        second = await reader.read()
    assert first.startswith(b"HTTP/1.1 204 ")
    allow = f"\r\naccess-control-allow-origin: {PAGE}\r\n".encode()
    assert allow in first
    assert allow in second.partition(b"\r\n\r\n")[0] + b"\r\n"
    assert second.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]" in second


REFUSED_HEADS = {
    "431 too large": "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\nx: " + "a" * 40_000,
    "431 too many": "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\n" + "x: y\r\n" * 200 + "\r\n",
    "408": "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\nx",
    "400": "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\naccept: */*\r\nno colon\r\n\r\n",
}


@pytest.mark.parametrize("head", REFUSED_HEADS.values(), ids=REFUSED_HEADS)
async def test_what_is_refused_before_it_is_a_request_may_be_read_too(text: TextModel, head: str) -> None:
    async with open_bench(text, allowed_origins=[PAGE]) as bench, serving(bench.gateway) as port:
        for origin, is_listed in ((PAGE, True), ("https://evil.example", False)):
            async with dial(port) as (reader, writer):
                writer.write(head.format(origin=origin).encode())
                answer = (await reader.read()).partition(b"\r\n\r\n")[0]
            assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))
            assert b"\r\nvary: Origin" in answer
            assert (f"\r\naccess-control-allow-origin: {PAGE}\r\n".encode() in answer) is is_listed


async def test_a_head_that_is_refused_on_a_used_connection_is_not_taken_for_the_request_before_it(text: TextModel) -> None:
    bench_of_one = open_bench(text, allowed_origins=[PAGE])
    async with bench_of_one as bench, serving(bench.gateway) as port, dial(port) as (reader, writer):
        writer.write(f"GET /live HTTP/1.1\r\nhost: localhost\r\norigin: {PAGE}\r\n\r\n".encode())
        assert PAGE.encode() in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x00 no http\r\n\r\n")
        answer = await reader.read()
    assert b"HTTP/1.1 400 " in answer
    assert PAGE.encode() not in answer


BAD = [
    ("allowed_origins", "app.example"),
    ("allowed_origins", "https://app.example/"),
    ("allowed_origins", '["https://app.example"]'),
    ("allowed_origins", "https://app.example, https://b.example"),
    ("allowed_origins", "null"),
    ("allowed_origins", "https://app.example:443"),
    ("allowed_origins", "HTTP://app.example:80"),
    ("allowed_origins", ""),
    ("allowed_hosts", "https://app.example"),
    ("allowed_hosts", "app.example:8000"),
    ("allowed_hosts", "*"),
    ("allowed_hosts", ""),
]


@pytest.mark.pure
def test_a_default_port_is_refused_with_the_origin_that_browsers_send() -> None:
    with pytest.raises(ConfigError, match=r"Write https://app\.example: browsers leave out the port"):
        gateway_config(allowed_origins=["https://app.example:443"])
    kept = ["https://app.example:80", "http://app.example:443", "http://[::1]:8080"]
    assert list(gateway_config(allowed_origins=kept).allowed_origins) == kept


@pytest.mark.pure
@pytest.mark.parametrize(("key", "value"), BAD)
def test_what_could_never_match_is_refused_at_start(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}\[1\]"):
        gateway_config(**{key: ["https://fine.example" if key == "allowed_origins" else "fine.example", value]})
