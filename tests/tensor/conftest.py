"""Fills memory that was made and not written with NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.tensor.host.fresh_memory import poisoned


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    with poisoned():
        yield
