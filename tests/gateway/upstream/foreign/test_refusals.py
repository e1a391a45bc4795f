"""Tests what follows an error of a foreign server, by its kind and in whatever form it is sent: which other server is asked, what the
client gets, and what other clients feel of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from foreign_kit import DONE, FAR, ScriptedServer, event, far_models, head, listening, page, said, scripted
from gateway_kit import MODEL, TestBench, chat_body, events_of, eventually, metric, open_bench

from headrace.gateway.upstream.foreign.server import ForeignServer
from headrace.gateway.upstream.foreign.upstream import HttpUpstream
from headrace.policy.routing.failures import BreakerLimits, CircuitState
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

GOOD = head() + said("good", "stop") + DONE
SECRET = "secret of the server"
MANY = 2 * BreakerLimits().max_failures


def status(line: str, body: Any, *headers: str) -> bytes:
    return head(line, "application/json", *headers) + json.dumps(body).encode()


def error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": f"{message} {SECRET}", **fields}}


def in_event(message: str, **fields: Any) -> bytes:
    return head() + said("", role="assistant") + event(**error(message, **fields)) + DONE


def in_document(body: Any) -> bytes:
    return head("200 OK", "application/json") + json.dumps(body).encode()


def in_order(*ports: int) -> list[dict[str, Any]]:
    (model,) = far_models(*ports)
    for order, upstream in enumerate(model["upstreams"]):
        upstream["order"] = order
    return [model]


def servers_of(bench: TestBench) -> tuple[ForeignServer, ...]:
    upstream = bench.gateway.service.models.get(FAR).upstream
    assert isinstance(upstream, HttpUpstream)
    return upstream.servers


async def ask(bench: TestBench, **fields: Any) -> Any:
    return await bench.client.post("/v1/chat/completions", json=chat_body(model=FAR, **fields))


NOT_OURS, PERHAPS_OURS = ("refused", 503, "unavailable"), ("forbidden", 503, "unavailable")
LIMITED, FILTERED, INVALID = ("rate_limited", 429, "overloaded"), ("forbidden", 400, "content_filter"), ("forbidden", 400, "invalid_value")

# name -> what the server sends, its result, the status and code of the client's error where no other server answers
REFUSALS: dict[str, tuple[bytes, str, int, str]] = {
    "a key as 400": (
        status("400 Bad Request", [error("x", status="INVALID_ARGUMENT", details=[{"reason": "API_KEY_INVALID"}])]),
        *NOT_OURS,
    ),
    "a key as 400, words alone": (status("400 Bad Request", {"code": "bad", "error": "Incorrect API key provided"}), *PERHAPS_OURS),
    "a key as 403": (status("403 Forbidden", error("x", type="permission_error")), *NOT_OURS),
    "a key in a document": (in_document({"base_resp": {"status_code": 2049, "status_msg": "invalid api key"}}), *PERHAPS_OURS),
    "a key in a document's error": (in_document(error("x", code="invalid_api_key")), *NOT_OURS),
    "a key in an event": (in_event("x", type="authentication_error"), *NOT_OURS),
    "a model": (status("400 Bad Request", error("x", code="model_not_found")), *NOT_OURS),
    "a rate limit as 400": (status("400 Bad Request", error("x", code="rate_limit_exceeded")), *LIMITED),
    "a quota as 403": (status("403 Forbidden", error("Quota exceeded", status="RESOURCE_EXHAUSTED")), *LIMITED),
    "overload as 503": (status("503 Service Unavailable", error("The model is overloaded.")), *LIMITED),
    "overload as 529": (status("529 Overloaded", error("x")), *LIMITED),
    "a rate limit in a document": (in_document(error("x", code=429)), *LIMITED),
    "a rate limit in an event": (in_event("x", code="rate_limit_exceeded"), *LIMITED),
    "a full queue in an event": (in_event("The request queue is full.", code=503), *LIMITED),
    "a filter as 400": (status("400 Bad Request", error("x", code="content_filter")), *FILTERED),
    "a filter as 403": (status("403 Forbidden", error("Content violates usage guidelines")), *FILTERED),
    "a filter in an event": (in_event("Content Exists Risk"), *FILTERED),
    "more than the account's limit": (
        status("413 Payload Too Large", error("Request too large on tokens per minute", code="rate_limit_exceeded")),
        *("forbidden", 400, "context_length_exceeded"),
    ),
    "tools as 404": (status("404 Not Found", error("No endpoints found that support tool use", code=404)), *INVALID),
    "a template as 500": (status("500 Internal Server Error", error("Jinja Exception: x", code=500)), *INVALID),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_another_server_is_asked_where_it_may_answer(text: TextModel, name: str) -> None:
    sent, result, _, _ = REFUSALS[name]
    bad, good = ScriptedServer(sent), ScriptedServer(GOOD)
    async with listening(bad, good) as ports, open_bench(text, models=in_order(*ports)) as near:
        response = await ask(near)
        assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, "good")
        assert metric(near.gateway, "headrace_upstream_attempts_total", model=FAR, replica="foreign-0", result=result) == 1


@pytest.mark.parametrize("name", REFUSALS)
async def test_the_client_is_told_what_it_can_do_and_the_operator_what_is_wrong(
    text: TextModel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, result, code_of_http, code = REFUSALS[name]
    server = ScriptedServer(sent)
    async with scripted(text, server) as near:
        response = await ask(near)
        assert (response.status_code, response.json()["error"]["code"]) == (code_of_http, code)
        assert SECRET not in response.text + caplog.text
        assert len(server.heads) == 1 or result == "rate_limited", "what is certain to fail is not tried again"
        assert ("refuses its key" in caplog.text) == ("a key" in name)
        assert ("does not have the model" in caplog.text) == (name == "a model")


@pytest.mark.parametrize("name", [name for name, (_, result, *_) in REFUSALS.items() if result != "refused"])
async def test_no_requests_of_one_client_shut_a_server_off_for_the_others(text: TextModel, name: str) -> None:
    sent, *_ = REFUSALS[name]
    async with scripted(text, ScriptedServer(GOOD, before=(sent,) * MANY)) as near:
        (server,) = servers_of(near)
        while server.num_sent < MANY:
            await ask(near)
            assert server.breaker.state is CircuitState.CLOSED
            await eventually(lambda: server.can_take(server._clock()))
        assert (await ask(near)).status_code == 200


QUOTED = {
    "as 400": status("400 Bad Request", error("unexpected value 'rate limit, invalid api key'", type="invalid_request_error")),
    "as 422": status("422 Unprocessable Entity", {"detail": [{"msg": "not a number: 'quota exceeded'", "input": "authentication_error"}]}),
    "as 500": status("500 Internal Server Error", error("cannot parse 'the model x does not exist'", code=500)),
    "in an event": in_event("cannot parse 'too many requests'"),
}


@pytest.mark.parametrize("name", QUOTED)
async def test_words_that_a_client_wrote_and_a_server_quotes_hold_nothing_back(text: TextModel, name: str) -> None:
    async with scripted(text, ScriptedServer(QUOTED[name])) as near:
        (server,) = servers_of(near)
        for _ in range(MANY):
            assert (await ask(near)).status_code >= 400
            assert server.can_take(server._clock())


OWN_FAULTS = {
    "a schema": error(
        "Invalid schema for function 'f': the api key is required, authorization error",
        type="invalid_request_error",
        code="invalid_function_parameters",
        param="tools[0].function.parameters",
    ),
    "a message": {
        "detail": [{"loc": ["body", "messages", 0], "msg": "content: violates the content policy's type", "type": "string_type"}]
    },
    "a model in words": error("the model 'x' does not exist", param="messages[0].content"),
}


@pytest.mark.parametrize("name", OWN_FAULTS)
async def test_a_fault_of_the_client_is_its_400_whatever_words_its_error_quotes(
    text: TextModel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent = status("400 Bad Request", OWN_FAULTS[name])
    bad, good = ScriptedServer(sent), ScriptedServer(GOOD)
    async with listening(bad, good) as ports, open_bench(text, models=in_order(*ports)) as near:
        response = await ask(near, tools=[{"type": "function", "function": {"name": "f"}}])
        expected = "tools" if name == "a schema" else "messages"
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
        assert response.json()["error"]["param"] == expected
        assert metric(near.gateway, "headrace_upstream_attempts_total", model=FAR, replica="foreign-0", result="invalid") == 1
        assert not good.heads
        assert "refuses its key" not in caplog.text


WAITS = {
    "as 429": status("429 Too Many Requests", error("Please try again in 7.66s.", code="rate_limit_exceeded")),
    "as 429, by its header": status("429 Too Many Requests", error("Please try again in 2h."), "retry-after: 8"),
    "as 529": status("529 Overloaded", error("x"), "retry-after: 8"),
    "as 400": status("400 Bad Request", error("x", code="rate_limit_exceeded", retry_after=8)),
    "as 403": status("403 Forbidden", error("Quota exceeded", status="RESOURCE_EXHAUSTED", details=[{"retryDelay": "8s"}])),
    "as 503": status("503 Service Unavailable", error("Overloaded. Retry after 8 seconds.")),
    "in an event": in_event("Rate limit", code=429, metadata={"retry_after_seconds": 8}),
    "in a document": in_document(error("Please try again in 8s.", code="rate_limit_exceeded")),
}


@pytest.mark.parametrize("name", WAITS)
async def test_a_rate_limit_holds_for_as_long_as_it_says_wherever_it_stands(text: TextModel, name: str) -> None:
    limited = ScriptedServer(WAITS[name])
    async with scripted(text, limited) as near:
        for _ in range(3):
            response = await ask(near)
            assert (response.status_code, response.headers["retry-after"]) == (429, "8")
        assert len(limited.heads) == 1


async def test_a_rate_limit_after_the_first_token_is_no_failure_of_the_server(text: TextModel) -> None:
    sent = head() + said("one ") + event(**error("Rate limit", code=429, retry_after=8))
    async with scripted(text, ScriptedServer(sent)) as near:
        *_, last = events_of((await ask(near, stream=True)).text)
        (server,) = servers_of(near)
        assert (last["error"]["code"], server.breaker.num_failures) == ("unavailable", 0)
        assert 7.0 < server.held_s(server._clock()) <= 8.0
        assert SECRET not in json.dumps(last)


OVERFLOWS = {
    "as 400": status("400 Bad Request", error("prompt is too long: 50 tokens > 16 maximum")),
    "as 500": status("500 Internal Server Error", error("the request exceeds the available context size")),
    "as 503": status("503 Service Unavailable", error("the request exceeds the available context size")),
    "in an event": in_event("The input token count (50) exceeds the maximum number of tokens allowed (16).", code=400),
    "in a document": in_document({"message": "Input is too long for requested model."}),
}


@pytest.mark.parametrize("name", OVERFLOWS)
async def test_a_prompt_too_long_in_any_words_goes_to_a_longer_context(text: TextModel, name: str) -> None:
    def listing(max_model_len: int) -> dict[str, bytes]:
        return {"/v1/models": page(json.dumps({"data": [{"id": MODEL, "max_model_len": max_model_len}]}).encode())}

    short, long = ScriptedServer(OVERFLOWS[name], pages=listing(100)), ScriptedServer(GOOD, pages=listing(101))
    async with listening(short, long) as ports, open_bench(text, models=in_order(*ports)) as near:
        await eventually(lambda: all(server.max_model_len is not None for server in servers_of(near)))
        assert (await ask(near)).status_code == 200
    async with scripted(text, ScriptedServer(OVERFLOWS[name])) as near:
        response = await ask(near)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert servers_of(near)[0].breaker.num_failures == 0


async def test_failures_of_one_tenant_alone_do_not_shut_a_server_off_for_another(text: TextModel) -> None:
    """Requests that make a server fail in words that nobody knows: it answers the others as before."""
    keys = [{"key": f"key-of-the-tenant-{tenant}", "tenant": tenant} for tenant in ("acme", "beta")]
    broken = status("500 Internal Server Error", {"error": "boom"})
    server = ScriptedServer(broken, before=(GOOD,))
    async with listening(server) as ports, open_bench(text, models=in_order(*ports), api_keys=keys) as near:

        async def ask_as(tenant: str) -> int:
            headers = {"authorization": f"Bearer key-of-the-tenant-{tenant}"}
            return int((await near.client.post("/v1/chat/completions", json=chat_body(model=FAR), headers=headers)).status_code)

        (far,) = servers_of(near)
        assert await ask_as("beta") == 200
        for _ in range(MANY):
            assert await ask_as("acme") == 503
            assert far.breaker.state is CircuitState.CLOSED
        server.before.append(GOOD)
        assert await ask_as("beta") == 200
        for tenant in ("acme", "beta") * BreakerLimits().max_failures:
            await ask_as(tenant)
        assert far.breaker.state is CircuitState.OPEN, "a server that fails everybody is left alone"


async def test_failures_of_the_only_tenant_of_a_minute_are_the_servers(text: TextModel) -> None:
    server = ScriptedServer(status("500 Internal Server Error", {"error": "boom"}), before=(GOOD,))
    async with scripted(text, server) as near:
        (far,) = servers_of(near)
        assert (await ask(near)).status_code == 200
        for _ in range(BreakerLimits().max_failures):
            assert (await ask(near)).status_code == 503
        assert far.breaker.state is CircuitState.OPEN
