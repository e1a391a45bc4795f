"""Debian's ClickHouse server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clickhouse_kit import MISSING, PROGRAM, ClickHouseServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    found = ClickHouseServer(tmp_path_factory.mktemp("clickhouse"))
    found.start()
    yield found
    found.stop()
