"""Puts an engine to sleep once it has nothing to do, and wakes it. Runs on the loop's thread.

From the moment that sleep is asked for gateways send no request; those that the engine has are finished first.
"""

from __future__ import annotations

from typing import Protocol

from headrace.core.errors import ConfigError, Unavailable
from headrace.core.sleep import SleepLevel
from headrace.engine.inbox import ChangeSleep
from headrace.policy.schedule.scheduler import Scheduler

GRACE_S = 0.5
"""Requests that gateways sent before they knew are taken: two heartbeats."""


class EngineMemory(Protocol):
    def sleep(self, level: SleepLevel) -> None:
        """The engine is idle, and no KV block is cached. Raises ConfigError, with nothing changed."""
        ...

    def wake(self) -> None:
        """Raises EngineFatal."""
        ...


class EngineSleep:
    """memory: None for an engine that cannot sleep"""

    def __init__(self, scheduler: Scheduler, memory: EngineMemory | None) -> None:
        self._scheduler, self._memory = scheduler, memory
        self._level: SleepLevel | None = None
        self._asked: ChangeSleep | None = None
        self._closes_at = 0.0

    @property
    def is_asleep(self) -> bool:
        """Or falls asleep: it is to get no request."""
        return self._level is not None or self._asked is not None

    def refuse_request(self, now: float) -> None:
        """Raises Unavailable."""
        if self._level is not None or (self._asked is not None and now >= self._closes_at):
            raise Unavailable("this replica is asleep")

    def change(self, message: ChangeSleep, now: float) -> None:
        if self._asked is not None:
            self._asked.done.set_exception(Unavailable("another command came before the engine slept"))
            self._asked = None
        if message.level is not None:
            self._asked, self._closes_at = message, now if self._level is not None else now + GRACE_S
            return
        if self._level is not None and self._memory is not None:
            self._memory.wake()
        self._level = None
        message.done.set_result(None)

    def fall_asleep(self, num_steps: int, now: float) -> None:
        """num_steps: uncommitted"""
        asked, kv = self._asked, self._scheduler.kv
        if asked is None or asked.level is None or now < self._closes_at:
            return
        if num_steps or self._scheduler.sequences.has_work or kv.has_blocks_in_use:
            return
        self._asked = None
        try:
            self._sleep(asked.level)
        except ConfigError as error:
            asked.done.set_exception(error)
        else:
            asked.done.set_result(None)

    def _sleep(self, level: SleepLevel) -> None:
        if self._memory is None:
            raise ConfigError("sleep", "this engine does not sleep")
        if self._level not in (level, SleepLevel.DISK):
            self._scheduler.kv.evict_all()
            self._memory.sleep(level)
            self._level = level

    def close(self) -> None:
        if self._asked is not None:
            self._asked.done.set_exception(Unavailable("the engine ended before it slept"))
