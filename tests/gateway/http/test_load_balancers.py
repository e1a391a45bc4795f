"""Tests what arrives before any client: health checks of load balancers without a Host, HTTP/1.0, https by mistake, and people at /."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator

import pytest
from gateway_kit import MODEL, TestBench, chat_body, dial, events_of, open_bench, post, serving

from headrace.gateway.http.tls import TLS_NOTICE_S, TlsNotice
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

PROBES = ("/", "/health", "/ping", "/live", "/ready")


@pytest.fixture
async def port(bench: TestBench) -> AsyncIterator[int]:
    async with serving(bench.gateway) as port:
        yield port


async def talk(port: int, request: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """(status, headers, body as it came) of the answer to bytes, read until the server closes the connection."""
    async with asyncio.timeout(10), dial(port) as (reader, writer):
        writer.write(request)
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), dict(line.lower().split(b": ", 1) for line in lines), body


@pytest.mark.parametrize("path", PROBES)
@pytest.mark.parametrize("method", ["OPTIONS", "GET", "HEAD"])
async def test_a_probe_without_a_host_is_answered(port: int, method: str, path: str) -> None:
    """HAProxy's `option httpchk` sends `OPTIONS / HTTP/1.0` and nothing else."""
    status, headers, body = await talk(port, f"{method} {path} HTTP/1.0\r\n\r\n".encode())
    assert status == 200
    assert b"transfer-encoding" not in headers
    assert headers[b"connection"] == b"close"
    assert method == "HEAD" or len(body) == int(headers[b"content-length"])


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/docs", "/nope", "/metrics/", "//v1/models"])
async def test_everything_else_wants_a_host(port: int, path: str) -> None:
    assert (await talk(port, f"GET {path} HTTP/1.0\r\n\r\n".encode()))[0] == 400


@pytest.mark.parametrize("path", PROBES)
async def test_http_1_1_wants_a_host_everywhere(port: int, path: str) -> None:
    assert (await talk(port, f"GET {path} HTTP/1.1\r\nconnection: close\r\n\r\n".encode()))[0] == 400


async def test_a_page_gets_nothing_by_speaking_http_1_0(port: int) -> None:
    assert (await talk(port, b"GET /health HTTP/1.0\r\norigin: http://evil.example\r\n\r\n"))[0] == 403


@pytest.mark.parametrize("host", ["10.42.0.7:8000", "headrace.default.svc", "evil.example"])
async def test_probes_are_answered_under_every_name_and_nothing_else_is(bench: TestBench, host: str) -> None:
    """A kubelet asks under the pod's address, a load balancer under its target's."""
    for path in (*PROBES, "/health/"):
        assert (await bench.client.get(path, headers={"host": host})).status_code == 200
    for path in ("/v1/models", "/metrics", "/docs", "/nope", "/metrics/"):
        assert (await bench.client.get(path, headers={"host": host})).status_code == 403


async def test_a_probe_wants_a_well_formed_host(port: int) -> None:
    assert (await talk(port, b"GET /health HTTP/1.1\r\nhost: a b\r\nconnection: close\r\n\r\n"))[0] == 400


async def test_probes_without_a_host_need_no_key(text: TextModel) -> None:
    async with open_bench(text, api_keys=[{"key": "sk-0123456789"}]) as bench, serving(bench.gateway) as port:
        assert (await talk(port, b"OPTIONS / HTTP/1.0\r\n\r\n"))[0] == 200
        assert (await talk(port, b"OPTIONS /v1/models HTTP/1.0\r\nhost: localhost\r\n\r\n"))[0] == 401


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
async def test_a_load_balancer_hears_that_no_engine_lives(bench: TestBench, path: str) -> None:
    bench.replica.die()
    assert (await bench.client.options(path)).status_code == 503


# -- HTTP/1.0 ----------------------------------------------------------------------------------------------------------------------


async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(bench: TestBench, port: int) -> None:
    """nginx's `proxy_pass` speaks HTTP/1.0 unless told otherwise."""
    request = post("/v1/chat/completions", chat_body(stream=True, seed=1, max_tokens=40, ignore_eos=True)).replace(
        b"HTTP/1.1", b"HTTP/1.0", 1
    )
    status, headers, body = await talk(port, request)
    assert (status, headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    assert not {b"transfer-encoding", b"content-length"} & set(headers)
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events_of(body.decode()))
    whole = (await bench.chat(seed=1, max_tokens=40, ignore_eos=True)).json()
    assert said == whole["choices"][0]["message"]["content"]


async def test_a_whole_answer_over_http_1_0_has_its_length(port: int) -> None:
    """Answers that are written in parts have no length of their own to tell."""
    request = post("/v1/chat/completions", chat_body(max_tokens=4)).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    status, headers, body = await talk(port, request)
    assert status == 200
    assert b"transfer-encoding" not in headers
    assert json.loads(body)["object"] == "chat.completion"


async def test_an_error_over_http_1_0_is_readable(port: int) -> None:
    status, headers, body = await talk(port, b"GET /nope HTTP/1.0\r\nhost: localhost\r\n\r\n")
    assert (status, len(body)) == (404, int(headers[b"content-length"]))


# -- https -------------------------------------------------------------------------------------------------------------------------


async def test_https_is_named_in_the_log_once_and_closed(port: int, caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.create_default_context()
    for _ in range(3):
        with caplog.at_level(logging.WARNING), pytest.raises((ssl.SSLError, ConnectionError)):
            async with asyncio.timeout(10):
                await asyncio.open_connection("127.0.0.1", port, ssl=context)
    [line] = [record.getMessage() for record in caplog.records if "https" in record.getMessage()]
    assert line == "127.0.0.1 spoke https to this http port: use http://, let a proxy in front end TLS, or configure gateway.tls"


@pytest.mark.pure
def test_the_next_line_about_https_counts_the_silent_ones(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 2.0, TLS_NOTICE_S))
    notice = TlsNotice(lambda: next(times))
    for _ in range(4):
        notice("10.0.0.9")
    assert ["so did 2 connections before it" in record.getMessage() for record in caplog.records] == [False, True]


# -- people ------------------------------------------------------------------------------------------------------------------------


async def test_browsers_get_a_page_that_leads_on(bench: TestBench) -> None:
    response = await bench.client.get("/", headers={"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == "default-src 'none'"
    for path in ("/docs", "/openapi.json", "/v1/models", "/metrics", "/health", "/ready"):
        assert f'href="{path}"' in response.text
        assert (await bench.client.get(path)).status_code == 200


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
async def test_others_get_the_same_as_json(bench: TestBench, accept: str) -> None:
    page = (await bench.client.get("/", headers={"accept": accept})).json()
    assert page["chat"] == "/v1/chat/completions"
    assert [(await bench.client.get(page[name])).status_code for name in ("models", "docs", "openapi", "metrics", "health", "ready")] == [
        200
    ] * 6


async def test_a_slash_behind_the_models_is_the_list(bench: TestBench) -> None:
    assert (await bench.client.get("/v1/models/")).json() == (await bench.client.get("/v1/models")).json()
    assert (await bench.client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
