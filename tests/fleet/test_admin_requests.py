"""Keys and tenants over the admin socket: the same operations as the commands, with the socket's token alone."""

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

from headrace.cli.control_client import _UnixConnection
from headrace.fleet.admin import SOCKET_NAME, TOKEN_NAME, admin_socket
from headrace.fleet.control import FleetControl
from headrace.gateway.access.admin_requests import REQUESTS, KeyRequests
from headrace.gateway.access.administration import Administration
from headrace.gateway.access.sqlite_keys import SqliteKeys
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.tier import BUILT_IN_TIERS

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Door:
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
async def door() -> AsyncIterator[Door]:
    with socket_dir() as folder:

        def administration(actor: str) -> Administration:
            store = SqliteKeys.open(str(folder / "keys.db"))
            return Administration(store, tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)

        async with admin_socket(folder, cast(FleetControl, None), [KeyRequests(administration)]):
            yield Door(folder)


async def test_a_key_and_its_tenant_from_creation_to_the_end(door: Door) -> None:
    status, made = await door.ask("POST", "/keys", {"tenant": "acme", "tier": "free", "user": "bob", "models": ["m"], "budget": 2.5})
    assert status == 200
    assert made.keys() == {"id", "key"}
    [listed] = (await door.ask("GET", "/keys?tenant=acme"))[1]
    assert (listed["id"], listed["user"], listed["models"], listed["budget"]) == (made["id"], "bob", ["m"], 2.5)
    assert (await door.ask("GET", "/keys?tenant=other"))[1] == []
    assert (await door.ask("GET", f"/keys/{made['id']}"))[1] == listed
    rotated = (await door.ask("POST", f"/keys/{made['id']}/rotate", {"grace_s": 60.0}))[1]
    assert rotated["key"] != made["key"]
    assert (await door.ask("POST", "/tenants/acme", {"tier": "premium", "options": {"log_prompts": True}}))[1]["tier"] == "premium"
    assert (await door.ask("DELETE", f"/keys/{made['id']}"))[1]["state"] == "revoked"
    assert (await door.ask("DELETE", "/tenants/acme"))[0] == 200
    assert (await door.ask("POST", "/tenants", {"name": "new", "tier": "batch", "budget": 3.0}))[1]["budget"] == 3.0
    assert [tenant["name"] for tenant in (await door.ask("GET", "/tenants"))[1]] == ["new"]
    assert (await door.ask("GET", "/tenants/new"))[1]["tier"] == "batch"
    records = (await door.ask("GET", "/audit"))[1]
    actions = ["tenant.create", "tenant.remove", "key.revoke", "tenant.set", "key.rotate", "key.create"]
    assert [record["action"] for record in records] == actions
    assert {record["actor"] for record in records} == {f"{getpass.getuser()}, through the admin socket"}
    assert len((await door.ask("GET", "/audit?limit=2"))[1]) == 2
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
async def test_a_refusal_names_the_field(door: Door, method: str, path: str, body: dict[str, object] | None, reason: str) -> None:
    status, answer = await door.ask(method, path, body)
    assert status == 400
    assert reason in answer["error"]


async def test_nothing_is_answered_without_the_token(door: Door) -> None:
    for shape in REQUESTS:
        for method in METHODS:
            for token in ("", "wrong", door.token[:-1]):
                assert (await door.ask(method, "/" + "/".join(shape[1:]), {}, token=token))[0] == 401, (method, shape)
    assert (await door.ask("GET", "/nothing", token="wrong"))[0] == 401
    assert (await door.ask("GET", "/nothing"))[0] == 404
    assert (await door.ask("PATCH", "/keys"))[0] == 404


async def test_a_store_that_does_not_answer_is_said_so() -> None:
    def fails(_actor: str) -> Administration:
        raise StoreFailed("redis: no connection")

    assert await KeyRequests(fails).answer("GET", ("keys",), {}, {}, "x") == (503, {"error": "redis: no connection"})
