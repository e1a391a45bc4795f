"""Makes the engine fail at named places when a test asks for it.

`failpoint("runner.forward")` does nothing until a test arms that name (`tests/support/failpoint_kit.py`).
"""

from __future__ import annotations

from collections.abc import Callable

armed_places: dict[str, Callable[[], None]] = {}


def failpoint(name: str) -> None:
    if armed_places and (visit := armed_places.get(name)) is not None:
        visit()
