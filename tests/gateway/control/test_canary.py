"""Tests that no other caller sees what a client sends, by canaries in every part of a request.

None of them is in anything that is written down or shown to another caller. Stores that keep conversations and answers for their tenant
have them, and nothing else has.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, eventually, open_bench
from identity_kit import administration
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.core.request import EngineRequest
from headrace.gateway.access.admin_requests import KeyRequests
from headrace.gateway.access.administration import Administration, IssuedKey, NewKey, NewTenant
from headrace.gateway.control.purge import cache_requests
from headrace.text.folder import TextModel
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.socket

PROMPT, ANSWER = "xyzzy-canary-prompt", "xyzzy-canary-answer"
SESSION, REPLAY = "xyzzy-canary-session", "xyzzy-canary-replay"
SALT, USER, METADATA, TOOL = "xyzzy-canary-salt", "xyzzy-canary-user", "xyzzy-canary-metadata", "xyzzy-canary-tool"
CANARY = "xyzzy-canary"
"""Begins all of them."""

CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
KEEPS_TEXT = {"answers.db", "replays.db", "sessions.db", "entries.db"}
"""Files for what is given back to its tenant."""


def said(text: str = PROMPT, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": TOOL, "parameters": {"type": "object"}}}
    return chat_body(
        messages=[{"role": "user", "content": text}],
        user=USER,
        cache_salt=SALT,
        metadata={"note": METADATA},
        tools=[tool],
        tool_choice="none",
        **GREEDY | fields,
    )


class Caller:
    """A client with one key. refusals: the bodies and headers of answers that were no success"""

    def __init__(self, bench: TestBench, key: str) -> None:
        self.bench = bench
        self._headers = {"authorization": f"Bearer {key}"}
        self.refusals: list[str] = []

    async def ask(self, method: str, path: str, status: int, body: Any = None, **headers: str) -> str:
        made = {"x-session-id": "session_id", "idempotency-key": "idempotency_key"}
        named = {name: headers[argument] for name, argument in made.items() if argument in headers}
        answer = await self.bench.client.request(method, path, json=body, headers={**self._headers, **named})
        assert answer.status_code == status, answer.text
        shown = f"{answer.text}{answer.headers}"
        if status >= 400:
            self.refusals.append(shown)
        return shown


async def use_everything(caller: Caller, state: Path) -> None:
    """Every part of the gateway that sees what a client says, with success, refused and failing."""
    bench = caller.bench
    for _ in range(2):  # the second is a hit
        await caller.ask("POST", CHAT, 200, said())
    for _ in range(2):  # the second is a replay
        await caller.ask("POST", CHAT, 200, said(temperature=1), idempotency_key=REPLAY)
        await eventually(lambda: not bench.gateway.service.stages.replays.claims)
    await caller.ask("POST", CHAT, 422, said(temperature=1, max_tokens=3), idempotency_key=REPLAY)
    await caller.ask("POST", CHAT, 400, said(), idempotency_key=f"{REPLAY} {REPLAY}")
    for _ in range(2):
        await caller.ask("POST", CHAT, 200, said(stream=True), session_id=SESSION)
        await eventually(lambda: not bench.gateway.service.stages.sessions.num_pending)
    await caller.ask("POST", CHAT, 400, said(n=2), session_id=SESSION)
    await caller.ask("POST", CHAT, 400, said(), session_id=f"{SESSION} {SESSION}")
    for session in (SESSION, SESSION + "-2"):
        for method in ("GET", "DELETE"):
            await caller.ask(method, f"/v1/sessions/{session}", 200 if session == SESSION else 404)
            await eventually(lambda: not bench.gateway.service.stages.sessions.num_pending)
    await caller.ask("POST", CHAT, 400, said(PROMPT * 100))
    long = [{"role": "user", "content": f"{number} {PROMPT * 3}"} for number in range(12)]
    for fitting in ("sliding_window", "summary"):
        await caller.ask("POST", CHAT, 200, {**said(context_fitting=fitting), "messages": long})
    await caller.ask("POST", "/v1/completions", 200, {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "echo": True})
    await caller.ask("POST", "/tokenize", 200, {"model": MODEL, "prompt": PROMPT})
    await fail(caller, state)


async def fail(caller: Caller, state: Path) -> None:
    """A bug, and a session whose store fails, while the client says its canaries."""

    def bug(request: EngineRequest, stream: ReplicaStream) -> None:
        raise RuntimeError(PROMPT)

    replica = caller.bench.replica
    replica.on_submit = bug
    await caller.ask("POST", CHAT, 500, said("another"), session_id=SESSION, idempotency_key=REPLAY + "-2")
    replica.on_submit = None
    with closing(sqlite3.connect(state / "sessions.db", isolation_level=None)) as other:  # its own: the store's may be within a transaction
        other.execute("ALTER TABLE entries RENAME TO hidden")
        await caller.ask("POST", CHAT, 503, said("another"), session_id=SESSION)
        other.execute("ALTER TABLE hidden RENAME TO entries")  # what waits to be written is tried again
    await eventually(lambda: not caller.bench.gateway.service.stages.sessions.num_pending)


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Administration]:
    opened = administration(tmp_path)
    yield opened
    await opened.close()


async def admin_answers(bench: TestBench, state: Path, issued: IssuedKey) -> str:
    """All answers of the admin socket about keys, tenants and caches."""
    config = bench.gateway.config
    keys = KeyRequests(lambda _actor: administration(state))
    caches = KeyRequests(lambda _actor: administration(state), cache_requests(lambda: config, time.time))
    asked = [
        ("GET", ("keys",)),
        ("GET", ("keys", issued.record.id)),
        ("GET", ("tenants",)),
        ("GET", ("tenants", "acme")),
        ("GET", ("audit",)),
    ]
    found = [await keys.answer(method, path, {}, {}, "test") for method, path in asked]
    found.append(await caches.answer("DELETE", ("cache", "acme"), {}, {}, "test"))
    assert all(answer is not None and answer[0] == 200 for answer in found), found
    return str(found)


def commands(state: Path) -> str:
    """What operators' commands print."""
    asked = [("usage", "--by", "tenant,user,model,day", "--json"), ("keys", "list"), ("keys", "audit"), ("tenants", "show", "acme")]
    done = [CliRunner().invoke(app, [*words, "--state", str(state)]) for words in asked]
    assert all(result.exception is None for result in done), [result.output for result in done]
    return "".join(result.output for result in done)


def files(state: Path) -> dict[str, bytes]:
    """Every file below the state folder but those that keep text for its tenant: spool, usage, limits, keys, logs."""
    return {
        str(path.relative_to(state)): path.read_bytes()
        for path in state.rglob("*")
        if path.is_file() and path.name.removesuffix("-wal").removesuffix("-shm") not in KEEPS_TEXT
    }


def excerpt(shown: str, secret: str) -> str:
    place = shown.index(secret)
    return shown[max(0, place - 200) : place + 100]


async def test_what_a_client_says_is_written_down_nowhere_and_shown_to_no_other(
    text: TextModel, tmp_path: Path, admin: Administration, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, logger="httpx2")  # the test's client
    await admin.create_tenant(NewTenant(name="acme", options={"cache": True}))
    issued, other = [await admin.create_key(NewKey(tenant=tenant)) for tenant in ("acme", "other")]
    async with open_bench(text, state=str(tmp_path), request_log=str(tmp_path / "requests.log")) as bench:
        bench.replica.said = ANSWER
        caller, stranger = Caller(bench, issued.key), Caller(bench, other.key)
        await use_everything(caller, tmp_path)
        seen = ["".join(caller.refusals)]
        for path in ("/metrics", "/health", "/ready", "/live", "/load", "/v1/models", "/v1/usage", "/version", "/openapi.json"):
            seen.append(await stranger.ask("GET", path, 200))
        seen += [repr(bench.gateway.config), await admin_answers(bench, tmp_path, issued)]
    seen += [caplog.text, "".join(capfd.readouterr()), await asyncio.to_thread(commands, tmp_path)]
    written = files(tmp_path)
    assert {"keys.db", "limits.db", "usage.db", "requests.log"} <= written.keys()
    assert any(name.startswith("spool/") for name in written), sorted(written)
    assert '"tenant": "acme"' in seen[-1]
    for secret in (CANARY, issued.key[3:]):
        assert [name for name, data in written.items() if secret.encode() in data] == []
        assert [excerpt(shown, secret) for shown in seen if secret in shown] == []
