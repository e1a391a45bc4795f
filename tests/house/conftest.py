"""Reads the source of the house once, for its tests."""

from __future__ import annotations

import pytest

from tests.house.reader import SOURCE, Module, read_package


@pytest.fixture(scope="session")
def house() -> dict[str, Module]:
    return read_package(SOURCE, "headrace")
