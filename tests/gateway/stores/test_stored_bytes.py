"""Tests that a store's bound holds for the memory or the file that the store takes, also where entries are small."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis_kit import RedisServer

from headrace.gateway.stores.redis import RedisStore, open_redis
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.store import EntryTooLarge, Store, StoreLimits

pytestmark = pytest.mark.loop

TOTAL = 1 << 20
LIMITS = StoreLimits(entry=1 << 20, total=TOTAL, tenant_share=lambda: 1.0)
NUM_ENTRIES, NUM_IN_REDIS, AT_ONCE = 3000, 1500, 5
"""Entries that are put, more than fit: Redis takes more for each than a file."""
MEASURE_MARGIN = 1.25
"""A table that was just enlarged, a page that is half full."""


async def fill(store: Store, num_entries: int, *, num_tenants: int) -> None:
    """Put many small entries, whose values alone would fit the bound many times over."""
    for start in range(0, num_entries, AT_ONCE):
        keys = range(start, start + AT_ONCE)
        await asyncio.gather(*(store.put(f"{key:064d}", b"x" * 40, tenant=f"t{key % num_tenants}", ttl_s=3600) for key in keys))


@pytest.mark.socket
@pytest.mark.parametrize("num_tenants", [1, NUM_IN_REDIS])
async def test_redis_takes_no_more_memory_for_small_entries_than_the_bound(redis_server: RedisServer, num_tenants: int) -> None:
    store = RedisStore(open_redis(redis_server.url), LIMITS)
    await fill(store, 100, num_tenants=num_tenants)
    await store._client.flushall()  # connections and scripts stay: they are no entries
    before = (await store._client.info("memory"))["used_memory"]
    await fill(store, NUM_IN_REDIS, num_tenants=num_tenants)
    used = (await store._client.info("memory"))["used_memory"] - before
    assert TOTAL / 2 < used < MEASURE_MARGIN * TOTAL
    assert 0 < await store.num_entries() < NUM_IN_REDIS
    await store.check()
    await store.close()


@pytest.mark.parametrize("num_tenants", [1, NUM_ENTRIES])
async def test_a_file_is_no_larger_for_small_entries_than_the_bound(tmp_path: Path, num_tenants: int) -> None:
    store = SqliteStore(str(tmp_path / "store.db"), LIMITS, lambda: 1e9)
    await fill(store, NUM_ENTRIES, num_tenants=num_tenants)
    assert 0 < await store.num_entries() < NUM_ENTRIES
    await store.check()
    await store.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < MEASURE_MARGIN * TOTAL


async def test_an_entry_that_fits_only_without_what_the_store_takes_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "store.db"), LIMITS, lambda: 1e9)
    with pytest.raises(EntryTooLarge, match=r"has 1048576 bytes, 1049\d+ as stored"):
        await store.put("k", bytes(TOTAL), tenant="t", ttl_s=60)
    await store.put("k", bytes(TOTAL - 600), tenant="t", ttl_s=60)
    await store.close()
