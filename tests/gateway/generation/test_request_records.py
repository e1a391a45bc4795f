"""Tests the request log: how a request ended, why it was refused, and nothing that the client wrote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, dial, eventually, metric, open_bench, post, serving

from headrace.core.errors import ConfigError, Unavailable
from headrace.gateway.app import UNPRINTED
from headrace.gateway.config import config_from
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

KEY = "sk-canary-7f3a9c51d2e84b60"


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "chat",
        {"temperature": 9},
        {"status": 400, "error": "invalid_value", "param": "temperature", "reason": "a number with 0 <= temperature <= 2"},
    ),
    ("chat", {"temprature": 1}, {"status": 400, "error": "invalid_value", "param": "temprature", "reason": "a field this server knows"}),
    ("chat", {"messages": []}, {"status": 400, "error": "invalid_value", "param": "messages"}),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, {"status": 400, "param": "messages[0].content"}),
    ("chat", {"model": "nope"}, {"status": 404, "error": "model_not_found", "param": "model", "reason": f"one of: {MODEL}, gpt-4o"}),
    ("chat", {"max_tokens": 10**6}, {"status": 400, "param": "max_tokens"}),
    ("complete", {"best_of": 2}, {"status": 400, "param": "best_of", "reason": "best_of = n (1)"}),
]


@pytest.mark.parametrize(("surface", "fields", "wanted"), REFUSALS, ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
async def test_a_refusal_names_field_and_rule(
    text: TextModel, tmp_path: Path, surface: str, fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        response = await (bench.chat(**fields) if surface == "chat" else bench.complete(**fields))
        counted = [metric(bench.gateway, "headrace_requests_total", model=name, replica="", outcome="refused") for name in ("", MODEL)]
        assert sum(counted) == 1
    [line] = lines(log)
    assert line["outcome"] == "refused"
    assert line["param"] == response.json()["error"]["param"]
    assert line["reason"]
    assert {name: line.get(name) for name in wanted} == wanted


async def test_refusals_before_a_request_is_known_say_why_too(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log), api_keys=[{"key": KEY}]) as bench, serving(bench.gateway) as port:
        await bench.chat()
        await bench.client.get("/nope", headers={"authorization": f"Bearer {KEY}"})
        await bench.client.get("/v1/chat/completions", headers={"authorization": f"Bearer {KEY}"})
        await bench.client.get("/v1/models", headers={"host": "evil.example"})
        await bench.client.get("/health", headers={"origin": "https://evil.example"})
        async with dial(port) as (reader, writer):
            writer.write(b"no http\r\n\r\n")
            await reader.read()
    found = [(line["status"], line["outcome"], line["error"], bool(line["reason"])) for line in lines(log)]
    assert found == [
        (401, "refused", "invalid_api_key", True),
        (404, "refused", "not_found", True),
        (405, "refused", "method_not_allowed", True),
        (403, "refused", "forbidden", True),
        (403, "refused", "forbidden", True),
        (400, "refused", "bad_http", True),
    ]


async def test_no_record_holds_what_a_client_gave(text: TextModel, tmp_path: Path) -> None:
    """A canary as every kind of value and as a key, refused everywhere; a key of another form than fields have is not shown."""
    canary = "xyzzy-canary-prompt"
    log = tmp_path / "log"
    bodies: list[dict[str, Any]] = [
        {canary: 1},
        {"stop": [canary] * 20},
        {"logit_bias": {canary: 1}},
        {"metadata": {canary: canary * 100}},
        {"chat_template_kwargs": {canary: canary}},
        {"model": canary},
        {"messages": canary},
        {"messages": [{"role": canary, "content": canary}]},
        {"messages": [{"role": "user", "content": [{"type": canary}]}]},
        {"messages": [{"role": "user", "content": "x", canary: 1}]},
        {"tools": [{"type": canary, "function": {"name": canary}}]},
        {"tools": [{"type": "function", "function": {"name": canary * 20}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": canary}, "strict": True}}]},
        {"response_format": {"type": canary}},
        {"user": 5, "seed": canary},
        {"stream_options": {canary: True}},
        {"priority": canary},
        {"temperature": canary},
    ]
    async with open_bench(text, request_log=str(log), api_keys=[{"key": KEY}]) as bench:
        headers = {"authorization": f"Bearer {KEY}"}
        for body in bodies:
            response = await bench.client.post("/v1/chat/completions", json=chat_body(**body), headers=headers)
            assert 400 <= response.status_code < 500, body
        raw = f'{{"model": "{MODEL}", "{canary}": 1, "{canary}": 2}}'
        await bench.client.post("/v1/chat/completions", content=raw, headers={**headers, "content-type": "application/json"})
        await bench.client.post("/tokenize", json={"model": MODEL, "prompt": {canary: canary}}, headers=headers)
        await bench.client.get("/version", headers={"authorization": f"Bearer {KEY}-{canary}"})
        await bench.client.get("/version", headers={**headers, "host": canary})
        await bench.client.get("/version", headers={**headers, "origin": f"https://{canary}"})
    assert len(lines(log)) == len(bodies) + 5
    assert canary not in log.read_text()
    assert KEY not in log.read_text()
    assert lines(log)[0]["param"] == UNPRINTED


async def test_the_path_stands_in_its_own_field_alone(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        response = await bench.client.get("/xyzzy")
        await bench.client.request("XYZZY", "/version")
    assert "/xyzzy" in response.json()["error"]["message"]
    assert [line["reason"] for line in lines(log)] == ["No such path.", "The method is not allowed here. Allowed: GET, HEAD."]
    assert lines(log)[0]["path"] == "/xyzzy"


LONG = "Paris is the capital of France, said the quick brown fox. " * 12


async def test_hashes_of_prompts_are_logged_where_they_are_asked_for(text: TextModel, tmp_path: Path) -> None:
    """Equal for prompts of a tenant that begin alike, of others never; and no word of the prompt."""
    keys = [{"key": f"{KEY}-{tenant}", "tenant": tenant} for tenant in ("acme", "globex")]
    for is_on in (False, True):
        log = tmp_path / f"log {is_on}"
        async with open_bench(text, request_log=str(log), log_prompt_blocks=is_on, api_keys=keys) as bench:
            for key, prompt in [("acme", LONG), ("acme", f"{LONG}?"), ("globex", LONG), ("acme", "Hello"), ("acme", [LONG, LONG])]:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
                answer = await bench.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}-{key}"})
                assert answer.status_code == 200, answer.text
        first, longer, other, *without = [line.get("prompt_blocks", "") for line in lines(log)]
        assert without == ["", ""], "a prompt below a block, and several prompts"
        assert "Paris" not in log.read_text()
        if not is_on:
            assert first == longer == other == ""
            continue
        assert first == longer[: len(first)]
        assert len(first) == len(other) == lines(log)[0]["prompt_tokens"] // 128 * 8 > 0
        assert first[:8] != other[:8]


@pytest.mark.pure
def test_hashes_for_no_log_are_refused() -> None:
    with pytest.raises(ConfigError, match="log_prompt_blocks: has no effect while request_log is off"):
        config_from({**SITE, "request_log": False, "log_prompt_blocks": True})


# -- how a request ended -------------------------------------------------------------------------------------------------------------


async def test_answers_are_completed(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        await bench.chat(max_tokens=3)
        await bench.chat(max_tokens=3, stream=True)
        await bench.client.get("/v1/models")
        await bench.client.post("/tokenize", json={"model": MODEL, "prompt": "Hello"})
    assert [(line["status"], line["outcome"]) for line in lines(log)] == [(200, "completed")] * 4
    assert not any(name in line for line in lines(log) for name in ("param", "reason", "error", "detail"))


async def test_a_refused_question_is_not_completed(text: TextModel, tmp_path: Path) -> None:
    """Of paths that generate nothing too."""
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        await bench.client.post("/tokenize", json={"model": MODEL})
        await bench.client.get("/v1/models/nope")
    assert [line["outcome"] for line in lines(log)] == ["refused", "refused"]


async def test_a_client_that_leaves_cancelled_its_request(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench, serving(bench.gateway) as port:
        bench.replica.go.clear()
        async with dial(port) as (_, writer):
            writer.write(post("/v1/chat/completions", chat_body()))
            await eventually(lambda: bench.replica.num_open == 1)
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
    assert [line["outcome"] for line in lines(log)] == ["cancelled"]


async def test_a_deadline_is_neither_a_failure_nor_a_refusal(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log), timeouts={"request_s": 20}) as bench:
        bench.replica.go.clear()
        assert (await bench.chat()).status_code == 504
    assert [line["outcome"] for line in lines(log)] == ["deadline"]


async def test_what_broke_here_failed(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        bench.replica.on_submit = lambda request, stream: (_ for _ in ()).throw(RuntimeError("words"))
        assert (await bench.chat()).status_code == 500
        bench.replica.die()
        assert (await bench.chat()).status_code == 503
    first, second = lines(log)
    assert (first["outcome"], first["error"], first["detail"], first.get("reason")) == ("failed", "internal_error", "RuntimeError", None)
    assert (second["outcome"], second["error"], bool(second["reason"])) == ("failed", "unavailable", True)


async def test_a_server_that_drains_refuses_the_new_and_fails_what_it_cuts(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        bench.replica.go.clear()
        running = asyncio.create_task(bench.chat())
        await eventually(lambda: bench.replica.num_open == 1)
        bench.gateway.service.open_requests.drain()
        assert (await bench.chat()).status_code == 503
        bench.gateway.service.open_requests.cut(Unavailable("shutting down"))
        assert (await running).status_code == 503
    assert [line["outcome"] for line in lines(log)] == ["refused", "failed"]


async def test_what_a_shutdown_cancels_failed(bench: TestBench, tmp_path: Path, text: TextModel) -> None:
    """Its client did not leave: the server did."""
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        bench.replica.go.clear()
        running = asyncio.create_task(bench.chat())
        await eventually(lambda: bench.replica.num_open == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    [line] = lines(log)
    assert (line["outcome"], line["detail"]) == ("failed", "cut off at the end of a shutdown")


# -- who is not in it ------------------------------------------------------------------------------------------------------------------


async def test_probes_and_scrapes_write_no_line(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        bench.replica.die()
        quiet = [endpoint.path for endpoint in ENDPOINTS if endpoint.is_quiet]
        assert set(quiet) == {"/", "/health", "/ping", "/live", "/ready", "/metrics"}
        for path in quiet:
            for method in ("GET", "HEAD"):
                assert (await bench.client.request(method, path)).status_code in (200, 503)
        assert metric(bench.gateway, "headrace_http_responses_total", status="503") == 6, "they are counted all the same"
        await bench.client.post("/health")
    [line] = lines(log)
    assert (line["method"], line["status"], line["outcome"]) == ("POST", 405, "refused")


# -- the option ------------------------------------------------------------------------------------------------------------------------

SITE = {"models": [{"name": "m", "folder": "/f", "replicas": [{"name": "r0", "address": "unix:/s"}]}]}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("given", "target"), [(True, "on"), ("on", "on"), (False, "off"), ("off", "off"), ("stderr", "stderr"), ("/var/log/x", "/var/log/x")]
)
def test_on_and_off_are_what_yaml_makes_of_them_too(given: bool | str, target: str) -> None:
    assert config_from({**SITE, "request_log": given}).request_log_target == target


@pytest.mark.pure
@pytest.mark.parametrize("given", ["", "  ", "none", "None", "null", "stdout", "false", "False", "true", "ON", "Off", "no", "STDERR"])
def test_words_that_look_like_targets_make_no_file(given: str) -> None:
    with pytest.raises(ConfigError, match=r"request_log: .* Write on \(stdout\), off"):
        config_from({**SITE, "request_log": given})
