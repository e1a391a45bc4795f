"""Tests the traces of a gateway against a collector: whole requests, foreign servers in the same trace, and collectors that fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from foreign_kit import DONE, FAR, ScriptedServer, far_models, head, listening, page, said
from gateway_kit import TestBench, chat_body, gateway_config, metric, open_bench
from virtual_time import virtual_loop

from headrace.core.errors import ConfigError
from headrace.observe import traces
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TAKEN = page(b"{}")
SECRET = "the prompt is nobody's business"


def answer(status: str) -> bytes:
    return head(status, "application/json", "content-length: 2") + b"{}"


def spans_in(collector: ScriptedServer) -> list[dict[str, Any]]:
    assert all(b"POST /v1/traces " in asked and b"content-type: application/json" in asked.lower() for asked in collector.heads)
    return [
        span
        for body in collector.bodies
        for resource in body["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def seconds_of(span: dict[str, Any]) -> float:
    return (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9


def attributes_of(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def counted(bench: TestBench) -> tuple[float, float, float]:
    """Spans that were exported, and that were dropped because of the queue and by the collector."""
    dropped = [metric(bench.gateway, "headrace_trace_spans_dropped_total", reason=reason) for reason in ("queue", "refused")]
    return (metric(bench.gateway, "headrace_trace_spans_exported_total"), dropped[0], dropped[1])


async def test_a_request_is_in_its_clients_trace_and_its_foreign_server_too(text: TextModel) -> None:
    collector, far = ScriptedServer(TAKEN), ScriptedServer(head(), said("good", "stop") + DONE, pause_s=0.5)
    async with listening(collector, far) as (port, far_port):
        endpoint = f"http://127.0.0.1:{port}"
        async with open_bench(text, models=far_models(far_port), otlp_traces_endpoint=endpoint) as bench:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
            body = {"model": FAR, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 9, "temperature": 0, "stop": [SECRET]}
            response = await bench.client.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 200
            await asyncio.sleep(traces.INTERVAL_S + 0.1)
            assert counted(bench) == (len(spans_in(collector)), 0, 0)
    root, *stages = spans_in(collector)
    assert stages
    assert all((stage["traceId"], stage["parentSpanId"], stage["kind"]) == (TRACE, root["spanId"], 1) for stage in stages)
    assert seconds_of(root) >= 0.5
    assert sum(map(seconds_of, stages)) == pytest.approx(seconds_of(root), rel=0.01)
    assert [event["name"] for event in root["events"]] == ["attempt"]
    assert (root["traceId"], root["parentSpanId"], root["traceState"], root["name"]) == (TRACE, SPAN, "vendor=1", f"chat {FAR}")
    sent = far.heads[-1].decode().lower()
    assert f"traceparent: 00-{TRACE}-{root['spanId']}-01\r\n" in sent
    assert "tracestate: vendor=1\r\n" in sent
    attributes = attributes_of(root)
    assert attributes["headrace.request_id"] == response.headers["x-request-id"]
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == ("9", 0.0)
    assert SECRET not in json.dumps(collector.bodies)


async def test_requests_without_a_trace_begin_one_each_and_probes_none(text: TextModel) -> None:
    collector = ScriptedServer(TAKEN)
    async with listening(collector) as (port,), open_bench(text, otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces") as bench:
        usage = (await bench.chat(stream=True, stream_options={"include_usage": True})).text
        assert (await bench.complete(temperature=-1)).status_code == 400
        await bench.client.get("/health")
    ok, refused = [span for span in spans_in(collector) if span["kind"] == 2]
    assert ok["traceId"] != refused["traceId"]
    assert f'"completion_tokens":{attributes_of(ok)["gen_ai.usage.output_tokens"]}' in usage
    assert (attributes_of(refused)["error.type"], attributes_of(refused)["http.response.status_code"]) == ("invalid_value", "400")


async def test_a_trace_that_its_client_does_not_sample_has_no_spans(text: TextModel) -> None:
    collector, far = ScriptedServer(TAKEN), ScriptedServer(head() + said("good", "stop") + DONE)
    async with (
        listening(collector, far) as (port, far_port),
        open_bench(text, models=far_models(far_port), otlp_traces_endpoint=f"http://127.0.0.1:{port}") as bench,
    ):
        await bench.client.post("/v1/chat/completions", json=chat_body(model=FAR), headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert not collector.bodies
    assert f"traceparent: 00-{TRACE}-".encode() in far.heads[-1].lower()
    assert b"-00\r\n" in far.heads[-1]


async def test_without_a_collector_a_clients_trace_is_passed_on_as_it_came(text: TextModel) -> None:
    far = ScriptedServer(head() + said("good", "stop") + DONE)
    async with listening(far) as (port,), open_bench(text, models=far_models(port)) as bench:
        for headers in ({"traceparent": f"00-{TRACE}-{SPAN}-01"}, {"traceparent": "nonsense"}, {}):
            await bench.client.post("/v1/chat/completions", json=chat_body(model=FAR), headers=headers)
    first, *others = [asked.lower() for asked in far.heads]
    assert f"traceparent: 00-{TRACE}-{SPAN}-01\r\n".encode() in first
    assert not any(b"traceparent" in asked for asked in others)


@pytest.mark.parametrize("status", ["429 Too Many Requests", "502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
async def test_spans_wait_for_a_collector_that_has_no_room(text: TextModel, status: str) -> None:
    collector = ScriptedServer(TAKEN, before=(answer(status), answer(status)))
    async with listening(collector) as (port,), open_bench(text, otlp_traces_endpoint=f"http://127.0.0.1:{port}") as bench:
        await bench.chat()
        await asyncio.sleep(traces.INTERVAL_S * (1 + 2 + 4) - 0.1)
        assert (len(collector.bodies), counted(bench)) == (2, (0, 0, 0))
        await asyncio.sleep(0.2)
        assert (len(collector.bodies), counted(bench)) == (3, (len(spans_in(collector)) / 3, 0, 0))
    assert collector.bodies[0] == collector.bodies[-1]


@pytest.mark.parametrize(
    ("said_by_collector", "num_refused"),
    [
        (answer("404 Not Found"), None),
        (answer("302 Found"), None),
        (page(b'{"partialSuccess":{"rejectedSpans":"1","errorMessage":"no"}}'), 1),
        (page(b'{"partialSuccess":{"rejectedSpans":1e999}}'), 0),
        (page(b'{"partialSuccess":[]}'), 0),
        (page(b"\xff"), 0),
        (page(b'{"partialSuccess":{"rejectedSpans":"-7"}}'), 0),
    ],
)
async def test_what_a_collector_refuses_is_counted_and_not_sent_again(
    text: TextModel, said_by_collector: bytes, num_refused: int | None
) -> None:
    collector = ScriptedServer(said_by_collector)
    async with listening(collector) as (port,), open_bench(text, otlp_traces_endpoint=f"http://127.0.0.1:{port}") as bench:
        await bench.chat()
        await asyncio.sleep(traces.LAST_RETRY_S)
        num_spans = len(spans_in(collector))
        wanted = num_spans if num_refused is None else num_refused
        assert counted(bench) == (num_spans - wanted, 0, wanted)
    assert len(collector.bodies) == 1


@pytest.mark.parametrize("is_down", [False, True])
async def test_a_collector_that_fails_costs_spans_and_no_request_its_time(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, is_down: bool
) -> None:
    """One that is down refuses connections, one that hangs takes spans and never answers."""
    monkeypatch.setattr(traces, "MAX_WAITING_BYTES", 8 << 10)
    collector = ScriptedServer(hangs=True)
    loop = virtual_loop()
    async with listening(collector) as (port,):
        async with open_bench(text, otlp_traces_endpoint=f"http://127.0.0.1:{1 if is_down else port}") as bench:
            for _ in range(40):
                began = loop.time()
                assert (await bench.chat()).status_code == 200
                assert loop.time() == began
            exported, queue, refused = counted(bench)
            assert (exported, refused) == (0, 0)
            assert queue > 0
            exporter = bench.gateway.traces
            assert exporter is not None
            assert 0 < exporter._waiting_bytes <= 8 << 10
            await asyncio.sleep(traces.INTERVAL_S + 0.1)
            assert bool(collector.heads) != is_down
            began = loop.time()
        assert loop.time() - began <= traces.CLOSE_S


@pytest.mark.pure
@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:4317",
        "grpc://localhost:4317",
        "http://",
        "http://user:hunter2@host:4318",
        "http://host:4318/v1/traces?key=secret",
        "http://h:0",
    ],
)
def test_an_endpoint_that_is_no_address_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint") as refused:
        gateway_config(otlp_traces_endpoint=endpoint)
    assert "hunter2" not in str(refused.value)
    assert "secret" not in str(refused.value)
