"""By how much this machine is late, for tests of promises in seconds: one that is busy makes all of them later.

A thread measures it. What blocks an event loop does not make the thread late, so that a product that waits or computes there gets no more
time for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.01


class Lateness:
    def __init__(self) -> None:
        self._late_s = 0.0
        self._due = time.monotonic() + TICK_S
        """When the thread looks at the clock again."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lateness", daemon=True)
        self._thread.start()

    @property
    def late_s(self) -> float:
        """Seconds by which this process got no CPU since the block began, what it is late right now included."""
        late_s = time.monotonic() - self._due
        return self._late_s + (late_s if late_s > TICK_S else 0.0)

    def _watch(self) -> None:
        while not self._is_over.wait(TICK_S):
            self._late_s, self._due = self.late_s, time.monotonic() + TICK_S

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()  # or it would go on counting what is read after the block
        self._late_s, self._due = self.late_s, float("inf")


@contextmanager
def machine_lateness() -> Iterator[Lateness]:
    """While inside, by how much this process was late."""
    lateness = Lateness()
    try:
        yield lateness
    finally:
        lateness.end()


def tries_while_late(num_tries: int, least_s: float = 0.2) -> Iterator[Lateness]:
    """Tries of a measure, again only while the machine is late: `for _ in tries_while_late(3):`, with a `break` where all is well.

    Ends, so that the caller's assertion decides, after a try in which the machine was late by less than `least_s`.
    """
    for number in range(num_tries):
        with machine_lateness() as lateness:
            yield lateness
        if lateness.late_s < least_s:
            return
        print(f"try {number + 1} counts no more: the machine was {lateness.late_s:.2f} s late")
