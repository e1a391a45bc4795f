"""Does what an engine's supervisor asks (`wire.leash`): reads the engine's file again, and gives it the adapters that it lists now; puts it
to sleep, and wakes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from headrace.core.adapters import AdapterSource
from headrace.core.differences import differences
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.model_info import ModelInfo
from headrace.core.sleep import SleepLevel
from headrace.engine.config import EngineConfig
from headrace.engine.server.config import ProcessConfig
from headrace.engine.server.dispatcher import call_unless_closed
from headrace.wire.leash import Leash, LeashRequest, LeashRequestKind

log = logging.getLogger(__name__)

INTERNAL = "the change failed by a fault of this program; its log says more"

Configs = tuple[ProcessConfig, EngineConfig]
ReadSources = Callable[[], Sequence[AdapterSource]]


class AdaptedEngine(Protocol):
    info: ModelInfo

    def change_sleep(self, level: SleepLevel | None) -> Future[None]:
        """level: None: it is to be awake. The result raises HeadraceError."""
        ...

    def set_adapters(self, sources: Sequence[AdapterSource]) -> None:
        """Reads their folders; all or none hold (`core.adapters`). Raises ConfigError or CheckpointError."""
        ...


def adapters_of(read: Callable[[], Configs], held: Configs) -> tuple[AdapterSource, ...]:
    """Raises ConfigError where the file says anything else than when the engine was started."""
    process, engine = read()
    adapted = replace(held[1], lora_modules=engine.lora_modules)
    changes = [*differences(held[0], process), *differences(adapted, engine, "engine")]
    if changes:
        raise ConfigError(changes[0].path, "cannot change while the engine runs", "Only adapters can: start it again for this.")
    return engine.lora_modules


def facts_of(engine: AdaptedEngine) -> dict[str, object]:
    return {"adapters": dict(engine.info.adapters)}


@asynccontextmanager
async def answering_reloads(
    leash: Leash, engine: AdaptedEngine, read: ReadSources | None, announce: Callable[[], None]
) -> AsyncIterator[None]:
    """read: what the file lists now; None: there is no file. announce: called on the event loop after each change"""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[LeashRequest] = asyncio.Queue()

    async def reload_in_order() -> None:
        while True:
            request = await waiting.get()
            if request.kind is LeashRequestKind.STATUS or read is None:
                leash.refused(request, "an engine reads its file again, sleeps and wakes")
            elif reason := await asyncio.to_thread(_why_refused, engine, read):
                log.error("the adapters stay as they are: %s", reason)
                leash.refused(request, reason)
            else:
                announce()
                leash.reloaded(request, facts_of(engine))

    def take(request: LeashRequest) -> None:
        if request.kind in (LeashRequestKind.SLEEP, LeashRequestKind.WAKE):
            change = engine.change_sleep(request.level)
            change.add_done_callback(lambda done: call_unless_closed(loop, answer_sleep, (request, done)))
        else:
            waiting.put_nowait(request)

    def answer_sleep(answered: tuple[LeashRequest, Future[None]]) -> None:
        request, done = answered
        announce()
        if (error := done.exception()) is None:
            leash.done(request)
        else:
            leash.refused(request, str(error).rstrip("."))

    leash.listen(lambda request: call_unless_closed(loop, take, request))  # in the leash's thread
    reloading = loop.create_task(reload_in_order(), name="reloads")
    try:
        yield
    finally:
        leash.listen(None)
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)


def _why_refused(engine: AdaptedEngine, read: ReadSources) -> str:
    try:
        engine.set_adapters(read())
    except HeadraceError as error:
        return str(error).rstrip(".")
    except Exception:  # the outermost frame of a change: the supervisor waits for an answer
        log.exception("a change of adapters failed")
        return INTERNAL
    return ""
