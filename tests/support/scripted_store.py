"""Wraps a store so that it is slow, hangs or fails when a test says so: a store of entries, limits or keys."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from gateway_kit import TestBench

from headrace.gateway.stores.store import StoreFailed

READS = frozenset({"get", "find", "state", "key", "tenant"})


class ScriptedStore:
    """
    inner      the store that works
    takes_s    seconds that each call takes
    failure, write_failure  why calls fail, and those that change something; "": they do not
    num_calls  by the method's name
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.takes_s = 0.0
        self.failure = self.write_failure = ""
        self.num_calls: dict[str, int] = {}
        self._goes = asyncio.Event()
        self._goes.set()

    def hang(self) -> None:
        self._goes.clear()

    def go_on(self) -> None:
        self._goes.set()
        self.failure = self.write_failure = ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._scripted(name, found) if inspect.iscoroutinefunction(found) and name not in ("close", "check") else found

    def _scripted(self, name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        @wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
            if self.takes_s:
                await asyncio.sleep(self.takes_s)
            await self._goes.wait()
            if failure := self.failure or (name not in READS and self.write_failure):
                raise StoreFailed(failure)
            return await method(*args, **kwargs)

        return call


def script_limits(bench: TestBench) -> ScriptedStore:
    limiter: Any = bench.gateway.limiter
    limiter._store = store = ScriptedStore(limiter._store)
    return store


def script_answers(bench: TestBench) -> ScriptedStore:
    return _script_entries(bench.gateway.service.stages.answer_cache._store)


def script_replays(bench: TestBench) -> ScriptedStore:
    return _script_entries(bench.gateway.service.stages.replays._store)


def script_sessions(bench: TestBench) -> ScriptedStore:
    return _script_entries(bench.gateway.service.stages.sessions._store)


def _script_entries(guarded: Any) -> ScriptedStore:
    guarded.store = store = ScriptedStore(guarded.store)
    return store
