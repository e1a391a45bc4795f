"""Tells whoever waits how compiling goes. A start on a new machine compiles for half a minute, and silence looks like a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core.event import Event, Listener, install_listener

COMPILE = "numba:compile"
"""Numba's event around each compilation of a function for a signature, one that another's compiling asks for included. `KeptCFunc`
triggers it for kernels, which Numba does not."""


class _Count(Listener):
    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._num_compiled = 0

    def on_start(self, event: Event) -> None:
        if self._num_compiled == 0:
            self._tell(0)

    def on_end(self, event: Event) -> None:
        self._num_compiled += 1
        self._tell(self._num_compiled)


@contextmanager
def report_compiling(tell: Callable[[int], None]) -> Iterator[None]:
    """While inside, `tell` is called with the number of functions compiled so far: 0 when the first begins, never if all come from the
    cache on disk. On the thread that compiles."""
    with install_listener(COMPILE, _Count(tell)):
        yield
