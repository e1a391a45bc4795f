"""Arms the engine's failpoints (`headrace.engine.failpoints`). `sites()` reads the list of places from the source.

with armed("runner.forward", times=1) as fault:
    engine.turn()
assert fault.hits == 1
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.engine import failpoints
from headrace.engine.failpoints import armed_places

_CALL = re.compile(r"(?<![\w`\"])failpoint\(\"([a-z0-9_.]+)\"\)")


class Injected(Exception):
    """The exception that an armed failpoint raises by default."""


class ArmedFailpoint:
    """An armed place: lets `skip` calls pass, then raises `times` times (None: until disarmed). `hits` counts the raises."""

    def __init__(self, name: str, make: Callable[[], BaseException], skip: int, times: int | None) -> None:
        self.name, self.hits, self.passed = name, 0, 0
        self._make, self._skip, self._times = make, skip, times
        self._lock = threading.Lock()

    def visit(self) -> None:
        with self._lock:
            if self.passed < self._skip or (self._times is not None and self.hits >= self._times):
                self.passed += 1
                return
            self.hits += 1
        raise self._make()


@contextmanager
def armed(name: str, make: Callable[[], BaseException] | None = None, *, skip: int = 0, times: int | None = 1) -> Iterator[ArmedFailpoint]:
    """Arm one place of this process until the block ends. times: None: each time.

    Raises: ValueError for a name that is in no source file or is armed already: a test that can never fire is a mistake.
    """
    if name not in sites():
        raise ValueError(f"no failpoint {name!r}; known: {', '.join(sites())}")
    if name in armed_places:
        raise ValueError(f"{name} is armed already")
    fault = ArmedFailpoint(name, make or (lambda: Injected(f"failpoint {name}")), skip, times)
    armed_places[name] = fault.visit
    try:
        yield fault
    finally:
        del armed_places[name]


def sites() -> tuple[str, ...]:
    here = Path(failpoints.__file__)
    texts = [path.read_text(encoding="utf-8") for path in here.parent.rglob("*.py") if path != here]
    return tuple(sorted({name for text in texts for name in _CALL.findall(text)}))
