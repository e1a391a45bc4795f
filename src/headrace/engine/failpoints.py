"""Makes the engine fail at named places when a test asks for it, so that "raise from every call site once" is a loop and not a hope.

`failpoint("runner.forward")` does nothing until something is armed under that name, which only tests do
(`tests/support/failpoint_kit.py`); in production its cost is one test of an empty dict.
"""

from __future__ import annotations

from collections.abc import Callable

armed_places: dict[str, Callable[[], None]] = {}
"""Name of a place -> the function that is called there and may raise. Names are literals, one per place."""


def failpoint(name: str) -> None:
    if armed_places and (visit := armed_places.get(name)) is not None:
        visit()
