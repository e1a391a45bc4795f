"""A connection to Redis (6.2 or later) or Valkey: how it is opened, and how its errors are translated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.gateway.stores.store import StoreFailed, StoreProgress

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
    """The calls of one client. A caller that is cancelled goes on at once, whatever becomes of its call.

    While it connects, the package may take a cancellation for a timeout of its own and try again, which takes six seconds where the server
    hangs. So each call is a task of its own.
    """

    def __init__(self, client: Any) -> None:
        """client: what `open_redis` made; ended by `close`"""
        self._client = client
        self._given_up: set[asyncio.Future[Any]] = set()
        self.progress = StoreProgress()

    async def answer(self, call: Awaitable[T]) -> T:
        """What a call gives. Raises StoreFailed for whatever goes wrong. The package's messages name the address and no password."""
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
        """A server that hangs keeps no gateway from ending: a connection that cannot be closed in time is dropped."""
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
            if not task.cancelled():
                task.exception()  # taken, since asyncio would log it

        self._given_up.add(task)
        task.add_done_callback(forget)
        task.cancel()
