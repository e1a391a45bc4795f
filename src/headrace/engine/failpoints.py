"""Named places where a test may make the engine fail, so that "raise from every call site once" is a loop and not a hope.

`failpoint("runner.forward")` does nothing until a test arms that name through the context manager; in production its cost is one test of
an empty dict. `sites()` reads the list of places from the source: every literal call in this package.

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


_armed: dict[str, ArmedFailpoint] = {}


def failpoint(name: str) -> None:
    """Raise here if a test armed `name`. Call it with a literal, one name per place."""
    if _armed and (fault := _armed.get(name)) is not None:
        fault.visit()


@contextmanager
def armed(name: str, make: Callable[[], BaseException] | None = None, *, skip: int = 0, times: int | None = 1) -> Iterator[ArmedFailpoint]:
    """Arm one place of this process until the block ends.

    make   builds the exception; default `Injected`
    skip   calls that pass before the first raise
    times  raises before the place works again; None = every time

    Raises: ValueError for a name that is in no source file or is armed already: a test that can never fire is a mistake.
    """
    if name not in sites():
        raise ValueError(f"no failpoint {name!r}; known: {', '.join(sites())}")
    if name in _armed:
        raise ValueError(f"{name} is armed already")
    fault = ArmedFailpoint(name, make or (lambda: Injected(f"failpoint {name}")), skip, times)
    _armed[name] = fault
    try:
        yield fault
    finally:
        del _armed[name]


def sites() -> tuple[str, ...]:
    """Every place in this package that calls `failpoint`, sorted. Reads the source files."""
    here = Path(__file__).parent
    found: set[str] = set()
    for path in here.rglob("*.py"):
        if path != Path(__file__):
            found.update(_CALL.findall(path.read_text(encoding="utf-8")))
    return tuple(sorted(found))
