"""Stores entries in Redis (6.2 or later) or Valkey, which gateways on several machines share.

An entry's size, tenant and age lie in keys of their own beside its value, so that the bounds hold whichever gateway writes. redis.lua
beside this module changes both together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.gateway.stores.store import StoreFailed, StoreLimits, StoreProgress, drop_error

T = TypeVar("T")

PREFIX = "{headrace}:"
"""The hash tag keeps all keys on one node of a cluster, as scripts need it."""

MAX_CONNECTIONS = 8

CONNECT_S = 1.0
ANSWER_S = 2.0

CLOSE_S = 1.0


def open_redis(url: str, *, password: str | None = None) -> Any:
    """Raises ConfigError."""
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError("store.url", "needs the package redis", "pip install 'headrace[redis]'") from None
    options = {"password": password, "socket_connect_timeout": CONNECT_S, "socket_timeout": ANSWER_S}
    try:
        # One retry at once: a server that was started again has closed the connections that are kept.
        pool = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=None, retry=Retry(NoBackoff(), 1), **options)
    except ValueError as error:
        raise ConfigError("store.url", f"cannot be used: {error}") from None
    return Redis(connection_pool=pool)


def read_script(module: str) -> str:
    return Path(module).with_suffix(".lua").read_text(encoding="ascii")


class RedisCalls:
    """Runs the calls of one Redis client; a cancelled caller does not wait. Each call is a task of its own: while it connects, the package
    may take a cancellation for a timeout and try again, for six seconds where the server hangs.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._given_up: set[asyncio.Future[Any]] = set()
        self.progress = StoreProgress()

    async def answer(self, call: Awaitable[T]) -> T:
        task = asyncio.ensure_future(call)
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        except Exception as error:  # beside RedisError and OSError: uvloop's RuntimeError where a connection has just closed
            raise StoreFailed(f"redis: {error}") from None
        self.progress.num_answers += 1
        return result

    async def close(self) -> None:
        """A connection that cannot be closed in time is dropped."""
        with suppress(Exception):
            await self._client.connection_pool.disconnect()  # ends what waits for an answer
        for task in list(self._given_up):
            task.cancel()
        if self._given_up:
            await asyncio.wait(self._given_up, timeout=CLOSE_S)
        with suppress(Exception):
            await self._client.aclose()
            await self._client.connection_pool.disconnect()

    def _give_up(self, task: asyncio.Future[Any]) -> None:
        def forget(_: object) -> None:
            self._given_up.discard(task)
            drop_error(task)

        self._given_up.add(task)
        task.add_done_callback(forget)
        task.cancel()


ENTRY_BYTES, KEY_COPIES = 820, 6
"""Overhead of an entry: bytes, and copies of its key. Redis 7.0 with jemalloc took 690 bytes where all entries are of one tenant, and 810
where each has its own (20,000 entries, keys of 16 and 64 bytes).
"""


class RedisStore(RedisCalls):
    """A `Store` in Redis, with the name of its part before each key."""

    def __init__(self, client: Any, limits: StoreLimits, part: str = "") -> None:
        """part: name of this store on the server; each part has its own bounds"""
        super().__init__(client)
        self._prefix = PREFIX + (f"{part}:" if part else "")
        self._limits = limits
        self._script = client.register_script(read_script(__file__))

    async def put(self, key: str, value: bytes, *, tenant: str, ttl_s: float) -> None:
        await self._put(key, value, tenant, ttl_s)

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self.answer(self._client.get(f"{self._prefix}entry:{key}"))
        return value

    async def swap(self, key: str, value: bytes, *, expected: bytes | None, tenant: str, ttl_s: float) -> bool:
        return await self._put(key, value, tenant, ttl_s, ("absent",) if expected is None else ("equal", expected))

    async def delete(self, key: str, *, expected: bytes | None = None) -> None:
        await self._call("delete", key, *(() if expected is None else (expected,)))

    async def purge(self, tenant: str) -> int:
        num_removed = 0
        while count := int(await self._call("purge", tenant)):
            num_removed += count
        return num_removed

    async def num_entries(self) -> int:
        return int(await self.answer(self._client.zcard(f"{self._prefix}ages")))

    async def check(self) -> None:
        sizes = {key: int(size) for key, size in (await self._client.hgetall(f"{self._prefix}sizes")).items()}
        tenants = await self._client.hgetall(f"{self._prefix}tenants")
        sums = {tenant: int(size) for tenant, size in (await self._client.hgetall(f"{self._prefix}bytes")).items()}
        assert sizes.keys() == tenants.keys()
        for tenant in {*tenants.values()}:
            held = sum(size for key, size in sizes.items() if tenants[key] == tenant)
            assert sums.get(tenant, 0) == held <= self._limits.tenant
        assert int(await self._client.get(f"{self._prefix}total") or 0) == sum(sizes.values()) <= self._limits.total

    async def _put(self, key: str, value: bytes, tenant: str, ttl_s: float, condition: tuple[str | bytes, ...] = ()) -> bool:
        size = ENTRY_BYTES + KEY_COPIES * len(key.encode()) + len(value)
        self._limits.check(len(value), size)
        bounds = max(1, round(1000 * ttl_s)), self._limits.tenant, self._limits.total, size
        return bool(await self._call("put", key, tenant, value, *bounds, *condition))

    async def _call(self, *words: object) -> Any:
        return await self.answer(self._script(keys=[self._prefix], args=words))
