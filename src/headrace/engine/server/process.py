"""Runs one engine as one process: the loop in its thread, the wire on the main thread, the leash to the supervisor, and signals.

SIGTERM drains, and the process exits with 0; a second one, or the end of the drain time, ends it at once. If the loop dies, the process
ends too, and the supervisor starts a new one. SIGUSR1 dumps the plan ring; before there is a ring it does nothing.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Generic, Protocol, TypeVar

from headrace.core.errors import CheckpointError, ConfigError, counted
from headrace.engine.loop import Engine, Outbox
from headrace.engine.server.adapter_reload import ReadSources, answering_reloads, facts_of
from headrace.engine.server.config import ProcessConfig
from headrace.engine.server.dispatcher import AsyncioOutbox, call_unless_closed
from headrace.engine.server.listener import CannotListen, check_can_listen
from headrace.engine.server.service import EngineService
from headrace.machine.signals import StopSignals, first_of
from headrace.wire.leash import Leash

log = logging.getLogger(__name__)

JOIN_S = 5.0


class EngineExitCode(IntEnum):
    """69 is `wire.leash.ORPHANED`."""

    DRAINED = 0
    ENGINE_DIED = 70
    CANNOT_LISTEN = 71
    INTERRUPTED = 75
    REFUSED = 78
    """Configuration or checkpoint: starting again does not help."""


class Runnable(Protocol):
    def run(self) -> None: ...


MakeEngine = Callable[[Outbox], Engine]
"""May take minutes; may raise ConfigError or CheckpointError."""


Made = TypeVar("Made", bound=Runnable)


class LoopThread(Generic[Made]):
    """Builds an engine, or a rank, and runs its loop, both in one thread, since the tensor library has thread-local state."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._loop = asyncio.get_running_loop()
        self._make = make
        self.built: asyncio.Future[Made] = self._loop.create_future()
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        # A daemon: a step that never returns must not keep a process alive that has to end.
        self.thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            self._post(self._refuse, error)
            return
        self._post(self.built.set_result, made)
        try:
            made.run()
        except BaseException as error:
            log.critical("the loop died", exc_info=error)
            self._post(self.ended.set_result, error)
        else:
            self._post(self.ended.set_result, None)

    def _refuse(self, error: BaseException) -> None:
        self.built.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _post(self, what: Callable[..., None], value: object) -> None:
        call_unless_closed(self._loop, what, value)


def run_process(make_engine: MakeEngine, config: ProcessConfig, leash: Leash, read_adapters: ReadSources | None = None) -> EngineExitCode:
    """read_adapters: what the engine's file lists now; None: it cannot be read again"""
    leash.watch()
    return asyncio.run(_run_until_stopped(make_engine, config, leash, read_adapters))


def leave(code: EngineExitCode) -> None:
    """A step that hangs in its daemon thread must not hold up the interpreter's shutdown."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run_until_stopped(
    make_engine: MakeEngine, config: ProcessConfig, leash: Leash, read_adapters: ReadSources | None = None
) -> EngineExitCode:
    with StopSignals() as stop:
        return await _serve(make_engine, config, leash, read_adapters, stop)


async def _serve(
    make_engine: MakeEngine, config: ProcessConfig, leash: Leash, read_adapters: ReadSources | None, stop: StopSignals
) -> EngineExitCode:
    loop = asyncio.get_running_loop()
    # By default the signal ends the process; a dump that is asked for too early must not.
    loop.add_signal_handler(signal.SIGUSR1, log.info, "SIGUSR1: there are no plans to dump before the engine is ready")
    bridge = AsyncioOutbox(loop)
    try:
        target = config.target()
        check_can_listen(target)
        thread = LoopThread(partial(make_engine, bridge))
        await first_of(thread.built, stop.soft, stop.hard)
        if not thread.built.done():
            return EngineExitCode.DRAINED  # while loading there is nothing to wait for
        engine = thread.built.result()
        service = EngineService(engine, bridge, target, replica=config.replica, on_drain=stop.ask)
        await service.start()
    except Exception as error:  # the outermost frame of start-up: the supervisor gets every reason
        return _refuse(leash, error)
    keep_objects()
    facts = {"address": service.address, "instance_id": service.hello.instance_id, "decided": list(engine.info.decided)}
    leash.ready({**facts, **facts_of(engine)})
    loop.add_signal_handler(signal.SIGUSR1, dump_plans, engine)
    log.info("%s serves %s at %s", config.replica, engine.info.architecture, service.address)
    try:
        async with answering_reloads(leash, engine, read_adapters, service.report):
            return await _until_end(service, thread, stop, config, leash)
    finally:
        await service.stop()


def keep_objects() -> None:
    """What was made at the start stays: a full collection would walk torch's and Numba's objects between two steps."""
    gc.collect()
    gc.freeze()


def dump_plans(engine: Engine) -> str:
    """Only this user can read the file: plans hold prompts."""
    handle, path = tempfile.mkstemp(prefix="headrace-plans-", suffix=".hrplan")
    with os.fdopen(handle, "wb") as file:
        file.write(engine.recent_plans())
    log.info("the last plans are in %s; `headrace replay` shows them", path)
    return path


def _refuse(leash: Leash, error: Exception) -> EngineExitCode:
    reason, code = str(error), EngineExitCode.ENGINE_DIED
    if isinstance(error, ConfigError | CheckpointError):
        code = EngineExitCode.REFUSED
    elif isinstance(error, CannotListen):
        code = EngineExitCode.CANNOT_LISTEN
    else:
        log.critical("start-up failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    log.error("cannot start: %s", reason)
    leash.failed(reason, can_retry=code is not EngineExitCode.REFUSED)
    return code


def run_member(make_member: Callable[[], Runnable], leash: Leash) -> EngineExitCode:
    """The process of a rank other than 0: SIGTERM alone does not end it, since rank 0 may need it for its drain; a second one does."""
    leash.watch()
    return asyncio.run(_run_member(make_member, leash))


async def _run_member(make_member: Callable[[], Runnable], leash: Leash) -> EngineExitCode:
    with StopSignals() as stop:
        thread = LoopThread(make_member)
        await first_of(thread.built, stop.soft)
        if not thread.built.done():
            return EngineExitCode.DRAINED
        if isinstance(error := thread.built.exception(), Exception):
            return _refuse(leash, error)
        keep_objects()
        leash.ready()
        await first_of(thread.ended, stop.soft)
        if not thread.ended.done():
            log.info("%s: this rank goes on until rank 0 has ended", stop.soft.result())
            await first_of(thread.ended, stop.hard)
        if not thread.ended.done():
            return EngineExitCode.INTERRUPTED
        if (death := thread.ended.result()) is not None:
            leash.failed(f"the rank died: {death!r:.500}", can_retry=True)
            return EngineExitCode.ENGINE_DIED
        return EngineExitCode.DRAINED


async def _until_end(
    service: EngineService, thread: LoopThread[Engine], stop: StopSignals, config: ProcessConfig, leash: Leash
) -> EngineExitCode:
    await first_of(thread.ended, stop.soft, stop.hard, service.heartbeat)
    if (error := _death(service, thread)) is not None:
        leash.failed(f"the engine died: {error!r:.500}", can_retry=True)
        return EngineExitCode.ENGINE_DIED
    service.drain(stop.soft.result() if stop.soft.done() else "stopping")
    draining = asyncio.ensure_future(service.drained(config.drain_timeout_s))
    await first_of(draining, stop.hard, thread.ended, service.heartbeat)
    if not draining.done() or not draining.result():
        draining.cancel()
        _death(service, thread)
        log.warning("leaving with %s open", counted(service.num_open, "request"))
        return EngineExitCode.INTERRUPTED
    thread.built.result().stop()
    await asyncio.wait([thread.ended], timeout=JOIN_S)
    return EngineExitCode.DRAINED


def _death(service: EngineService, thread: LoopThread[Engine]) -> BaseException | str | None:
    if thread.ended.done():
        return thread.ended.result() or "its loop ended"
    if not service.heartbeat.done():
        return None
    error = service.heartbeat.exception()
    log.critical("the heartbeat died", exc_info=error)
    return error or "its heartbeat ended"
