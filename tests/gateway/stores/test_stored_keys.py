"""Keys of the store at the door: what each gateway answers, how soon it follows a change, and what it does without its store."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, open_bench
from redis_kit import RedisServer

from headrace.core.errors import Unauthorized, Unavailable
from headrace.gateway.access.administration import Administration, NewKey, TenantChange
from headrace.gateway.access.auth import Authenticator
from headrace.gateway.access.key_records import StoredKey
from headrace.gateway.access.key_store import DirectoryState, KeyStore
from headrace.gateway.access.open_keys import open_keys
from headrace.gateway.access.principal import KeyLimits
from headrace.gateway.access.sqlite_keys import SqliteKeys
from headrace.gateway.access.stored_keys import MAX_ABSENT, OUTAGE_S, STORE_S, StoredKeys
from headrace.gateway.config import digest_of
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.store import StoreFailed
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.policy.limits.tier import BUILT_IN_TIERS
from headrace.text.folder import TextModel

FOLLOWS_S = 2.0 + 3.0
"""Seconds that a change has, and what a busy machine may add."""
CANARY = "canary"
PUBLIC = {endpoint.path for endpoint in ENDPOINTS if endpoint.is_public}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def administration(state: Path, url: str = "") -> Administration:
    store = open_keys(str(state), StoreConfig(url=url))
    assert store is not None
    return Administration(store, tiers=BUILT_IN_TIERS, unix_time=time.time, actor="test")


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Administration]:
    opened = administration(tmp_path)
    yield opened
    await opened.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(bench: TestBench, key: str | None, path: str = "/v1/models") -> int:
    return (await bench.client.get(path, headers=bearer(key) if key else {})).status_code


async def becomes(bench: TestBench, key: str | None, wanted: int) -> None:
    """Until the answer to `key` is `wanted`, which a change has FOLLOWS_S to bring about."""
    deadline = time.monotonic() + FOLLOWS_S
    while (got := await status(bench, key)) != wanted:
        assert time.monotonic() < deadline, f"still {got}"
        await asyncio.sleep(0.02)


async def test_the_first_key_closes_an_open_server_at_once(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        assert await status(bench, None) == 200
        assert await status(bench, "hr-anything") == 200, "an open server asks for none"
        issued = await admin.create_key(NewKey(tenant="acme"))
        await asyncio.sleep(0.06)
        assert await status(bench, None) == 401
        assert await status(bench, "hr-anything") == 401
        assert await status(bench, issued.key) == 200
        assert [await status(bench, None, path) for path in ("/ready", "/live", "/health", "/ping")] == [200] * 4
        await admin.revoke_key(issued.record.id)
        await becomes(bench, issued.key, 401)
        assert await status(bench, None) == 401, "a server that had a key does not open again"


@pytest.mark.parametrize("kind", ["file", "redis"])
async def test_two_gateways_follow_every_change(text: TextModel, tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""
    admin = administration(tmp_path, url)
    async with AsyncExitStack() as stack:
        benches = [await stack.enter_async_context(open_bench(text, state=str(tmp_path), store={"url": url})) for _ in range(2)]

        async def both(key: str, wanted: int) -> None:
            await asyncio.gather(*(becomes(bench, key, wanted) for bench in benches))

        issued = await admin.create_key(NewKey(tenant="acme"))
        await both(issued.key, 200)
        rotated = await admin.rotate_key(issued.record.id)
        await both(issued.key, 401)
        await both(rotated.key, 200)
        graced = await admin.rotate_key(issued.record.id, grace_s=3600.0)
        await both(graced.key, 200)
        await both(rotated.key, 200)
        await admin.revoke_key(issued.record.id)
        await both(graced.key, 401)
        await both(rotated.key, 401)
        short = await admin.create_key(NewKey(tenant="acme", expires_s=0.5))
        await both(short.key, 200)
        await both(short.key, 401)
    await admin.close()


async def test_what_a_key_may_is_its_own_or_its_tenants(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    limits = KeyLimits(monthly_budget=2.0, requests_per_minute=5, models=(MODEL,))
    issued = await admin.create_key(NewKey(tenant="acme", tier="free", user="bob", limits=limits))
    other = await admin.create_key(NewKey(tenant="acme", tier="batch"))
    await admin.set_tenant("acme", TenantChange(monthly_budget=9.0, options={"log_prompts": True}))
    async with open_bench(text, state=str(tmp_path)) as bench:
        authenticator = bench.gateway.active.authenticator

        async def principal(key: str) -> Any:
            return await authenticator.principal([(b"authorization", f"Bearer {key}".encode())])

        caller = await principal(issued.key)
        assert (caller.tenant, caller.user, caller.key_id, caller.tier_name) == ("acme", "bob", issued.record.id, "free")
        assert (caller.limits, caller.options) == (limits, {"log_prompts": True})
        assert caller.tier.monthly_budget == 9.0, "the tenant's own in the place of the tier's"
        assert caller.tier.requests_per_minute == BUILT_IN_TIERS["free"].requests_per_minute
        assert (await principal(other.key)).tier_name == "batch"
        await admin.set_tenant("acme", TenantChange(tier="premium"))
        deadline = time.monotonic() + FOLLOWS_S
        while (await principal(issued.key)).tier_name != "premium":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert (await principal(other.key)).tier_name == "batch"


async def test_a_tier_that_the_configuration_lost_refuses_and_lets_nothing_pass(
    text: TextModel, tmp_path: Path, admin: Administration
) -> None:
    store = open_keys(str(tmp_path), StoreConfig())
    assert store is not None
    gold = Administration(store, tiers=["gold"], unix_time=time.time, actor="test")
    issued = await gold.create_key(NewKey(tenant="acme", tier="gold"))
    await gold.close()
    async with open_bench(text, state=str(tmp_path)) as bench:
        assert await status(bench, issued.key) == 503
        assert await status(bench, None) == 401


# -- S3: default-deny, whatever the key and however the request looks -------------------------------------------------------------------


async def test_every_route_and_method_refuses_every_key_that_is_not_valid(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    expired = await admin.create_key(NewKey(tenant="acme", expires_s=0.001))
    revoked = await admin.create_key(NewKey(tenant="acme"))
    await admin.revoke_key(revoked.record.id)
    rotated = await admin.create_key(NewKey(tenant="acme"))
    await admin.rotate_key(rotated.record.id)
    removed = await admin.create_key(NewKey(tenant="gone"))
    await admin.remove_tenant("gone", revoke_keys=True)
    issued = (await admin.create_key(NewKey(tenant="acme"))).key
    bad = [
        None,
        expired.key,
        revoked.key,
        rotated.key,
        removed.key,
        "hr-" + secrets.token_urlsafe(32),
        issued[:-1],
        issued + "A",
        issued.swapcase(),
        digest_of(issued.encode()).hex(),
    ]
    async with open_bench(text, state=str(tmp_path)) as bench:
        for endpoint in ENDPOINTS:
            if endpoint.path in PUBLIC:
                continue
            path = endpoint.path.replace("{model:path}", MODEL).replace("{name}", "docs.js").replace("{session_id}", "s")
            for method in METHODS:
                answers = {
                    (response.status_code, b"" if method == "HEAD" else _without_id(response.content))
                    for key in bad
                    for response in [await bench.client.request(method, path, headers=bearer(key) if key else {})]
                }
                assert len(answers) == 1, (method, path)
                assert answers.pop()[0] == 401, (method, path)
        assert await status(bench, issued) == 200


def _without_id(body: bytes) -> bytes:
    return body.partition(b'"request_id"')[0]


FORGED_PATHS = [
    f"{before}{path}{after}"
    for path in ("/v1/models", "/v1/chat/completions", "/metrics", "/load")
    for before in ("", "/", "//", "/health/..", "/live/../", "/./", "/%2e%2e", "/;/", "/ready;", "/health%2f..", "/%00", "/admin")
    for after in ("", "/", "/.", "/..;/health", "?path=/health", ";/health", "%2f", "%00", "#/health", "/../live", "//")
]
FORGED_HEADERS: list[dict[str, str]] = [
    {"host": "localhost/health?"},
    {"host": "localhost", "x-forwarded-host": "localhost/health"},
    {"x-original-url": "/health"},
    {"x-rewrite-url": "/live"},
    {"x-forwarded-prefix": "/health"},
    {"x-forwarded-for": "127.0.0.1"},
    {"forwarded": "for=127.0.0.1;host=localhost;proto=https"},
    {"x-http-method-override": "OPTIONS"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer null"},
    {"x-api-key": "x", "cookie": "key=x"},
]


async def test_forged_paths_and_hosts_are_refused_alike(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    await admin.create_key(NewKey(tenant="acme"))
    async with open_bench(text, state=str(tmp_path)) as bench:
        forged: list[tuple[str, dict[str, str]]] = [(path, {}) for path in FORGED_PATHS]
        forged += [(path, headers) for path in ("/v1/models", "/metrics", "/nothing") for headers in FORGED_HEADERS]
        assert len(forged) >= 500
        for path, headers in forged:
            response = await bench.client.get(f"http://localhost{path}", headers=headers)
            refused = response.status_code in (401, 403, 400)
            assert refused or response.url.path in PUBLIC, (path, headers, response.status_code)  # a client resolves dots itself
            assert MODEL.encode() not in response.content or response.url.path in PUBLIC


# -- S4: keys ---------------------------------------------------------------------------------------------------------------------------


async def test_keys_with_a_common_beginning_never_share_an_identity(tmp_path: Path, admin: Administration) -> None:
    issued = await admin.create_key(NewKey(tenant="acme"))
    store = SqliteKeys.open(str(tmp_path / "keys.db"))
    async with StoredKeys(store, clock=time.monotonic, unix_time=time.time) as keys:
        assert await keys.find(digest_of(issued.key.encode())) is not None
        for length in range(len(issued.key)):
            assert await keys.find(digest_of(issued.key[:length].encode())) is None
            changed = f"{issued.key[:length]}{'A' if issued.key[length] != 'A' else 'B'}{issued.key[length + 1 :]}"
            assert await keys.find(digest_of(changed.encode())) is None


async def test_the_time_of_a_lookup_says_nothing_of_how_much_of_a_key_is_right(tmp_path: Path, admin: Administration) -> None:
    """Welch's t of two classes of wrong keys, of random characters and with all but the last one right, taken in turns."""
    issued = (await admin.create_key(NewKey(tenant="acme"))).key
    async with StoredKeys(SqliteKeys.open(str(tmp_path / "keys.db")), clock=time.monotonic, unix_time=time.time) as keys:
        authenticator = Authenticator((), {}, keys)

        async def cpu_ns(key: str) -> int:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            began = time.thread_time_ns()
            with pytest.raises(Unauthorized):
                await authenticator.principal(headers)
            return time.thread_time_ns() - began

        near, far = issued[:-1] + ("A" if issued[-1] != "A" else "B"), "hr-" + secrets.token_urlsafe(32)
        for key in (near, far):
            await cpu_ns(key)  # asked for once; from now on it is known to be absent
        times: dict[str, list[int]] = {near: [], far: []}
        for _ in range(3000):
            for key in (near, far):
                times[key].append(await cpu_ns(key))
        kept = [sorted(taken)[: len(taken) * 9 // 10] for taken in times.values()]  # without interruptions
        means, variances = [statistics.fmean(taken) for taken in kept], [statistics.variance(taken) / len(taken) for taken in kept]
        # The criterion of dudect is 4.5; half a microsecond is what a busy machine adds to either class.
        assert abs(means[0] - means[1]) < max(4.5 * sum(variances) ** 0.5, 500.0)


# -- S6: without the store --------------------------------------------------------------------------------------------------------------


class BrokenStore(SqliteKeys):
    """A store that can be made to fail, or to hang. num_finds: how often it was asked for a key"""

    mode = "works"
    num_finds = 0

    async def state(self) -> DirectoryState:
        await self._break()
        return await super().state()

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        self.num_finds += 1
        await self._break()
        return await super().find(sha256)

    async def _break(self) -> None:
        if self.mode == "fails":
            raise StoreFailed("broken")
        if self.mode == "hangs":
            await asyncio.sleep(60)


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def broken(state: Path) -> BrokenStore:
    opened = BrokenStore.open(str(state / "keys.db"))
    assert isinstance(opened, BrokenStore)
    return opened


@pytest.mark.parametrize("mode", ["fails", "hangs"])
async def test_without_its_store_a_key_that_was_seen_goes_on_for_a_while_and_no_other_passes(
    tmp_path: Path, admin: Administration, mode: str
) -> None:
    seen = (await admin.create_key(NewKey(tenant="acme"))).key
    unseen = (await admin.create_key(NewKey(tenant="acme"))).key
    clock, store = ManualClock(), broken(tmp_path)
    async with StoredKeys(store, clock=clock, unix_time=time.time) as keys:
        assert await keys.find(digest_of(seen.encode())) is not None
        store.mode = mode
        for key in (unseen, "hr-" + secrets.token_urlsafe(32)):
            began = time.monotonic()
            with pytest.raises(Unavailable) as raised:
                await keys.find(digest_of(key.encode()))
            assert time.monotonic() - began < STORE_S + 1.0, "the wait is bounded; a second is for a busy machine"
            assert raised.value.retry_after_s
        clock.now += OUTAGE_S - 1
        assert await keys.find(digest_of(seen.encode())) is not None
        clock.now += 2.0
        with pytest.raises(Unavailable):
            await keys.find(digest_of(seen.encode()))
        assert await keys.has_keys(), "a server that wants keys does not open"
        store.mode = "works"
        assert await keys.find(digest_of(unseen.encode())) is not None, "it heals by itself"


async def test_a_server_that_never_reached_its_store_is_closed(tmp_path: Path) -> None:
    store = broken(tmp_path)
    store.mode = "fails"
    async with StoredKeys(store, clock=time.monotonic, unix_time=time.time) as keys:
        with pytest.raises(Unavailable):
            await keys.has_keys()
        with pytest.raises(Unavailable):
            await Authenticator((), {}, keys).principal([])
        store.mode = "works"
        assert not await keys.has_keys()


async def test_wrong_keys_are_remembered_briefly_and_within_a_bound(tmp_path: Path) -> None:
    store, clock = broken(tmp_path), ManualClock()
    async with StoredKeys(store, clock=clock, unix_time=time.time) as keys:
        for _ in range(5):
            assert await keys.find(b"0" * 32) is None
        assert store.num_finds == 1
        clock.now += 3.0
        await keys.find(b"0" * 32)
        assert store.num_finds == 2
        keys._absent.update({number.to_bytes(32): 0.0 for number in range(MAX_ABSENT)})
        await keys.find(b"1" * 32)
        assert len(keys._absent) <= MAX_ABSENT


async def test_no_key_passes_while_redis_comes_and_goes(text: TextModel, tmp_path: Path, redis_server: RedisServer) -> None:
    """Of thousands of calls with forged keys none passes, whatever happens to the server; every wait is short; it heals."""
    admin = administration(tmp_path, redis_server.url)
    issued = await admin.create_key(NewKey(tenant="acme"))
    async with open_bench(text, store={"url": redis_server.url}) as bench:
        assert await status(bench, issued.key) == 200
        answers: dict[int, int] = {}
        waits: list[float] = []

        async def forge(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                began = time.monotonic()
                got = await status(bench, "hr-" + secrets.token_urlsafe(32))
                waits.append(time.monotonic() - began)
                answers[got] = answers.get(got, 0) + 1

        for trouble in (redis_server.hang, redis_server.go_on, redis_server.stop, redis_server.start):
            trouble()
            await asyncio.gather(*(forge(0.4) for _ in range(8)))
            assert await status(bench, issued.key) in (200, 401, 503)
        assert answers.keys() == {401, 503}
        assert sorted(waits)[len(waits) // 2] < STORE_S + 0.2
        # The restarted server has lost all keys: the gateway wants one all the same.
        await becomes(bench, issued.key, 401)
        assert await status(bench, None) == 401
        again = await admin.create_key(NewKey(tenant="acme"))
        await becomes(bench, again.key, 200)
    await admin.close()


# -- S7, S25: what is shown -------------------------------------------------------------------------------------------------------------


async def test_a_key_is_in_no_answer_metric_or_log(
    text: TextModel, tmp_path: Path, admin: Administration, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    issued = await admin.create_key(NewKey(tenant="acme", user=CANARY))
    async with open_bench(text, state=str(tmp_path), request_log=str(tmp_path / "requests.log")) as bench:
        seen = [
            await bench.client.post("/v1/chat/completions", json=chat_body(), headers=bearer(issued.key)),
            await bench.client.post("/v1/chat/completions", json={"model": issued.key}, headers=bearer(issued.key + "x")),
            await bench.client.get("/v1/models", headers=bearer(issued.key)),
            await bench.client.get("/metrics", headers=bearer(issued.key)),
            await bench.client.get("/ready"),
            await bench.client.get("/health"),
        ]
        await admin.revoke_key(issued.record.id)
        await becomes(bench, issued.key, 401)
        seen.append(await bench.client.get("/v1/models", headers=bearer(issued.key)))
        text_seen = "".join(f"{response.text}{response.headers}" for response in seen)
    shown = text_seen + caplog.text + "".join(capfd.readouterr()) + (tmp_path / "requests.log").read_text()
    assert issued.key not in shown
    assert issued.key[3:] not in shown
    assert issued.record.sha256 not in shown
    assert '"tenant":"acme"' in shown


async def test_the_door_has_no_admin_path(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    issued = await admin.create_key(NewKey(tenant="acme"))
    async with open_bench(text, state=str(tmp_path)) as bench:
        for path in ("/keys", "/tenants", "/audit", "/admin", "/admin/keys", "/reload", "/drain", "/scale", "/status", "/rollout"):
            for method in METHODS:
                response = await bench.client.request(method, path, headers=bearer(issued.key))
                assert response.status_code == 404, (method, path)


async def test_a_tenant_of_a_stored_key_may_hold_a_part_of_the_memory(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        limits = bench.gateway.service.memory.answers
        assert limits.limits.tenant == limits.limits.total, "the only tenant of an open server may hold all"
        issued = await admin.create_key(NewKey(tenant="acme"))
        await becomes(bench, issued.key, 200)
        await becomes(bench, None, 401)
        assert limits.limits.tenant == limits.limits.total // 4
        await bench.reloader.reload(lambda: bench.reloader.config)
        assert limits.limits.tenant == limits.limits.total // 4, "and a reload keeps that"
    async with open_bench(text, state=str(tmp_path)) as bench:
        limits = bench.gateway.service.memory.answers
        assert limits.limits.tenant == limits.limits.total // 4, "as does a start"


async def test_a_store_is_closed_with_its_gateway(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        stored: Any = bench.gateway.service.stored_keys
        store: KeyStore = stored._store
    assert stored._polling.done()
    assert isinstance(store, SqliteKeys)
    assert not store._thread._thread.is_alive()
