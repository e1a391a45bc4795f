"""Tests the lease on every store against a plain model: of several owners one has the entry, for its time, whatever comes late."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_kit import RedisServer

from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.lease import EntryLease
from headrace.gateway.stores.redis import RedisStore, open_redis
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import StoreFailed, StoreLimits

pytestmark = pytest.mark.socket

AnyStore = SqliteStore | RedisStore
LIMITS = StoreLimits(entry=1 << 10, total=1 << 20, tenant_share=lambda: 1.0)
KEY, LASTS_S, KEPT_S = "a", 10.0, 25.0

Act = tuple[str, int, int]
"""What is done, by which owner, and seconds that pass or whether a claim expects what is there (0 does not)."""

ACTS = st.lists(
    st.tuples(st.sampled_from(["claim", "renew", "replace", "free", "give back", "pass"]), st.integers(0, 2), st.integers(0, 14)),
    max_size=30,
)


class Model:
    """The entry, and when it is over."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._entry: tuple[bytes, float] | None = None

    def time(self) -> float:
        return self.now

    @property
    def entry(self) -> bytes | None:
        return self._entry[0] if self._entry is not None and self._entry[1] > self.now else None

    def set(self, value: bytes | None, lasts_s: float = 0.0) -> None:
        self._entry = None if value is None else (value, self.now + lasts_s)

    def swap(self, expected: bytes | None, value: bytes, lasts_s: float) -> bool:
        is_expected = self.entry == expected
        if is_expected:
            self.set(value, lasts_s)
        return is_expected


class Owners:
    """Three owners of one lease each, one after another's end, in step with the model."""

    def __init__(self, stores: list[AnyStore], model: Model) -> None:
        self.model = model
        self._stores = [GuardedStore(store, "leases") for store in stores]
        self._numbers = count()
        self._leases = [self._new(owner) for owner in range(3)]

    def _new(self, owner: int) -> EntryLease:
        store = self._stores[owner % len(self._stores)]
        return EntryLease(store, KEY, b"claim %d" % next(self._numbers), tenant="t", lasts_s=LASTS_S)

    async def do(self, act: str, owner: int, number: int) -> None:
        lease, model, store = self._leases[owner], self.model, self._stores[owner % len(self._stores)].store
        mine = lease.value
        if act == "claim":
            expected = model.entry if number else b"another"
            assert await lease.claim(store, expected=expected) == model.swap(expected, mine, LASTS_S)
        elif act == "renew":
            assert await lease.renew(store) == model.swap(mine, mine, LASTS_S)
        elif act == "replace":
            value = b"value %d" % number
            assert await lease.replace(store, value, ttl_s=KEPT_S) == any(model.swap(there, value, KEPT_S) for there in (mine, None))
            self._leases[owner] = self._new(owner)
        elif act == "give back":
            model.swap(mine, b"before", LASTS_S)
            await lease.give_back(store, b"before")
        elif act == "free":
            if model.entry == mine:
                model.set(None)
            await freed(lease)
            self._leases[owner] = self._new(owner)


async def freed(lease: EntryLease) -> None:
    ended: asyncio.Future[StoreFailed | None] = asyncio.get_running_loop().create_future()
    lease.free(ended.set_result)
    lease.free(lambda _: pytest.fail("a lease ends once"))
    assert await ended is None


async def compare(acts: list[Act], model: Model, stores: list[AnyStore]) -> None:
    owners = Owners(stores, model)
    try:
        for act, owner, number in acts:
            if act == "pass":
                model.now += number
                if model.entry is None and isinstance(first := stores[0], RedisStore):
                    await first._client.delete(f"{first._prefix}entry:{KEY}")  # as the server does, whose clock is its own
            else:
                await owners.do(act, owner, number)
            for store in stores:
                assert await store.get(KEY) == model.entry, (act, owner, number)
                await store.check()
    finally:
        for store in stores:
            await store.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.stores.lease.GIVE_BACK_PAUSES_S", (0.0, 0.0))


no_fixture_check = [HealthCheck.function_scoped_fixture]


@given(ACTS)
@settings(max_examples=60, deadline=None, suppress_health_check=no_fixture_check)
def test_a_lease_in_memory_does_what_the_model_does(acts: list[Act]) -> None:
    async def run() -> None:
        model = Model()
        await compare(acts, model, [SqliteStore(IN_MEMORY, LIMITS, model.time)])

    asyncio.run(run())


@given(ACTS)
@settings(max_examples=25, deadline=None, suppress_health_check=no_fixture_check)
def test_leases_of_two_processes_on_one_file_do_what_the_model_does(acts: list[Act]) -> None:
    async def run(folder: str) -> None:
        model = Model()
        stores: list[AnyStore] = [SqliteStore(os.path.join(folder, "store.db"), LIMITS, model.time) for _ in range(2)]
        await compare(acts, model, stores)

    with TemporaryDirectory() as folder:
        asyncio.run(run(folder))


@given(ACTS)
@settings(max_examples=40, deadline=None, suppress_health_check=no_fixture_check)
def test_leases_of_two_gateways_on_one_server_do_what_the_model_does(redis_server: RedisServer, acts: list[Act]) -> None:
    async def run() -> None:
        stores = [RedisStore(open_redis(redis_server.url), LIMITS) for _ in range(2)]
        await stores[0]._client.flushall()
        await compare(acts, Model(), [*stores])

    asyncio.run(run())
