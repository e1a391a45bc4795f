"""Reports the progress of compiling. A start on a new machine compiles for half a minute, and silence would look like a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core.event import Event, Listener, install_listener

COMPILE = "numba:compile"
"""Numba's event around each compilation of a function for a signature, nested ones included. Numba does not trigger it for C functions;
`KeptCFunc` does."""


class _Count(Listener):
    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._num_compiled = 0

    def on_start(self, event: Event) -> None:
        if self._num_compiled == 0:
            self._report(0)

    def on_end(self, event: Event) -> None:
        self._num_compiled += 1
        self._report(self._num_compiled)


@contextmanager
def report_compiling(report: Callable[[int], None]) -> Iterator[None]:
    """Inside, `report` is called with the number of functions compiled so far: 0 when the first begins, never if all come from the cache
    on disk. It is called on the thread that compiles."""
    with install_listener(COMPILE, _Count(report)):
        yield
