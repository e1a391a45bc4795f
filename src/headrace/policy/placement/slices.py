"""Decides which engines are awake that share one budget of bytes.

The engine that waits longest is next, and none overtakes it. For it the least recently used engines that are quiet go to sleep; then those
that are in use and had their time, the one that is awake longest first: each finishes its requests, and what comes meanwhile waits in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headrace.core.errors import ConfigError

MIN_AWAKE_S = 10.0
"""An engine that is in use stays awake this long, whoever waits: a switch reads its weights."""

QUIET_S = 1.0
"""Without a request for this long an engine counts as not in use."""

RETRY_S = 5.0


class SlicePhase(StrEnum):
    DOWN = "down"
    """There is no process; it waits for its turn to be started."""
    STARTING = "starting"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    """It finishes its requests."""
    ASLEEP = "asleep"
    WAKING = "waking"


NEXT_PHASES = {
    SlicePhase.STARTING: SlicePhase.AWAKE,
    SlicePhase.WAKING: SlicePhase.AWAKE,
    SlicePhase.FALLING_ASLEEP: SlicePhase.ASLEEP,
}


class SliceAction(NamedTuple):
    """phase: the one that the engine enters, of NEXT_PHASES"""

    name: str
    phase: SlicePhase


@dataclass(slots=True)
class Slice:
    """One engine.

    num_bytes      while it is not down or asleep
    since          of its phase
    used_at        when it last had a request
    waiting_since  None: nothing waits for it
    awake_until    it refused to sleep before then
    """

    name: str
    num_bytes: int
    since: float
    used_at: float
    phase: SlicePhase = SlicePhase.DOWN
    num_open: int = 0
    waiting_since: float | None = None
    awake_until: float = 0.0

    @property
    def held_bytes(self) -> int:
        return 0 if self.phase in (SlicePhase.DOWN, SlicePhase.ASLEEP) else self.num_bytes

    def enter(self, phase: SlicePhase, now: float) -> None:
        self.phase, self.since = phase, now

    def is_quiet(self, now: float) -> bool:
        return self.num_open == 0 and now - self.used_at >= QUIET_S

    def may_sleep(self, now: float) -> bool:
        is_over = self.is_quiet(now) or now - self.since >= MIN_AWAKE_S
        return self.phase is SlicePhase.AWAKE and now >= self.awake_until and is_over


class Slices:
    """A method that names an unknown engine does nothing: it was removed meanwhile."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._by_name: dict[str, Slice] = {}

    def __iter__(self) -> Iterator[Slice]:
        return iter([*self._by_name.values()])

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    # -- what happens --------------------------------------------------------------------------------------------------------------

    def add(self, name: str, num_bytes: int, now: float) -> None:
        """It is down. Raises ConfigError where it would never fit."""
        if num_bytes > self.budget_bytes:
            reason = f"{num_bytes:,} bytes are more than sleep_budget_bytes ({self.budget_bytes:,})"
            raise ConfigError(name, reason, "Raise the budget, or lower the engine's memory_bytes.")
        self._by_name[name] = Slice(name, num_bytes, now, now)

    def remove(self, name: str) -> None:
        self._by_name.pop(name, None)

    def wants_start(self, name: str, now: float) -> None:
        """Its process has ended, or there was none yet."""
        if (each := self._by_name.get(name)) is not None:
            each.enter(SlicePhase.DOWN, now)
            each.num_open, each.waiting_since = 0, now

    def gave_up(self, name: str, now: float) -> None:
        if (each := self._by_name.get(name)) is not None and each.phase is not SlicePhase.DOWN:
            each.enter(SlicePhase.DOWN, now)
            each.waiting_since = None

    def seen(self, name: str, now: float, *, num_open: int, num_held: int, is_used: bool) -> None:
        """num_held: requests that wait for it alone; is_used: it had a request since the last look"""
        if (each := self._by_name.get(name)) is None:
            return
        each.num_open = num_open
        if num_open or num_held or is_used:
            each.used_at = now
        if each.phase in (SlicePhase.ASLEEP, SlicePhase.FALLING_ASLEEP):
            each.waiting_since = (each.waiting_since or now) if num_held else None

    def carried_out(self, name: str, phase: SlicePhase, now: float) -> None:
        """What the engine was to do in this phase. Does nothing where it is in another one: it has died meanwhile."""
        each = self._by_name.get(name)
        if each is not None and each.phase is phase:
            each.enter(NEXT_PHASES[phase], now)
            each.used_at = now

    def refused_sleep(self, name: str, now: float) -> None:
        each = self._by_name.get(name)
        if each is not None and each.phase is SlicePhase.FALLING_ASLEEP:
            each.phase, each.awake_until, each.waiting_since = SlicePhase.AWAKE, now + RETRY_S, None

    # -- what to do ----------------------------------------------------------------------------------------------------------------

    def actions(self, now: float) -> list[SliceAction]:
        """Each engine named is in its new phase."""
        actions: list[SliceAction] = []
        while (first := self._first_waiting()) is not None and first.num_bytes <= self.budget_bytes - self.held_bytes:
            first.waiting_since = None
            first.enter(SlicePhase.STARTING if first.phase is SlicePhase.DOWN else SlicePhase.WAKING, now)
            actions.append(SliceAction(first.name, first.phase))
        if first is not None:
            for victim in self._victims(first, now):
                victim.enter(SlicePhase.FALLING_ASLEEP, now)
                actions.append(SliceAction(victim.name, victim.phase))
        return actions

    @property
    def held_bytes(self) -> int:
        return sum(each.held_bytes for each in self)

    def _first_waiting(self) -> Slice | None:
        waiting = [(each.waiting_since, each.name) for each in self if each.waiting_since is not None and not each.held_bytes]
        return self._by_name[min(waiting)[1]] if waiting else None

    def _victims(self, first: Slice, now: float) -> list[Slice]:
        """The engines that make room for it; empty while too few may sleep."""
        falling = sum(each.num_bytes for each in self if each.phase is SlicePhase.FALLING_ASLEEP)
        missing = first.num_bytes - (self.budget_bytes - self.held_bytes) - falling
        chosen: list[Slice] = []
        able = [each for each in self if each.may_sleep(now)]
        for each in sorted(able, key=lambda each: (not each.is_quiet(now), each.used_at if each.is_quiet(now) else each.since)):
            if missing <= 0:
                break
            chosen.append(each)
            missing -= each.num_bytes
        return chosen if missing <= 0 else []

    def check(self) -> None:
        assert self.held_bytes <= self.budget_bytes, "what is awake does not fit"
        for each in self:
            assert each.waiting_since is None or each.phase in (SlicePhase.DOWN, SlicePhase.ASLEEP, SlicePhase.FALLING_ASLEEP)
