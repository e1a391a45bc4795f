"""Tests the bridge from the engine's thread to the asyncio loop, while that loop is being closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.engine.server.outbox import AsyncioOutbox, call_unless_closed

pytestmark = pytest.mark.pure


class ClosingLoop:
    """An asyncio loop that is closed between the moment one asks and the moment one calls."""

    def __init__(self, *, is_closed: bool) -> None:
        self._is_closed = is_closed
        self.num_calls = 0

    def is_closed(self) -> bool:
        return self._is_closed and self.num_calls > 0

    def call_soon_threadsafe(self, *_: Any) -> None:
        self.num_calls += 1
        raise RuntimeError("Event loop is closed")


def test_updates_for_a_loop_that_is_just_closing_are_dropped() -> None:
    loop: Any = ClosingLoop(is_closed=True)
    AsyncioOutbox(loop)([])
    assert loop.num_calls == 1


def test_another_error_of_the_loop_is_not_taken_for_its_end() -> None:
    loop: Any = ClosingLoop(is_closed=False)
    with pytest.raises(RuntimeError):
        call_unless_closed(loop, print, None)


def test_a_real_loop_takes_calls_until_it_is_closed() -> None:
    loop, heard = asyncio.new_event_loop(), list[int]()
    call_unless_closed(loop, heard.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    call_unless_closed(loop, heard.append, 2)
    assert heard == [1]
