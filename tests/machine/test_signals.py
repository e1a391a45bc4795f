"""Tests what signals do: the first drains, a later one ends at once; SIGHUP reloads where there is a file to read again, else drains."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from headrace.machine import signals
from headrace.machine.signals import DUPLICATE_SIGNAL_S, StopSignals, interrupts_deferred, on_hangup

pytestmark = pytest.mark.loop

BOTH = signal.SIGTERM, signal.SIGINT


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    kept = [signal.getsignal(number) for number in BOTH]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    yield
    for number, handler in zip(BOTH, kept, strict=True):
        signal.signal(number, handler)


async def sent(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.001)  # the handler runs


def test_ctrl_c_is_deferred_to_the_end_of_a_block_and_replaces_what_the_block_raises() -> None:
    done = []

    def interrupted(error: Exception | None) -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(error)
            if error is not None:
                raise error

    for error in (None, ValueError()):
        with pytest.raises(KeyboardInterrupt):
            interrupted(error)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(done) == 2


async def test_the_first_one_drains_and_a_later_one_means_now() -> None:
    with StopSignals(duplicate_signal_s=0.0) as stop:
        await sent(signal.SIGTERM)
        assert (stop.soft.result(), stop.hard.done()) == ("stopped by SIGTERM", False)
        await sent(signal.SIGINT)
        assert stop.hard.done()


async def test_one_that_comes_twice_within_half_a_second_counts_once() -> None:
    with StopSignals() as stop:
        await sent(signal.SIGINT, signal.SIGINT)
        await asyncio.sleep(DUPLICATE_SIGNAL_S - 0.01)
        await sent(signal.SIGTERM)
        assert (stop.soft.done(), stop.hard.done()) == (True, False)
        await asyncio.sleep(0.01)
        await sent(signal.SIGINT)
        assert stop.hard.done()


async def test_after_a_block_without_one_they_have_their_default_actions() -> None:
    with StopSignals():
        pass
    assert [signal.getsignal(number) for number in BOTH] == [signal.SIG_DFL, signal.default_int_handler]


@pytest.mark.parametrize("num_sent", [1, 2])
async def test_after_the_block_of_a_process_that_was_stopped_they_are_ignored(num_sent: int) -> None:
    with StopSignals(duplicate_signal_s=0.0):
        await sent(*[signal.SIGTERM] * num_sent)
    await sent(*BOTH)  # would end this process


@pytest.fixture(autouse=True)
def default_action() -> Iterator[None]:
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, kept)


@pytest.fixture
async def stop() -> StopSignals:
    with StopSignals() as made:
        return made


async def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.001)  # the handler runs


async def test_it_reloads_and_is_ignored_afterwards(stop: StopSignals) -> None:
    reloads: list[None] = []
    with on_hangup(lambda: reloads.append(None), stop):
        await hang_up()
        await hang_up()
    assert len(reloads) == 2
    assert not stop.soft.done()
    await hang_up()
    assert len(reloads) == 2


async def test_without_a_file_it_drains(stop: StopSignals) -> None:
    with on_hangup(None, stop):
        await hang_up()
    assert stop.soft.result() == "stopped by SIGHUP"


async def test_when_the_terminal_is_gone_it_drains(stop: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    has_terminal = iter((True, True, False))
    monkeypatch.setattr(signals, "_has_terminal", lambda: next(has_terminal))
    reloads: list[None] = []
    with on_hangup(lambda: reloads.append(None), stop):
        await hang_up()
        assert (len(reloads), stop.soft.done()) == (1, False)
        await hang_up()
        assert (len(reloads), stop.soft.done()) == (1, True)


async def test_where_it_was_ignored_from_the_start_it_stays_so(stop: StopSignals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with on_hangup(lambda: pytest.fail("reloaded"), stop):
        await hang_up()
    assert not stop.soft.done()
