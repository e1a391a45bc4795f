"""What a test of the marker `timing` measures: printed, and failed only far beyond its bound.

Such a test reads the wall clock or the memory of its process. It runs alone, by `make test-timing`, and a machine may still be three times
as slow as the one that the bound was written on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

SLACK = 3.0
"""A figure fails beyond this many times its bound."""

Figure = Callable[[str, float, float, str], None]
"""figure(name, value, bound, unit): smaller is better."""


@pytest.fixture
def figure(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Figure:
    def note(name: str, value: float, bound: float, unit: str) -> None:
        line = f"{request.node.name}: {name} {value:.4g} {unit} (bound {bound:.4g}, fails beyond {SLACK * bound:.4g})"
        with capfd.disabled():
            print(f"\n  {line}", file=sys.stderr)
        assert value <= SLACK * bound, line

    return note
