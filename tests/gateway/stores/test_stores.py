"""Tests stores: entries are there for their time, within their bounds, and swapped by one caller at a time. Every implementation alike."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_kit import RedisRelay, RedisServer

from headrace.core.errors import ConfigError
from headrace.gateway.access.administration import Administration, NewKey
from headrace.gateway.access.key_store import RedisKeys
from headrace.gateway.config import config_from
from headrace.gateway.limits.redis import RedisLimits
from headrace.gateway.stores import redis, sqlite
from headrace.gateway.stores.config import StoreConfig, Stores
from headrace.gateway.stores.redis import RedisStore, open_redis
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import EntryTooLarge, StoreFailed, StoreLimits
from headrace.policy.limits.book import Claim, Holder
from headrace.policy.limits.counters import Amounts, Unit, Window
from headrace.policy.limits.tier import BUILT_IN_TIERS

pytestmark = pytest.mark.socket

T = TypeVar("T")
LIMITS = StoreLimits(entry=100, total=500, tenant_share=lambda: 0.4)


@pytest.fixture(autouse=True, scope="module")
def _only_values_count() -> Iterator[None]:
    """Sizes in this file are those of values. What a store takes beside them is measured in test_stored_bytes.py."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (redis, sqlite):
            patch.setattr(module, "ENTRY_BYTES", 0)
            patch.setattr(module, "KEY_COPIES", 0)
        yield


class ManualClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


AnyStore = SqliteStore | RedisStore


@pytest.fixture(params=["file", "memory", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[AnyStore]:
    opened: AnyStore
    if request.param == "redis":
        opened = RedisStore(open_redis(request.getfixturevalue("redis_url")), LIMITS)
    else:
        opened = SqliteStore(str(tmp_path / "store.db") if request.param == "file" else IN_MEMORY, LIMITS, clock)
    yield opened
    await opened.check()
    await opened.close()


@pytest.fixture
def waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction waits for another one longer than a busy machine keeps that open."""
    monkeypatch.setattr("headrace.gateway.stores.sqlite_thread.BUSY_MS", 20_000)


async def passed(store: AnyStore, clock: ManualClock) -> None:
    """Until an entry with a ttl_s of 0.1 is over."""
    clock.now += 0.1
    if isinstance(store, RedisStore):
        await asyncio.sleep(0.11)


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """What a call gives once the server has answered in time, which a busy machine may keep it from at first."""
    async with asyncio.timeout(60):
        while True:
            with suppress(StoreFailed):
                return await call()


async def test_an_entry_is_there_for_its_time(store: AnyStore, clock: ManualClock) -> None:
    await store.put("b", b"two", tenant="t", ttl_s=2000)
    await store.put("a", b"one", tenant="t", ttl_s=0.1)
    assert await store.get("none") is None
    await passed(store, clock)
    assert (await store.get("a"), await store.get("b")) == (None, b"two")
    await store.put("c", b"three", tenant="u", ttl_s=2000)
    assert await store.num_entries() == 2, "an entry that is over takes no room"


async def test_a_put_replaces_and_a_delete_removes(store: AnyStore) -> None:
    await store.put("a", b"one", tenant="t", ttl_s=1000)
    await store.put("a", b"other", tenant="t", ttl_s=1000)
    assert await store.get("a") == b"other"
    await store.delete("a")
    await store.delete("a")
    assert await store.get("a") is None


async def test_of_several_swaps_one_succeeds(store: AnyStore, clock: ManualClock) -> None:
    assert not await store.swap("a", b"claim", expected=b"one", tenant="t", ttl_s=1000)
    assert await store.get("a") is None, "a swap makes no entry"
    await store.put("a", b"one", tenant="t", ttl_s=1000)
    claims = [store.swap("a", b"claim %d" % number, expected=b"one", tenant="t", ttl_s=1000) for number in range(8)]
    found = await asyncio.gather(*claims)
    assert sum(found) == 1
    assert await store.get("a") == b"claim %d" % found.index(True)
    await store.put("b", b"two", tenant="t", ttl_s=0.1)
    await passed(store, clock)
    assert not await store.swap("b", b"late", expected=b"two", tenant="t", ttl_s=1000)


async def test_of_several_that_make_an_entry_one_succeeds(store: AnyStore, clock: ManualClock) -> None:
    made = await asyncio.gather(*(store.swap("a", b"%d" % number, expected=None, tenant="t", ttl_s=1000) for number in range(8)))
    assert sum(made) == 1
    assert await store.get("a") == b"%d" % made.index(True)
    assert await store.swap("b", b"one", expected=None, tenant="t", ttl_s=0.1)
    await passed(store, clock)
    assert await store.swap("b", b"again", expected=None, tenant="t", ttl_s=1000), "an entry that is over is none"


async def test_parts_of_one_server_share_neither_entries_nor_bounds(redis_url: str) -> None:
    parts = [RedisStore(open_redis(redis_url), LIMITS, part=part) for part in ("", "one", "two")]
    for number, store in enumerate(parts):
        await store.put("a", b"%d" % number * 90, tenant="t", ttl_s=1000)
    assert [await store.get("a") for store in parts] == [b"0" * 90, b"1" * 90, b"2" * 90]
    await parts[1].put("b", b"x" * 100, tenant="t", ttl_s=2000)
    await parts[1].put("c", b"x" * 100, tenant="t", ttl_s=30)
    assert [await store.get("a") is None for store in parts] == [False, True, False]
    for store in parts:
        await store.check()
        await store.close()


async def test_a_purge_removes_one_tenants_entries(store: AnyStore) -> None:
    await store.put("theirs", b"x", tenant="them", ttl_s=500)
    for number in range(5):
        await store.put(f"ours {number}", b"x", tenant="us", ttl_s=500)
    assert (await store.purge("us"), await store.purge("us")) == (5, 0)
    assert await store.num_entries() == 1
    assert await store.get("theirs") == b"x"


async def test_a_short_life_is_no_reason_to_be_removed_early(store: AnyStore) -> None:
    """Entries leave in the order in which they were written: a claim of seconds outlives older entries of a day."""
    await store.put("old", b"x" * 90, tenant="t", ttl_s=1000)
    await store.put("claim", b"x" * 20, tenant="t", ttl_s=100)
    await store.put("new", b"x" * 100, tenant="t", ttl_s=1000)
    assert [await store.get(key) is not None for key in ("old", "claim", "new")] == [False, True, True]


async def test_an_entry_beyond_the_bound_is_refused_and_what_was_there_stays(store: AnyStore) -> None:
    await store.put("a", b"one", tenant="t", ttl_s=1000)
    with pytest.raises(EntryTooLarge, match="at most 100"):
        await store.put("a", b"x" * 101, tenant="t", ttl_s=1000)
    assert await store.get("a") == b"one"


async def test_a_tenant_pushes_out_its_own_oldest_entries_alone(store: AnyStore) -> None:
    await store.put("theirs", b"x" * 100, tenant="them", ttl_s=900)
    for number in range(5):
        await store.put(f"ours {number}", b"x" * 80, tenant="us", ttl_s=1000 + number)
    there = [await store.get(f"ours {number}") is not None for number in range(5)]
    assert there == [False, False, False, True, True]
    assert await store.get("theirs") is not None


async def test_the_oldest_entries_of_all_go_when_the_store_is_full(store: AnyStore) -> None:
    for number in range(6):
        await store.put(str(number), b"x" * 100, tenant=f"t{number}", ttl_s=1000 + number)
    assert [await store.get(str(number)) is not None for number in range(6)] == [False, True, True, True, True, True]


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 120), st.sampled_from(["t", "u", "v"]), st.integers(1, 9)), max_size=40)
)
@settings(max_examples=60, deadline=None)
def test_the_bounds_hold_whatever_is_put(puts: list[tuple[str, int, str, int]]) -> None:
    async def run() -> None:
        clock = ManualClock()
        store = SqliteStore(IN_MEMORY, LIMITS, clock)
        for key, size, tenant, ttl_s in puts:
            clock.now += 1
            if size > LIMITS.entry:
                with pytest.raises(EntryTooLarge):
                    await store.put(key, b"x" * size, tenant=tenant, ttl_s=ttl_s)
                continue
            await store.put(key, b"x" * size, tenant=tenant, ttl_s=ttl_s)
            assert await store.get(key) == b"x" * size, "what was just put is there"
            await store.check()
        await store.close()

    asyncio.run(run())


@pytest.mark.usefixtures("waits_long")
async def test_a_file_is_shared_and_closed_to_other_users(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "store.db"
    with ThreadPoolExecutor() as pool:
        opened = list(pool.map(lambda _: SqliteStore(str(path), LIMITS, clock), range(6)))
    await asyncio.gather(*(store.put(f"{number}", b"x", tenant="t", ttl_s=500) for number, store in enumerate(opened)))
    for store in opened:
        assert [await store.get(str(number)) for number in range(6)] == [b"x"] * 6
    assert {stat.S_IMODE(os.stat(file).st_mode) for file in tmp_path.iterdir()} == {0o600}
    for store in opened:
        await store.close()


async def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute("PRAGMA user_version = 77")
    newer.close()
    for path, why in {"none/store.db": "No such file", "text": "not a database", "newer.db": "form 77"}.items():
        with pytest.raises(ConfigError, match=why):
            SqliteStore(str(tmp_path / path), LIMITS, clock)


async def test_an_error_of_the_file_fails_the_calls_and_later_ones_go_on(tmp_path: Path, clock: ManualClock) -> None:
    store = SqliteStore(str(tmp_path / "store.db"), LIMITS, clock)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreFailed, match="locked"):
        await store.put("a", b"one", tenant="t", ttl_s=500)
    other.execute("COMMIT")
    await store.put("a", b"one", tenant="t", ttl_s=500)
    assert await store.get("a") == b"one"
    other.close()
    await store.close()


@pytest.mark.usefixtures("waits_long")
async def test_a_cancelled_call_is_not_done(tmp_path: Path, clock: ManualClock) -> None:
    store = SqliteStore(str(tmp_path / "store.db"), LIMITS, clock)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    first = asyncio.create_task(store.put("a", b"one", tenant="t", ttl_s=500))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(store.put("b", b"two", tenant="t", ttl_s=500))
    await asyncio.sleep(0.01)
    second.cancel()
    other.execute("COMMIT")
    await first
    assert await store.get("b") is None
    other.close()
    await store.close()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"url": "http://h"}, "store.url"),
        ({"url": "redis://:secret@h"}, "store.url"),
        ({"password_file": "/f"}, "store.password_file"),
        ({"file": "/a"}, "store.file"),
    ],
)
def test_a_store_that_makes_no_sense_is_refused_by_name(given: dict[str, object], named: str) -> None:
    model = {"name": "m", "folder": "/f", "replicas": [{"name": "r", "address": "unix:/s"}]}
    with pytest.raises(ConfigError, match=named) as refused:
        config_from({"models": [model], "store": given})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("evicted", ["ages", "ages:t", "tenants", "sizes", "ends", "bytes", "total"])
async def test_a_server_that_evicts_keys_of_the_index_takes_writes_on(redis_url: str, evicted: str) -> None:
    store = RedisStore(open_redis(redis_url), LIMITS)
    for number in range(2):
        await store.put(f"a{number}", bytes(100), tenant="t", ttl_s=60)
    await store._client.delete(f"{store._prefix}{evicted}")
    for number in range(12):
        await store.put(f"b{number}", bytes(100), tenant=f"t{number % 3 or ''}", ttl_s=60)
        assert await store.get(f"b{number}") == bytes(100)
    for tenant in ("t", "t1", "t2"):
        async with asyncio.timeout(60):
            await store.purge(tenant)
    await store._client.flushall()
    await store.close()


async def test_a_server_that_was_started_again_is_used_again(redis_server: RedisServer) -> None:
    async with RedisRelay.open(redis_server) as relay:
        store = RedisStore(open_redis(relay.url), LIMITS)
        await store.put("a", b"one", tenant="t", ttl_s=500)
        await relay.stop()
        with pytest.raises(StoreFailed, match="redis: "):
            await store.get("a")
        redis_server.empty()
        await relay.start()
        assert await store.get("a") is None, "it keeps nothing on disk"
        await store.put("a", b"one", tenant="t", ttl_s=500)
        await relay.stop()
        await relay.start()
        assert await store.get("a") == b"one", "connections that were closed meanwhile fail no call"
        await store.close()


async def test_a_server_that_hangs_fails_calls_in_time(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.stores.redis.ANSWER_S", 0.1)
    async with RedisRelay.open(redis_server) as relay:
        store = RedisStore(open_redis(relay.url), LIMITS)
        await answered(lambda: store.put("a", b"one", tenant="t", ttl_s=6000))
        relay.hang()
        with pytest.raises(StoreFailed, match="Timeout"):
            await store.get("a")
        relay.go_on()
        assert await answered(lambda: store.get("a")) == b"one"
        await store.close()


Call = Callable[[], Awaitable[object]]
KEY_USE = Claim("t:acme/requests_per_minute", Window.MINUTE, Unit.REQUESTS, 1000, 1)


@pytest.mark.process
async def test_whatever_a_server_does_its_stores_fail_by_their_own_error_and_go_on_after_it(own_redis: RedisServer) -> None:
    """Entries, limits and keys: a replica takes no writes, and neither does a server without memory; and one is gone."""
    store, limits, keys = (
        RedisStore(open_redis(own_redis.url), LIMITS),
        RedisLimits(open_redis(own_redis.url)),
        RedisKeys(open_redis(own_redis.url)),
    )
    admin = Administration(keys, tiers=BUILT_IN_TIERS, unix_time=lambda: 1e9, actor="x")

    def entries() -> list[Call]:
        return [lambda: store.put("a", b"one", tenant="t", ttl_s=500), lambda: store.delete("b")]

    def others() -> list[Call]:
        holder = Holder(id="r", gateway="g", beat=0, saved=Amounts())
        return [
            lambda: limits.take(holder, [KEY_USE]),
            lambda: limits.renew("g", 1, {}),
            lambda: admin.create_key(NewKey(tenant="acme")),
        ]

    async def fails(*calls: Call) -> None:
        for call in calls:
            with pytest.raises(StoreFailed):
                await call()

    async def goes_on() -> None:
        for call in (*entries(), *others()):
            await call()
        assert await store.get("a") == b"one"

    await goes_on()
    await store._client.replicaof("127.0.0.1", "1")
    await fails(*entries(), *others())
    assert await store.get("a") == b"one", "what only reads is answered"
    await store._client.replicaof("NO", "ONE")
    await goes_on()
    await store._client.config_set("maxmemory", "1")
    await fails(*others())  # scripts of entries remove before they write, which the server may let go on
    await store._client.config_set("maxmemory", "0")
    await goes_on()
    own_redis.stop()
    await fails(*entries(), *others(), lambda: store.get("a"), keys.state)
    own_redis.start()
    assert await store.get("a") is None, "it keeps nothing on disk"
    await goes_on()
    for each in (store, limits, keys):
        await each.close()


@pytest.mark.process
async def test_a_password_comes_from_a_file_and_is_never_shown(own_redis: RedisServer, tmp_path: Path) -> None:
    own_redis.stop()
    own_redis.start(requirepass="right-secret")
    file = tmp_path / "password"
    file.touch(mode=0o600)
    for password, is_right in (("right-secret", True), ("wrong-secret", False)):
        file.write_text(password)
        store = Stores(StoreConfig(url=own_redis.url, password_file=str(file)).checked(), "", lambda: 1.0, ManualClock()).open_streams()
        if is_right:
            assert await store.get("a") is None
        else:
            with pytest.raises(StoreFailed) as failed:
                await store.get("a")
            assert "secret" not in str(failed.value)
        await store.close()


async def test_concurrent_puts_of_several_gateways_keep_the_bounds(redis_server: RedisServer) -> None:
    stores = [RedisStore(open_redis(redis_server.url), LIMITS) for _ in range(3)]
    puts = [
        store.put(f"{number % 17}", b"x" * (number % 90), tenant="tu"[number % 2], ttl_s=500) for number in range(60) for store in stores
    ]
    await asyncio.gather(*puts)
    await stores[0].check()
    for store in stores:
        await store.close()


async def test_streams_are_in_the_state_folder(tmp_path: Path, clock: ManualClock) -> None:
    store = Stores(StoreConfig(), str(tmp_path), lambda: 1.0, clock).open_streams()
    await store.put("a", b"one", tenant="t", ttl_s=500)
    await store.close()
    again = Stores(StoreConfig(), str(tmp_path), lambda: 1.0, clock).open_streams()
    assert await again.get("a") == b"one", "the next process reads it"
    await again.close()
    assert [path.name for path in tmp_path.glob("**/*.db")] == ["entries.db"]
    alone = Stores(StoreConfig(), "", lambda: 1.0, clock).open_streams()
    await alone.put("b", b"two", tenant="t", ttl_s=500)
    await alone.close()
    assert [path.name for path in tmp_path.glob("**/*.db")] == ["entries.db"], "without a folder it is memory"
