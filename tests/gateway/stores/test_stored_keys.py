"""Tests keys of the store: what each gateway answers, how soon it follows a change, and what it does without its store."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from figures import Figure
from gateway_kit import MODEL, TestBench, chat_body, eventually, open_bench
from identity_kit import administration
from patience import PATIENCE_S
from redis_kit import RedisRelay, RedisServer
from virtual_time import VirtualTimeLoop

from headrace.core.errors import Unauthorized, Unavailable
from headrace.core.request import PriorityClass
from headrace.gateway.access.administration import Administration, NewKey, NewTenant, TenantChange
from headrace.gateway.access.auth import Authenticator
from headrace.gateway.access.key_store import DirectoryState, KeyStore, R, RedisKeys, SqliteKeys, StoredKey, TenantRecord, open_keys
from headrace.gateway.access.principal import ApiKey, KeyLimits, digest_of
from headrace.gateway.access.stored_keys import ABSENT_S, MAX_ABSENT, MAX_FIRST_LOOKUPS, OPEN_S, OUTAGE_S, OUTDATED_S, StoredKeys
from headrace.gateway.http.asgi import OPENAI
from headrace.gateway.ledger.record import UsageRecord
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.guard import REQUEST_WAIT_S
from headrace.gateway.stores.store import StoreFailed
from headrace.gateway.surfaces.routes import ENDPOINTS, plain_path
from headrace.policy.limits.tier import BUILT_IN_TIERS
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

FOLLOWS_S = 2.0
"""Seconds that a change has."""
"""Seconds that it has where it is seen in real time."""

CANARY = "canary"
PUBLIC = {endpoint.path for endpoint in ENDPOINTS if endpoint.is_public}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


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
    """Until the answer to `key` is `wanted`."""

    async def is_so() -> bool:
        return await status(bench, key) == wanted

    await follows(is_so)


async def follows(condition: Callable[[], Awaitable[bool]]) -> None:
    """Until it holds, which a change has FOLLOWS_S of virtual time to bring about."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(FOLLOWS_S if isinstance(loop, VirtualTimeLoop) else PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def loop() -> VirtualTimeLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualTimeLoop)
    return running


def stored(store: KeyStore) -> StoredKeys:
    loop = asyncio.get_running_loop()
    return StoredKeys(store, clock=loop.time, unix_time=loop.unix_time if isinstance(loop, VirtualTimeLoop) else time.time)


async def test_the_first_key_closes_an_open_server_at_once(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        assert await status(bench, None) == 200
        assert await status(bench, "hr-anything") == 200, "an open server asks for none"
        issued = await admin.create_key(NewKey(tenant="acme"))
        await asyncio.sleep(OPEN_S + 0.001)
        assert await status(bench, None) == 401
        assert await status(bench, "hr-anything") == 401
        assert await status(bench, issued.key) == 200
        assert [await status(bench, None, path) for path in ("/ready", "/live", "/health", "/ping")] == [200] * 4
        await admin.revoke_key(issued.record.id)
        await becomes(bench, issued.key, 401)
        assert await status(bench, None) == 401, "a server that had a key does not open again"


async def test_two_gateways_of_one_file_follow_every_change_within_two_seconds(text: TextModel, tmp_path: Path) -> None:
    await two_gateways_follow(text, tmp_path)


@pytest.mark.socket
async def test_two_gateways_of_one_redis_follow_every_change(text: TextModel, tmp_path: Path, redis_url: str) -> None:
    await two_gateways_follow(text, tmp_path, redis_url)


async def two_gateways_follow(text: TextModel, tmp_path: Path, url: str = "") -> None:
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
    await admin.close()


async def test_a_key_that_expires_is_good_until_then_and_no_longer(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        issued = await admin.create_key(NewKey(tenant="acme", expires_s=90.0))
        await asyncio.sleep(89.999)
        assert await status(bench, issued.key) == 200
        await asyncio.sleep(0.002)
        assert await status(bench, issued.key) == 401


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", [{}, {"idempotency-key": "k"}], ids=["plain", "idempotent"])
async def test_an_open_request_of_a_revoked_key_ends_and_is_charged(
    text: TextModel, tmp_path: Path, admin: Administration, stream: bool, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    issued, other = [await admin.create_key(NewKey(tenant=name)) for name in ("acme", "globex")]
    async with open_bench(text, state=str(tmp_path), prices={MODEL: {"output": 1.0}}) as bench:
        await becomes(bench, issued.key, 200)
        bench.replica.token_delay_s = 0.3

        async def ask(key: str) -> Any:
            body = chat_body(stream=stream, max_tokens=100, ignore_eos=True)
            return await bench.client.post("/v1/chat/completions", json=body, headers=bearer(key) | more)

        asked = [asyncio.create_task(ask(issued.key)) for _ in range(1 if more else 3)]
        kept = asyncio.create_task(ask(other.key))
        await eventually(lambda: len(bench.replica.requests) == len(asked) + 1)
        await asyncio.sleep(0.5)  # each has said something
        ledger = bench.gateway.service.explanations.ledger
        assert ledger is not None
        charged: list[UsageRecord] = []
        monkeypatch.setattr(ledger, "write", charged.append)
        await admin.revoke_key(issued.record.id)
        async with asyncio.timeout(FOLLOWS_S):
            answers = await asyncio.gather(*asked)
        for answer in answers:
            assert answer.status_code == (200 if stream else 401)
            assert '"code":"invalid_api_key"' in answer.text
        assert not kept.done()
        bench.replica.token_delay_s = 0.0
        assert (await kept).status_code == 200
        assert [record.tenant for record in charged] == ["acme"] * len(asked) + ["globex"]
        assert all(record.completion_tokens >= 1 for record in charged)
        keys = bench.gateway.stored_keys
        await eventually(lambda: keys is not None and not keys.uses._ends)


async def test_what_a_key_may_is_its_own_or_its_tenants(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    limits = KeyLimits(monthly_budget=2.0, requests_per_minute=5, models=(MODEL,))
    wanted = NewKey(tenant="acme", tier="free", user="bob", budget=2.0, requests_per_minute=5, models=(MODEL,))
    issued = await admin.create_key(wanted)
    other = await admin.create_key(NewKey(tenant="acme", tier="batch"))
    await admin.set_tenant("acme", TenantChange(budget=9.0, options={"log_prompts": True}))
    async with open_bench(text, state=str(tmp_path)) as bench:
        authenticator = bench.gateway.active.authenticator

        async def principal(key: str) -> Any:
            return await authenticator.principal([(b"authorization", f"Bearer {key}".encode())], OPENAI)

        caller = await principal(issued.key)
        assert (caller.tenant, caller.user, caller.key_id, caller.tier_name) == ("acme", "bob", issued.record.id, "free")
        assert (caller.limits, caller.options) == (limits, {"log_prompts": True})
        assert caller.tier.monthly_budget == 9.0, "the tenant's own in the place of the tier's"
        assert caller.tier.requests_per_minute == BUILT_IN_TIERS["free"].requests_per_minute
        assert (await principal(other.key)).tier_name == "batch"
        await admin.set_tenant("acme", TenantChange(tier="premium"))

        async def is_premium() -> bool:
            return bool((await principal(issued.key)).tier_name == "premium")

        await follows(is_premium)
        assert (await principal(other.key)).tier_name == "batch"


async def test_a_tier_that_the_configuration_lost_refuses_and_lets_nothing_pass(
    text: TextModel, tmp_path: Path, loop: VirtualTimeLoop, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_keys(str(tmp_path), StoreConfig())
    assert store is not None
    gold = Administration(store, tiers=["gold"], unix_time=loop.unix_time, actor="test")
    issued = await gold.create_key(NewKey(tenant="acme", tier="gold"))
    await gold.close()
    async with open_bench(text, state=str(tmp_path)) as bench:
        answers = [await bench.client.get("/v1/models", headers=bearer(issued.key)) for _ in range(20)]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(403, "unusable_key")}
        assert "gold" not in answers[0].text
        assert len([line for line in caplog.messages if "gold" in line]) == 1, "one line in ten seconds, whatever comes"
        assert await status(bench, None) == 401


async def test_a_tenants_record_holds_for_its_keys_of_the_configuration(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    configured = {"plain": {}, "own": {"tier": "premium"}}
    keys = [{"key": f"sk-{name}-0123456789", "tenant": "acme", **more} for name, more in configured.items()]
    async with open_bench(text, state=str(tmp_path), api_keys=keys, prices={MODEL: {"output": 1000.0}}) as bench:

        async def principal(name: str) -> Any:
            return await bench.gateway.active.authenticator.principal([(b"authorization", f"Bearer sk-{name}-0123456789".encode())], OPENAI)

        async def until(tier_name: str) -> None:
            async def has_it() -> bool:
                return bool((await principal("plain")).tier_name == tier_name)

            await follows(has_it)

        assert [(await principal(name)).tier_name for name in configured] == ["standard", "premium"]
        record = await admin.create_tenant(NewTenant(name="acme", tier="free", budget=1e-6, options={"log_prompts": True}))
        await until("free")
        caller = await principal("plain")
        assert (caller.tenant_key, caller.logs_prompts, caller.tier.monthly_budget) == (record.id, True, 1e-6)
        assert [(await principal(name)).tier_name for name in configured] == ["free", "premium"]
        headers = bearer("sk-plain-0123456789")
        assert (await bench.client.post("/v1/chat/completions", json=chat_body(), headers=headers)).status_code == 429
        await admin.set_tenant("acme", TenantChange(tier="standard"))
        await until("standard")
        assert (await principal("own")).priority is PriorityClass.PREMIUM
        await admin.remove_tenant("acme")

        async def is_gone() -> bool:
            return not (await principal("plain")).tenant_id

        await follows(is_gone)


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
    await asyncio.sleep(0.001)
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


async def test_a_reader_gets_what_is_marked_for_readers_and_nothing_else(text: TextModel, tmp_path: Path, admin: Administration) -> None:
    """The reader belongs to the tenant whose answers, sessions and streams are there to be had."""
    reader = (await admin.create_key(NewKey(tenant="acme", role="reader"))).key
    user = (await admin.create_key(NewKey(tenant="acme"))).key
    configured = "sk-reader-0123456789"
    keys = [{"key": configured, "tenant": "acme", "role": "reader"}]
    async with open_bench(text, state=str(tmp_path), api_keys=keys) as bench:
        body, retried = chat_body(), {"idempotency-key": "one", "x-session-id": "s"}
        kept = await bench.client.post("/v1/chat/completions", json=body, headers=bearer(user) | retried)
        assert kept.status_code == 200
        for key in (reader, configured):
            for endpoint in ENDPOINTS:
                if endpoint.is_public:
                    continue
                path = endpoint.path.replace("{model:path}", MODEL).replace("{id}", "f" * 24)
                sent = body if endpoint.method == "POST" else None
                answer = await bench.client.request(endpoint.method, path, headers=bearer(key) | retried, json=sent)
                if endpoint.for_readers:
                    assert answer.status_code == (404 if path.endswith("/explain") else 200), path
                else:
                    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "reader_key"), path
                    assert "role reader" in answer.json()["error"]["message"]
            replayed = {**bearer(key), "last-event-id": kept.json()["id"]}
            assert (await bench.client.post("/v1/chat/completions", json=body, headers=replayed)).status_code == 403
            assert (await bench.client.get("/nope", headers=bearer(key))).status_code == 404
        assert len(bench.replica.requests) == 1
        shown = await bench.client.get("/v1/sessions/s", headers=bearer(user))
        assert len(shown.json()["messages"]) == 2, "no reader has removed it"


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
            is_public = plain_path(response.url.path) in PUBLIC  # a client resolves dots itself
            assert refused or is_public, (path, headers, response.status_code)
            assert MODEL.encode() not in response.content or is_public


# -- S4: keys ---------------------------------------------------------------------------------------------------------------------------


async def test_keys_with_a_common_beginning_never_share_an_identity(tmp_path: Path, admin: Administration) -> None:
    issued = await admin.create_key(NewKey(tenant="acme"))
    store = SqliteKeys(str(tmp_path / "keys.db"))
    async with stored(store) as keys:
        assert await keys.find(digest_of(issued.key.encode())) is not None
        for length in range(len(issued.key)):
            assert await keys.find(digest_of(issued.key[:length].encode())) is None
            changed = f"{issued.key[:length]}{'A' if issued.key[length] != 'A' else 'B'}{issued.key[length + 1 :]}"
            assert await keys.find(digest_of(changed.encode())) is None


@pytest.mark.timing
async def test_the_time_of_a_lookup_says_nothing_of_how_much_of_a_key_is_right(
    tmp_path: Path, admin: Administration, figure: Figure
) -> None:
    """Welch's t of two classes of wrong keys, of random characters and with all but the last one right, taken in turns."""
    issued = (await admin.create_key(NewKey(tenant="acme"))).key
    async with stored(SqliteKeys(str(tmp_path / "keys.db"))) as keys:
        authenticator = Authenticator((), {}, keys)

        async def cpu_ns(key: str) -> int:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            began = time.thread_time_ns()
            with pytest.raises(Unauthorized):
                await authenticator.principal(headers, OPENAI)
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
        bound = max(4.5 * sum(variances) ** 0.5, 500.0)
        figure("difference of two wrong keys", abs(means[0] - means[1]), bound, "ns", slack=1)


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

    async def record(self, kind: type[R], name: str) -> R | None:
        if kind is TenantRecord:
            await self._break()
        return await super().record(kind, name)

    async def _break(self) -> None:
        if self.mode == "fails":
            raise StoreFailed("broken")
        if self.mode == "hangs":
            await asyncio.sleep(60)


def broken(state: Path) -> BrokenStore:
    opened = BrokenStore(str(state / "keys.db"))
    assert isinstance(opened, BrokenStore)
    return opened


async def found(keys: StoredKeys, key: str) -> bool:
    """False: it cannot be known."""
    try:
        return await keys.find(digest_of(key.encode())) is not None
    except Unavailable:
        return False


@pytest.mark.parametrize("mode", ["fails", "hangs"])
async def test_without_its_store_a_key_that_was_seen_goes_on_for_a_while_and_no_other_passes(
    tmp_path: Path, admin: Administration, loop: VirtualTimeLoop, mode: str
) -> None:
    seen = (await admin.create_key(NewKey(tenant="acme"))).key
    unseen = (await admin.create_key(NewKey(tenant="acme"))).key
    store = broken(tmp_path)
    async with stored(store) as keys:
        assert await keys.find(digest_of(seen.encode())) is not None
        answered_at = loop.time()
        store.mode = mode
        for key in (unseen, "hr-" + secrets.token_urlsafe(32)):
            began = loop.time()
            with pytest.raises(Unavailable) as raised:
                await keys.find(digest_of(key.encode()))
            assert loop.time() - began == pytest.approx(REQUEST_WAIT_S if mode == "hangs" else 0.0)
            assert raised.value.retry_after_s
        await asyncio.sleep(answered_at + OUTAGE_S - loop.time() - 0.001)
        assert await keys.find(digest_of(seen.encode())) is not None
        await asyncio.sleep(0.002)
        with pytest.raises(Unavailable):
            await keys.find(digest_of(seen.encode()))
        assert await keys.has_keys(), "a server that wants keys does not open"
        store.mode = "works"
        await follows(lambda: found(keys, unseen))  # it heals by itself


async def test_a_configured_key_is_good_without_the_store_and_has_its_tenants_last_record(tmp_path: Path, admin: Administration) -> None:
    digest = digest_of(b"sk-acme-0123456789").hex()
    store, headers = broken(tmp_path), [(b"authorization", b"Bearer sk-acme-0123456789")]
    record = await admin.create_tenant(NewTenant(name="acme", options={"log_prompts": True}))
    async with stored(store) as keys:
        authenticator = Authenticator([ApiKey(sha256=digest, tenant="acme")], {}, keys)
        store.mode = "fails"
        assert (await authenticator.principal(headers, OPENAI)).tenant_id == ""
        store.mode = "works"
        assert (await authenticator.principal(headers, OPENAI)).tenant_id == record.id
        store.mode = "fails"
        assert (await authenticator.principal(headers, OPENAI)).tenant_id == record.id


async def test_a_caller_is_made_once_until_its_records_change(tmp_path: Path, admin: Administration) -> None:
    issued = await admin.create_key(NewKey(tenant="acme"))
    headers = [(b"authorization", b"Bearer " + issued.key.encode())]
    async with stored(SqliteKeys(str(tmp_path / "keys.db"))) as keys:
        authenticator = Authenticator((), {}, keys)
        first = await authenticator.principal(headers, OPENAI)
        assert await authenticator.principal(headers, OPENAI) is first
        await admin.set_tenant("acme", TenantChange(options={"log_prompts": True}))

        async def is_new() -> bool:
            return (await authenticator.principal(headers, OPENAI)).logs_prompts

        await follows(is_new)


async def test_a_server_that_never_reached_its_store_is_closed(tmp_path: Path) -> None:
    store = broken(tmp_path)
    store.mode = "fails"
    async with stored(store) as keys:
        with pytest.raises(Unavailable):
            await keys.has_keys()
        with pytest.raises(Unavailable):
            await Authenticator((), {}, keys).principal([], OPENAI)
        store.mode = "works"
        assert not await keys.has_keys()


async def test_wrong_keys_are_remembered_briefly_and_within_a_bound(tmp_path: Path) -> None:
    store = broken(tmp_path)
    async with stored(store) as keys:
        for _ in range(5):
            assert await keys.find(b"0" * 32) is None
        assert store.num_finds == 1
        await asyncio.sleep(ABSENT_S - 0.001)
        await keys.find(b"0" * 32)
        assert store.num_finds == 1
        await asyncio.sleep(0.002)
        await keys.find(b"0" * 32)
        assert store.num_finds == 2
        keys._absent.update({number.to_bytes(32): 0.0 for number in range(MAX_ABSENT)})
        await keys.find(b"1" * 32)
        assert len(keys._absent) <= MAX_ABSENT


class PooledStore(BrokenStore):
    """A store with eight connections, each of which takes `answer_s` for a look-up; None: it hangs for keys other than `known`."""

    known = ""
    answer_s: float | None = 0.02
    max_at_once = num_at_once = 0

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        self.connections = getattr(self, "connections", None) or asyncio.Semaphore(8)
        async with self.connections:
            self.num_at_once += 1
            self.max_at_once = max(self.max_at_once, self.num_at_once)
            try:
                if self.answer_s is None and sha256 != self.known:
                    await asyncio.sleep(60)
                await asyncio.sleep(self.answer_s or 0.0)
                return await super().find(sha256)
            finally:
                self.num_at_once -= 1


def pooled(state: Path) -> PooledStore:
    opened = PooledStore(str(state / "keys.db"))
    assert isinstance(opened, PooledStore)
    return opened


async def test_many_requests_of_one_key_share_a_look_up_also_after_a_change(tmp_path: Path, admin: Administration) -> None:
    digest = digest_of((await admin.create_key(NewKey(tenant="acme"))).key.encode())
    store = pooled(tmp_path)
    async with stored(store) as keys:
        found = await asyncio.gather(*(keys.find(digest) for _ in range(500)))
        assert all(found)
        assert store.num_finds == 1
        await admin.set_tenant("acme", TenantChange(budget=5.0))
        await keys._read_state()
        found = await asyncio.gather(*(keys.find(digest) for _ in range(500)))
        assert {each and each.tenant.monthly_budget for each in found} == {5.0}
        assert store.num_finds == 2


async def test_a_key_that_was_found_stays_good_for_the_rest_of_two_seconds_after_a_change(tmp_path: Path, admin: Administration) -> None:
    digest = digest_of((await admin.create_key(NewKey(tenant="acme"))).key.encode())
    store = broken(tmp_path)
    async with stored(store) as keys:
        assert await keys.find(digest) is not None
        await admin.set_tenant("acme", TenantChange(budget=5.0))
        await keys._read_state()
        store.mode = "fails"
        await asyncio.sleep(OUTDATED_S - 0.001)
        assert await keys.find(digest) is not None
        await asyncio.sleep(0.001)
        with pytest.raises(Unavailable):
            await keys.find(digest)


async def test_a_key_that_was_revoked_has_no_such_time_while_the_store_answers(tmp_path: Path, admin: Administration) -> None:
    issued = await admin.create_key(NewKey(tenant="acme"))
    async with stored(broken(tmp_path)) as keys:
        assert await keys.find(digest_of(issued.key.encode())) is not None
        await admin.revoke_key(issued.record.id)
        await keys._read_state()
        assert await keys.find(digest_of(issued.key.encode())) is None


async def test_a_flood_of_invented_keys_leaves_connections_for_keys_that_are_known(tmp_path: Path, admin: Administration) -> None:
    digest = digest_of((await admin.create_key(NewKey(tenant="acme"))).key.encode())
    store = pooled(tmp_path)
    store.known = digest.hex()
    async with stored(store) as keys:
        assert await keys.find(digest) is not None
        store.answer_s = None
        flood = [asyncio.create_task(keys.find(secrets.token_bytes(32))) for _ in range(1000)]
        await asyncio.sleep(0.01)
        assert store.max_at_once == MAX_FIRST_LOOKUPS
        await admin.set_tenant("acme", TenantChange(budget=5.0))
        await keys._read_state()
        found = await keys.find(digest)
        assert found is not None
        assert found.tenant.monthly_budget == 5.0, "it was looked up, and not good for the rest of two seconds"
        assert all(isinstance(ended, Unavailable) for ended in await asyncio.gather(*flood, return_exceptions=True))


@pytest.mark.socket
async def test_a_request_that_stops_waiting_closes_no_connection_of_redis(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"guard.REQUEST_WAIT_S": 0.01, "guard.MAX_UNANSWERED": 1000, "redis.ANSWER_S": 600.0}.items():
        monkeypatch.setattr(f"headrace.gateway.stores.{name}", value)
    monkeypatch.setattr("headrace.gateway.access.stored_keys.ANSWER_S", 600.0)
    admin = administration(tmp_path, redis_server.url)
    digest = digest_of((await admin.create_key(NewKey(tenant="acme"))).key.encode())
    await admin.close()
    async with RedisRelay.open(redis_server) as relay:
        store = open_keys("", StoreConfig(url=relay.url))
        assert isinstance(store, RedisKeys)
        await store.state()
        async with stored(store) as keys:
            relay.hang()
            for wanted in (digest, *(number.to_bytes(32) for number in range(20))):
                with pytest.raises(Unavailable):
                    await keys.find(wanted)
            relay.go_on()
            await eventually(lambda: not keys._lookups._running, within_s=PATIENCE_S)
            assert relay.num_taken <= 8, "one for each call that is in flight, and none anew"
            relay.hang()
            assert await keys.find(digest) is not None, "the look-up went on, and its answer is remembered"
            relay.go_on()


@pytest.mark.socket
async def test_no_key_passes_while_redis_comes_and_goes(
    text: TextModel, tmp_path: Path, redis_server: RedisServer, use_shipped_patience: Callable[[], None]
) -> None:
    """Of many calls with forged keys none passes, whatever happens to the server; it heals."""
    admin = administration(tmp_path, redis_server.url)
    issued = await admin.create_key(NewKey(tenant="acme"))
    async with RedisRelay.open(redis_server) as relay, open_bench(text, store={"url": relay.url}) as bench:
        assert await status(bench, issued.key) == 200
        use_shipped_patience()
        answers: set[int] = set()

        async def forge() -> None:
            for _ in range(10):
                answers.add(await status(bench, "hr-" + secrets.token_urlsafe(32)))

        async def hang() -> None:
            relay.hang()

        async def go_on() -> None:
            relay.go_on()

        async def start_empty() -> None:
            redis_server.empty()
            await relay.start()

        for trouble in (hang, go_on, relay.stop, start_empty):
            await trouble()
            await asyncio.gather(*(forge() for _ in range(8)))
            assert await status(bench, issued.key) in (200, 401, 503)
        await becomes(bench, "hr-" + secrets.token_urlsafe(32), 401)
        assert answers <= {401, 503}
        assert 503 in answers
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


async def test_the_http_api_has_no_admin_path(text: TextModel, tmp_path: Path, admin: Administration) -> None:
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


ONE_TENTH = bytes((1 << 20) // 10 - 2000)


async def num_kept(bench: TestBench, tenant: str) -> list[int]:
    """How many of eight entries, a tenth of the store each, every store of the gateway keeps for a tenant."""
    service: Any = bench.gateway.service
    found = []
    for owner in (service.stages.kept_streams, service.stages.sessions, service.stages.answer_cache, service.stages.replays):
        store = owner._store.store
        for number in range(8):
            await store.put(f"{tenant}-{number}", ONE_TENTH, tenant=tenant, ttl_s=60)
        found.append(sum([await store.get(f"{tenant}-{number}") is not None for number in range(8)]))
    return found


async def test_a_tenant_of_a_stored_key_may_fill_a_part_of_each_store(
    text: TextModel, tmp_path: Path, admin: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = ("stores.config.MAX_STREAMS", "sessions.sessions.MAX_SESSIONS", "cache.replays.MAX_REPLAYS", "cache.answer_cache.MAX_ANSWERS")
    for bound in stores:
        monkeypatch.setattr(f"headrace.gateway.{bound}_BYTES", 1 << 20)
    async with open_bench(text, state=str(tmp_path)) as bench:
        assert await num_kept(bench, "default") == [8, 8, 8, 8], "the only tenant of an open server may fill all"
        await admin.create_key(NewKey(tenant="acme"))
        await becomes(bench, None, 401)
        assert await num_kept(bench, "acme") == [2, 2, 2, 2]
        await bench.reloader.reload(lambda: bench.reloader.config)
        assert await num_kept(bench, "beta") == [2, 2, 2, 2], "and a reload keeps that"
    async with open_bench(text, state=str(tmp_path), limits={"max_tenant_share": 0.5}) as bench:
        assert await num_kept(bench, "gamma") == [5, 5, 5, 5], "as far as the configuration says nothing else"


@pytest.mark.parametrize(("option", "is_on", "result"), [(True, False, "hit"), (False, True, "off")])
async def test_a_tenants_option_turns_the_cache_on_or_off(
    text: TextModel, tmp_path: Path, admin: Administration, option: bool, is_on: bool, result: str
) -> None:
    await admin.create_tenant(NewTenant(name="acme", options={"cache": option}))
    issued = await admin.create_key(NewKey(tenant="acme"))
    async with open_bench(text, state=str(tmp_path), cache={"enabled": is_on}) as bench:
        for _ in range(2):
            answer = await bench.client.post("/v1/chat/completions", json=chat_body(temperature=0), headers=bearer(issued.key))
        assert answer.headers["x-headrace-cache"] == result


@pytest.mark.socket
async def test_a_store_is_closed_with_its_gateway(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        stored: Any = bench.gateway.stored_keys
        store: KeyStore = stored._store
    assert stored._polling.done()
    assert isinstance(store, SqliteKeys)
    assert not store._thread._thread.is_alive()
