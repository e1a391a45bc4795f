"""Prints what a test of the marker `timing` measures, and fails the test only far beyond its bound.

Such a test reads the wall clock or the memory of its process. It runs alone, by `make test-timing`, and a machine may still be three times
as slow as the one that the bound was written on.
"""

from __future__ import annotations

import sys
from typing import Protocol

import pytest

SLACK = 3.0
"""A figure fails beyond this many times its bound."""


class Figure(Protocol):
    def __call__(self, name: str, value: float, bound: float, unit: str, *, slack: float = SLACK) -> None:
        """Smaller is better. slack: 1 where the bound is a statistical one; less than SLACK where it is a ratio, which no machine's speed
        triples."""


@pytest.fixture
def figure(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Figure:
    def note(name: str, value: float, bound: float, unit: str, *, slack: float = SLACK) -> None:
        line = f"{request.node.name}: {name} {value:.4g} {unit} (bound {bound:.4g}, fails beyond {slack * bound:.4g})"
        with capfd.disabled():
            print(f"\n  {line}", file=sys.stderr)
        assert value <= slack * bound, line

    return note
