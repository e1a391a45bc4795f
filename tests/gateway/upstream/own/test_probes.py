"""Tests /health, /live, /ready and friends: the truth about replicas, in time and in words."""

from __future__ import annotations

import pytest
from gateway_kit import MODEL, TestBench, metric, open_bench, snapshot, some_replicas, two_replicas
from local_workers import LocalWorkers

import headrace
from headrace.gateway.upstream.own.replica_health import verdict
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, SeenLoad
from headrace.wire.service import HEARTBEAT_S, SILENT_AFTER_S

pytestmark = pytest.mark.loop


@pytest.mark.pure
@pytest.mark.parametrize(
    ("state", "seen", "now", "reason"),
    [
        (ConnectionState.DOWN, None, 0.0, "not connected"),
        (ConnectionState.SILENT, SeenLoad(snapshot(), 0.0), 0.0, "does not answer"),
        (ConnectionState.DRAINING, SeenLoad(snapshot(), 0.0), 0.0, "draining"),
        (ConnectionState.CONNECTED, None, 0.0, "has not reported yet"),
        (ConnectionState.CONNECTED, SeenLoad(snapshot(loop_age_s=0.3), 0.0), 0.2, ""),
        (ConnectionState.CONNECTED, SeenLoad(snapshot(loop_age_s=0.7), 0.0), 0.2, "its loop has not turned for 0.9 s"),
        (ConnectionState.CONNECTED, SeenLoad(snapshot(step_age_s=0.8, loop_age_s=0.8), 0.0), 0.1, ""),
        (ConnectionState.CONNECTED, SeenLoad(snapshot(loop_age_s=0.9, is_asleep=True), 0.0), 0.2, "asleep"),
        (ConnectionState.CONNECTED, SeenLoad(snapshot(step_age_s=0.9), 0.0), 0.2, "a step has taken 1.1 s, expected at most 1.0 s"),
        (ConnectionState.CONNECTED, SeenLoad(snapshot(step_age_s=7.9, step_predicted_s=2.0), 0.0), 0.0, ""),
        (
            ConnectionState.CONNECTED,
            SeenLoad(snapshot(step_age_s=8.1, step_predicted_s=2.0), 0.0),
            0.0,
            "a step has taken 8.1 s, expected at most 8.0 s",
        ),
    ],
)
def test_verdict(state: ConnectionState, seen: SeenLoad | None, now: float, reason: str) -> None:
    assert verdict(state, seen, now) == reason


@pytest.mark.pure
def test_silence_is_noticed_within_a_second() -> None:
    """A process that stops just after a heartbeat is noticed when `SILENT_AFTER_S` have passed."""
    assert HEARTBEAT_S < SILENT_AFTER_S < 1.0


async def test_ready_says_which_replica_and_why(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        assert (await bench.client.get("/ready")).json() == {
            "ok": True,
            "replicas": [
                {"model": MODEL, "replica": "r0", "ok": True, "reason": ""},
                {"model": MODEL, "replica": "r1", "ok": True, "reason": ""},
            ],
            "reason": "",
        }
        bench.replicas["r1"].state = ConnectionState.SILENT
        response = await bench.client.get("/ready?strict")
        assert response.status_code == 503
        assert response.json()["reason"] == f"{MODEL}/r1 does not answer"
        assert [state["ok"] for state in response.json()["replicas"]] == [True, False]


async def test_a_replica_that_is_asleep_is_not_missing_and_gets_no_request(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        for name in ("r0", "r1"):
            bench.replicas[name].snapshot = SeenLoad(snapshot(is_asleep=True), 0.0)
        response = await bench.client.get("/ready?strict")
        assert response.status_code == 200
        assert [state["reason"] for state in response.json()["replicas"]] == ["asleep", "asleep"]
        assert metric(bench.gateway, "headrace_replica_ready", model=MODEL, replica="r0") == 1, "an alert waits for 0 at every replica"
        bench.replicas["r1"].snapshot = None
        assert (await bench.chat()).status_code == 200
        assert not bench.replicas["r0"].requests


@pytest.mark.parametrize("state", [ConnectionState.SILENT, ConnectionState.DRAINING])
async def test_a_replica_that_was_asleep_and_is_lost_since_is_missing(text: TextModel, state: ConnectionState) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        bench.replicas["r0"].snapshot = SeenLoad(snapshot(is_asleep=True), 0.0)
        bench.replicas["r0"].state = state
        assert (await bench.client.get("/ready?strict")).status_code == 503
        assert metric(bench.gateway, "headrace_replica_ready", model=MODEL, replica="r0") == 0


async def test_a_replica_whose_circuit_is_open_is_not_strictly_ready_although_it_is_used(bench: TestBench) -> None:
    """The last replica of a model is never left out, whatever it fails."""
    (pool,) = [opened.pool for opened in bench.reloader._models.models.values() if opened.pool is not None]
    breaker = pool.replicas[0].circuit.breaker
    for _ in range(3):
        breaker.fail(breaker.send(pool.clock()), pool.clock())
    assert (await bench.client.get("/ready")).status_code == 200
    strict = await bench.client.get("/ready?strict")
    assert (strict.status_code, strict.json()["reason"]) == (503, f"{MODEL}/r0 failed several requests in a row")
    assert (await bench.chat()).status_code == 200


async def test_ready_is_true_while_one_replica_is(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        bench.replicas["r1"].state = ConnectionState.SILENT
        response = await bench.client.get("/ready")
        assert (response.status_code, response.json()["ok"], response.json()["reason"]) == (200, True, "")
        assert [state["ok"] for state in response.json()["replicas"]] == [True, False]
        bench.replicas["r0"].die()
        response = await bench.client.get("/ready")
        assert (response.status_code, response.json()["reason"]) == (503, f"{MODEL}/r0 not connected; {MODEL}/r1 does not answer")


async def test_ready_of_one_model_is_not_changed_by_another(text: TextModel) -> None:
    """Two models of one replica each; `a` has lost its own. An alias asks for its model."""
    (only,) = some_replicas(1)
    models = [{**only, "name": name, "aliases": [f"gpt-{name}"], "replicas": [{**only["replicas"][0], "name": name}]} for name in "ab"]
    async with open_bench(text, models=models) as bench:
        bench.replicas["a"].die()
        asked = ("", "?strict", "?model=a", "?model=gpt-a", "?model=b", "?model=gpt-b&strict=true", "?model=b&strict=false")
        answers = {query: await bench.client.get(f"/ready{query}") for query in asked}
        assert [answer.status_code for answer in answers.values()] == [200, 503, 503, 503, 200, 200, 200]
        assert answers["?model=a"].json()["reason"] == "a/a not connected"
        assert {len(answer.json()["replicas"]) for answer in answers.values()} == {2}, "the body lists all"


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [("?model=nope", 404, "model"), ("?stict", 400, "stict"), ("?strict=perhaps", 400, "strict"), ("?model", 404, "model")],
)
async def test_a_question_that_ready_does_not_know_is_refused_by_name(bench: TestBench, query: str, status: int, param: str) -> None:
    response = await bench.client.get(f"/ready{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_health_asks_for_one_living_engine_per_model(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        bench.replicas["r0"].die()
        assert (await bench.client.get("/health")).status_code == 200
        bench.replicas["r1"].state = ConnectionState.SILENT
        assert (await bench.client.get("/health")).status_code == 200
        bench.replicas["r1"].die()
        response = await bench.client.get("/health")
        assert (response.status_code, response.json()["reason"]) == (503, f"no engine for: {MODEL}")
        assert (await bench.client.get("/live")).status_code == 200


async def test_a_starting_model_is_listed_and_refuses(bench: TestBench) -> None:
    bench.replica.die()
    card = (await bench.client.get(f"/v1/models/{MODEL}")).json()
    assert (card["id"], card["max_model_len"], card["status"]) == (MODEL, None, "starting")
    response = await bench.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_what_a_replica_said_is_remembered_while_it_restarts(bench: TestBench) -> None:
    before = (await bench.client.get(f"/v1/models/{MODEL}")).json()
    assert (before["max_model_len"], before["status"]) == (512, "ready")
    bench.replica.die()
    assert (await bench.client.get(f"/v1/models/{MODEL}")).json() == {**before, "status": "starting"}


async def test_models_not_served_are_named_404(bench: TestBench) -> None:
    for response in (await bench.client.get("/v1/models/nope/x"), await bench.chat(model="nope/x")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert MODEL in error["message"]
        assert "gpt-4o" in error["message"]


async def test_version_and_load(bench: TestBench) -> None:
    assert (await bench.client.get("/version")).json() == {"version": headrace.__version__}
    assert (await bench.client.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/version", "/v1/models", "/metrics", "/docs", "/openapi.json"])
async def test_head_is_get_without_a_body(bench: TestBench, path: str) -> None:
    assert (await bench.client.head(path)).status_code == 200


async def test_tokenize_has_vllm_shape(bench: TestBench, text: TextModel) -> None:
    plain = (await bench.client.post("/tokenize", json={"model": MODEL, "prompt": "Hello"})).json()
    ids = text.tokenizer.encode("Hello", add_special_tokens=True)
    assert plain["tokens"] == ids
    assert plain["count"] == len(ids)
    assert plain["max_model_len"] == 512
    assert plain["token_strs"] == [text.tokenizer.id_to_token(token_id) for token_id in ids]
    bare = (await bench.client.post("/v1/tokenize", json={"prompt": "Hello", "add_special_tokens": False})).json()
    assert bare["tokens"] == ids[1:]


async def test_tokenize_renders_messages_as_chat_does(bench: TestBench) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = (await bench.client.post("/tokenize", json={"model": MODEL, "messages": messages})).json()["tokens"]
    await bench.chat(messages=messages, max_tokens=1)
    assert tuple(tokens) == bench.replica.requests[0].prompt_ids


async def test_detokenize_undoes_tokenize(bench: TestBench) -> None:
    tokens = (await bench.client.post("/tokenize", json={"model": MODEL, "prompt": "caf\u00e9", "add_special_tokens": False})).json()[
        "tokens"
    ]
    assert (await bench.client.post("/detokenize", json={"model": MODEL, "tokens": tokens})).json() == {"prompt": "caf\u00e9"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": 5}, "prompt"),
        ("/tokenize", {"model": MODEL, "messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"model": MODEL, "messages": []}, "messages"),
        ("/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"model": MODEL, "prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"model": "nope", "prompt": "x"}, "model"),
        ("/tokenize", {"model": MODEL, "prompt": "x", "extra": 1}, "extra"),
        ("/detokenize", {"model": MODEL}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [10**18]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": ["1"]}, "tokens[0]"),
    ],
)
async def test_tokenize_refuses_by_name(bench: TestBench, path: str, body: dict[str, object], param: str) -> None:
    response = await bench.client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


async def test_ready_says_that_no_prompt_can_be_read(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bench(text) as bench:
        monkeypatch.setattr(LocalWorkers, "reason", "the process that reads prompts is being started")
        response = await bench.client.get("/ready")
        assert response.status_code == 503
        assert response.json()["reason"] == "the process that reads prompts is being started"
