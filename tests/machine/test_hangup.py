"""Tests that SIGHUP reloads where there is a file to read again, else drains, and does nothing where it was ignored from the start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from headrace.machine import hangup
from headrace.machine.hangup import on_hangup
from headrace.machine.stop_signals import StopSignals

pytestmark = pytest.mark.loop


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
    monkeypatch.setattr(hangup, "_has_terminal", lambda: next(has_terminal))
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
