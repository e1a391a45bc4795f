"""Tests that a purge removes one tenant's answers, by command and through the admin socket, while a gateway runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import TestBench, chat_body, eventually, open_bench
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.gateway.access.admin_requests import KeyRequests
from headrace.gateway.access.administration import Administration
from headrace.gateway.access.key_store import open_keys
from headrace.gateway.control.purge import cache_requests
from headrace.gateway.stores.config import StoreConfig
from headrace.policy.limits.tier import BUILT_IN_TIERS
from headrace.text.folder import TextModel

pytestmark = pytest.mark.socket

KEYS = [{"key": f"key-of-{name}", "tenant": name} for name in ("one", "two")]
PATH = "/v1/chat/completions"


def administration(state: str, config: StoreConfig | None = None) -> Callable[[str], Administration]:
    def opened(actor: str) -> Administration:
        store = open_keys(state, config or StoreConfig())
        assert store is not None
        return Administration(store, tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)

    return opened


async def results(bench: TestBench) -> list[str]:
    """What the cache did for a request of each tenant, and for one under an Idempotency-Key."""
    found = []
    for name in ("one", "two"):
        headers = {"authorization": f"Bearer key-of-{name}"}
        answer = await bench.client.post(PATH, json=chat_body(temperature=0), headers=headers)
        found.append(answer.headers["x-headrace-cache"])
        drawn = await bench.client.post(PATH, json=chat_body(max_tokens=3), headers=headers | {"idempotency-key": "a"})
        found.append(drawn.headers.get("idempotent-replayed", "false"))
    service = bench.gateway.service
    await eventually(lambda: not service.stages.replays.claims and not service.stages.answer_cache.num_computing)
    return found


@pytest.mark.parametrize("way", ["command", "socket"])
async def test_one_tenants_answers_are_removed(text: TextModel, tmp_path: Path, way: str) -> None:
    async with open_bench(text, cache={"enabled": True}, api_keys=KEYS, state=str(tmp_path)) as bench:
        assert await results(bench) == ["miss", "false"] * 2
        assert await results(bench) == ["hit", "true"] * 2
        if way == "command":
            words = ["cache", "purge", "--tenant", "one", "--state", str(tmp_path), "--json"]
            done = await asyncio.to_thread(CliRunner().invoke, app, words)
            assert json.loads(done.stdout) == {"removed": 2}, done.output
        else:
            requests = KeyRequests(administration(str(tmp_path)), cache_requests(lambda: bench.gateway.config, lambda: 0.0))
            assert await requests.answer("DELETE", ("cache", "one"), {}, {}, "root") == (200, {"removed": 2})
            assert await requests.answer("GET", ("cache", "one"), {}, {}, "root") is None
        assert await results(bench) == ["miss", "false", "hit", "true"]
        admin = administration(str(tmp_path))("test")
        [record] = await admin.audit(10)
        await admin.close()
        assert (record.action, record.subject, record.detail) == ("cache.purge", "one", {"removed": 2})


@pytest.mark.parametrize("way", ["command", "socket"])
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_all_removes_a_tenants_sessions_and_kept_streams_too(
    request: pytest.FixtureRequest, text: TextModel, tmp_path: Path, way: str, kind: str
) -> None:
    store = {} if kind == "sqlite" else {"url": request.getfixturevalue("redis_server").url}
    async with open_bench(text, api_keys=KEYS, state=str(tmp_path), store=store) as bench:
        service = bench.gateway.service
        for name in ("one", "two"):
            sent = {"authorization": f"Bearer key-of-{name}"}
            answer = await bench.client.post(PATH, json=chat_body(), headers=sent | {"x-session-id": "s"})
            assert answer.status_code == 200
            await bench.client.post(PATH, json=chat_body(stream=True), headers=sent | {"last-event-id": "0"})
        await eventually(lambda: not service.stages.kept_streams.num_writing and not service.stages.sessions.num_pending)
        assert await removed(bench, tmp_path, "socket", is_all=False) == 0, "answers alone"
        assert await removed(bench, tmp_path, way, is_all=True) == 2
        assert await removed(bench, tmp_path, way, is_all=True) == 0
        for name, status in (("one", 404), ("two", 200)):
            found = await bench.client.get("/v1/sessions/s", headers={"authorization": f"Bearer key-of-{name}"})
            assert found.status_code == status
        admin = administration(str(tmp_path), bench.gateway.config.store)("test")
        [record, *_] = await admin.audit(1)
        await admin.close()
        assert (record.action, record.subject, record.detail) == ("cache.purge", "one", {"removed": 0, "all": True})


async def removed(bench: TestBench, folder: Path, way: str, *, is_all: bool) -> int:
    """Entries of the tenant `one` that a purge removes."""
    config = bench.gateway.config
    if way == "socket":
        requests = KeyRequests(administration(str(folder), config.store), cache_requests(lambda: config, lambda: 0.0))
        answer = await requests.answer("DELETE", ("cache", "one"), {}, {"all": is_all}, "root")
        assert answer is not None
        assert answer[0] == 200, answer
        found: Any = answer[1]
    else:
        file = folder / "server.yaml"
        upstream = {"name": "far", "upstreams": [{"url": "http://h/v1"}]}
        file.write_text(json.dumps({"models": [upstream], "gateway": {"store": {"url": config.store.url}}}))
        words = ["cache", "purge", "--tenant", "one", "--state", str(folder), "--config", str(file), "--json", "--all"]
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
        found = json.loads(done.stdout or "{}")
        assert done.exit_code == 0, done.output
    return int(found["removed"])


async def test_a_body_with_another_word_is_refused(tmp_path: Path) -> None:
    from gateway_kit import gateway_config

    config: Any = gateway_config(state=str(tmp_path))
    requests = KeyRequests(administration(str(tmp_path)), cache_requests(lambda: config, lambda: 0.0))
    answer = await requests.answer("DELETE", ("cache", "one"), {}, {"al": True}, "root")
    assert answer is not None
    assert answer[0] == 400


async def test_a_store_that_does_not_answer_is_said(tmp_path: Path) -> None:
    from gateway_kit import gateway_config

    config: Any = gateway_config(store={"url": f"unix://{tmp_path}/none.sock"})
    requests = KeyRequests(administration("", config.store), cache_requests(lambda: config, lambda: 0.0))
    answer = await requests.answer("DELETE", ("cache", "one"), {}, {}, "root")
    assert answer is not None
    assert answer[0] == 503
