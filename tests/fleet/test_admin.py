"""Tests keys and tenants over the admin socket: the same operations as the commands, with the socket's token alone."""

from __future__ import annotations

import asyncio
import getpass
import json
import time
from collections.abc import AsyncIterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import pytest
from wire_kit import socket_dir

from headrace.cli.admin.client import _UnixConnection
from headrace.core.errors import ConfigError
from headrace.fleet.admin import SOCKET_NAME, TOKEN_NAME, admin_socket
from headrace.fleet.commands import CommandAudit, Hear, no_operator
from headrace.fleet.control import FleetControl, reloading_when_asked
from headrace.gateway.access.admin_requests import REQUESTS, KeyRequests
from headrace.gateway.access.administration import Administration
from headrace.gateway.access.key_store import SqliteKeys
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.tier import BUILT_IN_TIERS

pytestmark = pytest.mark.socket

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class AdminClient:
    """The operator's end of a socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = (folder / TOKEN_NAME).read_text()

    async def ask(self, method: str, path: str, body: Mapping[str, object] | None = None, *, token: str | None = None) -> tuple[int, Any]:
        return await asyncio.to_thread(self._ask, method, path, body, self.token if token is None else token)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None, token: str) -> tuple[int, Any]:
        connection: HTTPConnection = _UnixConnection(self.folder / SOCKET_NAME)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"authorization": f"Bearer {token}"})
            reply = connection.getresponse()
            text = reply.read()
            return reply.status, json.loads(text) if reply.getheader("content-type", "").startswith("application/json") else text.decode()
        finally:
            connection.close()


@pytest.fixture
async def client() -> AsyncIterator[AdminClient]:
    with socket_dir() as folder:

        def administration(actor: str) -> Administration:
            store = SqliteKeys(str(folder / "keys.db"))
            return Administration(store, tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)

        async with admin_socket(folder, cast(FleetControl, None), [KeyRequests(administration)]):
            yield AdminClient(folder)


async def test_a_key_and_its_tenant_from_creation_to_the_end(client: AdminClient) -> None:
    status, made = await client.ask("POST", "/keys", {"tenant": "acme", "tier": "free", "user": "bob", "models": ["m"], "budget": 2.5})
    assert status == 200
    assert (made.keys(), made["tenant"]) == ({"id", "key", "tenant"}, "acme")
    [listed] = (await client.ask("GET", "/keys?tenant=acme"))[1]
    assert (listed["id"], listed["user"], listed["models"], listed["budget"]) == (made["id"], "bob", ["m"], 2.5)
    assert (await client.ask("GET", "/keys?tenant=other"))[1] == []
    assert (await client.ask("GET", f"/keys/{made['id']}"))[1] == listed
    rotated = (await client.ask("POST", f"/keys/{made['id']}/rotate", {"grace_s": 60.0}))[1]
    assert rotated["key"] != made["key"]
    assert (await client.ask("POST", "/tenants/acme", {"tier": "premium", "options": {"log_prompts": True}}))[1]["tier"] == "premium"
    assert (await client.ask("DELETE", f"/keys/{made['id']}"))[1]["state"] == "revoked"
    assert (await client.ask("DELETE", "/tenants/acme"))[0] == 200
    assert (await client.ask("POST", "/tenants", {"name": "new", "tier": "batch", "budget": 3.0}))[1]["budget"] == 3.0
    assert [tenant["name"] for tenant in (await client.ask("GET", "/tenants"))[1]] == ["new"]
    assert (await client.ask("GET", "/tenants/new"))[1]["tier"] == "batch"
    records = (await client.ask("GET", "/audit"))[1]
    actions = ["tenant.create", "tenant.remove", "key.revoke", "tenant.set", "key.rotate", "key.create"]
    assert [record["action"] for record in records] == actions
    assert {record["actor"] for record in records} == {f"{getpass.getuser()}, through the admin socket"}
    assert len((await client.ask("GET", "/audit?limit=2"))[1]) == 2
    assert not any(issued["key"] in json.dumps(records) for issued in (made, rotated))


@pytest.mark.parametrize(
    ("method", "path", "body", "reason"),
    [
        ("POST", "/keys", {"tenant": "acme", "tier": "gold"}, "tier: expected one of"),
        ("POST", "/keys", {"tier": "free"}, "tenant: is missing"),
        ("POST", "/keys", {"tenant": "acme", "expires": 5}, "Did you mean expires_s?"),
        ("POST", "/tenants", {"name": "x", "options": {"log_prompts": "yes"}}, "options.log_prompts"),
        ("GET", "/keys/key-1", None, "the id of a key"),
        ("DELETE", "/keys/key-1", None, "the id of a key"),
        ("GET", "/audit?limit=x", None, "limit: expected"),
    ],
)
async def test_a_refusal_names_the_field(client: AdminClient, method: str, path: str, body: dict[str, object] | None, reason: str) -> None:
    status, answer = await client.ask(method, path, body)
    assert status == 400
    assert reason in answer["error"]


class SpokenControl(FleetControl):
    """Commands that do nothing, and say what a deployment may say."""

    def __init__(self, audit: CommandAudit) -> None:
        self.audit = audit

    async def idle(self) -> None:
        return

    async def scale(self, model: str, replicas: int, hear: Hear = no_operator) -> list[str]:
        if replicas > 9:
            raise ConfigError(model, "is refused")
        return ["one replica cannot be started"] if replicas == 9 else []

    async def drain_all(self, within_s: float) -> list[str]:
        await asyncio.sleep(60)
        return []

    async def reload(self, hear: Hear = no_operator) -> list[str]:
        return []


async def test_commands_to_a_deployment_leave_audit_records() -> None:
    with socket_dir() as folder:

        def administration(actor: str) -> Administration:
            store = SqliteKeys(str(folder / "keys.db"))
            return Administration(store, tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)

        async def write(actor: str, action: str, subject: str, detail: Mapping[str, object]) -> None:
            admin = administration(actor)
            await admin.record(action, subject, detail)
            await admin.close()

        control = SpokenControl(CommandAudit(write))
        async with admin_socket(folder, control, [KeyRequests(administration)]):
            client = AdminClient(folder)
            version = await directory_version(folder)
            for replicas in (2, 9, 10):
                await client.ask("POST", "/scale", {"model": "m", "replicas": replicas})
            asked = asyncio.Event()
            async with reloading_when_asked(asked, control):
                asked.set()
                async with asyncio.timeout(60):
                    while (await client.ask("GET", "/audit"))[1][0]["action"] != "deployment.reload":
                        await asyncio.sleep(0.02)
            draining = asyncio.create_task(client.ask("POST", "/drain", {"within_s": 5.0}))
            async with asyncio.timeout(60):
                while len(records := (await client.ask("GET", "/audit"))[1]) < 4:
                    await asyncio.sleep(0.02)
            found = [(record["action"], record["subject"], record["detail"]) for record in records]
            assert found == [
                ("deployment.drain", "deployment", {"within_s": 5.0}),
                ("deployment.reload", "deployment", {}),
                ("deployment.scale", "m", {"model": "m", "replicas": 9, "failures": ["one replica cannot be started"]}),
                ("deployment.scale", "m", {"model": "m", "replicas": 2}),
            ]
            user = f"{getpass.getuser()}, through the admin socket"
            assert [record["actor"] for record in records] == [user, "SIGHUP", user, user]
            assert await directory_version(folder) == version, "no gateway reads its keys again"
        await draining


async def directory_version(folder: Path) -> int:
    store = SqliteKeys(str(folder / "keys.db"))
    try:
        return (await store.state()).version
    finally:
        await store.close()


@pytest.mark.loop
async def test_a_command_whose_audit_record_cannot_be_written_says_so() -> None:
    async def fails(actor: str, action: str, subject: str, detail: Mapping[str, object]) -> None:
        raise StoreFailed("redis: no connection")

    heard: list[str] = []
    await CommandAudit(fails).record("bob", "scale", {"model": "m"}, heard.append)
    assert heard == ["the audit record cannot be written: redis: no connection"]


async def test_nothing_is_answered_without_the_token(client: AdminClient) -> None:
    for shape in REQUESTS:
        for method in METHODS:
            for token in ("", "wrong", client.token[:-1]):
                assert (await client.ask(method, "/" + "/".join(shape[1:]), {}, token=token))[0] == 401, (method, shape)
    assert (await client.ask("GET", "/nothing", token="wrong"))[0] == 401
    assert (await client.ask("GET", "/nothing"))[0] == 404
    assert (await client.ask("PATCH", "/keys"))[0] == 404


@pytest.mark.loop
async def test_a_store_that_does_not_answer_is_said_so() -> None:
    def fails(_actor: str) -> Administration:
        raise StoreFailed("redis: no connection")

    assert await KeyRequests(fails).answer("GET", ("keys",), {}, {}, "x") == (503, {"error": "redis: no connection"})
