"""A Redis server, where one is installed, and stores that a busy machine may let wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_kit import MISSING, NO_PACKAGE, PROGRAM, RedisServer
from wire_kit import socket_dir


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is read in the tests' own process, which holds the event loop up for longer than a store may take."""
    monkeypatch.setattr("headrace.gateway.sessions.sessions.STORE_S", 10.0)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason=NO_PACKAGE)
    if PROGRAM is None:
        pytest.skip(MISSING)
    with socket_dir() as folder:
        server = RedisServer(folder)
        server.start()
        yield server
        server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url
