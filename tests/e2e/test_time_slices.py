"""Tests two models under a budget for one: real processes, requests to each in turn and at the same time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
from patience import PATIENCE_S
from server_kit import KEY, Server, serving

from headrace.bundled import DEFAULT_MODEL

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

BUDGET = 256 << 20
ENGINE = {"model": DEFAULT_MODEL, "max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 256, "num_threads": 1}
CONFIG: dict[str, Any] = {
    "sleep_budget_bytes": BUDGET,
    "models": [{"name": name, "sleeps": True, "engine": ENGINE} for name in "ab"],
    "gateway": {"api_keys": [{"key": KEY, "tenant": "t"}]},
}


def said(server: Server, model: str) -> str:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=2 * PATIENCE_S)
    try:
        body = {"model": model, "prompt": "The river", "max_tokens": 12, "temperature": 0}
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        assert reply.status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text
    finally:
        connection.close()


def reasons(server: Server) -> dict[str, str]:
    _, body = server.get("/ready")
    return {state["replica"]: state["reason"] for state in body["replicas"]}


def test_requests_to_two_models_under_a_budget_for_one_are_all_answered() -> None:
    with serving(CONFIG) as server:
        pids: dict[str, int] = {}
        expected = said(server, "a")
        for name, other in ("ba", "ab", "ba"):
            assert said(server, name) == expected, "it is the same model"
            assert reasons(server)[f"{other}-0"] == "asleep"
            pids[name] = pids.get(name, server.pids()[f"e{'ab'.index(name)}"])
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda name: said(server, name), "abababab")) == {expected}
        assert pids == {name: server.pids()[f"e{'ab'.index(name)}"] for name in "ab"}, "none was started again"
