"""Tests who is awake within a budget of bytes: against engines that do what they are asked after some time, under any load."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.policy.placement.slices import MIN_AWAKE_S, QUIET_S, SliceAction, SlicePhase, Slices

pytestmark = pytest.mark.pure

TICK_S = 0.2


@dataclass
class Site:
    """Engines under `Slices`. A change takes `lag_s`; an open request takes `service_s`.

    held     engine -> since when each held request waits
    open     engine -> when each open request ends
    waits    seconds that each served request waited
    sleeps   engine -> when it was asked to sleep
    """

    slices: Slices
    lag_s: float = 0.4
    service_s: float = 0.5
    now: float = 0.0
    held: dict[str, list[float]] = field(default_factory=dict)
    open: dict[str, list[float]] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    sleeps: dict[str, list[float]] = field(default_factory=dict)
    due: list[tuple[float, str, SlicePhase]] = field(default_factory=list)

    def add(self, name: str, num_bytes: int) -> None:
        self.slices.add(name, num_bytes, self.now)
        self.slices.wants_start(name, self.now)
        self.held[name], self.open[name], self.sleeps[name] = [], [], []

    def phase(self, name: str) -> SlicePhase:
        return next(each.phase for each in self.slices if each.name == name)

    def ask(self, name: str) -> None:
        self.held[name].append(self.now)

    def tick(self) -> None:
        self.now += TICK_S
        self._finish_changes()
        for name in self.held:
            self.open[name] = [end for end in self.open[name] if end > self.now]
            if self.phase(name) is SlicePhase.AWAKE:
                self.waits += [self.now - since for since in self.held[name]]
                self.open[name] += [self.now + self.service_s for _ in self.held[name]]
                self.held[name].clear()
            counts = {"num_open": len(self.open[name]), "num_held": len(self.held[name])}
            self.slices.seen(name, self.now, **counts, is_used=False)
        for name, phase in self.slices.actions(self.now):
            self.due.append((self.now + self.lag_s, name, phase))
            if phase is SlicePhase.FALLING_ASLEEP:
                self.sleeps[name].append(self.now)
        self.slices.check()

    def _finish_changes(self) -> None:
        for change in [*self.due]:
            at, name, phase = change
            if at > self.now or (phase is SlicePhase.FALLING_ASLEEP and self.open[name]):
                continue
            self.due.remove(change)
            if phase is SlicePhase.FALLING_ASLEEP:
                assert not self.open[name], "it sleeps in mid-stream"
            self.slices.carried_out(name, phase, self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()


def two(budget: int = 10) -> Site:
    site = Site(Slices(budget))
    site.add("a", 10)
    site.add("b", 10)
    site.run(10)
    return site


def test_engines_are_started_one_after_another_where_one_fits() -> None:
    site = Site(Slices(10))
    for name in "abc":
        site.add(name, 10)
    seen = set()
    for _ in range(60):
        site.tick()
        seen |= {name for name in "abc" if site.phase(name) is SlicePhase.AWAKE}
    assert seen == set("abc")


def test_a_request_wakes_its_engine_and_the_quiet_one_sleeps_at_once() -> None:
    site = two()
    for name in "abab":
        site.run(2 * QUIET_S)
        site.ask(name)
        site.run(2 * site.lag_s + 4 * TICK_S)
        assert site.phase(name) is SlicePhase.AWAKE
        assert not site.held[name]


def test_two_that_are_always_in_use_take_turns() -> None:
    """Each has its time; none waits longer than the other's turn, its last requests, and the switch."""
    site = two()
    began = site.now
    for _ in range(round(120 / TICK_S)):
        for name in "ab":
            site.ask(name)
        site.tick()
    turn_s = MIN_AWAKE_S + site.service_s + 2 * site.lag_s
    for name in "ab":
        times = [at for at in site.sleeps[name] if at > began + turn_s]
        assert 4 <= len(times) <= 120 / (2 * MIN_AWAKE_S)
        assert all(later - earlier >= 2 * MIN_AWAKE_S for earlier, later in pairwise(times))
    assert max(site.waits) <= turn_s + 8 * TICK_S


def test_the_least_recently_used_sleeps_and_no_more_than_must() -> None:
    site = Site(Slices(30))
    for name in "abc":
        site.add(name, 10)
    site.run(5)
    for name in "acb":
        site.ask(name)
        site.run(2)
    site.add("d", 10)
    site.run(5)
    assert [name for name in "abcd" if site.sleeps[name]] == ["a"]
    site.ask("a")
    site.run(5)
    assert [name for name in "abcd" if site.phase(name) is SlicePhase.ASLEEP] == ["c"]


def test_a_large_engine_is_not_overtaken_by_small_ones() -> None:
    site = Site(Slices(10))
    for name, size in (("large", 10), ("s", 5), ("t", 5), ("u", 5)):
        site.add(name, size)
    site.run(20)
    site.ask("large")
    for _ in range(200):
        for name in "stu":
            site.ask(name)
        site.tick()
    assert not site.held["large"]
    assert site.sleeps["large"], "the small ones had their turn again"


def test_what_never_fits_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"big-0: 11 bytes are more than sleep_budget_bytes \(10\)"):
        Slices(10).add("big-0", 11, 0.0)


def test_one_that_refuses_to_sleep_stays_awake_and_is_asked_again() -> None:
    slices = Slices(10)
    for name in "ab":
        slices.add(name, 10, 0.0)
        slices.wants_start(name, 0.0)
    assert slices.actions(0.0) == [SliceAction("a", SlicePhase.STARTING)]
    slices.carried_out("a", SlicePhase.STARTING, 1.0)
    assert slices.actions(2.0) == [SliceAction("a", SlicePhase.FALLING_ASLEEP)]
    slices.refused_sleep("a", 2.0)
    assert slices.actions(3.0) == []
    assert slices.actions(7.5) == [SliceAction("a", SlicePhase.FALLING_ASLEEP)]
    slices.carried_out("a", SlicePhase.FALLING_ASLEEP, 8.0)
    assert slices.actions(8.0) == [SliceAction("b", SlicePhase.STARTING)]


EVENTS = ["ask", "die", "give up", "remove", "refuse", "tick"]
Load = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 40)), max_size=120)


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(1, 10), min_size=5, max_size=5), load=Load, service_s=st.sampled_from([0.1, 1.0, 15.0]))
def test_whatever_is_asked_for_is_served_within_the_budget(sizes: list[int], load: list[tuple[str, int]], service_s: float) -> None:
    """`tick` checks the bytes and that nothing sleeps in mid-stream."""
    site = Site(Slices(10), service_s=service_s)
    for name, size in zip("abcde", sizes, strict=True):
        site.add(name, size)
    for name, ticks in load:
        site.ask(name)
        site.run(ticks * TICK_S)
    site.run(10 * (MIN_AWAKE_S + service_s + 2))
    assert not any(site.held.values())
    assert len(site.waits) == len(load)


@settings(max_examples=80, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(EVENTS)), max_size=80))
def test_engines_that_die_give_up_or_leave_keep_no_bytes(events: list[tuple[str, str]]) -> None:
    site = Site(Slices(10))
    for name in "abc":
        site.add(name, 6)
    for name, event in events:
        if name not in site.slices:
            site.add(name, 6)
        if event == "ask":
            site.ask(name)
        elif event == "refuse":
            site.slices.refused_sleep(name, site.now)
        elif event == "die":
            site.due = [change for change in site.due if change[1] != name]
            site.open[name].clear()
            site.slices.wants_start(name, site.now)
        elif event == "give up":
            site.due = [change for change in site.due if change[1] != name]
            site.open[name].clear()
            site.slices.gave_up(name, site.now)
        elif event == "remove":
            site.due = [change for change in site.due if change[1] != name]
            site.held.pop(name), site.open.pop(name)
            site.slices.remove(name)
        site.tick()
    site.slices.check()
