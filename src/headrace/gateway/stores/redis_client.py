"""A connection to Redis (6.2 or later) or Valkey: how it is opened, and how its errors are translated."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.gateway.stores.store import StoreFailed

T = TypeVar("T")

PREFIX = "{headrace}:"
"""Begins every key. Its hash tag keeps all keys on one node of a cluster, as scripts need it."""

MAX_CONNECTIONS = 8
"""Connections of one client. A call beyond them waits for one."""

CONNECT_S = 1.0
ANSWER_S = 2.0
"""Seconds for a connection, and for the answer to a call. Requests wait less (`kept_streams.STORE_S`)."""


def open_redis(url: str, *, password: str | None = None) -> Any:
    """The package's asynchronous client, which connects with the first call; end it with `close_redis`.

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


async def close_redis(client: Any) -> None:
    await client.aclose()
    await client.connection_pool.disconnect()


async def answer(call: Awaitable[T]) -> T:
    """What a call gives. Raises StoreFailed for whatever goes wrong. The package's messages name the address and no password."""
    from redis.exceptions import RedisError

    try:
        return await call
    except (RedisError, OSError) as error:
        raise StoreFailed(f"redis: {error}") from None
