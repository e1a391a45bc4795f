"""Closes the socket pairs that a test made."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def closed_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made, make = list[socket.socket](), socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        ends = make()
        made.extend(ends)
        return ends

    monkeypatch.setattr(socket, "socketpair", pair)
    yield
    for end in made:
        end.close()
