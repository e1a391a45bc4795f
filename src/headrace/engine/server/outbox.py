"""Carries a step's updates from the loop's thread to the asyncio loop of an engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from headrace.core.update import Rejected, SequenceUpdate

Updates = list[SequenceUpdate | Rejected]
Value = TypeVar("Value")


class AsyncioOutbox:
    """Passes updates from the engine's thread to the asyncio loop, once per step. Drops them once the asyncio loop is closed.

    deliver  called on the asyncio loop with each step's updates; set by the service
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.deliver: Callable[[Updates], None] | None = None

    def __call__(self, updates: Updates) -> None:
        call_unless_closed(self._loop, self._arrive, updates)

    def _arrive(self, updates: Updates) -> None:
        if self.deliver is not None:
            self.deliver(updates)


def call_unless_closed(loop: asyncio.AbstractEventLoop, call: Callable[[Value], None], value: Value) -> None:
    """`call(value)` on the loop, from another thread. Does nothing if the loop is closed, even if that happens concurrently."""
    try:
        loop.call_soon_threadsafe(call, value)
    except RuntimeError:
        if not loop.is_closed():
            raise
