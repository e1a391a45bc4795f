"""Tests that an engine sleeps between requests alone, whatever comes in which order."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from engine_kit import VOCAB, DrivenEngine, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_oracle import expected_tokens

from headrace.core.errors import ConfigError, HeadraceError, Unavailable
from headrace.core.sleep import SleepLevel
from headrace.engine.sleeping import GRACE_S

pytestmark = pytest.mark.pure

PROMPT = [5, 6, 7, 8, 9, 10]


class CheckedMemory:
    """Fails where it is given back while something uses it. refusal: of the next sleep"""

    def __init__(self) -> None:
        self.driven: DrivenEngine | None = None
        self.level: SleepLevel | None = None
        self.refusal: ConfigError | None = None

    def sleep(self, level: SleepLevel) -> None:
        assert self.driven is not None
        if self.refusal is not None:
            raise self.refusal
        self.driven.check_idle()
        assert all(pool.num_cached == 0 for pool in self.driven.kv.pools), "a cached block would name KV that is gone"
        assert self.level is None or (self.level, level) == (SleepLevel.RAM, SleepLevel.DISK)
        self.level = level

    def wake(self) -> None:
        assert self.level is not None, "it was awake"
        self.level = None


def driven(depth: int = 2) -> tuple[DrivenEngine, CheckedMemory]:
    memory = CheckedMemory()
    memory.driven = DrivenEngine(depth=depth, memory=memory)
    return memory.driven, memory


def test_what_runs_is_finished_first_and_nothing_is_begun() -> None:
    engine, memory = driven()
    engine.submit(request("first", PROMPT))
    engine.turn(2)
    slept = engine.engine.change_sleep(SleepLevel.RAM)
    engine.turn()
    assert not slept.done()
    assert engine.engine.snapshot().is_asleep, "gateways send no more"
    engine.submit(request("sent before", PROMPT))
    engine.run()
    assert engine.tokens["sent before", 0]
    assert not slept.done()
    engine.clock.now += GRACE_S
    engine.submit(request("late", PROMPT))
    engine.run()
    assert slept.done()
    assert memory.level is SleepLevel.RAM
    assert engine.tokens["first", 0] == expected_tokens(PROMPT, 8, VOCAB)
    assert isinstance(engine.errors["late"], Unavailable)


def test_an_engine_that_woke_computes_a_prompt_anew() -> None:
    engine, memory = driven()
    engine.submit(request("before", PROMPT))
    engine.run()
    for level in (SleepLevel.RAM, SleepLevel.DISK):
        engine.engine.change_sleep(level)
        engine.turn()
        engine.clock.now += GRACE_S
        engine.turn()
    woken = engine.engine.change_sleep(None)
    engine.turn()
    assert woken.done()
    assert memory.level is None
    engine.submit(request("after", PROMPT))
    engine.run()
    assert engine.tokens["after", 0] == engine.tokens["before", 0]
    assert [update.num_cached_tokens for update in engine.updates if update.num_cached_tokens is not None] == [0, 0]


def test_a_refused_sleep_leaves_the_engine_awake() -> None:
    engine, memory = driven()
    memory.refusal = ConfigError("level", "no packed weights")
    slept = engine.engine.change_sleep(SleepLevel.DISK)
    engine.turn()
    engine.clock.now += GRACE_S
    engine.turn()
    assert slept.exception() is memory.refusal
    engine.submit(request("next", PROMPT))
    engine.run()
    assert engine.tokens["next", 0] == expected_tokens(PROMPT, 8, VOCAB)
    without = DrivenEngine()
    refused = without.engine.change_sleep(SleepLevel.RAM)
    without.turn()
    without.clock.now += GRACE_S
    without.turn()
    assert isinstance(refused.exception(), ConfigError)


def test_an_engine_that_ends_answers_who_waits_for_its_sleep() -> None:
    engine, _ = driven()
    engine.submit(request("endless", PROMPT, max_tokens=50))
    engine.turn(2)
    slept = engine.engine.change_sleep(SleepLevel.RAM)
    engine.engine.stop()
    engine.turn()
    engine.engine.run()
    assert isinstance(slept.exception(), Unavailable)


class SleepMachine(RuleBasedStateMachine):
    """Requests, commands and turns in any order. The memory checks that nothing uses it when it is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.memory = driven()
        self.num_requests = 0
        self.changes: list[Future[None]] = []

    @rule(length=st.integers(1, 12), count=st.integers(1, 6))
    def submit(self, length: int, count: int) -> None:
        self.engine.submit(request(f"r{self.num_requests}", PROMPT[:1] * length, max_tokens=count))
        self.num_requests += 1

    @rule(count=st.integers(1, 4))
    def turn(self, count: int) -> None:
        self.engine.clock.now += GRACE_S / 2
        self.engine.turn(count)

    @rule(level=st.sampled_from([None, *SleepLevel]))
    def change(self, level: SleepLevel | None) -> None:
        self.changes.append(self.engine.engine.change_sleep(level))

    @precondition(lambda self: self.num_requests)
    @rule(number=st.integers(0, 30))
    def cancel(self, number: int) -> None:
        self.engine.engine.cancel(request(f"r{number % self.num_requests}", PROMPT).request_id)

    @invariant()
    def is_asleep_only_without_work(self) -> None:
        assert self.memory.level is None or not self.engine.scheduler.sequences.has_work

    def teardown(self) -> None:
        self.changes.append(self.engine.engine.change_sleep(None))
        self.engine.run()
        assert all(change.done() for change in self.changes)
        assert self.memory.level is None
        assert all(isinstance(error, HeadraceError) for error in self.engine.errors.values())
        self.engine.submit(request("last", PROMPT))
        self.engine.run()
        assert self.engine.tokens["last", 0] == expected_tokens(PROMPT, 8, VOCAB)


TestSleepMachine = SleepMachine.TestCase
TestSleepMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
