"""Stores entries in Redis (6.2 or later) or Valkey, which gateways on several machines share.

An entry's size, tenant and age lie in keys of their own beside its value, so that the bounds hold whichever gateway writes. Scripts change
both together. All keys have one hash tag, so that a cluster keeps them on one node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.gateway.stores.store import StoreFailed, StoreLimits, StoreProgress, drop_error

T = TypeVar("T")

PREFIX = "{headrace}:"
"""Begins every key. Its hash tag keeps all keys on one node of a cluster, as scripts need it."""

MAX_CONNECTIONS = 8
"""Connections of one client. A call beyond them waits for one."""

CONNECT_S = 1.0
ANSWER_S = 2.0
"""Seconds for a connection, and for the answer to a call. Requests wait less (`stores.guard`)."""

CLOSE_S = 1.0
"""Seconds that `RedisCalls.close` waits for calls that were given up."""


def open_redis(url: str, *, password: str | None = None) -> Any:
    """The package's asynchronous client, which connects with the first call; `RedisCalls.close` ends it.

    Raises ConfigError where the `redis` package is not installed, or the address makes no sense.
    """
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


class RedisCalls:
    """The calls of one client. A cancelled caller goes on at once, while its call may still be running.

    While it connects, the package may take a cancellation for a timeout of its own and try again, which takes six seconds where the server
    hangs. So each call is a task of its own.
    """

    def __init__(self, client: Any) -> None:
        """client: what `open_redis` made; ended by `close`"""
        self._client = client
        self._given_up: set[asyncio.Future[Any]] = set()
        self.progress = StoreProgress()

    async def answer(self, call: Awaitable[T]) -> T:
        """The result of a call. Raises StoreFailed for every error. The package's messages show the address, and no password."""
        task = asyncio.ensure_future(call)
        try:
            found = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        except Exception as error:  # beside RedisError and OSError: uvloop's RuntimeError where a connection has just closed
            raise StoreFailed(f"redis: {error}") from None
        self.progress.num_answers += 1
        return found

    async def close(self) -> None:
        """Close the client. A connection that cannot be closed in time is dropped, so that a hanging server does not delay this process."""
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
"""What the server takes for an entry beside its value: these bytes, and its key this many times. Without them the memory of many small
entries would have no bound. Redis 7.0 with jemalloc took 690 bytes where all entries are of one tenant, and 810 where each has a tenant
of its own (20,000 entries, keys of 16 and 64 bytes)."""

COMMON = """
local P = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function hold(tenant, bytes)
  if redis.call('HINCRBY', P .. 'bytes', tenant, bytes) == 0 then redis.call('HDEL', P .. 'bytes', tenant) end
  redis.call('INCRBY', P .. 'total', bytes)
end

local function remove(key)
  redis.call('DEL', P .. 'entry:' .. key)
  redis.call('ZREM', P .. 'ends', key)
  redis.call('ZREM', P .. 'ages', key)
  local tenant = redis.call('HGET', P .. 'tenants', key)
  if not tenant then return end
  hold(tenant, 0 - (redis.call('HGET', P .. 'sizes', key) or 0))
  redis.call('HDEL', P .. 'sizes', key)
  redis.call('HDEL', P .. 'tenants', key)
  redis.call('ZREM', P .. 'ages:' .. tenant, key)
end

local function make_room(ages, sum, max, forget)
  while sum() > max do
    local oldest = redis.call('ZRANGE', ages, 0, 0)[1]
    if not oldest then forget() return end
    remove(oldest)
    redis.call('ZREM', ages, oldest)
  end
end
"""
"""KEYS[1] begins all keys of the store. entry:KEY is a value; sizes and tenants map a key to size and tenant; bytes maps a tenant to the
sum of its sizes, total is the sum of all; ends are keys by the time at which they are over; ages and ages:TENANT are keys by the number of
their write. A server that evicts keys may take any of them: a sum of entries of which the ages know nothing begins anew."""

PUT = (
    COMMON
    + """
local key, tenant, value, ttl_ms, max_tenant, max_total = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local size, mode, found = tonumber(ARGV[7]), ARGV[8], redis.call('GET', P .. 'entry:' .. key)
if mode == 'absent' and found or mode == 'equal' and found ~= ARGV[9] then return 0 end
for _, over in ipairs(redis.call('ZRANGEBYSCORE', P .. 'ends', '-inf', now, 'LIMIT', 0, 256)) do remove(over) end
remove(key)
make_room(P .. 'ages:' .. tenant,
  function() return tonumber(redis.call('HGET', P .. 'bytes', tenant) or 0) end, max_tenant - size,
  function() redis.call('HDEL', P .. 'bytes', tenant) end)
make_room(P .. 'ages',
  function() return tonumber(redis.call('GET', P .. 'total') or 0) end, max_total - size,
  function() redis.call('DEL', P .. 'total', P .. 'bytes') end)
redis.call('SET', P .. 'entry:' .. key, value, 'PX', ttl_ms)
redis.call('HSET', P .. 'sizes', key, size)
redis.call('HSET', P .. 'tenants', key, tenant)
redis.call('ZADD', P .. 'ends', now + ttl_ms, key)
local number = redis.call('INCR', P .. 'writes')
redis.call('ZADD', P .. 'ages', number, key)
redis.call('ZADD', P .. 'ages:' .. tenant, number, key)
hold(tenant, size)
return 1
"""
)
DELETE = COMMON + "if not ARGV[2] or redis.call('GET', P .. 'entry:' .. ARGV[1]) == ARGV[2] then remove(ARGV[1]) end"
PURGE = (
    COMMON
    + """
local found = redis.call('ZRANGE', P .. 'ages:' .. ARGV[1], 0, 255)
for _, key in ipairs(found) do
  remove(key)
  redis.call('ZREM', P .. 'ages:' .. ARGV[1], key)
end
return #found
"""
)


class RedisStore(RedisCalls):
    """A `Store` in Redis, which connects at the first call."""

    def __init__(self, client: Any, limits: StoreLimits, part: str = "") -> None:
        """
        client  from `open_redis`
        part    name of this store among those of one server; each has its own bounds
        """
        super().__init__(client)
        self._prefix = PREFIX + (f"{part}:" if part else "")
        self._limits = limits
        self._put_script = client.register_script(PUT)
        self._delete_script = client.register_script(DELETE)
        self._purge_script = client.register_script(PURGE)

    async def put(self, key: str, value: bytes, *, tenant: str, ttl_s: float) -> None:
        await self._put(key, value, tenant, ttl_s)

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self.answer(self._client.get(f"{self._prefix}entry:{key}"))
        return found

    async def swap(self, key: str, value: bytes, *, expected: bytes | None, tenant: str, ttl_s: float) -> bool:
        return await self._put(key, value, tenant, ttl_s, ("absent",) if expected is None else ("equal", expected))

    async def delete(self, key: str, *, expected: bytes | None = None) -> None:
        condition = () if expected is None else (expected,)
        await self.answer(self._delete_script(keys=[self._prefix], args=[key, *condition]))

    async def purge(self, tenant: str) -> int:
        num_removed = 0
        while count := int(await self.answer(self._purge_script(keys=[self._prefix], args=[tenant]))):
            num_removed += count
        return num_removed

    async def num_entries(self) -> int:
        return int(await self.answer(self._client.zcard(f"{self._prefix}ages")))

    async def check(self) -> None:
        """Assert that the sums are of the entries, and that the bounds hold. For a server that is idle."""
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
        return bool(await self.answer(self._put_script(keys=[self._prefix], args=[key, tenant, value, *bounds, *condition])))
