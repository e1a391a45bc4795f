"""Provides a ledger that ships at once, and a ClickHouse server where one is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clickhouse_kit import MISSING, PROGRAM, ClickHouseServer
from kinds import guard
from ledger_kit import ship_at_once


@pytest.fixture(autouse=True)
def ships_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no test waits for. The seconds that a ledger takes are asserted by `test_shipper`, on clocks of its own."""
    ship_at_once(monkeypatch)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    found = ClickHouseServer(tmp_path_factory.mktemp("clickhouse"))
    with guard.lifted():  # it starts in the first test that asks for it, and ends in the last test of the process, whatever their kinds
        found.start()
    yield found
    with guard.lifted():
        found.stop()
